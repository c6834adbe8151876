"""``interp-run matrix influence`` and ``decoding``: against single forward passes, loops and the task."""

import numpy as np
import pytest
import torch

import tasks
from interp_tasks.checkpoints import load_checkpoint, save_checkpoint
from interp_tasks.experiments import COLUMNS, copying, decoding, influence
from interp_tasks.papers.matrix_completion.copying_decoding_influence import CHANGE, PART
from tasks import pool


@pytest.fixture(scope="module")
def result(folders):
    return influence(folders, samples=12)


@pytest.fixture(scope="module")
def by_hand(task, folders):
    """(example, source, target) -> change of the output, one forward pass each."""
    batch = task.sample(12)
    found = task.influences(batch, 0.1, 0)
    model = load_checkpoint(folders[0]).model
    changes = {}
    with torch.no_grad():
        clean = model(batch.tokens)[..., 0]
        for b, p in found.changed.nonzero().tolist():
            edited = batch.tokens[b].clone()
            edited[p] = found.tokens[b, p]
            moved = model(edited[None])[0, :, 0] - clean[b]
            changes |= {(b, p, q): moved[q].item() for q in range(9) if found.read[b, q]}
    return found, changes


@pytest.mark.parametrize("kind", ["same row", "same column", "neither"])
def test_changes_are_those_of_one_forward_pass_each(kind, result, by_hand, folders):
    found, changes = by_hand
    inside = [abs(change) for pair, change in changes.items() if found.kinds[kind][pair[1:]]]
    frame = result.frame
    mine = frame[(frame["ref"] == folders[0]) & (frame["intervention"] == kind)].set_index("metric")
    assert mine.loc[CHANGE, "value"] == pytest.approx(np.mean(inside), rel=1e-4)
    whole = [abs(change) for change in changes.values()]
    assert mine.loc[PART, "value"] == pytest.approx(sum(inside) / sum(whole), rel=1e-4)
    assert mine.loc[PART, "baseline"] == pytest.approx(len(inside) / len(whole))


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


def test_copying_compares_with_what_stands_in_the_input(task, models, folders):
    result = copying(folders, samples=24, seed=3)
    for step, model in enumerate(models):
        for name, (copied, original) in task.copying_inputs(24, 3, "test").items():
            output = model(copied.tokens)[..., 0].detach()
            hidden = copied.extras["hidden"]
            mine = result.frame[(result.frame["step"] == step) & (result.frame["variant"] == name)]
            rows = mine.set_index("metric").to_dict("index")
            kind, _, token = name.partition(", ")
            # The grid of this task has steps of 0.1.
            m = {"MASK": 0.0, "0.4": 0.4, "-0.2": -0.2}[token]
            assert kind in ("rank 1", "full rank")
            expected = (output - m).square()[hidden].mean()
            assert rows["mse_masked"]["value"] == pytest.approx(float(expected), rel=1e-5)
            truth = (output - original.targets).square()[hidden].mean()
            assert rows["mse_masked"]["baseline"] == pytest.approx(float(truth), rel=1e-5)
            assert rows["mse_observed"]["effect"] == 0
