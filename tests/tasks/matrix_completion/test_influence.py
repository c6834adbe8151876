"""Pairs of entries against breadth-first search, the derivative of the rank-1 ratio against autograd."""

from __future__ import annotations

import itertools
from collections import deque

import pytest
import torch

from tasks.matrix_completion import MatrixCompletion
from tasks.matrix_completion.rank_one import on_shortest_path, pairs_of_entries, ratio_derivative


def paths_by_search(observed: list[list[bool]], i: int, j: int) -> set[tuple[int, int]]:
    """Entries on shortest paths from row i to column j: all paths, breadth first, up to the first length."""
    n, m = len(observed), len(observed[0])
    queue: deque[tuple[tuple[str, int], tuple[tuple[int, int], ...]]] = deque([(("row", i), ())])
    best, found = None, set()
    while queue:
        (side, at), path = queue.popleft()
        if best is not None and len(path) > best:
            break
        if (side, at) == ("column", j):
            best = len(path)
            found |= set(path)
            continue
        if len(path) > n + m:
            break
        for other in range(m if side == "row" else n):
            entry = (at, other) if side == "row" else (other, at)
            if observed[entry[0]][entry[1]] and entry not in path:
                queue.append((("column" if side == "row" else "row", other), (*path, entry)))
    return found


@pytest.mark.parametrize(("n", "m", "p_mask"), [(3, 3, 0.5), (3, 4, 0.6), (2, 3, 0.3)])
def test_entries_on_shortest_paths_are_those_of_a_search(n: int, m: int, p_mask: float) -> None:
    observed = torch.rand(12, n, m, generator=torch.Generator().manual_seed(n + m)) > p_mask
    found = on_shortest_path(observed).unflatten(1, (n, m)).unflatten(3, (n, m))
    for example, i, j in itertools.product(range(12), range(n), range(m)):
        if not observed[example, i, j]:
            entries = set(map(tuple, found[example, :, :, i, j].nonzero().tolist()))
            assert entries == paths_by_search(observed[example].tolist(), i, j)


def test_every_pair_is_of_one_place_and_of_one_use() -> None:
    batch = MatrixCompletion(n=4, rank=1).sample(50)
    hidden = batch.extras["hidden"].view(-1, 4, 4)
    kinds, _ = pairs_of_entries(batch.targets.view(-1, 4, 4), hidden)
    pairs = ~hidden.flatten(1)[:, :, None] & hidden.flatten(1)[:, None]
    for names in (
        ("same row", "same column", "neither"),
        ("on a shortest path", "off the shortest paths", "to unrecoverable"),
    ):
        assert torch.equal(sum(kinds[name].int() for name in names), pairs.int())
    row, column = torch.arange(16) // 4, torch.arange(16) % 4
    for name, of in (("same row", row), ("same column", column)):
        assert not (kinds[name] & (of[:, None] != of)).any()


def ratio(values: torch.Tensor, hidden: torch.Tensor, i: int, j: int) -> torch.Tensor:
    n, m = values.shape
    triples = [
        (values[i, b] * values[a, j], values[a, b])
        for a, b in itertools.product(range(n), range(m))
        if a != i and b != j and not (hidden[i, b] or hidden[a, j] or hidden[a, b])
    ]
    if not triples:
        return torch.tensor(torch.nan, dtype=values.dtype, requires_grad=True)
    return sum(top * below for top, below in triples) / sum(below**2 for _, below in triples)


def test_the_derivative_of_the_ratio_is_autograds() -> None:
    random_stream = torch.Generator().manual_seed(0)
    values = torch.randn(4, 3, 4, generator=random_stream, dtype=torch.float64)
    hidden = torch.rand(4, 3, 4, generator=random_stream) < 0.35
    found = ratio_derivative(values, hidden).unflatten(1, (3, 4)).unflatten(3, (3, 4))
    seen = 0
    for example, i, j in itertools.product(range(4), range(3), range(4)):
        if not hidden[example, i, j]:
            assert found[example, :, :, i, j].isnan().all()
            continue
        leaf = values[example].clone().requires_grad_()
        estimate = ratio(leaf, hidden[example], i, j)
        if estimate.isnan():
            assert found[example, :, :, i, j].isnan().all()
            continue
        (gradient,) = torch.autograd.grad(estimate, leaf)
        torch.testing.assert_close(found[example, :, :, i, j], gradient)
        seen += 1
    assert seen > 5


def test_a_shift_moves_each_observed_entry_by_so_many_steps() -> None:
    task = MatrixCompletion(n=3, rank=1, grid_max=2.0, grid_step=0.05)
    batch = task.sample(40)
    found = task.influences(batch, 0.1, seed=0)
    moved = (found.tokens - task.encode(batch.targets)).abs()
    assert set(moved.unique().tolist()) == {2}
    assert torch.equal(found.changed, ~batch.extras["hidden"])
    assert torch.equal(found.read, batch.extras["hidden"])
    new = task.influences(batch, None, seed=0)
    assert (new.tokens != task.encode(batch.targets)).float().mean() > 0.8
    assert list(found.references) == ["rank-1 ratio"]
    assert not MatrixCompletion(n=3, rank=2).influences(MatrixCompletion(n=3).sample(2), 0.1, 0).references
