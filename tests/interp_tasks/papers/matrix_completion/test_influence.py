"""``interp-run matrix influence``: its changes against single forward passes, its pooling against loops."""

import numpy as np
import pytest
import torch

from interp_tasks.checkpoints import load_checkpoint
from interp_tasks.experiments import COLUMNS, influence
from interp_tasks.papers.matrix_completion.influence import CHANGE, PART


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


def test_the_table(result, folders):
    frame = result.frame
    assert tuple(frame.columns) == COLUMNS
    assert list(dict.fromkeys(frame["ref"])) == folders
    assert set(frame["variant"]) == {"model", "rank-1 ratio"}
    parts = frame[(frame["metric"] == PART) & (frame["ref"] == folders[0]) & (frame["variant"] == "model")]
    places = parts.set_index("intervention")["value"]
    assert places[["same row", "same column", "neither"]].sum() == pytest.approx(1)
    assert parts["baseline"].between(0, 1).all()
    assert (parts["value_ci_low"] <= parts["value"]).all()
    assert (parts["value"] <= parts["value_ci_high"]).all()
    assert result.page().html()


@pytest.mark.parametrize(
    "kind", ["same row", "same column", "neither", "on a shortest path", "to unrecoverable"]
)
def test_changes_are_those_of_one_forward_pass_each(kind, result, by_hand, folders):
    found, changes = by_hand
    inside = [abs(change) for pair, change in changes.items() if found.kinds[kind][pair]]
    frame = result.frame
    mine = frame[
        (frame["ref"] == folders[0]) & (frame["variant"] == "model") & (frame["intervention"] == kind)
    ].set_index("metric")
    assert mine.loc[CHANGE, "value"] == pytest.approx(np.mean(inside), rel=1e-4)
    whole = [abs(change) for change in changes.values()]
    assert mine.loc[PART, "value"] == pytest.approx(sum(inside) / sum(whole), rel=1e-4)
    assert mine.loc[PART, "baseline"] == pytest.approx(len(inside) / len(whole))
