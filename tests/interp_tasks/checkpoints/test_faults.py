"""Whatever is wrong with a checkpoint, or with what is to be one, is said in one line that names the file."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save
from transformer_lens import HookedTransformer

import tasks
from circuits import intervene, transplant
from interp_tasks.checkpoints import load_checkpoint, read_metrics, read_run, save_checkpoint
from interp_tasks.checkpoints.checkpoint import read_checked_tensors
from interp_tasks.checkpoints.run_reader import read_checkpoint_meta, size_and_sha256, with_own_sha256
from interp_tasks.errors import UserError
from tasks.errors import TaskError
from tests.interp_tasks.checkpoints.models import build


@pytest.fixture
def saved(tmp_path):
    return save_checkpoint(tmp_path / "model", build(), step=7)


def complaint(folder, **options):
    with pytest.raises(UserError) as caught:
        load_checkpoint(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def rewrite_meta(folder, change, sign=True):
    meta = json.loads((folder / "meta.json").read_text())
    change(meta)
    (folder / "meta.json").write_text(json.dumps(with_own_sha256(meta) if sign else meta))


def rewrite_weights(folder, content):
    """A weights file whose digest is right: only what is in it is wrong."""
    (folder / "model.safetensors").write_bytes(content)
    rewrite_meta(folder, lambda meta: meta["weights"].update(size_and_sha256(content)))


def rewrite_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    rewrite_weights(folder, save(tensors))


def bytes_of(name, change):
    """Returns a change of a file's bytes."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def weights(change):
    """Returns a change of the weights file whose digest is made right."""
    return lambda folder: rewrite_weights(folder, change((folder / "model.safetensors").read_bytes()))


def tensors(change):
    return lambda folder: rewrite_tensors(folder, change)


def model(**change):
    return lambda folder: rewrite_meta(folder, lambda content: content["model"].update(change))


def in_place_of(name, make):
    def put(folder):
        (folder / name).unlink()
        make(folder / name)

    return put


def flipped(content):
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


#: What is done to a whole checkpoint, and what is said of it.
FAULTS = [
    *((bytes_of("model.safetensors", lambda old, n=n: old[:n]), "has been altered: ") for n in (0, 9, -1)),
    (bytes_of("model.safetensors", lambda old: old + b"x"), " bytes where meta.json says "),
    (bytes_of("model.safetensors", flipped), "model.safetensors has been altered"),
    (weights(lambda old: save({"wte": torch.zeros(5, 4)})), "model.safetensors lacks parameter"),
    (tensors(lambda each: each.pop("embed.W_E")), "lacks parameter embed.W_E:"),
    (tensors(lambda each: each.update(more=torch.zeros(1))), "holds an unknown parameter more:"),
    (
        tensors(lambda each: each.update({"embed.W_E": torch.zeros(6, 4)})),
        "shape [6, 4], the model has [5, 4]",
    ),
    (bytes_of("meta.json", lambda old: old[:-3]), "meta.json is not valid JSON"),
    (bytes_of("meta.json", lambda old: b"[1]"), "holds a JSON list, not an object"),
    (bytes_of("meta.json", lambda old: b'{"format": 2}'), "has format version 2, this interp-tasks reads 1"),
    (bytes_of("meta.json", lambda old: b'{"format": 1}'), "meta.json has been altered"),
    (bytes_of("meta.json", lambda old: old.replace(b"relu", b"gelu")), "meta.json has been altered"),
    (model(invented=1), "does not know: config field invented"),
    (model(dtype="complex64"), "describes no model that transformer-lens can build: 'complex64'"),
    (model(act_fn="swirl"), "describes no model that transformer-lens can build"),
    (model(d_vocab=9), "parameter embed.W_E has shape [5, 4], the model has [9, 4]"),
    (in_place_of("model.safetensors", os.mkdir), "which should hold the model's parameters: Is a directory"),
    (in_place_of("meta.json", os.mkfifo), "is no run and no checkpoint folder"),
    (in_place_of("model.safetensors", lambda at: None), "is missing: it would hold the model's parameters"),
]


