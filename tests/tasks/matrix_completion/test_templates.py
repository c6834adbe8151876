"""Templates and paired examples of matrix completion, by their definitions."""

import pytest
import torch
from torch import Tensor

from tasks.matrix_completion import MatrixCompletion
from tasks.matrix_completion.attention_templates import longest_column_run
from tasks.matrix_completion.matrix_task_base import MASK_ID

PICTURES = {
    # One run of three, though another column has as many entries.
    "run": ((".#.", ".#.", ".##", "##.", "###"), {(0, 0), (1, 0), (2, 0)}),
    # Two runs of two in one column and one in another: all of them.
    "ties": ((".#", ".#", "##", "..", ".."), {(0, 0), (1, 0), (3, 0), (4, 0), (3, 1), (4, 1)}),
    "nothing observed": (("##", "##"), set()),
    "all observed": (("..", ".."), {(0, 0), (0, 1), (1, 0), (1, 1)}),
    "single entries": ((".#", "#."), {(0, 0), (1, 1)}),
}


@pytest.mark.parametrize("name", PICTURES)
def test_the_longest_column_of_a_picture(name):
    rows, expected = PICTURES[name]
    observed = torch.tensor([character == "." for row in rows for character in row])
    found = longest_column_run(torch.stack([observed, torch.ones_like(observed)]), len(rows), len(rows[0]))
    inside = {(int(i) // len(rows[0]), int(i) % len(rows[0])) for i in found[0].nonzero()}
    assert inside == expected
    assert bool(found[1].all()), "each example has its own"


def test_templates_by_their_definitions():
    task = MatrixCompletion(n=3, m=4, rank=1, p_mask=0.6)
    batch = task.sample(5, seed=1)
    hidden = batch.extras["hidden"]
    found = {}
    for name, template in task.attention_templates().items():
        keys = template if isinstance(template, Tensor) else template(batch)
        assert keys.dtype == torch.bool
        found[name] = keys.expand(5, 12, 12)
    for example in range(5):
        for query in range(12):
            for key in range(12):
                row = query // 4 == key // 4 and query != key
                column = query % 4 == key % 4 and query != key
                seen = not bool(hidden[example, key])
                here = bool(hidden[example, query])
                left = sum(not hidden[example, 4 * (query // 4) + j] for j in range(4))
                expected = {
                    "identity": query == key,
                    "row": row,
                    "column": column,
                    "mask_ignore": seen,
                    "hidden": not seen,
                    "row_observed": row and seen,
                    "column_observed": column and seen,
                    "masked_row": row and seen and here and left == 1,
                    "row_observed_elsewhere": row and seen and left > 1,
                    "observed_copy": query == key and not here,
                    "identity_in_hidden_rows": query == key and here and left <= 1,
                }
                for name, on in expected.items():
                    assert bool(found[name][example, query, key]) is on, name
    assert bool((found["longest_column"] == found["longest_column"][:, :1]).all())
    assert set(found) == {*expected, "longest_column"}
    assert all(keys.any() for keys in found.values()), "a template without any key here tests nothing"
    rules = task.attention_rules()
    assert set(rules) <= {*found, "input_processing"}
    assert {rule.unless for rule in rules.values()} <= {*found, None}


def test_moves_change_one_thing():
    task = MatrixCompletion(n=4, rank=1)
    batch = task.sample(200, seed=1)
    moved = task.attention_moves(batch, seed=1)
    assert torch.equal(moved["mask"].targets, batch.targets)
    assert torch.equal(moved["values"].extras["hidden"], batch.extras["hidden"])
    for other in moved.values():
        assert len(other) == 200
        assert torch.equal(other.tokens == MASK_ID, other.extras["hidden"])
        assert torch.equal(
            other.tokens, task.encode(other.targets).masked_fill(other.extras["hidden"], MASK_ID)
        )
    # What changed is drawn anew: nothing left of it but chance.
    assert bool(((moved["values"].targets - batch.targets).abs().mean(1) > 0).all())
    both = (moved["mask"].extras["hidden"] & batch.extras["hidden"]).double().mean()
    assert both.item() == pytest.approx(0.09, abs=0.02)
    again = task.attention_moves(batch, seed=1)
    assert torch.equal(again["mask"].tokens, moved["mask"].tokens)
    assert not torch.equal(task.attention_moves(batch, seed=2)["mask"].tokens, moved["mask"].tokens)
