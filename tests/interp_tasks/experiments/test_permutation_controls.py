"""``interp-run permute --what``: groups of positions by the task's grid, against tables permuted by hand."""

import numpy as np
import pytest
import torch

from interp_tasks.experiments import permute

N, SEED = 24, 3
WHAT = ["all", "rows", "columns", "within-rows", "within-columns"]
GRID = np.arange(9).reshape(3, 3)


def orders(result, variant):
    (done,) = result.config["done"]
    return [np.array(draw["permutation"]).reshape(3, 3) for draw in done["interventions"][variant]]


@pytest.fixture(scope="module")
def found(folders):
    return permute(folders[0], 3, WHAT, samples=N, seed=SEED)


@pytest.mark.parametrize(
    ("what", "is_right"),
    [
        ("rows", lambda order: (order % 3 == GRID % 3) & (order // 3 == order[:, :1] // 3)),
        ("columns", lambda order: (order // 3 == GRID // 3) & (order % 3 == order[:1] % 3)),
        ("within-rows", lambda order: order // 3 == GRID // 3),
        ("within-columns", lambda order: order % 3 == GRID % 3),
    ],
)
def test_each_group_leaves_alone_what_it_should(found, what, is_right):
    assert all(is_right(order).all() for order in orders(found, what))
    assert any((order != GRID).any() for order in orders(found, what))


def test_each_group_is_a_variant(found):
    assert list(dict.fromkeys(found.frame["variant"])) == ["positions", *WHAT[1:]]
    assert set(found.frame["intervention"]) == {
        f"{name}(draws=3)" for name in found.frame["variant"].unique()
    }
    assert found.config["what"] == WHAT


def test_whole_rows_are_a_symmetry_of_the_data(found, task, models, pooled):
    """The edited model does on the matrices what the unedited one does on matrices whose rows have moved."""
    batch = task.sample(N, seed=SEED)
    for order, draw in zip(orders(found, "rows"), range(3), strict=True):
        flat = torch.from_numpy(order.flatten())
        values, hidden = torch.empty_like(batch.targets), torch.empty_like(batch.extras["hidden"])
        values[:, flat], hidden[:, flat] = batch.targets, batch.extras["hidden"]
        moved = task.batch(values, hidden)
        expected = pooled(models[0](moved.tokens), moved)
        rows = found.frame[(found.frame["variant"] == "rows") & (found.frame["draw"] == draw)]
        assert dict(zip(rows["metric"], rows["value"], strict=True)) == pytest.approx(expected, rel=1e-5)
