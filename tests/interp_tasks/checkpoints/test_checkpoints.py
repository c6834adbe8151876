"""Saving and loading: what comes back is what went in, bit for bit, whoever built the model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformer_lens import HookedTransformer

import tasks
from interp_tasks.checkpoints import (
    load_checkpoint,
    load_checkpoints,
    save_checkpoint,
)
from interp_tasks.checkpoints.load import read_training_state
from interp_tasks.checkpoints.meta import read_meta, signed
from interp_tasks.errors import UserError
from tasks.post_norm import PostNormTransformer
from tests.interp_tasks.checkpoints.models import build


def tokens() -> Tensor:
    return torch.randint(0, 5, (3, 3), generator=torch.Generator().manual_seed(1))


def matrix_task() -> tasks.Task:
    return tasks.get("matrix-completion", n=3, rank=1, grid_max=1.2, grid_step=0.1)


def matrix_model(task: tasks.Task) -> HookedTransformer:
    return task.build_model(0, task.Model(n_layers=1, n_heads=2, d_model=8, biases="frozen"))


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"attention_dir": "bidirectional"},
    "folded LayerNorm": {"normalization_type": "LNPre"},
    "no LayerNorm": {"normalization_type": None, "act_fn": "relu"},
    "RMS": {"normalization_type": "RMS", "gated_mlp": True, "act_fn": "silu"},
    "attention only": {"attn_only": True, "act_fn": None},
    "rotary": {"positional_embedding_type": "rotary"},
    "shortformer": {"positional_embedding_type": "shortformer"},
    "seeded": {"seed": 5, "init_weights": True, "initializer_range": np.float64(0.3)},
    "wide read-out": {"d_vocab_out": 11},
    "grouped queries": {"n_key_value_heads": 1},
    "local attention": {
        "n_layers": 2,
        "use_local_attn": True,
        "window_size": 2,
        "attn_types": ["local", "global"],
    },
    "float64": {"dtype": torch.float64},
    "post-norm": {"norm": "post", "eps": 1e-12},
    "post-norm, attention only": {"norm": "post", "attn_only": True, "attention_dir": "bidirectional"},
    "hooked results": {"use_attn_result": True, "use_split_qkv_input": True, "use_hook_mlp_in": True},
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_any_hooked_transformer_comes_back_bit_for_bit(tmp_path: Path, kind: str) -> None:
    model = build(**ARCHITECTURES[kind])
    saved = save_checkpoint(tmp_path / "own", model, task=None, step=12)
    checkpoint = load_checkpoint(saved)
    assert "HookPoint" not in repr(checkpoint)
    assert torch.equal(checkpoint.model(tokens()), model(tokens()))
    assert (checkpoint.task, checkpoint.step, checkpoint.run) == (None, 12, None)
    for field in dataclasses.fields(model.cfg):
        assert getattr(checkpoint.model.cfg, field.name) == getattr(model.cfg, field.name), field.name


def test_weights_load_only_into_the_norm_they_were_made_with(tmp_path: Path) -> None:
    """Only post-norm models name it; what names none, as all older checkpoints, is pre-norm."""
    saved = {
        norm: save_checkpoint(tmp_path / norm, build(**{"norm": norm} if norm == "post" else {}))
        for norm in ("pre", "post")
    }
    assert isinstance(load_checkpoint(saved["post"]).model, PostNormTransformer)
    assert not isinstance(load_checkpoint(saved["pre"]).model, PostNormTransformer)
    metas = {norm: read_meta(folder) for norm, folder in saved.items()}
    assert "norm" not in metas["pre"]["model"]
    for norm, stored, said in (
        ("post", {}, "lacks parameter ln_final.b"),
        ("pre", {"norm": "post"}, "lacks parameter ln_embed.b"),
        ("post", {"norm": "pre"}, "a post-norm model has norm = 'post', not 'pre'"),
    ):
        model = {name: value for name, value in metas[norm]["model"].items() if name != "norm"} | stored
        (saved[norm] / "meta.json").write_text(json.dumps(signed({**metas[norm], "model": model})))
        with pytest.raises(UserError, match=said) as error:
            load_checkpoint(saved[norm])
        assert "\n" not in str(error.value)
        (saved[norm] / "meta.json").write_text(json.dumps(metas[norm]))


def test_a_task_comes_back_with_its_config_and_frozen_parameters(tmp_path: Path) -> None:
    task = matrix_task()
    model = matrix_model(task)
    checkpoint = load_checkpoint(
        save_checkpoint(tmp_path / "one", model, task, 3, metrics={"mse": np.float32(0.5)})
    )
    assert checkpoint.task == task
    assert checkpoint.require_task() == task
    assert checkpoint.meta["metrics"] == {"mse": 0.5}
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert {name: parameter.requires_grad for name, parameter in checkpoint.model.named_parameters()} == flags
    assert not all(flags.values())
    batch = task.sample(4)
    assert torch.equal(checkpoint.model(batch.tokens), model(batch.tokens))


def test_float16_halves_the_file_and_comes_back_in_the_models_dtype(tmp_path: Path) -> None:
    model = build(d_model=32, d_head=16)
    whole = save_checkpoint(tmp_path / "whole", model)
    half = save_checkpoint(tmp_path / "half", model, weights_dtype="float16")
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (whole, half)]
    assert sizes[1] < 0.6 * sizes[0]
    back = load_checkpoint(half).model
    for name, parameter in back.named_parameters():
        original = dict(model.named_parameters())[name]
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, original.half().float()), name


def test_a_model_cast_after_construction_keeps_its_dtype(tmp_path: Path) -> None:
    model = build()
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    assert model.cfg.dtype == torch.float32
    back = load_checkpoint(save_checkpoint(tmp_path / "one", model)).model
    assert all(
        torch.equal(one, other) for one, other in zip(back.parameters(), model.parameters(), strict=True)
    )
    assert back.cfg.dtype == torch.float64


def test_loading_leaves_global_randomness_alone(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path / "one", build(**ARCHITECTURES["seeded"]))
    # Python's own generator is left out: the type checker that the tests switch on draws from it.
    torch.manual_seed(0)
    np.random.seed(0)
    expected = torch.rand(1).item(), np.random.rand()
    torch.manual_seed(0)
    np.random.seed(0)
    load_checkpoint(saved)
    assert (torch.rand(1).item(), np.random.rand()) == expected


def test_training_state_survives_to_the_last_bit(tmp_path: Path) -> None:
    tensors = {
        "adam.step": torch.tensor(3.0),
        "rng": torch.get_rng_state(),
        "filter": torch.randn(4, 3).T,
        "nothing": torch.zeros(0),
        "not finite": torch.tensor([float("inf"), float("nan")]),
    }
    folder = save_checkpoint(tmp_path / "one", build(), training_state=tensors)
    state = read_training_state(folder, read_meta(folder))
    assert state is not None
    for name, tensor in tensors.items():
        assert torch.equal(state[name].nan_to_num(7), tensor.nan_to_num(7)), name
        assert state[name].dtype == tensor.dtype
    (folder / "training_state.safetensors").unlink()
    assert read_training_state(folder, read_meta(folder)) is None
    assert load_checkpoint(folder).step == 0


def test_a_task_not_registered_here_is_kept_by_name(tmp_path: Path) -> None:
    class Foreign(type(matrix_task())):  # type: ignore[misc]
        """A task that some other installation knows."""

    Foreign.name = "from-elsewhere"
    task = Foreign(n=3, rank=1, grid_max=1.2, grid_step=0.1)
    checkpoint = load_checkpoint(save_checkpoint(tmp_path / "one", matrix_model(task), task))
    assert checkpoint.task is None
    assert checkpoint.meta["task"]["name"] == "from-elsewhere"
    with pytest.raises(UserError, match=r"'from-elsewhere', which is not registered.*matrix-completion"):
        checkpoint.require_task()


def test_several_checkpoints_load_one_at_a_time(tmp_path: Path) -> None:
    for step in (0, 10, 20):
        save_checkpoint(tmp_path / "run" / "checkpoints" / f"{step:08d}", build(step), step=step)
    stream = load_checkpoints(f"{tmp_path}/run@all")
    assert next(stream).step == 0
    (tmp_path / "run" / "checkpoints" / "00000010" / "meta.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        next(stream)
    with pytest.raises(UserError, match=r"names 3 checkpoints.*load_checkpoints"):
        load_checkpoint(f"{tmp_path}/run@all")
    with pytest.raises(UserError, match="no checkpoint at step 5"):
        load_checkpoints(f"{tmp_path}/run@5")
