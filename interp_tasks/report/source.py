"""The source of a report: checkpoints of a run, with its log and its drop where there is one. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from interp_tasks.checkpoints import ResolvedCheckpoint, find_marks, resolve
from interp_tasks.checkpoints.refs import ZOO
from interp_tasks.checkpoints.run_files import METRICS_FILE, RUN_FILE, is_checkpoint, log_file
from interp_tasks.errors import UserError
from interp_tasks.measurement.run_logs import Curve, Run, read_one


@dataclass(frozen=True)
class Source:
    """Checkpoints of one run, by ascending step.

    Attributes:
        name: the run as one types it, or the folder of a checkpoint on its own.
        run: its log; ``None`` where it has none, for the reason in ``missing``.
        curve: the logged metric whose drop is the task's.
        marks: pre, onset, end and post of its drop; empty where there is none, for the reason in ``missing``.
        missing: what there is not, in words.
    """

    name: str
    checkpoints: Sequence[ResolvedCheckpoint]
    run: Run | None = None
    curve: Curve | None = None
    marks: Mapping[str, int] = field(default_factory=dict)
    missing: Sequence[str] = ()

    @property
    def refs(self) -> list[str]:
        return [checkpoint.ref for checkpoint in self.checkpoints]


def read_source(ref: str) -> Source:
    """Returns the checkpoints that a run or a REF names: of a run without ``@`` all.

    Raises:
        UserError: if it names none, or checkpoints of several runs; for a mangled log.
    """
    folder = Path(ref)
    is_run = folder.is_dir() if not ref.startswith(ZOO) else True
    named = "@" not in ref or (folder.is_dir() and not ref.startswith(ZOO))
    alone = is_run and named and not ref.startswith(ZOO) and is_checkpoint(folder)
    resolved = resolve(f"{ref}@all" if named and not alone else ref)
    runs = list(dict.fromkeys(str(each.run_path or each.path) for each in resolved))
    if len(runs) > 1:
        raise UserError(
            f"{ref} names {len(runs)} runs ({runs[0]} ... {runs[-1]}): a report is of one, and --compare puts "
            "another beside it"
        )
    checkpoints = sorted(resolved, key=lambda each: each.step)
    path = checkpoints[0].run_path
    if path is None:
        return Source(ref, checkpoints, missing=("A checkpoint on its own: no training curve, no drop.",))
    name = checkpoints[0].run_name or path.as_posix()
    for file in (RUN_FILE, METRICS_FILE):
        if not log_file(path, file).is_file():
            return Source(name, checkpoints, missing=(f"No {file}: no training curve, no drop.",))
    run = read_one(name, path)
    missing = []
    try:
        curve = run.curve(run.drop_metric)
    except UserError as error:
        curve, missing = None, [f"No training curve: {error}."]
    try:
        marks = find_marks(path, name)
    except UserError as error:
        marks, missing = {}, [*missing, f"No marks around a drop: {error}."]
    return Source(name, checkpoints, run, curve, marks, tuple(missing))
