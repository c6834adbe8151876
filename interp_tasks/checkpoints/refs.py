"""REFs: how checkpoints are named on the command line and in Python. Imports no torch.

    RUN@4000  RUN@last  RUN@all  RUN@100,200,last  RUN@0:20000:2000 (end included; every one must be stored)
    RUN@1000: RUN@:5000 RUN@1000:5000 (all that are stored in the range)
    RUN@pre   RUN@onset RUN@end  RUN@post (around the drop that the run's metrics show)
    RUN (the last)    zoo:NAME@... (shipped with the package)    a checkpoint folder

RUN may hold globs; matches are taken in natural order, ``seed-2`` before ``seed-10``.
"""

from __future__ import annotations

import difflib
import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints.marks import MARKS, find_drop, find_marks
from interp_tasks.checkpoints.meta import read_meta
from interp_tasks.checkpoints.run_files import (
    CHECKPOINTS_FOLDER,
    META_FILE,
    RUN_FILE,
    TRAINING_STATE_FILE,
    checkpoint_folder,
    is_checkpoint,
    is_run,
    read_run,
    stored_steps,
)
from interp_tasks.errors import UserError

if TYPE_CHECKING:
    from tasks import Task

ZOO = "zoo:"
GRAMMAR = "a step, first:last:every, last, all, pre, onset, end or post, several joined by commas"
_STEP = re.compile(r"^\d+$", re.ASCII)
_RANGE = re.compile(r"^(\d*):(\d*)(?::(\d+))?$", re.ASCII)


@dataclass(frozen=True)
class ResolvedCheckpoint:
    """One stored checkpoint.

    Attributes:
        run_path: its run folder; ``None`` for a checkpoint folder on its own.
        run_name: the run as one would type it, ``runs/x`` or ``zoo:NAME``; ``None`` likewise.
        path: the checkpoint folder.
        ref: the canonical REF, ``run_name@step``, or the folder.
        label: what tables call it: the REF as it was written, where one was.
    """

    run_path: Path | None
    run_name: str | None
    step: int
    path: Path
    ref: str
    label: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.ref)

    @cached_property
    def meta(self) -> dict[str, Any]:
        """Its ``meta.json``, read once.

        Raises:
            UserError: for a mangled file, or a format of another version.
        """
        return read_meta(self.path)

    @cached_property
    def task(self) -> Task | None:
        """The task that it names, made once; ``None`` where it names none, or one that is not registered here.

        Raises:
            UserError: for a configuration that the task refuses.
        """
        from interp_tasks.checkpoints.meta import stored_task

        return stored_task(self.meta, self.path / META_FILE)


def resolve(ref: str | Path) -> list[ResolvedCheckpoint]:
    """Returns the stored checkpoints that a REF names, at least one, in the order of runs and then of the selectors.

    Raises:
        UserError: in one line, if it names none, or is not a REF.
    """
    text = str(ref)
    if not text.strip():
        raise UserError(f"an empty checkpoint reference: it is RUN@STEP, STEP being {GRAMMAR}")
    if isinstance(ref, Path) or Path(text).is_dir():
        runs, selectors = [text], None
    else:
        runs, selectors = _split(text)
    resolved: dict[Path, ResolvedCheckpoint] = {}
    for run in runs:
        for checkpoint in _in_run(run, selectors, text):
            resolved.setdefault(checkpoint.path, checkpoint)
    return list(resolved.values())


def zoo_folder() -> Path:
    """Returns the folder of the shipped runs."""
    return Path(str(files("interp_tasks"))) / "zoo"


def zoo_names() -> list[str]:
    """Returns the shipped runs, as ``zoo:NAME`` takes them; those in a folder of several as ``FOLDER/NAME``."""
    folder = zoo_folder()
    names = [run.relative_to(folder).as_posix() for run in _runs_below(folder)] if folder.is_dir() else []
    return sorted(names, key=natural_key)


