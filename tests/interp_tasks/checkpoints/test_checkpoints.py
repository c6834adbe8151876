"""Saving and loading: what comes back is what went in, bit for bit, whoever built the model."""

import dataclasses
import json

import numpy as np
import pytest
import torch

import tasks
from interp_tasks.checkpoints import load_checkpoint, save_checkpoint
from interp_tasks.checkpoints.checkpoint import read_checked_tensors
from interp_tasks.checkpoints.run_reader import read_checkpoint_meta, with_own_sha256
from interp_tasks.errors import UserError
from tasks.model_building import PostNormTransformer
from tests.interp_tasks.checkpoints.models import build


def tokens():
    return torch.randint(0, 5, (3, 3), generator=torch.Generator().manual_seed(1))


def matrix_task():
    return tasks.get("matrix-completion", n=3, rank=1, grid_max=1.2, grid_step=0.1)


def matrix_model(task):
    return task.build_model(0, task.Model(n_layers=1, n_heads=2, d_model=8, biases="frozen"))


ARCHITECTURES = {
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
def test_any_hooked_transformer_comes_back_bit_for_bit(tmp_path, kind):
    model = build(**ARCHITECTURES[kind])
    saved = save_checkpoint(tmp_path / "own", model, task=None, step=12)
    checkpoint = load_checkpoint(saved)
    assert "HookPoint" not in repr(checkpoint)
    assert torch.equal(checkpoint.model(tokens()), model(tokens()))
    assert (checkpoint.task, checkpoint.step, checkpoint.run) == (None, 12, None)
    for field in dataclasses.fields(model.cfg):
        assert getattr(checkpoint.model.cfg, field.name) == getattr(model.cfg, field.name), field.name


def test_weights_load_only_into_the_norm_they_were_made_with(tmp_path):
    """Only post-norm models name it; what names none, as all older checkpoints, is pre-norm."""
    saved = {
        norm: save_checkpoint(tmp_path / norm, build(**{"norm": norm} if norm == "post" else {}))
        for norm in ("pre", "post")
    }
    assert isinstance(load_checkpoint(saved["post"]).model, PostNormTransformer)
    assert not isinstance(load_checkpoint(saved["pre"]).model, PostNormTransformer)
    metas = {norm: read_checkpoint_meta(folder) for norm, folder in saved.items()}
    assert "norm" not in metas["pre"]["model"]
    for norm, stored, said in (
        ("post", {}, "lacks parameter ln_final.b"),
        ("pre", {"norm": "post"}, "lacks parameter ln_embed.b"),
        ("post", {"norm": "pre"}, "a post-norm model has norm = 'post', not 'pre'"),
    ):
        model = {name: value for name, value in metas[norm]["model"].items() if name != "norm"} | stored
        (saved[norm] / "meta.json").write_text(json.dumps(with_own_sha256({**metas[norm], "model": model})))
        with pytest.raises(UserError, match=said) as error:
            load_checkpoint(saved[norm])
        assert "\n" not in str(error.value)
        (saved[norm] / "meta.json").write_text(json.dumps(metas[norm]))


def test_a_task_comes_back_with_its_config_and_frozen_parameters(tmp_path):
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


def test_a_model_cast_after_construction_keeps_its_dtype(tmp_path):
    model = build()
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    assert model.cfg.dtype == torch.float32
    back = load_checkpoint(save_checkpoint(tmp_path / "one", model)).model
    assert all(
        torch.equal(one, other) for one, other in zip(back.parameters(), model.parameters(), strict=True)
    )
    assert back.cfg.dtype == torch.float64


def test_loading_leaves_global_randomness_alone(tmp_path):
    saved = save_checkpoint(tmp_path / "one", build(**ARCHITECTURES["seeded"]))
    # Python's own generator is left out: the type checker that the tests switch on draws from it.
    torch.manual_seed(0)
    np.random.seed(0)
    expected = torch.rand(1).item(), np.random.rand()
    torch.manual_seed(0)
    np.random.seed(0)
    load_checkpoint(saved)
    assert (torch.rand(1).item(), np.random.rand()) == expected


def test_training_state_survives_to_the_last_bit(tmp_path):
    tensors = {
        "adam.step": torch.tensor(3.0),
        "rng": torch.get_rng_state(),
        "filter": torch.randn(4, 3).T,
        "nothing": torch.zeros(0),
        "not finite": torch.tensor([float("inf"), float("nan")]),
    }
    folder = save_checkpoint(tmp_path / "one", build(), training_state=tensors)
    file = folder / "training_state.safetensors"
    state = read_checked_tensors(file, read_checkpoint_meta(folder))
    for name, tensor in tensors.items():
        assert torch.equal(state[name].nan_to_num(7), tensor.nan_to_num(7)), name
        assert state[name].dtype == tensor.dtype
    file.unlink()
    assert load_checkpoint(folder).step == 0


def test_a_task_not_registered_here_is_kept_by_name(tmp_path):
    class Foreign(type(matrix_task())):
        """A task that some other installation knows."""

    Foreign.name = "from-elsewhere"
    task = Foreign(n=3, rank=1, grid_max=1.2, grid_step=0.1)
    checkpoint = load_checkpoint(save_checkpoint(tmp_path / "one", matrix_model(task), task))
    assert checkpoint.task is None
    assert checkpoint.meta["task"]["name"] == "from-elsewhere"
    with pytest.raises(UserError, match=r"'from-elsewhere', which is not registered.*matrix-completion"):
        checkpoint.require_task()
