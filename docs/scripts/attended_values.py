"""Measures how much of the answer the attention patterns of a model hold by themselves.

Run it as `python -P docs/scripts/attended_values.py REF...`; it writes a row for each checkpoint into
docs/results/attended-values.csv. At a hidden entry the sum of the observed values, weighted by a head's pattern, is one
number a head. A linear reader of these numbers alone, the same at every position and fitted on other matrices, guesses
the entry: its squared error as a share of the variance of an entry, with the 95% interval of a bootstrap over
matrices; and that of a reader of one layer's heads. Nothing of the model but its patterns is used.
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
    """Returns the weighted sum of values that each head looks at, [batch pos layer head], in float64."""
    values = batch.targets.masked_fill(batch.extras["hidden"], 0.0).double()
    found = []
    for start in range(0, len(batch), CHUNK):
        rows = slice(start, start + CHUNK)
        patterns = torch.stack(list(cache(checkpoint.model, batch.tokens[rows], "pattern").values()))
        found.append(torch.einsum("lbhqk,bk->bqlh", patterns.double(), values[rows]))
    return torch.cat(found)


def guesses(fitted: Tensor, answers: Tensor, scored: Tensor) -> Tensor:
    """Returns the guesses [batch pos] for the numbers `scored` [batch pos number] of a reader that was fitted."""
    one_more = [torch.cat([x, torch.ones_like(x[..., :1])], dim=-1) for x in (fitted, scored)]
    # Some heads have the same pattern: of all solutions the smallest.
    weights = torch.linalg.lstsq(one_more[0], answers[:, None], driver="gelsd").solution
    return (one_more[1] @ weights)[..., 0]


def measured(ref: str) -> dict[str, float | str]:
    """Returns the error of the linear reader of a checkpoint's patterns, with its interval."""
    checkpoint = load_checkpoint(ref)
    task = checkpoint.require_task()
    fitted, scored = task.sample(FITTED, split="train"), task.sample(SCORED)
    of_fitted, of_scored = (attended_values(checkpoint, batch) for batch in (fitted, scored))
    answers = fitted.targets[fitted.extras["hidden"]].double()
    hidden, variance = scored.extras["hidden"], task.entry_variance  # type: ignore[attr-defined]
    counts = hidden.sum(1).double().numpy()[None]

    def squared_errors(layers: slice) -> np.ndarray:
        """Returns the sum over the hidden entries of each matrix, [1 matrix], as a share of the variance."""
        numbers = of_fitted[fitted.extras["hidden"]][:, layers].flatten(1)
        errors = guesses(numbers, answers, of_scored[:, :, layers].flatten(2)) - scored.targets
        return (errors.square() / variance).masked_fill(~hidden, 0.0).sum(1).numpy()[None]

    sums = squared_errors(slice(None))
    low, high = percentile_bounds(bootstrap_ratios(sums, counts, 0, DRAWS), 0.95)
    found = {"error": sums.sum() / counts.sum(), "low": low[0], "high": high[0]}
    for layer in range(of_scored.shape[2]):
        found[f"layer {layer}"] = squared_errors(slice(layer, layer + 1)).sum() / counts.sum()
    return {"ref": ref, **{name: round(float(number), 4) for name, number in found.items()}}


def main() -> None:
    table = pandas.read_csv(FILE, index_col="ref") if FILE.is_file() else pandas.DataFrame()
    found = pandas.DataFrame([measured(ref) for ref in sys.argv[1:]]).set_index("ref")
    table = found.combine_first(table)[list(found)]
    table.to_csv(FILE, lineterminator="\n")
    print(table.to_string())


if __name__ == "__main__":
    main()
