"""Ways to fill in entries, against loops and closed forms; what the task declares of them."""

import itertools

import numpy as np
import pytest
import torch

import tasks
from tasks.matrix_completion import low_rank_fill_methods, unrecoverable_entries
from tasks.matrix_completion.task import NUCLEAR_NORM, PENALTIES

METHODS = {
    "ratio": low_rank_fill_methods.fill_by_rank1_ratio,
    "als": lambda x, h: low_rank_fill_methods.alternating_least_squares(x, h, 1, 300),
    "descent": lambda x, h: low_rank_fill_methods.gradient_descent(x, h, 1, 3000),
}


def rank_one(batch=20, rows=4, columns=5, seed=0, p_mask=0.3):
    """Factors away from 0, where nothing is ill-conditioned."""
    stream = torch.Generator().manual_seed(seed)

    def factor(size):
        sizes = 0.5 + torch.rand(batch, size, 1, generator=stream, dtype=torch.float64)
        return sizes * (torch.rand(batch, size, 1, generator=stream) < 0.5).double().mul(2).sub(1)

    hidden = torch.rand(batch, rows, columns, generator=stream) < p_mask
    return factor(rows) @ factor(columns).mT, hidden


@pytest.mark.parametrize("name", METHODS)
def test_exact_at_rank_one_where_the_mask_lets_it(name):
    values, hidden = rank_one()
    unknown = values.masked_fill(hidden, float("nan"))
    found = METHODS[name](unknown, hidden)
    assert torch.equal(found[~hidden], values[~hidden])
    known = hidden & ~unrecoverable_entries(hidden)
    if name == "ratio":
        known &= low_rank_fill_methods.has_anchor(values, hidden)
    assert known.sum() > 50
    torch.testing.assert_close(found[known], values[known], rtol=0, atol=1e-6)
    if name == "ratio":
        assert (found[hidden & ~low_rank_fill_methods.has_anchor(values, hidden)] == 0).all()


def test_the_ratio_is_what_a_loop_gives():
    stream = torch.Generator().manual_seed(3)
    # Not of rank 1, so that anchors and rows differ; with zeros, which are no anchors.
    values = torch.randn(6, 4, 3, generator=stream, dtype=torch.float64)
    values[:, 1, 1] = 0
    hidden = torch.rand(6, 4, 3, generator=stream) < 0.4
    found = low_rank_fill_methods.fill_by_rank1_ratio(values, hidden)
    for b, i, j in hidden.nonzero().tolist():
        x, h = values[b].numpy(), hidden[b].numpy()
        ratios = [
            x[i, l] * x[k, j] / x[k, l]
            for k, l in itertools.product(range(4), range(3))
            if k != i and l != j and not (h[i, l] or h[k, j] or h[k, l]) and x[k, l]
        ]
        assert found[b, i, j] == pytest.approx(np.mean(ratios) if ratios else 0, abs=1e-12)
        assert bool(low_rank_fill_methods.has_anchor(values, hidden)[b, i, j]) == bool(ratios)


def test_als_is_least_squares_row_by_row():
    values, hidden = rank_one(batch=3, rows=5, columns=5, seed=5, p_mask=0.1)
    values = values + 0.3 * torch.randn(values.shape, generator=torch.Generator().manual_seed(1)).double()
    found = low_rank_fill_methods.alternating_least_squares(values, hidden, 2, 1)
    for x, h, got in zip(values.numpy(), hidden.numpy(), found.numpy(), strict=True):
        left, singular, right = np.linalg.svd(np.where(h, 0, x))
        right = right.T[:, :2] * np.sqrt(singular[:2])
        left = np.stack([np.linalg.lstsq(right[~h[i]], x[i, ~h[i]])[0] for i in range(5)])
        right = np.stack([np.linalg.lstsq(left[~h[:, j]], x[~h[:, j], j])[0] for j in range(5)])
        np.testing.assert_allclose(got[h], (left @ right.T)[h], rtol=1e-5, atol=1e-5)


def test_gradient_descent_goes_down_the_gradient():
    values, hidden = rank_one(batch=2, seed=7)
    seen = values.masked_fill(hidden, 0)
    left, singular, right = torch.linalg.svd(seen, full_matrices=False)
    root = singular[:, None, :1].sqrt()
    u, v = (left[..., :1] * root).requires_grad_(), (right.mT[..., :1] * root).requires_grad_()
    loss = ((u @ v.mT - values).masked_fill(hidden, 0) ** 2).sum() / 2
    of_u, of_v = torch.autograd.grad(loss, (u, v))
    size = 0.5 / singular[:, :1, None]
    expected = (u - size * of_u) @ (v - size * of_v).mT
    found = low_rank_fill_methods.gradient_descent(values, hidden, 1, 1)
    torch.testing.assert_close(found[hidden], expected[hidden].detach())


@pytest.fixture(scope="module")
def task():
    return tasks.get("matrix-completion", n=4, m=3, rank=1, grid_max=1.2, grid_step=0.05)