def _runs_below(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if is_run(entry):
            yield entry
        elif entry.is_dir():
            yield from _runs_below(entry)


def _split(text: str) -> tuple[list[str], list[str] | None]:
    """Runs (globs expanded), and the selectors after the last ``@`` (``None`` where there is none)."""
    run, at, selection = text.rpartition("@")
    if not at:
        run, selectors = text, None
    else:
        selectors = [part.strip() for part in selection.split(",")]
        for selector in selectors:
            check_selector(selector, text)
    if not run:
        raise UserError(f"{text!r} names no run before the @: it is RUN@STEP")
    if run.startswith(ZOO):
        found = shipped(run)
        # Of several, those that ship their log alone have no checkpoint that could be meant.
        stored = [each for each in found if stored_steps(zoo_folder() / each.removeprefix(ZOO))]
        return stored or found, selectors
    if not glob.has_magic(run) or Path(run).is_dir():
        return [run], selectors
    matches = [match for match in glob.glob(run, recursive=True) if _is_either(Path(match))]
    if not matches:
        raise UserError(f"no run or checkpoint folder matches {run!r}")
    return sorted(matches, key=natural_key), selectors


def shipped(given: str) -> list[str]:
    """Returns the shipped runs, as ``zoo:NAME``, that a name or glob means; the name itself where it means none."""
    # Such a name is refused when it is looked for, by a message that says what is close to it.
    return [ZOO + name for name in zoo_names() if fnmatchcase(ZOO + name, given)] or [given]


def _is_either(path: Path) -> bool:
    return path.is_dir() and (is_checkpoint(path) or is_run(path))


def natural_key(text: str) -> list[tuple[int, str]]:
    """Returns a sort key under which the numbers within names count as numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]


def check_selector(selector: str, text: str) -> None:
    """Refuses what cannot stand after the ``@`` of the REF ``text``, without looking at any run."""
    ranged = _RANGE.match(selector)
    if ranged:
        first, last, every = ranged.groups()
        if first and last and int(first) > int(last):
            raise UserError(f"{text!r}: the range {selector} ends before it begins")
        if every is not None and int(every) == 0:
            raise UserError(f"{text!r}: the range {selector} has steps of 0")
        return
    if _STEP.match(selector) or selector in {"last", "all", *MARKS}:
        return
    close = difflib.get_close_matches(selector, ["last", "all", *MARKS], n=1)
    hint = f"did you mean @{close[0]}? " if close else ""
    raise UserError(f"{text!r}: no step {selector!r}: {hint}after the @ comes {GRAMMAR}")


def _in_run(name: str, selectors: list[str] | None, text: str) -> list[ResolvedCheckpoint]:
    """Returns the checkpoints of a run, or the one checkpoint of a folder, that the selectors of a REF name."""
    path = find_run(name)
    if not name.startswith(ZOO) and is_checkpoint(path):
        if selectors is not None:
            raise UserError(f"{text!r}: {path} is one checkpoint, not a run: leave out the @")
        return [_from_folder(path)]
    if not path.is_dir():
        if path.is_file():
            raise UserError(
                f"{name} is a file, no run or checkpoint folder: interp-run runs import {name} --out RUN makes a run "
                "of weights"
            )
        raise UserError(f"no run or checkpoint folder {name!r}{_close_folder(path)}")
    steps = stored_steps(path)
    if not steps:
        if name.startswith(ZOO):
            if set(MARKS).intersection(selectors or ()):
                # Without a drop, training it again would not give what is asked for.
                find_drop(path, read_run(path), name)
            raise UserError(f"{name} ships its log alone: train it by its recipe for checkpoints")
        kind = "is no run and no checkpoint folder"
        if (path / RUN_FILE).is_file():
            kind = "has no checkpoints yet"
        elif (path / "config.json").is_file():
            kind = (
                f"is a Hugging Face model's folder: interp-run runs import {path} --out RUN makes a run of it"
            )
        raise UserError(f"{name} {kind}")
    run_name = name if name.startswith(ZOO) else path.as_posix()
    chosen: list[int] = []
    for selector in selectors or ["last"]:
        if selector in MARKS:
            chosen.append(_stored(find_marks(path, run_name, [selector])[selector], run_name, steps))
        else:
            chosen += _select(selector, run_name, steps)
    return [
        ResolvedCheckpoint(path, run_name, step, checkpoint_folder(path, step), f"{run_name}@{step}")
        for step in dict.fromkeys(chosen)
    ]


def find_run(name: str) -> Path:
    """Returns the folder of a run given as a path or as ``zoo:NAME``; only the latter is checked to exist."""
    if not name.startswith(ZOO):
        return Path(name)
    shipped = name.removeprefix(ZOO)
    names = zoo_names()
    if shipped not in names:
        below = [each for each in names if each.startswith(shipped.rstrip("/") + "/")] if shipped else []
        if below:
            # The last of several names would be taken for the only one.
            folder = name.rstrip("/")
            own = ", ".join(each.removeprefix(folder.removeprefix(ZOO) + "/") for each in below)
            raise UserError(
                f"{name} is a folder of {len(below)} runs ({own}): name one, as {ZOO}{below[0]}, or all, {folder}/*"
            )
        raise UserError(f"no {name}{closest(shipped, names, ZOO)}; interp-run runs zoo lists what ships")
    return zoo_folder() / shipped


def closest(given: str, names: Sequence[str], prefix: str = "") -> str:
    """Returns what to say of a name that is none of these: the closest three."""
    close = difflib.get_close_matches(given, names, n=3, cutoff=0.3)
    return f": the closest are {', '.join(prefix + each for each in close)}" if close else ""


def _close_folder(path: Path) -> str:
    parent = path.parent
    siblings = [entry.name for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []
    close = difflib.get_close_matches(path.name, siblings, n=1)
    return f": did you mean {(parent / close[0]).as_posix()!r}?" if close else ""


def _from_folder(path: Path) -> ResolvedCheckpoint:
    """Returns a checkpoint given by its folder; where that lies in a run, it is named as the run would name it."""
    step = read_meta(path)["step"]
    run = path.parent.parent
    in_run = path.parent.name == CHECKPOINTS_FOLDER and path == checkpoint_folder(run, step)
    if in_run and (run / RUN_FILE).is_file():
        return ResolvedCheckpoint(run, run.as_posix(), step, path, f"{run.as_posix()}@{step}")
    return ResolvedCheckpoint(None, None, step, path, path.as_posix())


def _select(selector: str, run_name: str, steps: list[int]) -> list[int]:
    """Returns those of a run's ``steps`` that a selector names which is no mark."""
    if selector == "all":
        return steps
    if selector == "last":
        return steps[-1:]
    ranged = _RANGE.match(selector)
    if ranged is None:
        return [_stored(int(selector), run_name, steps)]
    first = int(ranged[1] or 0)
    last = int(ranged[2]) if ranged[2] else steps[-1]
    if ranged[3] is not None:
        wanted = range(first, last + 1, int(ranged[3]))
        return [_stored(step, run_name, steps) for step in wanted]
    inside = [step for step in steps if first <= step <= last]
    if not inside:
        raise UserError(f"{run_name} stores no step in {selector}: it has {_shown(steps)}")
    return inside


def _stored(step: int, run_name: str, steps: list[int]) -> int:
    if step in steps:
        return step
    below = [each for each in steps if each < step][-1:]
    above = [each for each in steps if each > step][:1]
    nearest = " and ".join(map(str, below + above))
    raise UserError(
        f"{run_name} has no checkpoint at step {step}: the nearest are {nearest} (of {_shown(steps)})"
    )


def _shown(steps: list[int]) -> str:
    if len(steps) <= 8:
        return ", ".join(map(str, steps))
    return f"{', '.join(map(str, steps[:3]))}, ... {', '.join(map(str, steps[-2:]))}: {len(steps)} in all"


def describe_run(path: str | Path) -> list[dict[str, Any]]:
    """Returns a row per checkpoint: ``step, marks, bytes, dtype, training_state, task, metrics, saved_at, path``.

    ``marks`` lists those of pre, onset, end and post that fall on the step: none where the run shows no drop.

    ``path`` is a run folder or ``zoo:NAME``.

    Raises:
        UserError: if the folder holds no checkpoints, or one whose meta.json is mangled.
    """
    run = find_run(str(path))
    steps = stored_steps(run)
    if not steps:
        raise UserError(f"{run} holds no checkpoints: it is no run folder, or the run has just begun")
    try:
        marks = find_marks(run, needed=())
    except UserError:
        marks = {}
    rows = []
    for step in steps:
        folder = checkpoint_folder(run, step)
        meta = read_meta(folder)
        row = {
            "step": meta["step"],
            "marks": [mark for mark in MARKS if marks.get(mark) == step],
            "bytes": sum(file.stat().st_size for file in folder.iterdir() if file.is_file()),
            "dtype": meta["weights"]["dtype"],
            "training_state": (folder / TRAINING_STATE_FILE).is_file(),
            "task": meta["task"]["name"] if meta["task"] else None,
            "metrics": meta["metrics"],
            "saved_at": meta["saved_at"],
            "path": str(folder),
        }
        rows.append(row)
    return rows
