"""REFs: how checkpoints are named on the command line and in Python. Imports no torch,
except for a run whose ``run.json`` is older than the stored plateau: its task is loaded then.

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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints.drop_detection import Drop, detect_drop_or_reason
from interp_tasks.checkpoints.run_files import (
    META_FILE,
    METRICS_FILE,
    RUN_FILE,
    checkpoint_folder,
    is_checkpoint,
    is_run,
    log_file,
    read_columns,
    read_meta,
    read_run,
    stored_steps,
)
from interp_tasks.errors import UserError

if TYPE_CHECKING:
    from tasks import Task

MARKS = ("pre", "onset", "end", "post")


def find_marks(
    run: str | Path,
    run_name: str | None = None,
    needed: Collection[str] = MARKS,
    described: Mapping[str, Any] | None = None,
) -> dict[str, int]:
    """Returns the step of each mark that there is; with the default arguments, of all four.

    ``pre`` lies well inside the plateau (of the steps before the onset, the one nearest to a quarter of it;
    step 0 only if there is no other), ``onset`` and ``end`` are the stored steps either side of the detected
    drop, and ``post`` is the last. A run of the preset ``paper`` whose ``run.json`` has ``published_drop``
    takes those steps instead.

    Args:
        described: the content of its ``run.json``; ``None``: as it is on disk.

    Raises:
        UserError: if the run has no drop (yet), no checkpoint on a side of it that a needed mark is on, or no metrics.
    """
    folder = Path(run)
    name = run_name or folder.as_posix()
    if not (folder / RUN_FILE).is_file():
        raise UserError(f"{name} has no {RUN_FILE}, so its drop is unknown: give steps, or @last")
    described = read_run(folder) if described is None else described
    published = described.get("published_drop") if described.get("preset") == "paper" else None
    given = {mark: int(step) for mark, step in (published or {}).items() if mark in MARKS}
    if set(given) == set(MARKS):
        return given
    drop, steps = find_drop(folder, described, name), stored_steps(folder)
    before = [step for step in steps if step <= drop.onset]
    after = [step for step in steps if step >= drop.end]
    lacking = set(needed) - set(given)
    for side, where, nearest, marks in (
        (before, "before", f"first is @{steps[0]}", {"pre", "onset"}),
        (after, "after", f"last is @{steps[-1]}", {"end", "post"}),
    ):
        if not side and marks & lacking:
            raise UserError(
                f"{name} has no checkpoint {where} its drop (steps {drop.onset} to {drop.end}): the {nearest}"
            )
    found = {}
    if before:
        plateau = [step for step in before if step > 0] or before
        found = {"pre": min(plateau, key=lambda step: abs(step - drop.onset / 4)), "onset": before[-1]}
    if after:
        found |= {"end": after[0], "post": steps[-1]}
    return found | given


def find_drop(run: Path, described: Mapping[str, Any], name: str) -> Drop:
    """Returns the drop that a run's own metrics show."""
    metric = described.get("drop_metric")
    if not isinstance(metric, dict) or metric.get("direction") not in ("down", "up") or "name" not in metric:
        raise UserError(
            f"{run / RUN_FILE} declares no drop_metric, so no drop can be found: give steps, or @last"
        )
    columns, _ = read_columns(run)
    logged = columns.get(("validation", metric["name"]))
    if logged is None or all(value != value for value in logged[1]):
        raise UserError(
            f"{log_file(run, METRICS_FILE)} logs no validation {metric['name']}, so no drop can be found"
        )
    steps, values = logged
    theory = theoretical_plateau(described)
    drop = detect_drop_or_reason(steps, values, metric["direction"], theory)
    if not isinstance(drop, Drop):
        expected = "" if theory is None else f" from its plateau by theory, {theory:.4g},"
        raise UserError(
            f"{name} shows no drop in {metric['name']}{expected} up to step {steps[-1]}: {drop}. Give steps, or @last"
        )
    return drop


def theoretical_plateau(described: Mapping[str, Any]) -> float | None:
    """Returns the plateau of a run's drop metric by theory, from its ``run.json``; ``None`` where there is none."""
    metric = described["drop_metric"]
    if "plateau" in metric:
        stored: float | None = metric["plateau"]
        return stored
    # An older run does not say.
    task = task_of_run(described)
    return None if task is None else task.plateau_levels().get(metric["name"])


