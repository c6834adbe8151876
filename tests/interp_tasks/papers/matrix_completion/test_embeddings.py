"""``interp-run matrix embeddings``: its numbers against scikit-learn and closed forms, on embeddings made by hand."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score, silhouette_score

import tasks
from interp_tasks.checkpoints import save_checkpoint
from interp_tasks.experiments import COLUMNS, embeddings
from interp_tasks.measurement.confidence_intervals import weighted_correlation
from interp_tasks.papers.matrix_completion.embedding_geometry import (
    ALIGNMENT,
    area_under_roc,
    pairwise_distances,
    silhouette,
    silhouette_test,
)
from tests.interp_tasks.rows import row_of

RNG = np.random.default_rng(0)
ONES = np.ones((1, 30))


def test_silhouettes_are_those_of_scikit_learn():
    points, labels = RNG.normal(size=(30, 4)), RNG.integers(0, 3, 30)
    points[labels == 1] += 2
    assert silhouette(pairwise_distances(points), labels) == pytest.approx(silhouette_score(points, labels))
    alone = np.append(np.zeros(29, dtype=int), 1)
    assert silhouette(pairwise_distances(points), alone) == pytest.approx(silhouette_score(points, alone))


def test_permuted_labels_tell_clusters_from_chance():
    labels = np.repeat(np.arange(4), 4)
    points = RNG.normal(size=(16, 8))
    assert silhouette_test(points + 3 * labels[:, None], labels, 0)[2] == 0.001
    _, null, p = silhouette_test(points, labels, 0)
    assert p > 0.05
    assert abs(null) < 0.2
    assert silhouette_test(np.ones((16, 2)), labels, 0) == (0, 0, 1)


def test_separability_is_the_area_under_the_curve_of_either_end():
    scores, positive = np.round(RNG.normal(size=30), 1), RNG.random(30) < 0.4
    area = roc_auc_score(positive, scores)
    for sign in (1, -1):
        assert area_under_roc(sign * scores, positive, ONES)[0] == pytest.approx(max(area, 1 - area))
    weights = RNG.multinomial(30, np.full(30, 1 / 30), size=3).astype(float)
    drawn = area_under_roc(scores, positive, weights)
    end = 1 if area > 0.5 else -1
    for each, found in zip(weights, drawn, strict=True):
        assert found == pytest.approx(roc_auc_score(positive, end * scores, sample_weight=each))


def test_weighted_correlation_is_that_of_the_repeated_points():
    one, other = RNG.normal(size=(2, 30))
    weights = RNG.multinomial(30, np.full(30, 1 / 30), size=2).astype(float)
    for each, found in zip(weights, weighted_correlation(one, other, weights), strict=True):
        repeated = np.repeat(np.arange(30), each.astype(int))
        assert found == pytest.approx(np.corrcoef(one[repeated], other[repeated])[0, 1])
    planes = RNG.normal(size=(2, 30, 2))
    centred = [(plane - plane.mean(0)).ravel() for plane in planes]
    expected = centred[0] @ centred[1] / np.linalg.norm(centred[0]) / np.linalg.norm(centred[1])
    assert weighted_correlation(*planes, ONES)[0] == pytest.approx(expected)
    far = [plane + 1e9 for plane in planes]
    assert weighted_correlation(*far, ONES)[0] == pytest.approx(expected, rel=1e-5)
    assert weighted_correlation(np.ones(30), one, ONES)[0] == 0


@pytest.fixture(scope="module")
def task():
    return tasks.get("matrix-completion", n=3, m=4, rank=1, grid_max=1.5, grid_step=0.1)


def arranged(task, turn=0.0):
    """Embeddings [sign, |v|, turned noise], and positions that are their column, the middle row shorter."""
    model = task.build_model(0, task.Model(n_layers=1, n_heads=2, d_model=8))
    with torch.no_grad():
        model.embed.W_E.zero_()
        for token, value in task.token_values().items():
            model.embed.W_E[token, 0] = np.sign(value)
            model.embed.W_E[token, 1] = abs(value) + turn * np.sin(37 * value)
        columns = torch.eye(8)[:4].repeat(3, 1)
        model.pos_embed.W_pos[:] = columns
        model.pos_embed.W_pos[4:8] *= 0.5
    return model


@pytest.fixture(scope="module")
def made(task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    return str(save_checkpoint(folder / "c", arranged(task), task, step=0))


def value_of(frame, metric, column="value"):
    return row_of(frame, metric=metric)[column]


def test_an_arrangement_made_by_hand_is_found(made, task):
    result = embeddings(made)
    frame = result.frame
    assert tuple(frame.columns) == COLUMNS
    assert value_of(frame, "norm asymmetry") == pytest.approx(0, abs=1e-7)
    assert value_of(frame, "norm symmetry") == pytest.approx(1)
    assert value_of(frame, "sign separability") == 1
    # v and -v are equal in exact arithmetic only, and ranks tell the smallest difference.
    assert value_of(frame, "magnitude correlation") > 0.99
    assert value_of(frame, "silhouette by column: p") == 0.001
    assert value_of(frame, "silhouette by row: p") > 0.5
    assert value_of(frame, "norm of the middle row / others") == pytest.approx(0.5)
    assert value_of(frame, "sign separability", "baseline") < 1
    # Of a single checkpoint nothing is said about the way to the last.
    assert ALIGNMENT not in set(frame["metric"])
    # 21 values in [-1, 1], of 31 on the grid.
    assert set(frame.loc[frame["variant"] == "tokens", "n"]) == {21}
    assert len(result.data["tables"][made][0]) == 21
    assert "component 1" in result.page().html()
    assert len(embeddings(made, 0.5).data["tables"][made][0]) == 11


def test_a_plain_dot_product_not_centred_is_what_is_correlated(task, tmp_path):
    """Against the same in four lines of numpy."""
    from interp_tasks.measurement.token_and_position_embeddings import Embeddings
    from interp_tasks.papers.matrix_completion.embedding_geometry import alignment_with_last

    ids = task.token_values()
    own, end = Embeddings.of(arranged(task, 2.0)), Embeddings.of(arranged(task))
    own.tokens[:, 2] += 3.0
    # Components of its own that are not the last checkpoint's.
    own.tokens[:, 3] += 4.0 * np.cos(np.arange(len(own.tokens)))
    last = end.rows_of_tokens(ids)
    _, vectors = np.linalg.eigh(np.cov(last.T))
    one, other = own.rows_of_tokens(ids) @ vectors[:, -2:], last @ vectors[:, -2:]
    one, other = (x - x.mean(0) for x in (one, other))
    expected = (one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other)
    assert alignment_with_last(own.rows_of_tokens(ids), last, np.ones((1, len(ids))))[0] == pytest.approx(
        expected
    )
