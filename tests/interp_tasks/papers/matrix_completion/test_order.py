"""``interp-run matrix order``: its curves against the task's metrics and plain loops, on a run made by hand."""

import numpy as np
import pytest

from circuits import ablate, heads
from circuits import run as run_model
from interp_tasks import load_checkpoint
from interp_tasks.experiments import COLUMNS, order
from interp_tasks.papers.matrix_completion.what_moves_first import STEP, VALUE
from tasks import pool

STEPS = (0, 2, 4, 6, 8)
NAME = "mse_masked"


@pytest.fixture(scope="module")
def run(task, tmp_path_factory):
    from interp_tasks import train

    config = {"steps": 8, "batch_size": 8, "checkpoint_every": 2, "eval_samples": 8, "learning_rate": 0.01}
    config |= {"checkpoint_at": list(STEPS)}
    settings = {"n_layers": 2, "n_heads": 2, "d_model": 8, "init_std": 0.4}
    return str(train(task, out=tmp_path_factory.mktemp("runs") / "run", settings=settings, config=config))


@pytest.fixture(scope="module")
def refs(run):
    return [f"{run}@{step}" for step in STEPS]


@pytest.fixture(scope="module")
def result(refs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("interp_tasks.checkpoints.steps_around_drop.find_marks", lambda *asked: {"pre": 0})
        # The last one first: the order of the run is found, not taken over.
        return order([refs[-1], *refs[:-1]], samples=24)


def curve(frame, name):
    return frame[(frame["variant"] == name) & (frame["metric"] == VALUE)].set_index("step")["value"]


def test_the_table(result):
    frame = result.frame
    assert tuple(frame.columns) == COLUMNS
    values = frame[frame["metric"] == VALUE]
    assert set(values.groupby("variant")["step"].agg(tuple)) == {STEPS}
    assert {"silhouette of positions by column", "embedding alignment", NAME} <= set(values["variant"])
    steps = frame[frame["metric"].str.startswith(STEP)]
    assert set(steps["step"]) == {8}
    assert set(steps["metric"]) == {"step at 10%", "step at 50%", "step at 90%"}
    assert steps.loc[steps["variant"] == NAME, "effect"].isna().all()
    others = steps[steps["variant"] != NAME]
    gap = others["value"] - others["baseline"]
    assert np.allclose(gap, others["effect"], equal_nan=True)
    assert "step at 50%" in result.page().html()


def test_metrics_and_ablation_are_the_tasks(result, task, refs):
    batch = task.sample(24)
    for ref, step in zip(refs, STEPS, strict=True):
        model = load_checkpoint(ref).model
        clean = pool(task.metrics(run_model(model, batch.tokens), batch))[NAME]
        edited = run_model(model, batch.tokens, ablate.uniform(heads("all", model)))
        gap = pool(task.metrics(edited, batch))[NAME] - clean
        assert curve(result.frame, NAME)[step] == pytest.approx(clean)
        assert curve(result.frame, f"effect of ablation on {NAME}")[step] == pytest.approx(gap, abs=1e-7)


def test_the_way_from_the_plateau_is_shorter(run, refs, monkeypatch):
    monkeypatch.setattr("interp_tasks.checkpoints.steps_around_drop.find_marks", lambda *asked: {"pre": 3})
    found = order(refs, samples=24)
    # Of two stored steps as near to 3 the earlier one.
    steps = found.frame[found.frame["metric"].str.startswith(STEP)]["value"].dropna()
    assert (steps >= 2).all()
