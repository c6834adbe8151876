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
from collections.abc import Iterable, Sequence
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
WORDS = ("last", "all", *MARKS)
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
        """Its ``meta.json``, read once."""
        return read_meta(self.path)

    @cached_property
    def task(self) -> Task | None:
        """The task that it names, made once; ``None`` where it names none, or one that is not registered here."""
        import tasks
        from tasks.errors import TaskError

        named = self.meta["task"]
        if named is None or named["name"] not in tasks.list():
            return None
        try:
            return tasks.get(named["name"], **named["config"])
        except TaskError as error:
            raise UserError(f"{self.path / META_FILE}: {error}") from None


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
    return sorted(
        (file.parent.relative_to(folder).as_posix() for file in folder.rglob(RUN_FILE)), key=natural_key
    )


def _split(text: str) -> tuple[list[str], list[str] | None]:
    """Runs (globs expanded), and the selectors after the last ``@`` (``None`` where there is none)."""
    run, at, selection = text.rpartition("@")
    run, selectors = (run, [part.strip() for part in selection.split(",")]) if at else (text, None)
    for selector in selectors or ():
        check_selector(selector, text)
    if not run:
        raise UserError(f"{text!r} names no run before the @: it is RUN@STEP")
    if not glob.has_magic(run) or Path(run).is_dir():
        return [run], selectors
    if run.startswith(ZOO):
        found = shipped(run)
        # Of several, those that ship their log alone have no checkpoint that could be meant.
        stored = [each for each in found if stored_steps(zoo_folder() / each.removeprefix(ZOO))]
        return stored or found, selectors
    matches = [
        each for each in glob.glob(run, recursive=True) if is_checkpoint(Path(each)) or is_run(Path(each))
    ]
    if not matches:
        raise UserError(f"no run or checkpoint folder matches {run!r}")
    return sorted(matches, key=natural_key), selectors


def shipped(given: str) -> list[str]:
    """Returns the shipped runs, as ``zoo:NAME``, that a name or glob means; the name itself where it means none."""
    # Such a name is refused when it is looked for, by a message that says what is close to it.
    return [ZOO + name for name in zoo_names() if fnmatchcase(ZOO + name, given)] or [given]


