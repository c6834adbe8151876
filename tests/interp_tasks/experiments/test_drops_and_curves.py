"""``drops`` and ``curve`` on made-up logs whose numbers are known, and on a tiny run."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import tasks
from interp_tasks import UserError, load_checkpoint, train
from interp_tasks.checkpoints import detect_drop
from interp_tasks.cli import main
from interp_tasks.experiments import COLUMNS, curve, drops
from interp_tasks.experiments.drops_and_curve import drops_view_columns as view_columns
from interp_tasks.experiments.drops_and_curve import drops_view_rows as view_rows
from interp_tasks.experiments.drops_and_curve import plateau_end_and_has_left
from tests.interp_tasks.logs import write_run

STEPS = range(0, 4001, 50)
TASK = {"name": "matrix-completion", "n": 4, "rank": 1, "grid_max": 1.2, "grid_step": 0.05}


def sigmoid(at, power=12, high=1 / 9, low=0.01):
    """Falls from high to low, half way at a step, as sharp as its power."""
    return [low + (high - low) / (1 + (step / at) ** power) for step in STEPS]


def write(path, metrics, **settings):
    """A run whose log has these metrics -> values at ``STEPS``; settings are ``model__d_model=32``, ``task__n=5``."""
    config = {"task": TASK, "model": {"d_model": 64}, "train_config": {}}
    for key, value in settings.items():
        section, name = key.split("__")
        section = "train_config" if section == "train" else section
        config[section] = {**config[section], name: value}
    validation = {name: dict(zip(STEPS, values, strict=True)) for name, values in metrics.items()}
    return write_run(path, validation, drop="mse_masked", **config)


def values(result, run, variant="mse_masked"):
    rows = result.frame[(result.frame["run"] == run) & (result.frame["variant"] == variant)]
    return dict(zip(rows["metric"], rows["value"], strict=True))


def test_a_row_for_each_thing_said_of_a_curve(tmp_path):
    logged = sigmoid(1500)
    run = write(tmp_path / "run", {"mse_masked": logged})
    found = drops(run)
    expected = detect_drop(STEPS, logged, "down")
    said = values(found, run)
    assert said == pytest.approx(
        {
            "drop": 1,
            "onset": expected.onset,
            "crossing": expected.crossing,
            "end": expected.end,
            "length": expected.end - expected.onset,
            "sharpness": expected.sharpness,
            "plateau": expected.plateau,
            "final": expected.final,
            # 0.9 / 9 of the way: 1 / (1 + x) = (0.1 - 0.01) / (1/9 - 0.01), to the next logged step.
            "plateau until": 50 * math.ceil(1500 * ((1 / 9 - 0.01) / 0.09 - 1) ** (1 / 12) / 50),
            "plateau left": 1,
        }
    )
    assert said["crossing"] == pytest.approx(1500, abs=50)
    assert list(found.frame.columns) == list(COLUMNS)
    levels = found.frame[found.frame["metric"].isin(["plateau", "final"])]
    assert levels["baseline"].tolist() == pytest.approx([1 / 9, 1 / 9])
    assert levels["effect"].tolist() == pytest.approx([said["plateau"] - 1 / 9, said["final"] - 1 / 9])


def test_a_run_without_a_drop_is_a_row_that_says_so(tmp_path, capsys):
    run = write(tmp_path / "flat", {"mse_masked": [0.11] * len(STEPS)})
    said = values(drops(run), run)
    assert said["drop"] == 0
    assert said["final"] == 0.11
    assert said["plateau until"] == 4000
    assert all(
        math.isnan(said[name]) for name in ("onset", "crossing", "end", "length", "sharpness", "plateau")
    )
    assert main(["runs", "drops", "--ckpt", run, "--quiet"]) == 0
    # However many lines the path of the run takes above it.
    [row] = [line.split() for line in capsys.readouterr().out.splitlines() if " no " in line]
    assert row[1:] == ["no", *["–"] * 5, "0.11", "never", "left"]


def test_seeds_are_pooled_into_medians_and_ranges(tmp_path):
    crossings = [1000, 1200, 1500, 2400]
    for seed, at in enumerate(crossings):
        write(tmp_path / f"seed-{seed}", {"mse_masked": sigmoid(at)}, train__seed=seed)
    write(tmp_path / "seed-9", {"mse_masked": [0.11] * len(STEPS)}, train__seed=9)
    found = drops(str(tmp_path / "seed-*"))
    pooled = found.frame[found.frame["run"] == f"{tmp_path}/seed-*"].set_index("metric")
    each = [values(found, f"{tmp_path}/seed-{seed}")["crossing"] for seed in range(4)]
    assert pooled.loc["drop", "value"] == 0.8
    assert pooled.loc["drop", "n_runs"] == 5
    row = pooled.loc["crossing"]
    assert row["value"] == np.median(each)
    assert row["n_runs"] == 4
    half = 3.1824 * np.std(each, ddof=1) / 2  # Student's t over four runs
    ends = np.mean(each) - half, np.mean(each) + half
    assert (row["value_ci_low"], row["value_ci_high"]) == pytest.approx(ends, rel=1e-4)
    # Four of five: the exact binomial interval.
    assert tuple(pooled.loc["drop", ["value_ci_low", "value_ci_high"]]) == pytest.approx(
        (0.2836, 0.9949), abs=1e-4
    )
    assert pooled.loc["crossing, smallest", "value"] == min(each)
    assert pooled.loc["crossing, largest", "value"] == max(each)
    rows = view_rows(found.frame)
    assert rows["run"].tolist() == [*(f"seed-{seed}" for seed in (0, 1, 2, 3, 9)), "seed-*"]
    assert set(rows["ref"]) == {f"5 runs of {tmp_path}"}
    assert rows["drop"].tolist() == ["yes"] * 4 + ["no", "80% of runs"]
    alone = drops([str(tmp_path / "seed-0"), write(tmp_path / "other", {"mse_masked": sigmoid(900)})])
    assert not alone.frame["run"].str.contains("*", regex=False).any()


def test_rank_correlations_are_over_runs_that_differ_in_one_setting_alone(tmp_path):
    runs = [
        write(
            tmp_path / f"w{width}-{seed}", {"mse_masked": sigmoid(at)}, model__d_model=width, train__seed=seed
        )
        for width, seed, at in ((16, 0, 2500), (32, 0, 2000), (32, 1, 2100), (64, 0, 1000))
    ]
    odd = write(tmp_path / "odd", {"mse_masked": sigmoid(3000)}, model__d_model=128, task__n=5)
    found = drops([*runs, odd], against="model.d_model").frame
    row = found[found["run"].eq("against model.d_model") & found["metric"].str.endswith("of crossing")]
    assert row["n_runs"].tolist() == [4]
    assert row["value"].item() == pytest.approx(
        spearmanr([16, 32, 32, 64], [2500, 2000, 2100, 1000]).statistic
    )
    assert row["value_ci_low"].item() <= row["value"].item() <= row["value_ci_high"].item()
    # People see the interval too; that of a drop, which all four have, is of no correlation.
    rows = view_rows(found)
    cells = {column.header: column.shown(rows.to_dict("records")[-1]) for column in view_columns(rows)}
    assert (cells["crossing"], cells["drop"]) == ("-0.9487 [-1.00, 0.494]", "")
    for key, runs_given in (("model.d_model", runs[:2]), ("task.name", runs)):
        with pytest.raises(
            UserError, match=f"^--against {key}: no three of the runs have different numbers there"
        ):
            drops(runs_given, against=key)


def test_the_plateau_ends_where_the_metric_stays_below(tmp_path):
    dip = [0.5, 0.11, 0.09, 0.11, 0.11, 0.11, 0.09, 0.08, 0.08, 0.08]
    assert plateau_end_and_has_left(range(0, 100, 10), dip, 1 / 9) == (60, True)
    assert plateau_end_and_has_left(range(0, 100, 10), [0.11] * 10, 1 / 9) == (90, False)
    # One that leaves at its last step is none that never leaves.
    flat = [0.11] * len(STEPS)
    for seed, logged in enumerate((flat, flat, [*flat[:-1], 0.09])):
        write(tmp_path / f"seed-{seed}", {"mse_masked": logged}, train__seed=seed)
    frame = drops(f"{tmp_path}/seed-*").frame
    assert view_rows(frame)["plateau until"].tolist()[:3] == ["never left", "never left", "4000"]
    left = frame[frame["metric"] == "plateau left"]
    assert left["value"].tolist() == pytest.approx([0, 0, 1, 1 / 3])
    assert left["n_runs"].tolist() == [1, 1, 1, 3]


def test_what_falls_in_the_drop(tmp_path):
    masked, observed = sigmoid(1500), sigmoid(1500, 12, 0.002, 0.001)
    both = {"mse_masked": masked, "mse_observed": observed}
    run = write(tmp_path / "run", both)
    with pytest.raises(UserError, match="meta"):
        curve(run)  # its checkpoint is no checkpoint
    found = curve(run, stored=False).frame
    rows = dict(zip(zip(found["variant"], found["metric"], strict=True), found["value"], strict=True))
    fell = {name: rows["plateau", name] - rows["final", name] for name in both}
    assert rows["drop", "share of the fall: mse_masked"] == pytest.approx(
        0.3 * fell["mse_masked"] / (0.3 * fell["mse_masked"] + 0.7 * fell["mse_observed"])
    )
    assert rows["plateau", "mse_masked"] == pytest.approx(1 / 9, rel=1e-3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    task = tasks.get("matrix-completion-sizes", sizes=(2, 3), grid_max=1, grid_step=0.1)
    config = {"steps": 6, "batch_size": 8, "eval_samples": 8, "log_every": 1, "checkpoint_every": 4}
    out = tmp_path_factory.mktemp("tiny") / "run"
    return task, train(task, out=out, settings={"d_model": 8, "n_heads": 2}, config=config)


def test_stored_steps_are_measured_on_the_same_examples(tiny):
    task, run = tiny
    found = curve(str(run), samples=16, seed=3)
    rows = found.frame[found.frame["variant"] == "stored step"]
    assert rows["step"].unique().tolist() == [0, 1, 2, 4, 6]
    for name, part in task.parts().items():
        batch = part.sample(16, seed=3)
        for step in (0, 6):
            with torch.no_grad():
                output = load_checkpoint(f"{run}@{step}").model(batch.tokens)
            expected = tasks.pool(part.metrics(output, batch) | part.accuracies(output, batch))
            for metric, value in expected.items():
                row = rows[(rows["step"] == step) & (rows["metric"] == f"{metric} ({name})")]
                assert row["value"].item() == pytest.approx(value, rel=1e-5)
                assert row["value_ci_low"].item() <= value + 1e-9
                assert row["value_ci_high"].item() >= value - 1e-9
    both = curve([str(run), "zoo:modular-arithmetic-sweeps/addition-60"], samples=4)
    assert set(both.frame[both.frame["variant"] == "stored step"]["run"]) == {str(run)}
    assert "store no checkpoints" in both.notes[-1]
    # Without a drop there is no plateau, and that is no error.
    assert found.frame[found.frame["variant"] == "plateau"]["value"].isna().all()
