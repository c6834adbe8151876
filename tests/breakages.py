"""Proof that the tests can fail: break one rule at a time and see the named test go red.

    python tests/breakages.py [--only NAME] [--jobs 2] [--limit SECONDS] [--passed] [--list]

Each entry of `tests/breakages.toml` names a rule, the text that breaks it (file, old text, new text) and the test
that must notice. An entry counts as red only if an assertion in that test failed (or a `pytest.raises` saw nothing
raised); an error of any other kind proves nothing. Unbroken, every named test must pass, which is tried first unless
`--passed` says that the whole suite has just been run. Exit status 0 if all that holds, else 1.

Nothing is written into the repository: each entry is a forked child that imports the broken text in place of the
file's. Heavy modules are imported once, before the forks. So this runs where `os.fork` does, and a test that starts
a process of its own notices nothing. Edits made in the repository during a run get into it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.machinery
import importlib.metadata
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Children run beside each other, and a fork of a process with threads can hang.
for _library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR"):
    os.environ[f"{_library}_NUM_THREADS"] = "1"

REPOSITORY = Path(__file__).resolve().parents[1]
#: Lines of a child's output that are shown of what is not good.
TAIL = 30


@dataclass(frozen=True)
class Breakage:
    name: str
    rule: str
    file: str
    old: str
    new: str
    test: str

    def broken(self, root: Path) -> str:
        """Return the broken text of the file; ValueError says why there is none."""
        text = (root / self.file).read_text(encoding="utf-8")
        if (times := text.count(self.old)) != 1:
            raise ValueError(f"the old text occurs {times} times in {self.file}, not once")
        text = text.replace(self.old, self.new)
        try:
            compile(text, self.file, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise ValueError(f"with the new text {self.file} is no Python: {error.msg}") from None
        return text


def read_file(path: Path) -> tuple[list[str], list[str], list[Breakage]]:
    """Return the modules to import before the forks, pytest's options, and the entries."""
    with path.open("rb") as file:
        data = tomllib.load(file)
    entries = [Breakage(**entry) for entry in data["breakage"]]
    names = [entry.name for entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SystemExit(f"{path.name}: two entries are called {twice[0]!r}")
    return data.get("preload", []), data.get("options", []), entries


class Listener:
    """A pytest plugin that keeps what is needed to judge."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}  # node id -> type of the exception in the test itself
        self.passed: list[str] = []
        self.trouble: list[str] = []  # whatever else went wrong

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        skipped = call.excinfo is not None and call.excinfo.typename == "Skipped"
        if call.excinfo is not None and not skipped:
            if call.when == "call":
                self.failed[item.nodeid] = call.excinfo.typename
            else:
                self.trouble.append(f"{item.nodeid}: {call.when} failed")
        elif call.when == "call" and not skipped:
            self.passed.append(item.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.trouble.append(f"{report.nodeid or 'the tests'}: cannot be collected")


def import_broken(path: Path, text: str) -> list[Path]:
    """Have every import of `path` from now on read `text`; return a list that is not empty once one has."""
    read: list[Path] = []
    loader, real = importlib.machinery.SourceFileLoader, importlib.machinery.SourceFileLoader.get_data
    bytecode = path.parent / "__pycache__"

    def get_data(self: Any, name: str) -> bytes:
        # By the stem alone: jaxtyping's loader has bytecode files of its own.
        if Path(name).parent == bytecode and Path(name).name.startswith(f"{path.stem}."):
            raise OSError("that bytecode is of the text as it was")
        if Path(name) == path:
            read.append(path)
            return text.encode()
        return real(self, name)

    loader.get_data = get_data  # type: ignore[method-assign]
    sys.dont_write_bytecode = True
    return read


def run_child(
    pipe: Any, log: Path, root: Path, options: list[str], tests: list[str], entry: Breakage | None
) -> None:
    """Run pytest on `tests` in a forked process, the entry's file broken; send (failed, passed, trouble)."""
    os.setsid()  # so that whatever the test starts can be killed with it
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    listener = Listener()
    try:
        import pytest

        os.chdir(root)
        sys.path.insert(0, str(root))
        os.environ["PYTHONPATH"] = str(root)
        quiet = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        where = [f"--rootdir={root}", f"--config-file={root / 'pyproject.toml'}"]
        if entry is None:
            pytest.main([*quiet, *where, *options, *tests], plugins=[listener])
        else:
            read = import_broken(root / entry.file, entry.broken(root))
            pytest.main([*quiet, *where, *options, "-x", *tests], plugins=[listener])
            if not read:
                listener.failed.clear()
                listener.trouble.insert(0, f"nothing imported {entry.file} of this repository")
    except BaseException as error:
        traceback.print_exc()
        listener.trouble.append(
            str(error) if isinstance(error, ValueError) else f"the child stopped: {error!r}"
        )
    pipe.send((listener.failed, listener.passed, listener.trouble))
    pipe.close()
    sys.stdout.flush()
    os._exit(0)


@dataclass
class Job:
    """One child: an entry, or (entry None) tests with nothing broken."""

    tests: list[str]
    entry: Breakage | None = None
    process: Any = None
    log: Path = Path()
    start: float = 0.0


@dataclass(frozen=True)
class Verdict:
    name: str
    word: str  # "red" is good for an entry, "green" for what is not broken
    text: str
    good: bool
    seconds: float
    tail: str = ""  # the end of the child's output

    def __str__(self) -> str:
        word = self.word if self.good else self.word.upper()
        return f"{word:6} {self.seconds:5.1f} s  {self.name}: {self.text}"


def judge(
    entry: Breakage | None, tests: list[str], failed: dict[str, str], passed: list[str], trouble: list[str]
) -> tuple[str, str]:
    """Return (red, green or error; why)."""
    if entry is None:
        if trouble:
            return "error", trouble[0]
        if failed:
            return "red", f"{next(iter(failed))} fails though nothing is broken"
        ran = {node.split("[")[0] for node in passed} | set(passed)
        missing = [test for test in tests if test not in ran]
        return ("error", f"{missing[0]} did not run") if missing else ("green", f"{len(tests)} named tests")
    if failed:
        node, kind = next(iter(failed.items()))
        if kind not in ("AssertionError", "Failed"):
            return "error", f"{node} failed with {kind}, not with AssertionError or Failed"
        return "red", entry.rule
    if trouble:
        return "error", trouble[0]
    return ("green", f"{entry.test} does not notice") if passed else ("error", f"{entry.test} did not run")


def run_jobs(
    waiting: list[Job], root: Path, options: list[str], jobs: int, limit: float, scratch: Path
) -> Iterator[Verdict]:
    """Yield verdicts as the children finish, `jobs` at a time; one that takes `limit` seconds a test is killed."""
    context, running = get_context("fork"), {}
    waiting = list(reversed(waiting))
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                job = waiting.pop()
                receiver, sender = context.Pipe(duplex=False)
                job.log, job.start = scratch / f"{len(waiting)}-{len(job.tests)}.log", time.monotonic()
                arguments = (sender, job.log, root, options, job.tests, job.entry)
                job.process = context.Process(target=run_child, args=arguments)
                job.process.start()
                sender.close()
                running[receiver] = job
            ready = connection.wait(list(running), timeout=1)
            for pipe, job in list(running.items()):
                late = time.monotonic() - job.start > limit * len(job.tests)
                if pipe in ready or late:
                    del running[pipe]
                    yield finish(pipe, job, "" if pipe in ready else f"no end after {limit:g} s")
    finally:
        for job in running.values():
            kill(job.process)


def finish(pipe: Any, job: Job, late: str) -> Verdict:
    try:
        answer = ({}, [], [late]) if late else pipe.recv()
    except EOFError:
        answer = ({}, [], ["the child died without a word"])
    kill(job.process)
    pipe.close()
    word, text = judge(job.entry, job.tests, *answer)
    good = word == ("green" if job.entry is None else "red")
    tail = "" if good else "\n".join(job.log.read_text(errors="replace").splitlines()[-TAIL:])
    name = "nothing broken" if job.entry is None else job.entry.name
    return Verdict(name, word, text, good, time.monotonic() - job.start, tail)


def kill(process: Any) -> None:
    """End a child, and whatever its test has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def preload(modules: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in modules:
            importlib.import_module(name)
        for plugin in importlib.metadata.entry_points(group="pytest11"):
            plugin.load()
    # What is there before the forks need not be looked through by every child's garbage collection.
    gc.collect()
    gc.freeze()


def main() -> int:
    parser = argparse.ArgumentParser(description="Break one rule at a time and see a test go red.")
    parser.add_argument("--only", default="", metavar="NAME", help="entries whose name contains NAME")
    parser.add_argument("--jobs", type=int, default=2, help="children at a time (default: 2)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one test (default: 300)")
    parser.add_argument(
        "--passed", action="store_true", help="the named tests have just passed: break at once"
    )
    parser.add_argument("--list", action="store_true", help="show the entries and stop")
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="the repository (default: this one)")
    given = parser.parse_args()
    root = given.root.resolve()
    modules, options, entries = read_file(root / "tests" / "breakages.toml")
    entries = [entry for entry in entries if given.only in entry.name]
    if not entries:
        raise SystemExit("no such entry; --list shows them")
    if given.list:
        for entry in entries:
            print(f"{entry.name}: {entry.rule} ({entry.file}; {entry.test})")
        return 0

    start = time.monotonic()
    # So that children go when this is stopped from outside.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    preload(modules)
    tests = sorted({entry.test for entry in entries})
    # Dealt out, since the longest ones are of a few files that follow each other.
    lots = [] if given.passed else [tests[first :: given.jobs] for first in range(given.jobs)]
    unbroken = [Job(lot) for lot in lots if lot]
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="breakages-") as scratch:
        for todo in (unbroken, [Job([entry.test], entry) for entry in entries]):
            for verdict in run_jobs(todo, root, options, given.jobs, given.limit, Path(scratch)):
                verdicts.append(verdict)
                print(verdict, flush=True)
    bad = [verdict for verdict in verdicts if not verdict.good]
    print(f"{len(entries)} entries; {len(bad)} verdicts are not good; {time.monotonic() - start:.0f} s")
    for verdict in bad:
        print(f"\n{verdict}", *(f"    | {line}" for line in verdict.tail.splitlines()), sep="\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