@pytest.mark.parametrize(("spoil", "said"), FAULTS, ids=[said for _, said in FAULTS])
def test_what_is_wrong_with_a_checkpoint_is_one_line(saved, spoil, said):
    rewrite_tensors(saved, lambda tensors: None)
    assert load_checkpoint(saved).step == 7
    spoil(saved)
    message = complaint(saved)
    assert said in message
    assert str(saved) in message


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("metrics.jsonl", b'{"step": 0}\n{"step": 9007199254740993}\n', r"metrics\.jsonl is mangled: line 2"),
        *(
            ("run.json", json.dumps({"config": {}, field: value}).encode(), f"'{field}' is of the wrong kind")
            for field, value in (("resumed", 3), ("drop_metric", {"name": ["loss"]}), ("preset", []))
        ),
    ],
)
def test_what_no_trainer_wrote(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_run(tmp_path) if name == "run.json" else read_metrics(tmp_path)


def test_a_config_its_task_refuses(tmp_path):
    task = tasks.get("modular-addition", p=5)
    saved = save_checkpoint(tmp_path / "one", task.build_model(0, task.Model(n_heads=2, d_model=4)), task)
    rewrite_meta(saved, lambda meta: meta["task"]["config"].update(p=6))
    assert "meta.json: task.p: p must be prime" in complaint(saved)
    rewrite_meta(saved, lambda meta: meta["task"]["config"].update(p=7))
    assert "does not fit this model" in complaint(saved)


def test_a_checkpoint_under_another_steps_name(saved, tmp_path):
    folder = tmp_path / "run" / "checkpoints" / "00000008"
    folder.parent.mkdir(parents=True)
    saved.rename(folder)
    assert "is misplaced: its meta.json says step 7" in complaint(f"{tmp_path / 'run'}@8")
    assert "device 'abacus' is not available" in complaint(folder, device="abacus")


def test_mangled_training_state(tmp_path):
    saved = save_checkpoint(tmp_path / "one", build(), training_state={"a": torch.ones(9)})
    file = saved / "training_state.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"training_state\.safetensors has been altered"):
        read_checked_tensors(file, read_checkpoint_meta(saved))


def refusal(path, model, task=None, step=0, **options):
    before = set(path.parent.iterdir()) if path.parent.is_dir() else set()
    with pytest.raises((UserError, TaskError)) as caught:
        save_checkpoint(path, model, task, step, **options)
    assert "\n" not in str(caught.value)
    assert (set(path.parent.iterdir()) if path.parent.is_dir() else set()) == before
    return str(caught.value)


def test_values_that_a_file_cannot_hold_are_not_saved(tmp_path):
    for value, options, said in (
        (float("nan"), {}, "parameter embed.W_E holds NaN or infinite values"),
        (float("inf"), {}, "parameter embed.W_E holds NaN or infinite values"),
        (1e5, {"weights_dtype": "float16"}, "parameter embed.W_E reaches 1e+05"),
        (1.0, {"weights_dtype": "int8"}, "no weights_dtype 'int8'"),
    ):
        model = build()
        with torch.no_grad():
            model.embed.W_E[0, 0] = value
        assert refusal(tmp_path / "x", model, **options).startswith(said)


def test_an_existing_path_is_refused(saved, tmp_path):
    content = (saved / "meta.json").read_bytes()
    assert "exists already and is not overwritten" in refusal(saved, build())
    assert (saved / "meta.json").read_bytes() == content
    (tmp_path / "file").write_text("mine")
    assert "exists already" in refusal(tmp_path / "file", build())
    assert "cannot write" in refusal(tmp_path / "file" / "below", build())


def test_what_no_checkpoint_can_hold(tmp_path):
    class Forgetful(HookedTransformer):
        def forward(self, *arguments, **options):
            return torch.zeros(1)

    assert "only a HookedTransformer can be stored" in refusal(tmp_path / "x", torch.nn.Linear(2, 2))
    model = build()
    model.__class__ = Forgetful
    assert "got a Forgetful" in refusal(tmp_path / "x", model)
    model = build()
    model.embed.W_E.data = model.embed.W_E.data.double()
    assert "parameters of one dtype" in refusal(tmp_path / "x", model)
    model = build()
    model.extra = torch.nn.Parameter(torch.zeros(2))
    assert "parameter extra has shape [2] in the model and none" in refusal(tmp_path / "x", model)
    model = build()
    model.cfg.act_fn = torch.relu
    assert "the model's config cannot be stored: cfg.act_fn" in refusal(tmp_path / "x", model)
    assert "at least 0, got -1" in refusal(tmp_path / "x", build(), step=-1)
    model = build()
    with intervene(model, transplant.weights(build(1.0), ["mlp"])):
        assert "end the block" in refusal(tmp_path / "x", model)
    save_checkpoint(tmp_path / "own", model)
    task = tasks.get("modular-addition", p=5)
    assert "does not fit this model" in refusal(tmp_path / "x", build(), task)
