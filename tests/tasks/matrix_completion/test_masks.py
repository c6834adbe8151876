"""Masks with a structure, and masks whose longest column changes place."""

import pytest
import torch

from tasks import TaskError
from tasks.matrix_completion import MatrixCompletion, mask_hiding_rows
from tasks.matrix_completion.attention_templates import longest_column_run, named_masks, parse_mask
from tasks.matrix_completion.matrix_task_base import MASK_ID


def test_the_published_mask_and_smaller_ones():
    """Rows 4 and 7 of 7, counted from 1, hidden but for columns 2 and 6."""
    assert named_masks(7, 7)["rows"] == mask_hiding_rows(7, 7, {3: 1, 6: 5})
    assert named_masks(7, 7)["columns"] == tuple(
        "".join(row) for row in zip(*named_masks(7, 7)["rows"], strict=True)
    )
    assert named_masks(4, 4)["rows"] == ("....", "#.##", "....", "##.#")
    assert named_masks(4, 4)["columns"] == (".#.#", "...#", ".#..", ".#.#")
    assert named_masks(5, 3)["rows"] == ("...", "...", "#.#", "...", "#.#")
    assert named_masks(2, 4) == {}


def test_a_mask_for_a_whole_batch():
    task = MatrixCompletion(n=4, rank=1)
    batch = task.sample(6, seed=2)
    for mask, rows in (("rows", named_masks(4, 4)["rows"]), ("....,#..#,....,####", None)):
        found = task.with_mask(batch, mask)
        picture = torch.tensor([character == "#" for row in rows or mask.split(",") for character in row])
        assert torch.equal(found.extras["hidden"], picture.expand(6, -1))
        assert torch.equal(found.tokens == MASK_ID, found.extras["hidden"])
        assert torch.equal(found.targets, batch.targets)


@pytest.mark.parametrize(
    "text", ["diagonal", "....,....,....", "....,....,....,..x.", "....,....,....,...", ""]
)
def test_masks_that_do_not_fit(text):
    with pytest.raises(TaskError, match=r"write rows, columns, or 4 rows of 4 characters, each \. or #"):
        parse_mask(text, 4, 4)
    with pytest.raises(TaskError, match="write 2 rows of 3 characters"):
        parse_mask("rows", 2, 3)


@pytest.mark.parametrize(("n", "m"), [(4, 4), (5, 3)])
def test_the_longest_column_moves_and_nothing_else(n, m):
    task = MatrixCompletion(n=n, m=m, rank=1)
    batch = task.sample(300, seed=1)
    moved = task.attention_relocations(batch, seed=1)["longest_column"]
    assert torch.equal(moved.groups, torch.arange(n * m) % m)
    assert bool((moved.source != moved.target).all())
    alone = 0
    for hidden in batch.extras["hidden"]:
        alone += len(set((longest_column_run(~hidden[None], n, m)[0].nonzero() % m).flatten().tolist())) == 1
    assert len(moved.before) == len(moved.after) == alone > 30
    assert torch.equal(moved.before.targets, moved.after.targets)
    for example in range(alone):
        for pair, place in ((moved.before, moved.source), (moved.after, moved.target)):
            inside = longest_column_run(~pair.extras["hidden"][example : example + 1], n, m)[0]
            assert set((inside.nonzero() % m).flatten().tolist()) == {int(place[example])}
        one, other = (pair.extras["hidden"][example].view(n, m) for pair in (moved.before, moved.after))
        rest = [j for j in range(m) if j not in (int(moved.source[example]), int(moved.target[example]))]
        assert torch.equal(one[:, rest], other[:, rest])
        assert torch.equal(one[:, moved.source[example]], other[:, moved.target[example]])
    assert len(set(moved.target[moved.source == 0].tolist())) == m - 1, "it always goes to one place"
    again = task.attention_relocations(batch, seed=1)["longest_column"]
    assert torch.equal(again.after.tokens, moved.after.tokens)
    assert not torch.equal(task.attention_relocations(batch, seed=2)["longest_column"].target, moved.target)