def task_of_run(described: Mapping[str, Any]) -> Task | None:
    """Returns the task of a run, from its ``run.json``; ``None`` for one that is not known here by those settings."""
    import tasks

    try:
        settings = dict(described["config"]["task"])
        return tasks.get(settings.pop("name"), **settings)
    except (LookupError, TypeError, ValueError):
        return None


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
        return read_meta(self.path)

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


def resolve_one(ref: str | Path, written: str = "") -> ResolvedCheckpoint:
    """Returns the one checkpoint that a REF names; a refusal shows it as it was ``written``, with its option."""
    first, *others = resolve(ref)
    if others:
        names = f"{written or ref} names {len(others) + 1} checkpoints"
        raise UserError(f"{names} ({first.ref} ... {others[-1].ref}): name one")
    return first


def zoo_names() -> list[str]:
    """Returns the shipped runs, as ``zoo:NAME`` takes them; those in a folder of several as ``FOLDER/NAME``."""
    found = ZOO_FOLDER.rglob(RUN_FILE)
    return sorted((file.parent.relative_to(ZOO_FOLDER).as_posix() for file in found), key=natural_key)


def _matching_runs(pattern: str) -> list[str]:
    """Returns the runs and checkpoint folders that a glob means, in natural order."""
    if pattern.startswith(ZOO):
        found = zoo_runs(pattern)
        # Of several, those that ship their log alone have no checkpoint that could be meant.
        return [each for each in found if stored_steps(ZOO_FOLDER / each.removeprefix(ZOO))] or found
    paths = {each: Path(each) for each in glob.glob(pattern, recursive=True)}
    matches = [each for each, path in paths.items() if is_checkpoint(path) or is_run(path)]
    if not matches:
        raise UserError(f"no run or checkpoint folder matches {pattern!r}")
    return sorted(matches, key=natural_key)


def zoo_runs(given: str) -> list[str]:
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
        close = difflib.get_close_matches(selector.lower(), WORDS, n=1)
        hint = f"did you mean @{close[0]}? " if close else ""
        raise UserError(f"{text!r}: no step {selector!r}: {hint}after the @ comes {GRAMMAR}")


def _checkpoints_in_run(name: str, selectors: list[str], text: str) -> list[ResolvedCheckpoint]:
    """Returns the checkpoints of a run, or the one checkpoint of a folder, that the selectors of a REF name."""
    path = find_run(name)
    if not name.startswith(ZOO) and is_checkpoint(path):
        if selectors:
            raise UserError(f"{text!r}: {path} is one checkpoint, not a run: leave out the @")
        return [_from_folder(path)]
    steps = stored_steps(path)
    if not steps:
        raise _no_checkpoints_error(name, path, selectors)
    run = name if name.startswith(ZOO) else path.as_posix()
    chosen = [step for selector in selectors or ["last"] for step in _select(selector, path, run, steps)]
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
    raise UserError(f"no {name}{suggest(given, names, ZOO)}; interp-run runs zoo lists what ships")


def suggest(given: str, names: Sequence[str], prefix: str = "") -> str:
    """Returns what to say of a name that is none of these: the closest three."""
    close = difflib.get_close_matches(given, names, n=3, cutoff=0.3)
    return f": the closest are {', '.join(prefix + each for each in close)}" if close else ""


def _from_folder(path: Path) -> ResolvedCheckpoint:
    """Returns a checkpoint given by its folder; where that lies in a run, it is named as the run would name it."""
    step = read_meta(path)["step"]
    run, ref = path.parent.parent, path.as_posix()
    if path == checkpoint_folder(run, step) and (run / RUN_FILE).is_file():
        ref = f"{run.as_posix()}@{step}"
        return ResolvedCheckpoint(run, run.as_posix(), step, path, ref, ref)
    return ResolvedCheckpoint(None, None, step, path, ref, ref)


def _select(selector: str, path: Path, run: str, steps: list[int]) -> Iterable[int]:
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
