"""Whatever is wrong with a checkpoint, or with what is to be one, is said in one line that names the file."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor
from transformer_lens import HookedTransformer, HookedTransformerConfig

import tasks
from interp_tasks.checkpoints import (
    TrainingState,
    load_checkpoint,
    read_metrics,
    read_run,
    save_checkpoint,
)
from interp_tasks.checkpoints.content import digest
from interp_tasks.checkpoints.meta import read_meta, signed
from interp_tasks.checkpoints.training_state import read_training_state
from interp_tasks.errors import UserError
from tasks.errors import TaskError
from tasks.hooked import construct


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here cuts the power, and a busy disk takes seconds to sync."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def build(**changes: Any) -> HookedTransformer:
    sizes = {
        "n_layers": 1,
        "d_model": 4,
        "n_ctx": 3,
        "d_head": 2,
        "n_heads": 2,
        "d_vocab": 5,
        "device": "cpu",
    }
    return construct(HookedTransformerConfig(**{**sizes, "act_fn": "relu", **changes}))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "model", build(), step=7)


def complaint(folder: str | Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_checkpoint(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def rewrite_meta(folder: Path, change: Callable[[dict[str, Any]], None], sign: bool = True) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    change(meta)
    (folder / "meta.json").write_text(json.dumps(signed(meta) if sign else meta))


def rewrite_weights(folder: Path, content: bytes) -> None:
    """A weights file whose digest is right: only what is in it is wrong."""
    (folder / "model.safetensors").write_bytes(content)
    rewrite_meta(folder, lambda meta: meta["weights"].update(digest(content)))


def rewrite_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    rewrite_weights(folder, save(tensors))


def test_the_untouched_checkpoint_loads(saved: Path) -> None:
    rewrite_tensors(saved, lambda tensors: None)
    rewrite_meta(saved, lambda meta: None)
    assert load_checkpoint(saved).step == 7


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.9999])
def test_truncated_weights(saved: Path, share: float) -> None:
    file = saved / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    assert complaint(saved).startswith(f"{file} is truncated: {int(share * len(content))} bytes")


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 200, -1])
def test_a_cut_safetensors_file_whose_digest_matches(saved: Path, cut: int) -> None:
    content = (saved / "model.safetensors").read_bytes()
    rewrite_weights(saved, content[:cut])
    assert "model.safetensors is not a readable safetensors file" in complaint(saved)


@pytest.mark.parametrize("name", ["model.safetensors", "meta.json"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.6, 0.99])
def test_one_flipped_bit(saved: Path, name: str, share: float) -> None:
    content = bytearray((saved / name).read_bytes())
    content[int(share * (len(content) - 1))] ^= 1
    (saved / name).write_bytes(content)
    message = complaint(saved)
    assert str(saved / name) in message or (name == "meta.json" and str(saved) in message)


def test_every_flipped_bit_of_meta_is_noticed(saved: Path) -> None:
    content = (saved / "meta.json").read_bytes()
    for position in range(0, len(content), 37):
        flipped = bytearray(content)
        flipped[position] ^= 1
        (saved / "meta.json").write_bytes(flipped)
        with contextlib.suppress(UserError):
            # What passes differs in white space alone.
            assert read_meta(saved) == json.loads(content)


def test_something_appended(saved: Path) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"x")
    assert "is too long" in complaint(saved)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x04\x95", b"\xff" * 64, b"{}"])
def test_another_file_under_its_name(saved: Path, content: bytes) -> None:
    (saved / "model.safetensors").write_bytes(content)
    assert str(saved / "model.safetensors") in complaint(saved)
    rewrite_weights(saved, content)
    assert "is not a readable safetensors file" in complaint(saved)


def test_a_pickle_is_not_opened(saved: Path, tmp_path: Path) -> None:
    torch.save({"embed.W_E": torch.zeros(5, 4)}, saved / "model.safetensors")
    rewrite_weights(saved, (saved / "model.safetensors").read_bytes())
    assert "is not a readable safetensors file" in complaint(saved)


def test_foreign_safetensors(saved: Path) -> None:
    rewrite_weights(saved, save({"transformer.wte.weight": torch.zeros(5, 4)}))
    message = complaint(saved)
    assert "model.safetensors lacks parameter" in message
    assert "more" in message


def test_missing_parameter(saved: Path) -> None:
    rewrite_tensors(saved, lambda tensors: tensors.pop("blocks.0.attn.W_Q"))
    assert "lacks parameter blocks.0.attn.W_Q:" in complaint(saved)


def test_extra_parameter(saved: Path) -> None:
    rewrite_tensors(saved, lambda tensors: tensors.update({"blocks.1.attn.W_Q": torch.zeros(1)}))
    assert "holds an unknown parameter blocks.1.attn.W_Q:" in complaint(saved)


def test_misshapen_parameter(saved: Path) -> None:
    rewrite_tensors(saved, lambda tensors: tensors.update({"embed.W_E": torch.zeros(6, 4)}))
    assert "parameter embed.W_E has shape [6, 4], the model has [5, 4]" in complaint(saved)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_parameter(saved: Path, value: float) -> None:
    rewrite_tensors(saved, lambda tensors: tensors["unembed.W_U"].view(-1)[3:4].fill_(value))
    assert "parameter unembed.W_U holds NaN or infinite values" in complaint(saved)


def test_parameter_of_another_dtype(saved: Path) -> None:
    rewrite_tensors(
        saved, lambda tensors: tensors.update({"embed.W_E": torch.zeros(5, 4, dtype=torch.int32)})
    )
    assert "parameter embed.W_E is int32 where meta.json says float32" in complaint(saved)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is not valid JSON"),
        ('{"format": 1', "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[1]", "holds a JSON list, not an object"),
        ("{}", "has format version None"),
        ('{"format": 2}', "has format version 2, this interp-tasks reads 1"),
        ('{"format": 1}', "is mangled: 'step' is missing"),
    ],
)
def test_mangled_meta(saved: Path, content: str, expected: str) -> None:
    (saved / "meta.json").write_text(content)
    message = complaint(saved)
    assert expected in message
    assert str(saved / "meta.json") in message


def test_meta_that_is_not_text(saved: Path) -> None:
    (saved / "meta.json").write_bytes(b"\xff\xfe\x00")
    assert "is not valid JSON" in complaint(saved)


def test_meta_without_a_digest_of_the_weights(saved: Path) -> None:
    rewrite_meta(saved, lambda meta: meta.update(weights={"dtype": "float32"}))
    assert "records no bytes and sha256 of model.safetensors" in complaint(saved)


@pytest.mark.parametrize(
    "change",
    [
        {"step": True},
        {"step": -1},
        {"step": 10**20},
        {"frozen": [["b"]]},
        {"task": {"name": "modular-addition", "config": [5]}},
        {"task": {"name": ["modular-addition"], "config": {}}},
        {"weights": {}},
        {"metrics": 3},
        {"saved_at": None},
    ],
)
def test_meta_of_a_wrong_form(saved: Path, change: dict[str, Any]) -> None:
    rewrite_meta(saved, lambda meta: meta.update(change))
    assert f"meta.json is mangled: {next(iter(change))!r} is missing or of the wrong kind" in complaint(saved)


@pytest.mark.parametrize("name", ["model.safetensors", "meta.json"])
@pytest.mark.parametrize("place", ["pipe", "endless device"])
def test_what_is_no_file_is_not_waited_for(saved: Path, name: str, place: str) -> None:
    (saved / name).unlink()
    if place == "pipe":
        os.mkfifo(saved / name)
    else:
        (saved / name).symlink_to("/dev/zero")
    assert complaint(saved).startswith(
        f"{saved / name} is no regular file" if name == "model.safetensors" else f"{saved} is no"
    )


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 1, "x": ' + b"[" * 100_000,
        b'{"step": -1}',
        b'{"step": 9007199254740993}',
    ],
)
def test_a_log_that_no_trainer_wrote(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n' + line + b"\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl is mangled: line 2"):
        read_metrics(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"peak_memory": "much"},
        {"peak_memory": {"process": "much"}},
        {"resumed": 3},
        {"drop_metric": {"name": ["loss"]}},
        {"published_drop": {"pre": "early"}},
        {"preset": []},
    ],
)
def test_a_run_of_a_wrong_form(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"config": {}, **change}))
    with pytest.raises(UserError, match=f"run.json is mangled: '{next(iter(change))}' is of the wrong kind"):
        read_run(tmp_path)


def test_edited_meta(saved: Path) -> None:
    rewrite_meta(saved, lambda meta: meta["model"].update(eps=1e-3), sign=False)
    assert "meta.json has been altered" in complaint(saved)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"invented": 1}, "does not know: config field invented"),
        ({"dtype": "complex64"}, "dtype is 'complex64'"),
        ({"act_fn": "swirl"}, "describes no model that transformer-lens can build"),
        ({"n_layers": "two"}, "describes no model that transformer-lens can build"),
        ({"d_vocab": 9}, "parameter embed.W_E has shape [5, 4], the model has [9, 4]"),
    ],
)
def test_unknown_architecture(saved: Path, change: dict[str, Any], expected: str) -> None:
    rewrite_meta(saved, lambda meta: meta["model"].update(change))
    assert expected in complaint(saved)


def test_a_config_its_task_refuses(tmp_path: Path) -> None:
    task = tasks.get("modular-addition", p=5)
    model = task.build_model(0, task.Model(n_heads=2, d_model=4))
    saved = save_checkpoint(tmp_path / "one", model, task)
    rewrite_meta(saved, lambda meta: meta["task"]["config"].update(p=6))
    assert "meta.json: task.p: p must be prime" in complaint(saved)
    rewrite_meta(saved, lambda meta: meta["task"]["config"].update(p=7))
    assert "does not fit this model" in complaint(saved)


def test_missing_files(saved: Path, tmp_path: Path) -> None:
    (saved / "model.safetensors").unlink()
    assert (
        complaint(saved) == f"{saved / 'model.safetensors'} is missing: it would hold the model's parameters"
    )
    (saved / "meta.json").unlink()
    assert complaint(saved) == f"{saved} is no run and no checkpoint folder"
    assert complaint(tmp_path / "modle").endswith(f"did you mean {(tmp_path / 'model').as_posix()!r}?")


def test_a_checkpoint_under_another_steps_name(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints" / "00000008"
    folder.parent.mkdir(parents=True)
    saved.rename(folder)
    assert "is misplaced: its meta.json says step 7" in complaint(f"{tmp_path / 'run'}@8")


def test_unknown_device(saved: Path) -> None:
    assert "device 'abacus' is not available: this machine has cpu" in complaint(saved, device="abacus")


def test_mangled_training_state(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path / "one", build(), training_state=TrainingState({"a": torch.ones(9)}))
    file = saved / "training_state.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"training_state\.safetensors has been altered"):
        read_training_state(saved, read_meta(saved))
    file.write_bytes(content := save({"a": torch.ones(1)}))
    rewrite_meta(saved, lambda meta: meta["training_state"].update(digest(content)))
    with pytest.raises(UserError, match="is not a training state"):
        read_training_state(saved, read_meta(saved))


def refusal(path: Path, model: Any, task: Any = None, step: int = 0, **options: Any) -> str:
    before = set(path.parent.iterdir()) if path.parent.is_dir() else set()
    with pytest.raises((UserError, TaskError)) as caught:
        save_checkpoint(path, model, task, step, **options)
    assert "\n" not in str(caught.value)
    assert (set(path.parent.iterdir()) if path.parent.is_dir() else set()) == before
    return str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_is_not_finite_is_not_saved(tmp_path: Path, value: float) -> None:
    model = build()
    with torch.no_grad():
        model.blocks[0].mlp.W_in[1, 1] = value
    assert refusal(tmp_path / "x", model).startswith(
        "parameter blocks.0.mlp.W_in holds NaN or infinite values"
    )


def test_weights_beyond_float16_are_not_halved(tmp_path: Path) -> None:
    model = build()
    with torch.no_grad():
        model.embed.W_E[0, 0] = 1e5
    assert "parameter embed.W_E reaches 1e+05" in refusal(tmp_path / "x", model, weights_dtype="float16")
    assert "no weights_dtype 'int8'" in refusal(tmp_path / "x", model, weights_dtype="int8")


def test_an_existing_path_is_refused(saved: Path, tmp_path: Path) -> None:
    content = (saved / "meta.json").read_bytes()
    assert "exists already and is not overwritten" in refusal(saved, build())
    assert (saved / "meta.json").read_bytes() == content
    (tmp_path / "file").write_text("mine")
    assert "exists already" in refusal(tmp_path / "file", build())
    assert "cannot write" in refusal(tmp_path / "file" / "below", build())


def test_what_no_checkpoint_can_hold(tmp_path: Path) -> None:
    class Forgetful(HookedTransformer):
        def forward(self, *arguments: Any, **options: Any) -> Tensor:
            return torch.zeros(1)

    assert "only a HookedTransformer can be stored" in refusal(tmp_path / "x", torch.nn.Linear(2, 2))
    model = build()
    model.__class__ = Forgetful
    assert "got a Forgetful" in refusal(tmp_path / "x", model)
    model = build()
    model.embed.W_E.data = model.embed.W_E.data.double()
    assert "parameters of one dtype" in refusal(tmp_path / "x", model)
    model = build()
    model.blocks[0].attn.IGNORE.fill_(-1.0)
    assert "buffer blocks.0.attn.IGNORE has been changed" in refusal(tmp_path / "x", model)
    model = build()
    model.extra = torch.nn.Parameter(torch.zeros(2))
    assert "parameter extra has shape [2] in the model and none" in refusal(tmp_path / "x", model)
    model = build()
    model.cfg.act_fn = torch.relu
    assert "the model's config cannot be stored: cfg.act_fn" in refusal(tmp_path / "x", model)
    assert "at least 0, got -1" in refusal(tmp_path / "x", build(), step=-1)
    task = tasks.get("modular-addition", p=5)
    assert "does not fit this model" in refusal(tmp_path / "x", build(), task)
    state = TrainingState({}, {"rng": object()})
    assert "must be plain JSON" in refusal(tmp_path / "x", build(), training_state=state)
