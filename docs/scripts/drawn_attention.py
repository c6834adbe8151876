"""Writes teachers whose attention is drawn by hand: models of the flagship's shape that were never trained.

Run it as `python -P docs/scripts/drawn_attention.py FOLDER`; it writes the checkpoints FOLDER/row-column and
FOLDER/shifted, which the recipe matrix-completion-7x7-drawn gives to students as `train.attention_from`. In every
layer the first half of the heads attends evenly to the observed entries of a row, the second to those of a column: in
`row-column` of the query's own, in `shifted` of those three further on.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from circuits import cache
from interp_tasks import load_checkpoint, save_checkpoint
from tasks.matrix_completion.matrix_task_base import MASK_ID

#: What sets an attended key apart from one of another row, or from a hidden one: e^14 times the weight.
LOGITS = 14.0
#: Teacher -> how many rows and columns further on its heads look.
SHIFTS = {"row-column": 0, "shifted": 3}


def attended(hidden: torch.Tensor, n: int, n_heads: int, shift: int) -> torch.Tensor:
    """Returns the patterns [batch head query key] by their definition, NaN where no entry is observed there."""
    entries = torch.arange(n * n)
    row, column = entries // n, entries % n
    same = [((of + shift) % n)[:, None] == of[None] for of in (row, column)]
    maps = torch.stack([same[head >= n_heads // 2] for head in range(n_heads)]) & ~hidden[:, None, None]
    return maps / maps.sum(-1, keepdim=True)


@torch.no_grad()
def drawn(model: Any, n: int, shift: int) -> Any:
    """Returns the model with these patterns; what its blocks add to the stream is 0, so that all layers read the same.

    The stream has a 1 at the entry's row, one at its column, and one that says observed or hidden, so that LayerNorm
    only scales it.
    """
    for parameter in model.parameters():
        parameter.zero_()
    model.ln_final.w.fill_(1.0)
    model.W_E[:, 2 * n] = 1.0
    model.W_E[MASK_ID, 2 * n : 2 * n + 2] = torch.tensor([0.0, 1.0])
    entries = torch.arange(n * n)
    model.W_pos[entries, entries // n] = model.W_pos[entries, n + entries % n] = 1.0
    # By LayerNorm's scale a 1 of the stream is this much above a 0.
    share = 3 / model.cfg.d_model
    unit = (share - share**2) ** -0.5
    for block in model.blocks:
        block.ln1.w.fill_(1.0)
        block.ln2.w.fill_(1.0)
        scale = LOGITS * model.cfg.attn_scale
        for head in range(model.cfg.n_heads):
            first = n * (head >= model.cfg.n_heads // 2)
            for place in range(n):
                block.attn.W_K[head, first + place, place] = 1 / unit
                block.attn.W_Q[head, first + (place - shift) % n, place] = scale / unit
            # Every query asks for observed keys.
            block.attn.W_K[head, 2 * n, n] = 1 / unit
            block.attn.b_Q[head, n] = scale
    return model


def main() -> None:
    flagship = load_checkpoint("zoo:matrix-completion-7x7@post")
    task, n = flagship.require_task(), 7
    batch = task.sample(64)
    for name, shift in SHIFTS.items():
        folder = Path(sys.argv[1]) / name
        model = drawn(flagship.model, n, shift)
        save_checkpoint(folder, model, task)
        by_definition = attended(batch.extras["hidden"], n, model.cfg.n_heads, shift)
        patterns = cache(model, batch.tokens, "pattern")
        furthest = max((found - by_definition).nan_to_num().abs().max().item() for found in patterns.values())
        print(f"{folder}: at most {furthest:.1e} from the patterns by definition")


if __name__ == "__main__":
    main()
