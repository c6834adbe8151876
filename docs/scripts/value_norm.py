"""Measures whether a model of before copies with weights of after, their value weights at the norm of before.

Run it as `python -P docs/scripts/value_norm.py RUN...` on the folders of runs of the flagship, with pre and post; it
writes a row for each run into docs/results/value-norm.csv: the error at observed entries over the variance
of an entry. The rule stands in interp_tasks/published/CHANGES.md, 2026-11-27 ("Written now").
"""

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from scipy.stats import t as student

from circuits import sweep, transplant
from interp_tasks import load_checkpoint
from interp_tasks.checkpoints import read_run

FILE = Path(__file__).parents[1] / "results" / "value-norm.csv"
SAMPLES = 512
VALUES = ["W_V", "b_V"]


@torch.no_grad()
def with_value_norms(model: Any, of: Any) -> Any:
    """Returns a copy of a model whose value weights and biases have, in each layer, the norm of another model's."""
    changed = copy.deepcopy(model)
    for block, other in zip(changed.blocks, of.blocks, strict=True):
        for name in VALUES:
            getattr(block.attn, name).mul_(
                getattr(other.attn, name).norm() / getattr(block.attn, name).norm()
            )
    return changed


def measured(run: str) -> dict[str, float]:
    """Returns the error at observed entries, of the variance, of the model of before with each choice of weights."""
    checkpoint, after = load_checkpoint(f"{run}@pre"), load_checkpoint(f"{run}@post").model
    before, weights = checkpoint.model, transplant.weights
    edits = {
        "qkv_of_after": weights(after, ["q", "k", "v"]),
        "qkv_of_after_norm_of_before": weights(with_value_norms(after, before), ["q", "k", "v"]),
        "qk_of_after": weights(after, ["q", "k"]),
        "own_v_norm_of_after": weights(with_value_norms(before, after), ["v"]),
    }
    task = checkpoint.task
    batch = task.sample(SAMPLES, seed=0, split="test")
    frame = sweep(before, batch.tokens, edits, task.metrics, batch).frame
    errors = frame[frame["metric"] == "mse_observed"].set_index("variant")["value"] / task.entry_variance
    growth = (after.W_V.norm() / before.W_V.norm()).item()
    return {"seed": read_run(run)["config"]["train"]["seed"], "growth": growth, **errors}


def main() -> None:
    table = pandas.read_csv(FILE, index_col="seed") if FILE.is_file() else pandas.DataFrame()
    measures = pandas.DataFrame([measured(run) for run in sys.argv[1:]]).set_index("seed")
    table = measures.combine_first(table)[list(measures)]
    table.to_csv(FILE, float_format="%.4g")
    print(table.T.round(4))
    new = np.log(table[table.index >= 5])
    half = student.ppf(0.975, len(new) - 1) * new.std() / np.sqrt(len(new))
    print(np.exp(pandas.DataFrame({"mean": new.mean(), "low": new.mean() - half, "high": new.mean() + half})))


if __name__ == "__main__":
    main()
