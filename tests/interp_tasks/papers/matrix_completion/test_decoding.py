"""``interp-run matrix decoding``: its numbers are the task's, greedy beside teacher forcing."""

import pytest
import torch

import tasks
from interp_tasks.checkpoints import save_checkpoint
from interp_tasks.experiments import COLUMNS, decoding
from tasks import pool


@pytest.fixture(scope="module")
def autoregressive(tmp_path_factory):
    task = tasks.get("matrix-completion-autoregressive", n=2, m=3, rank=1, grid_max=1.2, grid_step=0.2)
    model = task.build_model(0, task.Model(n_layers=2, n_heads=2, d_model=16, init_std=0.3))
    return task, model, str(save_checkpoint(tmp_path_factory.mktemp("c") / "c", model, task, step=0))


def test_values_are_the_tasks_metrics_of_both_ways(autoregressive):
    task, model, ref = autoregressive
    frame = decoding(ref, samples=20).frame
    assert tuple(frame.columns) == COLUMNS
    batch = task.sample(20)
    with torch.no_grad():
        expected = {"teacher forcing": pool(task.metrics(model(batch.tokens), batch))}
    expected["greedy"] = pool(task.decoded(model, batch))
    for variant, metrics in expected.items():
        rows = frame[frame["variant"] == variant].set_index("metric")
        assert rows["value"].to_dict() == pytest.approx(metrics)
        assert (rows["value_ci_low"] <= rows["value"] + 1e-12).all()
        assert (rows["value"] <= rows["value_ci_high"] + 1e-12).all()
    greedy = frame[frame["variant"] == "greedy"].set_index("metric")
    assert greedy["baseline"].to_dict() == pytest.approx(
        {name: expected["teacher forcing"][name] for name in greedy.index}
    )
    assert (greedy["effect"] == greedy["value"] - greedy["baseline"]).all()
