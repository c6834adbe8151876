"""What campaigns have in common: numbered trials, a count of what was tried, and each failure with its number."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: One trial by its number, which decides all of it; gives what it tried, to be counted.
Trial = Callable[[int], Sequence[str]]
PACKAGES = ("interp-tasks", "torch", "transformer-lens", "safetensors", "distributed")


class Fault(AssertionError):
    """What should not have happened, in one line."""


class Unknown(Exception):
    """A trial or a device that there is not, in one line."""


class Skipped(Exception):
    """A trial that this machine cannot make, and why."""


@dataclass(frozen=True)
class Trials:
    """What a campaign has prepared.

    Attributes:
        count: how many different trials there are; ``None``: each number is another random one.
        names: of all trials, where they have some.
    """

    trial: Trial
    count: int | None = None
    names: Sequence[str] = ()

    def called(self, wanted: Sequence[int | str]) -> list[int]:
        """Returns the numbers of trials that are asked for by number, or by a part of their names.

        Raises:
            Unknown: no trial has that in its name.
        """
        found: list[int] = []
        for each in wanted:
            named = [number for number, name in enumerate(self.names) if str(each) in name]
            if isinstance(each, str) and not named:
                raise Unknown(f"no trial is called {each!r}" if self.names else "trials have numbers alone")
            found += [each] if isinstance(each, int) else named
        return found


@dataclass(frozen=True)
class Campaign:
    """Prepared in a scratch folder, for as long as its trials run."""

    name: str
    about: str
    prepare: Callable[[Path], AbstractContextManager[Trials]]
    #: Trials of the long form, where there is no end to them.
    usual: int = 100


@dataclass
class Summary:
    """What came of a campaign; ``failures`` and ``skipped`` by the number of the trial."""

    campaign: str
    first: int
    n: int = 0
    seconds: float = 0.0
    kinds: dict[str, int] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    machine: str = ""

    def json(self) -> str:
        return json.dumps(asdict(self))


def expect(held: bool, what: str) -> None:
    if not held:
        raise Fault(what)


def perform(
    campaign: Campaign,
    n: int | None = None,
    seed: int = 0,
    only: Sequence[int | str] = (),
    debug: bool = False,
) -> Summary:
    """Trials ``seed`` to ``seed + n``, or those of ``only``; of a campaign whose trials have an end, all of them."""
    summary = Summary(campaign.name, seed, versions=versions(), machine=machine())
    kinds: Counter[str] = Counter()
    start = time.monotonic()
    with scratch_folder() as scratch, campaign.prepare(scratch) as trials:
        wanted = campaign.usual if n is None else n
        if trials.count is not None:
            wanted = trials.count if n is None else min(n, trials.count)
        numbers = trials.called(only) or range(seed, seed + wanted)
        for number in numbers:
            try:
                kinds.update(trials.trial(number))
            except KeyboardInterrupt:
                break  # what there is so far
            except Skipped as reason:
                summary.skipped[number] = str(reason)
            except Exception as error:
                summary.failures[number] = told(error)
                if debug:
                    traceback.print_exc()
            summary.n += 1
            tell(campaign, summary, len(numbers), start)
    summary.kinds, summary.seconds = dict(sorted(kinds.items())), round(time.monotonic() - start, 1)
    return summary


def told(error: Exception) -> str:
    """A fault in its own words, anything else with its kind and place."""
    if isinstance(error, Fault):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text} ({Path(place.filename).name}:{place.lineno})"


def tell(campaign: Campaign, summary: Summary, of: int, start: float) -> None:
    """Where it stands: always on a terminal, else ten times."""
    if not sys.stderr.isatty() and summary.n * 10 // of == (summary.n - 1) * 10 // of:
        return
    line = f"{campaign.name}: {summary.n} of {of}, {len(summary.failures)} failed, {time.monotonic() - start:.0f} s"
    sys.stderr.write(f"\r{line}" if sys.stderr.isatty() else f"{line}\n")
    sys.stderr.flush()


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """In memory where there is room for it: nothing here cuts the power, and a busy disk takes seconds to sync."""
    shared = Path("/dev/shm")
    place = shared if shared.is_dir() and os.access(shared, os.W_OK) and free(shared) > 1 << 30 else None
    with tempfile.TemporaryDirectory(prefix="campaign-", dir=place) as folder:
        # Some trials are other users'.
        os.chmod(folder, 0o755)
        yield Path(folder)


def free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine() -> str:
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"


def shown(summary: Summary) -> str:
    """For a reader; the last line is JSON."""
    lines = [f"  {number:6}  {text}" for number, text in summary.failures.items()]
    skipped = Counter(summary.skipped.values())
    lines += [f"  skipped {count}: {text}" for text, count in skipped.items()]
    lines += [f"  {count:6}  {kind}" for kind, count in summary.kinds.items()]
    head = f"{summary.campaign}: {summary.n} trials, {len(summary.failures)} failed, {summary.seconds} s"
    if summary.failures:
        head += f"; to repeat one: python -m tests.campaigns {summary.campaign} --only NUMBER"
    return "\n".join([head, *lines, summary.json()])
