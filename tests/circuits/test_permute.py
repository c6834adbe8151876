"""Positional permutation against a deep copy of the model whose position table has its rows in another order."""

import copy

import numpy as np
import pytest
import torch

from circuits import CircuitsError, permute, run
from circuits.model.hooked_model import HookedModel
from circuits.permute import random_order

ORDER = (2, 0, 5, 1, 4, 3)


def table_of(model):
    weights = HookedModel(model).named_weights()
    return next(weight for name, weight in weights.items() if name.startswith("pos_embed."))


def with_rows(model, order):
    """A copy whose table holds row order[i] at i, later rows staying."""
    permuted = copy.deepcopy(model)
    table = table_of(permuted).data
    table[: len(order)] = table[list(order)].clone()
    return permuted


def test_a_permutation_against_a_copy_with_permuted_rows(model, tokens, by_hand, assert_same):
    clean, before = by_hand(model, tokens), table_of(model).detach().clone()
    for given in (ORDER, list(ORDER), np.array(ORDER), torch.tensor(ORDER)):
        found = run(model, tokens, permute.positions(given))
        assert_same(found, by_hand(with_rows(model, ORDER), tokens), clean)
    assert bool((table_of(model) == before).all())
    assert bool((run(model, tokens, permute.positions(range(6))) == run(model, tokens)).all())


def test_a_shorter_one_leaves_the_later_rows_and_a_longer_is_refused(model, tokens, by_hand, assert_same):
    found = run(model, tokens, permute.positions([1, 2, 0]))
    assert_same(found, by_hand(with_rows(model, [1, 2, 0]), tokens), by_hand(model, tokens))
    short = tokens[:, :4]
    assert_same(
        run(model, short, permute.positions([3, 1, 0, 2])),
        by_hand(with_rows(model, [3, 1, 0, 2]), short),
        by_hand(model, short),
    )
    with pytest.raises(
        CircuitsError, match=r"the permutation has 6 rows, the run 4 positions; give one of 0-3"
    ):
        run(model, short, permute.positions(ORDER))


def test_a_seed_permutes_the_rows_in_use_and_nothing_else_decides(model, tokens, by_hand, assert_same):
    """arXiv:2410.22244, section 3.2.1: a random permutation of the rows that the input uses, the input unchanged."""
    short, state = tokens[:, :4], torch.get_rng_state()
    order = random_order(4, 11)
    assert sorted(order) == [0, 1, 2, 3]
    expected = by_hand(with_rows(model, order), short)
    assert_same(run(model, short, permute.positions(11)), expected, by_hand(model, short))
    # Not the batch, nor other generators.
    found = run(model, short[:3], permute.positions(np.int64(11)))
    assert_same(found, expected[:3], by_hand(model, short[:3]))
    assert bool((torch.get_rng_state() == state).all())
    assert permute.positions(11) == permute.positions(11) != permute.positions(12)


GRID = np.arange(12).reshape(3, 4)


def given(intervention):
    """The permutation of the 12 positions of a grid [3 4], as a grid."""
    found = intervention.replacement.order
    assert sorted(found) == list(range(12))
    return np.array(found).reshape(3, 4)


def test_slices_are_moved_as_a_whole():
    for seed in range(20):
        rows, columns = given(permute.slices((3, 4), 0, seed)), given(permute.slices([3, 4], 1, seed))
        assert (rows % 4 == GRID % 4).all(), "an entry left its column"
        assert (rows // 4 == rows[:, :1] // 4).all(), "a row was torn apart"
        assert (columns // 4 == GRID // 4).all(), "an entry left its row"
        assert (columns % 4 == columns[:1] % 4).all(), "a column was torn apart"
        assert (rows[:, 0] // 4 == random_order(3, seed)).all()
    assert len({str(given(permute.slices((3, 4), 0, seed))) for seed in range(60)}) == 6, "not all"


def test_within_slices_nothing_leaves_its_slice():
    found = [given(permute.within((3, 4), 0, seed)) for seed in range(200)]
    assert all((grid // 4 == GRID // 4).all() for grid in found)
    assert len({str(grid[0]) for grid in found}) == 24, "not all permutations of a row"
    assert any((grid[0] != grid[1] % 4).any() for grid in found), "all rows have one permutation"
    columns = [given(permute.within((3, 4), 1, seed)) for seed in range(20)]
    assert all((grid % 4 == GRID % 4).all() for grid in columns)
    assert len({str(grid) for grid in columns}) > 1
    first, second = np.array(permute.within((2, 3, 4), 0).replacement.order).reshape(2, 12)
    assert sorted(first) == sorted(second - 12) == list(range(12)) != list(first)


def test_moving_whole_rows_of_positions_is_moving_rows_of_the_input(hooked_only, make_model, tokens):
    """In a model where every position sees every other: the output moves with the rows, and is the same."""
    model = make_model(attention_dir="bidirectional")
    grid = tokens[:, :6].reshape(-1, 3, 2)
    order = list(random_order(3, 2))
    moved = torch.empty_like(grid)
    moved[:, order] = grid
    permuted = run(model, grid.flatten(1), permute.slices((3, 2), 0, 2))
    expected = run(model, moved.flatten(1)).unflatten(1, (3, 2))[:, order].flatten(1, 2)
    torch.testing.assert_close(permuted, expected)
    assert order != [0, 1, 2]
    assert not torch.allclose(permuted, run(model, grid.flatten(1)))