def natural_key(text: str) -> list[tuple[int, str]]:
    """Returns a sort key under which the numbers within names count as numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]


def check_selector(selector: str, text: str) -> None:
    """Refuses what cannot stand after the ``@`` of the REF ``text``, without looking at any run."""
    if ranged := _RANGE.match(selector):
        first, last, every = ranged.groups()
        if first and last and int(first) > int(last):
            raise UserError(f"{text!r}: the range {selector} ends before it begins")
        if every is not None and int(every) == 0:
            raise UserError(f"{text!r}: the range {selector} has steps of 0")
    elif not _STEP.match(selector) and selector not in WORDS:
        close = difflib.get_close_matches(selector, WORDS, n=1)
        hint = f"did you mean @{close[0]}? " if close else ""
        raise UserError(f"{text!r}: no step {selector!r}: {hint}after the @ comes {GRAMMAR}")


def _in_run(name: str, selectors: list[str] | None, text: str) -> list[ResolvedCheckpoint]:
    """Returns the checkpoints of a run, or the one checkpoint of a folder, that the selectors of a REF name."""
    path = find_run(name)
    if not name.startswith(ZOO) and is_checkpoint(path):
        if selectors is not None:
            raise UserError(f"{text!r}: {path} is one checkpoint, not a run: leave out the @")
        return [_from_folder(path)]
    steps = stored_steps(path)
    if not steps:
        raise _without_steps(name, path, selectors or [])
    run_name = name if name.startswith(ZOO) else path.as_posix()
    chosen: list[int] = []
    for selector in selectors or ["last"]:
        if selector in MARKS:
            chosen += _stored([find_marks(path, run_name, [selector])[selector]], run_name, steps)
        else:
            chosen += _select(selector, run_name, steps)
    return [
        ResolvedCheckpoint(path, run_name, step, checkpoint_folder(path, step), f"{run_name}@{step}")
        for step in dict.fromkeys(chosen)
    ]


def _without_steps(name: str, path: Path, selectors: list[str]) -> UserError:
    """Returns what to say of a name that is of no run with checkpoints."""
    if path.is_file():
        return UserError(
            f"{name} is a file, no run or checkpoint folder: interp-run runs import {name} --out RUN makes a run of "
            "weights"
        )
    if not path.is_dir():
        parent = path.parent
        siblings = [entry.name for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []
        close = difflib.get_close_matches(path.name, siblings, n=1)
        hint = f": did you mean {(parent / close[0]).as_posix()!r}?" if close else ""
        return UserError(f"no run or checkpoint folder {name!r}{hint}")
    if name.startswith(ZOO):
        if set(MARKS).intersection(selectors):
            # Without a drop, training it again would not give what is asked for.
            find_drop(path, read_run(path), name)
        return UserError(f"{name} ships its log alone: train it by its recipe for checkpoints")
    if (path / RUN_FILE).is_file():
        return UserError(f"{name} has no checkpoints yet")
    if (path / "config.json").is_file():
        return UserError(
            f"{name} is a Hugging Face model's folder: interp-run runs import {path} --out RUN makes a run of it"
        )
    return UserError(f"{name} is no run and no checkpoint folder")


def find_run(name: str) -> Path:
    """Returns the folder of a run given as a path or as ``zoo:NAME``; only the latter is checked to exist."""
    if not name.startswith(ZOO):
        return Path(name)
    given, folder = name.removeprefix(ZOO), zoo_folder()
    run = folder / given
    is_inside = given == Path(given).as_posix() and ".." not in given and folder in run.parents
    if is_inside and (run / RUN_FILE).is_file():
        return run
    names = zoo_names()
    own = [each for each in names if given and each.startswith(given.rstrip("/") + "/")]
    if own:
        # The last of several names would be taken for the only one.
        listed = ", ".join(each.rpartition("/")[2] for each in own)
        raise UserError(
            f"{name} is a folder of {len(own)} runs ({listed}): name one, as {ZOO}{own[0]}, or all, "
            f"{name.rstrip('/')}/*"
        )
    raise UserError(f"no {name}{closest(given, names, ZOO)}; interp-run runs zoo lists what ships")


def closest(given: str, names: Sequence[str], prefix: str = "") -> str:
    """Returns what to say of a name that is none of these: the closest three."""
    close = difflib.get_close_matches(given, names, n=3, cutoff=0.3)
    return f": the closest are {', '.join(prefix + each for each in close)}" if close else ""


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
    if selector in ("all", "last"):
        return steps if selector == "all" else steps[-1:]
    ranged = _RANGE.match(selector)
    if ranged is None:
        return _stored([int(selector)], run_name, steps)
    first, last = int(ranged[1] or 0), int(ranged[2] or steps[-1])
    if ranged[3] is not None:
        return _stored(range(first, last + 1, int(ranged[3])), run_name, steps)
    inside = [step for step in steps if first <= step <= last]
    if not inside:
        raise UserError(f"{run_name} stores no step in {selector}: it has {_shown(steps)}")
    return inside


def _stored(wanted: Iterable[int], run_name: str, steps: list[int]) -> list[int]:
    """Returns the steps that are wanted, all of which must be stored."""
    found = []
    for step in wanted:  # of a range without end the first that is missing is refused
        if step not in steps:
            near = [each for each in steps if each < step][-1:] + [each for each in steps if each > step][:1]
            raise UserError(
                f"{run_name} has no checkpoint at step {step}: the nearest are {' and '.join(map(str, near))} "
                f"(of {_shown(steps)})"
            )
        found.append(step)
    return found


def _shown(steps: list[int]) -> str:
    if len(steps) <= 8:
        return ", ".join(map(str, steps))
    return f"{', '.join(map(str, steps[:3]))}, ... {', '.join(map(str, steps[-2:]))}: {len(steps)} in all"