def test_methods_of_the_task_never_read_hidden_entries(task):
    batch = task.sample(50, seed=1)
    hidden = batch.extras["hidden"]
    other = type(batch)(batch.tokens, torch.where(hidden, -7.0, batch.targets), batch.extras)
    for name, method in {**task.baselines(), **task.methods()}.items():
        found = method(batch)
        assert found.shape == (50, 12, 1), name
        assert found.isfinite().all(), name
        assert torch.equal(found, method(other)), name


def test_baselines_of_the_task(task):
    assert list(task.baselines()) == [
        NUCLEAR_NORM,
        *(f"{NUCLEAR_NORM}, lambda {penalty:g}" for penalty in PENALTIES),
    ]
    batch = task.sample(20, seed=1)
    norms = [task.properties(method(batch))["nuclear_norm"] for method in task.baselines().values()]
    assert (norms[0] <= task.properties(batch.targets[..., None])["nuclear_norm"] + 1e-4).all()
    for larger, smaller in itertools.pairwise(norms):
        assert larger.mean() > smaller.mean()


def test_kinds_of_entries(task):
    batch = task.sample(400, seed=2)
    hidden = batch.extras["hidden"]
    groups = task.entry_groups(batch)
    assert list(groups) == ["recoverable", "one anchor", "longer path", "unrecoverable"]
    assert torch.equal(groups["recoverable"] ^ groups["unrecoverable"], hidden)
    assert torch.equal(groups["one anchor"] ^ groups["longer path"], groups["recoverable"])
    assert groups["longer path"].any()
    lost = unrecoverable_entries(hidden.unflatten(1, (4, 3))).flatten(1)
    assert torch.equal(groups["unrecoverable"], lost)
    wide = tasks.get("matrix-completion", n=4, rank=2)
    assert list(wide.entry_groups(wide.sample(3))) == ["hidden"]


def test_variations_differ_in_one_thing(task):
    groups = task.variations()
    assert list(groups) == ["p_mask", "entries", "rank", "rows", "columns"]
    assert [each.p_mask for each in groups["p_mask"].values()] == pytest.approx(
        [0.10, 0.15, 0.20, 0.25, 0.30, 0.35, 0.40, 0.45, 0.50, 0.55, 0.60]
    )
    assert [each.rank for each in groups["rank"].values()] == [1, 2, 3]
    assert [each.n for each in groups["rows"].values()] == [2, 3, 4, 5, 6]
    assert [each.columns for each in groups["columns"].values()] == [1, 2, 3, 4, 5]
    laws = [(each.distribution, each.scale) for each in groups["entries"].values()]
    assert laws == [("uniform", 1.0), ("gaussian", 0.5), ("laplace", 0.25)]
    own = task.model_dump() | {"m": 3}
    allowed = {"entries": {"distribution", "scale"}, "rows": {"n"}, "columns": {"m"}}
    for group, variants in groups.items():
        for each in variants.values():
            new = each.model_dump() | {"m": each.columns}
            assert {key for key in own if new[key] != own[key]} <= allowed.get(group, {group})


def test_copying_inputs(task):
    found = task.copying_inputs(30, 5, "test")
    assert list(found) == [
        f"{kind}, {token}" for kind in ("rank 1", "full rank") for token in ("MASK", "0.45", "-0.25")
    ]
    plain = task.sample(30, seed=5, split="test")
    for name, (copied, original) in found.items():
        hidden = copied.extras["hidden"]
        value = 0.0 if "MASK" in name else float(name.split(", ")[1])
        assert torch.equal(copied.tokens, original.tokens)
        torch.testing.assert_close(copied.targets[hidden], torch.full_like(copied.targets[hidden], value))
        assert torch.equal(copied.targets[~hidden], original.targets[~hidden])
        tokens = copied.tokens[hidden]
        if value:
            torch.testing.assert_close(task.decode(tokens), torch.full(tokens.shape, value))
        else:
            assert (tokens == 0).all()
        assert torch.equal(task.decode(copied.tokens[~hidden]), original.targets[~hidden])
        assert torch.equal(
            hidden, found["full rank, MASK" if "full" in name else "rank 1, MASK"][0].extras["hidden"]
        )
        if name.startswith("rank"):
            assert torch.equal(original.targets, plain.targets)
        else:
            ranks = torch.linalg.matrix_rank(original.targets.unflatten(1, (4, 3)))
            assert (ranks == 3).all()


def test_a_shift_moves_each_observed_entry_by_so_many_steps():
    task = tasks.get("matrix-completion", n=3, rank=1, grid_max=2.0, grid_step=0.05)
    batch = task.sample(40)
    found = task.influences(batch, 0.1, seed=0)
    moved = (found.tokens - task.encode(batch.targets)).abs()
    assert set(moved.unique().tolist()) == {2}
    assert torch.equal(found.changed, ~batch.extras["hidden"])
    assert torch.equal(found.read, batch.extras["hidden"])
    row, column = torch.arange(9) // 3, torch.arange(9) % 3
    assert torch.equal(found.kinds["same row"], (row[:, None] == row) & (column[:, None] != column))
    assert torch.equal(found.kinds["same column"], (row[:, None] != row) & (column[:, None] == column))
    assert torch.equal(found.kinds["neither"], (row[:, None] != row) & (column[:, None] != column))
