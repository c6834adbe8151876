"""Measures whether attention leads the loss: scores of heads, the norm of W_V and the error, at a run's stored steps.

Run it as `python -P docs/scripts/attention_and_loss.py RUN...` on runs of the recipe matrix-completion-7x7-dense, or on
the folder of the flagship; it writes their rows into docs/results/attention-and-loss.csv and prints when each quantity
starts in dense runs, and the leads. The rule stands in interp_tasks/published/CHANGES.md, 2026-11-28.
"""

import sys
from pathlib import Path

import numpy as np
import pandas
from scipy.stats import t as student

from circuits import patterns
from interp_tasks import load_checkpoint
from interp_tasks.checkpoints import read_metrics, read_run
from interp_tasks.checkpoints.run_reader import stored_steps

FILE = Path(__file__).parents[1] / "results" / "attention-and-loss.csv"
DENSE = range(8_000, 13_001, 100)
#: Steps before `FIRST` are left out.
FIRST, LAST, SAMPLES, STARTED = 4_000, 44_000, 512, 0.1
QUANTITIES = ["score", "norm", "error"]
TEMPLATES = ["row", "column", "mask_ignore", "hidden"]


def measured(run: str) -> pandas.DataFrame:
    """Returns a row for each stored step: the largest score of a row or column, ‖W_V‖, the error, and the largest score
    by template.
    """
    errors = {line["step"]: line["validation"]["mse_masked"] for line in read_metrics(run)}
    rows = []
    for checkpoint in (load_checkpoint(f"{run}@{step}") for step in stored_steps(run) if step >= FIRST):
        task, model = checkpoint.task, checkpoint.model
        batch = task.sample(SAMPLES, seed=0, split="test")
        templates = {name: task.attention_templates()[name] for name in TEMPLATES}
        table = patterns.scores(model, batch.tokens, templates, batch=batch).frame
        best = table.groupby("template")["corrected"].max()
        score, norm = max(best["row"], best["column"]), model.W_V.norm().item()
        rows.append((checkpoint.step, score, norm, errors[checkpoint.step], *best[TEMPLATES]))
    seed = read_run(run)["config"]["train"]["seed"]
    return pandas.DataFrame(rows, columns=["step", *QUANTITIES, *TEMPLATES]).assign(seed=seed)


def starts(rows: pandas.DataFrame, end: pandas.Series) -> pandas.Series:
    """Returns, by quantity, the first dense step from which on a tenth of the way from the first of them to the end
    is made; NaN where it never is.
    """
    dense = rows[rows["step"].isin(DENSE)].sort_values("step")
    share = (dense[QUANTITIES] - dense[QUANTITIES].iloc[0]) / (end[QUANTITIES] - dense[QUANTITIES].iloc[0])
    lasting = (share >= STARTED)[::-1].cummin()[::-1]
    return lasting.apply(lambda started: dense["step"][started].min())


def main() -> None:
    table = pandas.read_csv(FILE) if FILE.is_file() else pandas.DataFrame()
    for run in sys.argv[1:]:
        rows = measured(run)
        kept = table[table["seed"] != rows["seed"].iloc[0]] if len(table) else table
        table = pandas.concat([kept, rows]).sort_values(["seed", "step"])
        table[["seed", "step", *QUANTITIES, *TEMPLATES]].to_csv(FILE, index=False, float_format="%.6g")
    ends = table[table["step"] == LAST].set_index("seed")
    found = {}
    for seed, rows in table.groupby("seed"):
        if rows["step"].isin(DENSE).sum() == len(DENSE):
            found[seed] = starts(rows, ends.loc[seed])
    result = pandas.DataFrame(found, index=QUANTITIES).T
    print(result)
    for name in ("error", "norm"):
        lead = (result[name] - result["score"]).to_numpy(float)
        half = student.ppf(0.975, len(lead) - 1) * lead.std(ddof=1) / np.sqrt(len(lead))
        print(
            f"score before {name}: {lead.mean():.0f} [{lead.mean() - half:.0f}, {lead.mean() + half:.0f}] steps"
        )


if __name__ == "__main__":
    main()
