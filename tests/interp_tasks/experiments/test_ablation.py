"""The ablation experiment: its numbers against a computation by hand, its table, its files."""

import json

import numpy
import pandas
import pyarrow.parquet
import pytest
import torch

from circuits.interventions.replacements import derangement
from interp_tasks.experiments import COLUMNS, Result, ablation
from interp_tasks.measurement.head_options_and_edits import MODES

N, SEED = 24, 3


@pytest.fixture
def by_hand(pooled):
    """Pooled metrics of a model whose hooks ``names`` are edited; plain hooks, plain numpy."""

    def measure(model, task, edit, names):
        batch = task.sample(N, seed=SEED, split="test")
        with torch.no_grad():
            output = model.run_with_hooks(batch.tokens, fwd_hooks=[(name, edit) for name in names])
        return pooled(output, batch)

    return measure


PATTERNS = [f"blocks.{layer}.attn.hook_pattern" for layer in (0, 1)]


def measured(frame, column="value"):
    return dict(zip(frame["metric"], frame[column], strict=True))


def test_uniform_ablation_is_what_plain_hooks_compute(task, models, folders, by_hand):
    def to_all(pattern, hook):
        return torch.full_like(pattern, 1 / 9)

    def two_keys(pattern, hook):
        return torch.zeros_like(pattern).index_fill(-1, torch.tensor([0, 4]), 0.5)

    for keys, edit in ((None, to_all), ("0,4", two_keys)):
        result = ablation(folders, mode="uniform", keys=keys, samples=N, seed=SEED)
        for index, model in enumerate(models):
            rows = result.frame[result.frame["step"] == index]
            expected = by_hand(model, task, edit, PATTERNS)
            clean = by_hand(model, task, lambda pattern, hook: pattern, PATTERNS)
            assert measured(rows) == pytest.approx(expected, rel=1e-6)
            assert measured(rows, "baseline") == pytest.approx(clean, rel=1e-6)
            assert abs(expected["mse_all"] / clean["mse_all"] - 1) > 0.01, (
                "too small an effect to test anything"
            )


@pytest.mark.parametrize("mode", sorted({*MODES} - {"noise"}))
def test_every_mode_edits_at_the_queries_and_nowhere_else(task, models, folders, by_hand, mode):
    new = {
        "uniform": lambda pattern: torch.full_like(pattern, 1 / 9),
        "mean_pattern": lambda pattern: pattern.mean(0, keepdim=True).expand_as(pattern),
        "edited_mean_pattern": lambda pattern: pattern.mean(0, keepdim=True).expand_as(pattern),
        "zero": torch.zeros_like,
        "mean": lambda z: z.mean(0, keepdim=True).expand_as(z),
        "resample": lambda z: z[derangement(N, SEED)],
    }[mode]

    def edit(activation, hook):
        edited = activation.clone()
        at = (slice(None), slice(None), 4) if "pattern" in hook.name else (slice(None), 4)
        edited[at] = new(activation)[at]
        return edited

    site = "pattern" if mode == "uniform" or "pattern" in mode else "z"
    found = ablation(folders[0], heads="1.0-1", mode=mode, positions="4", samples=N, seed=SEED)
    expected = by_hand(models[0], task, edit, [f"blocks.1.attn.hook_{site}"])
    assert measured(found.frame) == pytest.approx(expected, rel=1e-5)
    everywhere = ablation(folders[0], heads="1.0-1", mode=mode, samples=N, seed=SEED)
    assert measured(everywhere.frame) != pytest.approx(expected, rel=1e-3)


def test_files_hold_the_table_and_are_stamped(folders, tmp_path):
    result = ablation(folders[0], samples=N)
    records = json.loads(result.to_json(), parse_constant=lambda text: pytest.fail(f"{text} in JSON"))
    assert records == result.records()
    assert [tuple(record) for record in records] == [COLUMNS] * 3
    assert (records[0]["draw"], records[0]["head"]) == (None, None)
    assert (type(records[0]["step"]), type(records[0]["null_effect"])) == (int, bool)
    gaps = result.frame.assign(value=float("nan"), value_ci_high=float("inf"))
    first = Result("x", gaps).records()[0]
    assert (first["value"], first["value_ci_high"]) == (None, None)
    folder = tmp_path / "out"
    written = {path.name for path in result.write(folder)}
    assert written == {f"ablation.{end}" for end in ("config.json", "csv", "json", "parquet")}
    pandas.testing.assert_frame_equal(pandas.read_parquet(folder / "ablation.parquet"), result.frame)
    assert pandas.read_csv(folder / "ablation.csv")["value"].tolist() == result.frame["value"].tolist()
    stamp = json.loads((folder / "ablation.config.json").read_text())
    metadata = pyarrow.parquet.read_schema(folder / "ablation.parquet").metadata
    assert json.loads(metadata[b"interp-tasks"]) == stamp
    assert (stamp["config"]["samples"], stamp["config"]["heads"]) == (N, ["all"])
    assert stamp["versions"]["torch"] == torch.__version__


def test_own_tokens_give_the_distance_from_the_unedited_output(models, folders, tmp_path):
    tokens = numpy.random.default_rng(0).integers(0, 20, (6, 9))
    numpy.save(tmp_path / "tokens.npy", tokens)
    frame = ablation(folders[0], tokens=tmp_path / "tokens.npy").frame
    assert measured(frame, "baseline") == {"mse": 0}
    with torch.no_grad():
        clean = models[0](torch.from_numpy(tokens))
        edited = models[0].run_with_hooks(
            torch.from_numpy(tokens),
            fwd_hooks=[(name, lambda pattern, hook: torch.full_like(pattern, 1 / 9)) for name in PATTERNS],
        )
    assert measured(frame)["mse"] == pytest.approx((clean - edited).square().mean().item(), rel=1e-5)
    assert set(frame["n"]) == {6}
    assert set(ablation(folders[0], tokens=tokens, samples=2).frame["n"]) == {2}


def test_noise_is_that_of_circuits(task, models, folders):
    from circuits import ablate, sweep

    found = ablation(folders[0], heads="1.0", mode="noise", scale=0.5, positions=4, samples=N, seed=SEED)
    assert set(found.frame["intervention"]) == {"noise(positions=4; scale=0.5)"}
    batch = task.sample(N, seed=SEED)
    edit = ablate.noise([(1, 0)], 0.5, SEED, positions=(4,))
    by_hand = sweep(models[0], batch.tokens, {"1.0": edit}, metric=task.metrics, batch=batch)
    assert found.frame["value"].tolist() == pytest.approx(by_hand.frame["value"].tolist(), rel=1e-5)
