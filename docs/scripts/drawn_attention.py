"""Writes teachers whose attention is set by hand, in part or altogether.

Run it as `python -P docs/scripts/drawn_attention.py FOLDER`; it writes checkpoints below FOLDER, which the recipe
matrix-completion-7x7-drawn gives to students as `train.attention_from`:

- row-column: in every layer half of the heads attend evenly to the observed entries of the query's own row, half to
  those of its own column (where there are none, to the hidden ones of that line and to all observed entries).
- apart: every head attends to one entry, observed or not: in layers 0 and 2 to one of the query's own row, in layers 1
  and 3 to one of its own column, each of the seven in a head of its own (the eighth head has the query itself again).
- mean: every head has the mean of its patterns in the flagship's last checkpoint, whatever the input.
- values-unseen: the flagship's last checkpoint with one embedding, the mean, for all values: its patterns depend on
  what is hidden, and on no number.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from circuits import cache
from interp_tasks import load_checkpoint, save_checkpoint
from tasks.matrix_completion import MatrixCompletion
from tasks.matrix_completion.matrix_task_base import MASK_ID

FLAGSHIP = "zoo:matrix-completion-7x7@post"
N, LAYERS, HEADS = 7, 4, 8
SIZE = N * N
ENTRIES = torch.arange(SIZE)
ROW, COLUMN = ENTRIES // N, ENTRIES % N
#: What sets an attended key apart from any other: e^14 times the weight.
LOGITS = 14.0
#: Examples that mean patterns are of, and the seed of their draw; those that teachers are checked on, and how closely.
SAMPLES, SEED, CHECKED, TOLERANCE = 2048, 1, 64, 1e-4


def row_and_column() -> Tensor:
    """Returns whether a key is in the query's row (first half of the heads) or column, [layer head query key]."""
    same = [of[:, None] == of for of in (ROW, COLUMN)]
    return torch.stack([same[head >= HEADS // 2] for head in range(HEADS)]).expand(LAYERS, -1, -1, -1)


def single_entries() -> Tensor:
    """Returns whether a key is the one entry that a head looks at, [layer head query key]."""
    chosen = torch.zeros(LAYERS, HEADS, SIZE, SIZE, dtype=torch.bool)
    for layer in range(LAYERS):
        for head in range(HEADS):
            along_row = layer % 2 == 0
            row = ROW if along_row else (ROW + head) % N
            column = (COLUMN + head) % N if along_row else COLUMN
            chosen[layer, head, ENTRIES, row * N + column] = True
    return chosen


@torch.no_grad()
def teacher(task: MatrixCompletion, scores: Tensor, observed_alone: bool) -> Any:
    """Returns a model with attention scores [layer head query key], and `LOGITS` more at observed keys if asked for.

    Its stream is a 1 at the entry's position and one that says observed or hidden, so that LayerNorm only scales it,
    and its blocks add nothing to it. Query weights hold the scores.
    """
    width = SIZE + 2
    sizes = {"n_layers": LAYERS, "n_heads": HEADS, "d_model": width, "d_head": SIZE + 1, "n_ctx": SIZE}
    model = task.build_model(settings=task.Model(**sizes))
    for parameter in model.parameters():
        parameter.zero_()
    model.W_pos[ENTRIES, ENTRIES] = 1.0
    model.W_E[:, SIZE] = 1.0
    model.W_E[MASK_ID, SIZE:] = torch.tensor([0.0, 1.0])
    # By LayerNorm's scale a 1 of the stream is `unit` above a 0, and a 0 is `share * unit` below 0: biases undo that.
    share = 2 / width
    unit = (share - share**2 + model.cfg.eps) ** -0.5
    for block, of_layer in zip(model.blocks, scores * model.cfg.attn_scale, strict=True):
        block.ln1.w.fill_(1.0)
        block.attn.W_K[:, : SIZE + 1] = torch.eye(SIZE + 1) / unit
        block.attn.b_K.fill_(share)
        block.attn.W_Q[:, :SIZE, :SIZE] = of_layer / unit
        block.attn.b_Q[:, :SIZE] = share * of_layer.sum(1)
        block.attn.b_Q[:, SIZE] = LOGITS * model.cfg.attn_scale * observed_alone
    return model


def main() -> None:
    flagship = load_checkpoint(FLAGSHIP)
    task = flagship.require_task()
    assert isinstance(task, MatrixCompletion)
    seen = cache(flagship.model, task.sample(SAMPLES, SEED, "train").tokens, "pattern")
    mean = torch.stack([pattern.mean(0) for pattern in seen.values()])
    batch = task.sample(CHECKED)
    observed = ~batch.extras["hidden"][:, None, None, None]
    # The scores of each teacher, and its patterns by definition [batch layer head query key], before they sum to 1.
    teachers = {
        "row-column": (LOGITS * row_and_column(), row_and_column() & observed),
        "apart": (LOGITS * single_entries(), single_entries().expand(CHECKED, -1, -1, -1, -1)),
        "mean": (mean.log(), mean.expand(CHECKED, -1, -1, -1, -1)),
    }
    for name, (scores, expected) in teachers.items():
        model = teacher(task, scores, observed_alone=name == "row-column")
        folder = save_checkpoint(Path(sys.argv[1]) / name, model, task)
        found = torch.stack(list(cache(model, batch.tokens, "pattern").values()), dim=1)
        weight = expected.sum(-1, keepdim=True)
        # Where no entry of a row or column is observed, the pattern is defined by nothing.
        furthest = torch.where(weight > 0, found - expected / weight, 0.0).abs().max().item()
        assert furthest < TOLERANCE, f"{name}: {furthest} from the patterns by definition"
        print(f"{folder}: at most {furthest:.1e} from the patterns by definition")
    unseeing, others = flagship.model, [token for token in range(task.d_vocab) if token != MASK_ID]
    with torch.no_grad():
        unseeing.W_E[others] = unseeing.W_E[list(task.token_values())].mean(0)
    print(save_checkpoint(Path(sys.argv[1]) / "values-unseen", unseeing, task))


if __name__ == "__main__":
    main()
