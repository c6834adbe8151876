"""Recoverable entries against union-find."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.matrix_completion import unrecoverable_entries


def lost_by_union_find(hidden):
    """Row i and column j are in one component of the observed entries, or entry (i, j) is lost."""
    rows, columns = len(hidden), len(hidden[0])
    parent = list(range(rows + columns))

    def root(node):
        while parent[node] != node:
            node = parent[node]
        return node

    for i, j in itertools.product(range(rows), range(columns)):
        if not hidden[i][j]:
            parent[root(i)] = root(rows + j)
    return [[hidden[i][j] and root(i) != root(rows + j) for j in range(columns)] for i in range(rows)]


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 2**49 - 1), st.sampled_from([0.3, 0.6, 0.8, 0.9]))
def test_unrecoverable_entries_are_those_between_components(rows, columns, seed, p_mask):
    draws = torch.rand(20, rows, columns, generator=torch.Generator().manual_seed(seed))
    hidden = draws < p_mask
    assert unrecoverable_entries(hidden).tolist() == [lost_by_union_find(mask) for mask in hidden.tolist()]
