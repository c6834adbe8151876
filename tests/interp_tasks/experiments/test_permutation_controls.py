"""``interp-run permute --what``: groups of positions by the task's grid, against tables permuted by hand."""

import numpy as np
import pytest
import torch

from interp_tasks.experiments import permute

N, SEED = 24, 3
WHAT = ["all", "rows", "columns", "within-rows", "within-columns", "middle-row", "middle-column"]
GRID = np.arange(9).reshape(3, 3)


def orders(result, variant):
    (done,) = result.config["done"]
    return [np.array(draw["permutation"]).reshape(3, 3) for draw in done["interventions"][variant]]


@pytest.fixture(scope="module")
def found(folders):
    return permute(folders[0], 3, WHAT, samples=N, seed=SEED)


def test_each_group_leaves_alone_what_it_should(found):
    for order in orders(found, "rows"):
        assert (order % 3 == GRID % 3).all()
        assert (order // 3 == order[:, :1] // 3).all()
    for order in orders(found, "columns"):
        assert (order // 3 == GRID // 3).all()
        assert (order % 3 == order[:1] % 3).all()
    for order in orders(found, "within-rows"):
        assert (order // 3 == GRID // 3).all()
    for order in orders(found, "within-columns"):
        assert (order % 3 == GRID % 3).all()
    for order in orders(found, "middle-row"):
        assert (order[[0, 2]] == GRID[[0, 2]]).all()
        assert (order[1] // 3 == 1).all()
    for order in orders(found, "middle-column"):
        assert (order[:, [0, 2]] == GRID[:, [0, 2]]).all()
        assert (order[:, 1] % 3 == 1).all()
    assert any((order != GRID).any() for order in orders(found, "middle-row"))
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


def test_a_grid_with_an_even_number_of_rows_has_two_in_the_middle():
    result = permute("zoo:matrix-completion-4x4@pre", 2, "middle-row", samples=4)
    grid = np.arange(16).reshape(4, 4)
    (done,) = result.config["done"]
    found = [np.array(draw["permutation"]).reshape(4, 4) for draw in done["interventions"]["middle-row"]]
    for order in found:
        assert (order[[0, 3]] == grid[[0, 3]]).all()
        assert (order // 4 == grid // 4).all()
    assert any((order[1] != grid[1]).any() and (order[2] != grid[2]).any() for order in found)
