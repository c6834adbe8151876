"""Trains the runs of a paper that are neither shipped nor at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from interp_tasks.published import Paper, read_paper
from interp_tasks.published.paper import as_typed
from interp_tasks.reproduction.evidence import names_of
from interp_tasks.reproduction.runs import locate_all


def train_missing(
    paper: str | Paper,
    preset: str = "cpu",
    *,
    runs: str | Path = "runs",
    rows: Sequence[int] = (),
    device: str = "cpu",
    progress: Callable[[str], Any] | None = None,
) -> list[Path]:
    """Trains what neither ships nor stands under ``runs``, in the paper's order; what was interrupted goes on.

    Args:
        progress: called with each run's name; returns what ``train`` calls as progress(step, steps, line), or ``None``.

    Returns:
        The run folders.
    """
    from interp_tasks.training.config import resolve_config
    from interp_tasks.training.trainer import train_resolved

    paper = read_paper(paper) if isinstance(paper, str) else paper
    roles = {
        role
        for study in paper.study
        if not rows or set(rows) & set(study.rows)
        for role in (study.role, study.shuffled)
    }
    trained = []
    for each in locate_all(paper, preset, Path(runs)):
        run = each.run
        if run.role not in roles:
            continue
        settings = {key: as_typed(value) for key, value in run.settings.items()}
        resolved = resolve_config(run.task, run.train_preset, settings)
        for seed, name in names_of(run).items():
            if seed not in each.bases:
                out = Path(runs) / name
                line = None if progress is None else progress(out.as_posix())
                trained.append(train_resolved(resolved, out, seed=seed, device=device, progress=line))
    return trained
