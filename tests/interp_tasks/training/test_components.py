"""Weights to start from, and which parts train: what moves, what does not, what is refused."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

import tasks
from interp_tasks import UserError, load_checkpoint, save_checkpoint, train
from interp_tasks.checkpoints import read_metrics, read_run, stored_steps
from interp_tasks.training.config import PARTS, WHOLE_PARTS
from interp_tasks.training.start_weights_and_freezing import is_in_parts

TINY = {"d_model": 8, "n_heads": 2, "n_layers": 2}
CONFIG = {
    "steps": 4,
    "batch_size": 8,
    "eval_samples": 8,
    "checkpoint_every": 2,
    "learning_rate": 0.01,
    "threads": 1,
}
#: Which parameters are of which part, written out by hand.
NAMES = {
    "attn": {
        f"blocks.{layer}.{name}"
        for layer in (0, 1)
        for name in ("ln1.w", "ln1.b", *(f"attn.{kind}_{one}" for kind in "Wb" for one in "QKVO"))
    },
    "qk": {f"blocks.{layer}.attn.{kind}_{one}" for layer in (0, 1) for kind in "Wb" for one in "QK"},
    "mlp": {
        f"blocks.{layer}.{name}"
        for layer in (0, 1)
        for name in ("ln2.w", "ln2.b", "mlp.W_in", "mlp.b_in", "mlp.W_out", "mlp.b_out")
    },
    "embed": {"embed.W_E"},
    "pos_embed": {"pos_embed.W_pos"},
    "unembed": {"ln_final.w", "ln_final.b", "unembed.W_U", "unembed.b_U"},
}


@pytest.fixture(scope="module")
def matrices():
    return tasks.get("matrix-completion", n=2, rank=1, grid_max=1, grid_step=0.1)


@pytest.fixture(scope="module")
def source(matrices, tmp_path_factory):
    return train(matrices, out=tmp_path_factory.mktemp("source") / "run", settings=TINY, config=CONFIG)


def weights(run, step):
    return load_file(run / "checkpoints" / f"{step:08d}" / "model.safetensors")


def started(source, out, matrices, settings=TINY, **config):
    config = {**CONFIG, "start_from": f"{source}@4", "seed": 1, **config}
    return train(matrices, out=out, settings=settings, config=config)


def test_the_parts_share_out_all_parameters(matrices):
    names = {name for name, _ in matrices.build_model(0, matrices.Model(**TINY)).named_parameters()}
    assert set().union(*(NAMES[part] for part in WHOLE_PARTS)) == names
    assert {part: {name for name in names if is_in_parts(name, [part])} for part in PARTS} == NAMES
    post = matrices.build_model(0, matrices.Model(**TINY, norm="post"))
    theirs = {
        part: {name for name, _ in post.named_parameters() if is_in_parts(name, [part])} for part in PARTS
    }
    changed = {"embed": {"embed.W_E", "ln_embed.w", "ln_embed.b"}, "unembed": {"unembed.W_U", "unembed.b_U"}}
    assert theirs == NAMES | changed
    with pytest.raises(
        UserError, match=r"parameter blocks\.0\.attn2\.W belongs to none of the parts attn, qk, mlp"
    ):
        is_in_parts("blocks.0.attn2.W", PARTS)


@pytest.mark.parametrize("part", PARTS)
def test_only_a_part_trains_and_it_begins_afresh(source, matrices, tmp_path, part):
    run = started(source, tmp_path / "run", matrices, train_parts=[part])
    given, fresh = (
        weights(source, 4),
        dict(matrices.build_model(1, matrices.Model(**TINY)).named_parameters()),
    )
    first, last = weights(run, 0), weights(run, 4)
    for name in given:
        if name in NAMES[part]:
            assert torch.equal(first[name], fresh[name]), name
        else:
            assert torch.equal(first[name], given[name]), name
            assert torch.equal(last[name], given[name]), name
    assert any(not torch.equal(first[name], last[name]) for name in NAMES[part])
    frozen = set(load_checkpoint(f"{run}@4").meta["frozen"])
    assert frozen == set(given) - NAMES[part]


def test_an_extended_run_goes_on_exactly_and_knows_its_source(source, matrices, tmp_path):
    config = {"train_parts": ["attn", "mlp"], "weight_decay": 0.1}
    straight = started(source, tmp_path / "straight", matrices, **config, steps=6)
    run = started(source, tmp_path / "run", matrices, **config, steps=2)
    started(source, run, matrices, **config, steps=6)
    expected = weights(straight, 6)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(run, 6).items())
    start = read_run(run)["config"]["start"]
    assert start["ref"] == f"{source}@4"
    assert start["sha256"] == load_checkpoint(f"{source}@4").meta["weights"]["sha256"]


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_weights_of_another_norm_are_refused(matrices, tmp_path, norm):
    """Attention has the same names and shapes in both, and means another function."""
    other = {"pre": "post", "post": "pre"}[norm]
    model = matrices.build_model(5, matrices.Model(**TINY, norm=other))
    where = save_checkpoint(tmp_path / "source", model, matrices)
    config = {**CONFIG, "start_from": str(where), "start_parts": ["attn"]}
    with pytest.raises(UserError, match=f"is of a {other}-norm model, this one is {norm}-norm"):
        train(matrices, out=tmp_path / "run", settings={**TINY, "norm": norm}, config=config)


def test_a_source_that_has_changed_is_refused(matrices, tmp_path):
    model = matrices.build_model(5, matrices.Model(**TINY))
    where = save_checkpoint(tmp_path / "source", model, matrices)
    config = {**CONFIG, "start_from": str(where), "train_parts": ["attn"]}
    run = train(matrices, out=tmp_path / "run", settings=TINY, config=config)
    for file in where.iterdir():
        file.unlink()
    where.rmdir()
    save_checkpoint(where, matrices.build_model(6, matrices.Model(**TINY)), matrices)
    with pytest.raises(
        UserError, match=r"^.* was made by another config \(start\.sha256: '\w+' there, '\w+' asked"
    ):
        train(matrices, out=run, settings=TINY, config={**config, "steps": 8})
    assert read_metrics(run)[-1]["step"] == 4


def test_the_mask_row_stays_zero_whatever_it_was_in_the_source(matrices, tmp_path):
    learned = {**TINY, "mask_embedding": "learned"}
    other = train(matrices, out=tmp_path / "learned", settings=learned, config=CONFIG)
    assert weights(other, 4)["embed.W_E"][0].any()
    for parts in (["embed"], ["attn"]):
        run = started(other, tmp_path / parts[0], matrices, start_parts=["embed"], train_parts=parts)
        assert not weights(run, 0)["embed.W_E"][0].any()
        assert not weights(run, 4)["embed.W_E"][0].any()
        assert torch.equal(weights(run, 0)["embed.W_E"][1:], weights(other, 4)["embed.W_E"][1:])


@pytest.mark.parametrize(
    ("settings", "config", "message"),
    [
        (
            {"d_model": 16},
            {},
            "is of another architecture: blocks.0.attn.W_K is [2, 8, 4] there and [2, 16, 8]",
        ),
        ({"n_layers": 1}, {}, "blocks.1.attn.W_K is [2, 8, 4] there and missing here"),
        ({"n_layers": 3}, {}, "blocks.2.attn.W_K is missing there and [2, 8, 4] here"),
        ({"attn_only": True}, {"start_parts": ["embed"], "train_parts": ["mlp"]}, "nothing to train there"),
    ],
)
def test_refusals_are_one_line_before_any_work(source, matrices, tmp_path, settings, config, message):
    with pytest.raises(UserError, match=f"^[^\n]*{re.escape(message)}[^\n]*$"):
        started(source, tmp_path / "run", matrices, settings={**TINY, **settings}, **config)
    assert not (tmp_path / "run").exists()


def test_sgd_with_momentum_is_its_recurrence_and_resumes(matrices, tmp_path):
    """v ← 0.9 v + g, w ← w − η v, on the batches of the run, in float64."""
    config = {**CONFIG, "optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.05}
    short = train(matrices, out=tmp_path / "run", settings=TINY, config={**config, "steps": 2})
    run = train(matrices, out=short, settings=TINY, config=config)
    model = matrices.build_model(0, matrices.Model(**TINY)).double()
    velocity = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step in range(4):
        batch = matrices.sample(8, seed=tasks.derive_seed(0, "batch", step), split="train")
        model.zero_grad()
        matrices.loss(model(batch.tokens), batch).backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                velocity[name] = 0.9 * velocity[name] + parameter.grad
                parameter -= 0.05 * velocity[name]
    stored = weights(run, 4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(stored[name].double(), parameter.detach(), rtol=1e-4, atol=1e-6)


def test_a_run_older_than_a_setting_goes_on_at_its_default(tmp_path):
    task, settings = tasks.get("modular-addition", p=5), {"d_model": 8, "n_heads": 2}
    run = train(task, out=tmp_path / "run", settings=settings, config={"steps": 1, "threads": 1})
    stored = json.loads((run / "run.json").read_text())
    assert stored["config"]["train"].pop("grokfast_window") == 100
    (run / "run.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match=r"train\.grokfast_window: 100 there, 7 asked for"):
        train(task, out=run, settings=settings, config={"steps": 2, "threads": 1, "grokfast_window": 7})
    train(task, out=run, settings=settings, config={"steps": 2, "threads": 1})
    assert stored_steps(run)[-1] == 2
