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
import os
import re
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints.run_reader import (
    META_FILE,
    RUN_FILE,
    checkpoint_folder,
    is_checkpoint_folder,
    is_run_folder,
    read_checkpoint_meta,
    read_run,
    stored_steps,
)
from interp_tasks.checkpoints.steps_around_drop import MARKS, detect_drop_of_run, find_marks
from interp_tasks.errors import UserError
from tasks.errors import did_you_mean

if TYPE_CHECKING:
    from tasks import Task


ZOO = "zoo:"
#: Where the shipped runs are.
ZOO_FOLDER = Path(str(files("interp_tasks"))) / "zoo"
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
        label: what tables call it: the REF as it was written where that names one checkpoint, else ``ref``.
    """

    run_path: Path | None
    run_name: str | None
    step: int
    path: Path
    ref: str
    label: str = field(compare=False)

    @cached_property
    def meta(self) -> dict[str, Any]:
        """Its ``meta.json``, read once."""
        return read_checkpoint_meta(self.path)

    @cached_property
    def model_config(self) -> Any:
        """The configuration of its model, with attributes as ``model.cfg`` has them: ``n_layers`` and so on."""
        return SimpleNamespace(**self.meta["model"])

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
    run, at, selection = text.rpartition("@")
    selectors: list[str] = []
    # Of a text longer than a name may be, Path.is_dir() raises.
    is_folder = isinstance(ref, Path) or os.path.isdir(text)
    if is_folder or not at:
        run = text
    else:
        selectors = [part.strip() for part in selection.split(",")]
    for selector in selectors:
        check_selector(selector, text)
    if not run:
        raise UserError(f"{text!r} names no run before the @: it is RUN@STEP")
    is_glob = glob.has_magic(run) and not is_folder and not os.path.isdir(run)
    resolved: dict[Path, ResolvedCheckpoint] = {}
    for each in _matching_runs(run) if is_glob else [run]:
        for checkpoint in _checkpoints_in_run(each, selectors, text):
            resolved.setdefault(checkpoint.path, checkpoint)
    found = list(resolved.values())
    return [replace(found[0], label=text)] if len(found) == 1 else found


def resolve_one_ref(ref: str | Path, option_text: str = "") -> ResolvedCheckpoint:
    """Returns the one checkpoint that a REF names; a refusal shows it as it was ``option_text``, with its option."""
    first, *others = resolve(ref)
    if others:
        names = f"{option_text or ref} names {len(others) + 1} checkpoints"
        raise UserError(f"{names} ({first.ref} ... {others[-1].ref}): name one")
    return first


def zoo_names() -> list[str]:
    """Returns the shipped runs, as ``zoo:NAME`` takes them; those in a folder of several as ``FOLDER/NAME``."""
    found = ZOO_FOLDER.rglob(RUN_FILE)
    return sorted((file.parent.relative_to(ZOO_FOLDER).as_posix() for file in found), key=natural_sort_key)


def _matching_runs(pattern: str) -> list[str]:
    """Returns the runs and checkpoint folders that a glob means, in natural order."""
    if pattern.startswith(ZOO):
        found = matching_zoo_runs(pattern)
        # Of several, those that ship their log alone have no checkpoint that could be meant.
        return [each for each in found if stored_steps(ZOO_FOLDER / each.removeprefix(ZOO))] or found
    paths = {each: Path(each) for each in glob.glob(pattern, recursive=True)}
    matches = [each for each, path in paths.items() if is_checkpoint_folder(path) or is_run_folder(path)]
    if not matches:
        raise UserError(f"no run or checkpoint folder matches {pattern!r}")
    return sorted(matches, key=natural_sort_key)


def matching_zoo_runs(given: str) -> list[str]:
    """Returns the shipped runs, as ``zoo:NAME``, that a name or glob means; the name itself where it means none."""
    # Such a name is refused when it is looked for, by a message that says what is close to it.
    return [ZOO + name for name in zoo_names() if fnmatchcase(ZOO + name, given)] or [given]


def natural_sort_key(text: str) -> list[tuple[int, str]]:
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
        hint = did_you_mean(selector.lower(), WORDS, "@")
        raise UserError(f"{text!r}: no step {selector!r}: {hint}after the @ comes {GRAMMAR}")


def _checkpoints_in_run(name: str, selectors: list[str], text: str) -> list[ResolvedCheckpoint]:
    """Returns the checkpoints of a run, or the one checkpoint of a folder, that the selectors of a REF name."""
    path = find_run_folder(name)
    if not name.startswith(ZOO) and is_checkpoint_folder(path):
        if selectors:
            raise UserError(f"{text!r}: {path} is one checkpoint, not a run: leave out the @")
        return [_resolve_checkpoint_folder(path)]
    steps = stored_steps(path)
    if not steps:
        raise _no_checkpoints_error(name, path, selectors)
    run = name if name.startswith(ZOO) else path.as_posix()
    chosen = [
        step for selector in selectors or ["last"] for step in _select_steps(selector, path, run, steps)
    ]
    return [
        ResolvedCheckpoint(path, run, step, checkpoint_folder(path, step), f"{run}@{step}", f"{run}@{step}")
        for step in dict.fromkeys(chosen)
    ]


def _no_checkpoints_error(name: str, path: Path, selectors: list[str]) -> UserError:
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
        hint = (
            f": did you mean {(parent / close[0]).as_posix()!r}?"
            if close
            else "; interp-run runs zoo lists what ships"
        )
        return UserError(f"no run or checkpoint folder {name!r}{hint}")
    if name.startswith(ZOO):
        if set(MARKS).intersection(selectors):
            # Without a drop, training it again would not give what is asked for.
            detect_drop_of_run(path, read_run(path), name)
        return UserError(f"{name} ships its log alone: train it by its recipe for checkpoints")
    if (path / RUN_FILE).is_file():
        return UserError(f"{name} has no checkpoints yet")
    if (path / "config.json").is_file():
        return UserError(
            f"{name} is a Hugging Face model's folder: interp-run runs import {path} --out RUN makes a run of it"
        )
    return UserError(f"{name} is no run and no checkpoint folder")


def find_run_folder(name: str) -> Path:
    """Returns the folder of a run given as a path or as ``zoo:NAME``; only the latter is checked to exist."""
    if not name.startswith(ZOO):
        return Path(name)
    given, folder = name.removeprefix(ZOO), ZOO_FOLDER
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
    raise UserError(f"no {name}{closest_names_hint(given, names, ZOO)}; interp-run runs zoo lists what ships")


def closest_names_hint(given: str, names: Sequence[str], prefix: str = "") -> str:
    """Returns what to say of a name that is none of these: the closest three."""
    close = difflib.get_close_matches(given, names, n=3, cutoff=0.3)
    return f": the closest are {', '.join(prefix + each for each in close)}" if close else ""


def _resolve_checkpoint_folder(path: Path) -> ResolvedCheckpoint:
    """Returns a checkpoint given by its folder; where that lies in a run, it is named as the run would name it."""
    step = read_checkpoint_meta(path)["step"]
    run, ref = path.parent.parent, path.as_posix()
    if path == checkpoint_folder(run, step) and (run / RUN_FILE).is_file():
        ref = f"{run.as_posix()}@{step}"
        return ResolvedCheckpoint(run, run.as_posix(), step, path, ref, ref)
    return ResolvedCheckpoint(None, None, step, path, ref, ref)


def _select_steps(selector: str, path: Path, run: str, steps: list[int]) -> Iterable[int]:
    """Returns those of a run's stored steps that a selector names; all of them must be stored."""
    if selector in ("all", "last"):
        return steps if selector == "all" else steps[-1:]
    wanted: Sequence[int]
    if selector in MARKS:
        wanted = [find_marks(path, run, [selector])[selector]]
    elif ranged := _RANGE.match(selector):
        first, last = int(ranged[1] or 0), int(ranged[2] or steps[-1])
        if ranged[3] is None:
            wanted = [step for step in steps if first <= step <= last]
        else:
            wanted = range(first, last + 1, int(ranged[3]))
        if not wanted:
            raise UserError(f"{run} stores no step in {selector}: it has {_format_steps(steps)}")
    else:
        wanted = [int(selector)]
    # Of a range without end the first that is missing is refused.
    for missing in (step for step in wanted if step not in steps):
        after = bisect(steps, missing)
        near = steps[max(after - 1, 0) : after + 1]
        raise UserError(
            f"{run} has no checkpoint at step {missing}: the nearest are {' and '.join(map(str, near))} "
            f"(of {_format_steps(steps)})"
        )
    return wanted


def _format_steps(steps: list[int]) -> str:
    if len(steps) <= 8:
        return ", ".join(map(str, steps))
    return f"{', '.join(map(str, steps[:3]))}, ... {', '.join(map(str, steps[-2:]))}: {len(steps)} in all"
