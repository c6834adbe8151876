"""Measures how much of the answer the attention patterns of a model hold by themselves.

Run it as `python -P docs/scripts/attended_values.py REF...`; it writes a row for each checkpoint into
docs/results/attended-values.csv. At a hidden entry each head of a model looks at some values; their average under its
pattern, hidden entries counting as 0, is one number a head. A linear reader of these numbers alone, fitted on other
matrices, guesses the entry: its squared error as a share of the variance of an entry, with the 95% interval of a
bootstrap over matrices. Nothing of the model but its patterns is used.
"""

import sys
from pathlib import Path

import numpy as np
import pandas
import torch
from torch import Tensor

from circuits import cache
from circuits.statistics import bootstrap_ratios, percentile_bounds
from interp_tasks import load_checkpoint
from interp_tasks.checkpoints.checkpoint import Checkpoint
from tasks import Batch

FILE = Path(__file__).parents[1] / "results" / "attended-values.csv"
#: Matrices that the reader is fitted on, and those that it is scored on; how many are run at a time.
FITTED, SCORED, CHUNK = 2000, 1000, 250
DRAWS = 1000


def attended_values(checkpoint: Checkpoint, batch: Batch) -> Tensor:
    """Returns the average value that each head looks at, and a 1, [batch pos head+1], in float64."""
    values = batch.targets.masked_fill(batch.extras["hidden"], 0.0).double()
    found = []
    for start in range(0, len(batch), CHUNK):
        rows = slice(start, start + CHUNK)
        patterns = torch.cat(list(cache(checkpoint.model, batch.tokens[rows], "pattern").values()), dim=1)
        read = torch.einsum("bhqk,bk->bqh", patterns.double(), values[rows])
        found.append(torch.cat([read, torch.ones_like(read[..., :1])], dim=-1))
    return torch.cat(found)


def measured(ref: str) -> dict[str, float | str]:
    """Returns the error of the linear reader of a checkpoint's patterns, with its interval."""
    checkpoint = load_checkpoint(ref)
    task = checkpoint.require_task()
    fitted, scored = task.sample(FITTED, split="train"), task.sample(SCORED)
    hidden = fitted.extras["hidden"]
    features, answers = attended_values(checkpoint, fitted)[hidden], fitted.targets[hidden].double()
    # Some heads have the same pattern: of all solutions the smallest.
    weights = torch.linalg.lstsq(features, answers[:, None], driver="gelsd").solution
    hidden = scored.extras["hidden"]
    errors = (attended_values(checkpoint, scored) @ weights)[..., 0] - scored.targets
    sums = errors.square().masked_fill(~hidden, 0.0).sum(1).numpy()[None]
    counts = hidden.sum(1).double().numpy()[None]
    low, high = percentile_bounds(bootstrap_ratios(sums, counts, 0, DRAWS), 0.95)
    shares = np.array([sums.sum() / counts.sum(), low[0], high[0]]) / task.entry_variance  # type: ignore[attr-defined]
    return {"ref": ref, **dict(zip(("error", "low", "high"), shares.round(4), strict=True))}


def main() -> None:
    table = pandas.read_csv(FILE, index_col="ref") if FILE.is_file() else pandas.DataFrame()
    found = pandas.DataFrame([measured(ref) for ref in sys.argv[1:]]).set_index("ref")
    table = found.combine_first(table)[["error", "low", "high"]]
    table.to_csv(FILE, lineterminator="\n")
    print(table.to_string())


if __name__ == "__main__":
    main()
