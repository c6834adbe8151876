"""Proof that the tests can fail: break one rule at a time in a scratch copy and see the named test go red.

    python tests/breakages.py [--only NAME ...] [--part K/N] [--jobs 2] [--list]

`tests/breakages.toml` says what is broken (file, old text, new text), which rule that is, and which test
must notice. An entry counts as red only if the named test ran and an assertion in it failed. A test that
does not start (collection, import or syntax error), a name that does not exist, or an exception that the
entry does not announce (`raises = "..."`) is an error of the entry. The unbroken copies must be green in
every named test. Exit code 0 if all that holds, else 1.

An entry that took longer than the limit is tried once more, alone, after all others, and only that second verdict
counts: a machine that was busy elsewhere is no fault of the entry. Nothing else is tried twice. Below the summary
every verdict that was not good stands again, of errors with the end of pytest's output.

Heavy modules are imported once; each entry is a forked child that imports the package from the copy and
runs pytest in its own process. So this runs where `os.fork` does. The named tests run unbroken first, and leave
their bytecode to the broken copies.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.metadata
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Lines of a child's output that are shown again.
TAIL = 30

# Children run beside each other, and a fork of a process with threads can hang.
for _library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR"):
    os.environ[f"{_library}_NUM_THREADS"] = "1"


@dataclass(frozen=True)
class Settings:
    """The head of the TOML file."""

    copy: tuple[str, ...]  # files and folders that the tests need, relative to the repository
    packages: tuple[str, ...]  # must be imported from the copy
    preload: tuple[str, ...] = ()  # imported once, before the forks
    options: tuple[str, ...] = ()  # for pytest
    limit: float = 120.0  # seconds for one child


@dataclass(frozen=True)
class Breakage:
    name: str
    rule: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    raises: str | None = None

    def fault(self, root: Path) -> str | None:
        """Why it cannot be tried, if it cannot."""
        path = root / self.file
        if not path.is_file():
            return f"no file {self.file}"
        text = path.read_text(encoding="utf-8")
        if (times := text.count(self.old)) != 1:
            return f"the old text occurs {times} times in {self.file}, not once"
        if path.suffix == ".py":
            try:
                compile(self.broken(text), self.file, "exec")
            except SyntaxError as error:
                return f"with the new text {self.file} is no Python: {error.msg}, line {error.lineno}"
        return None

    def broken(self, text: str) -> str:
        return text.replace(self.old, self.new)


@dataclass
class Outcome:
    """What pytest said in one child."""

    failed: dict[str, str] = field(
        default_factory=dict
    )  # node id -> type of the exception, in the test itself
    passed: set[str] = field(default_factory=set)
    trouble: list[str] = field(default_factory=list)  # whatever else went wrong

    def failure(self, test: str) -> str | None:
        return next((kind for node, kind in self.failed.items() if belongs(node, test)), None)

    def ran(self, test: str) -> bool:
        return any(belongs(node, test) for node in (*self.failed, *self.passed))


@dataclass(frozen=True)
class Verdict:
    name: str
    word: str  # "red" is good for a breakage, "green" for the restored copy
    text: str
    seconds: float
    good: bool
    tail: str = ""  # the end of the child's output
    late: bool = False  # it took longer than the limit

    def __str__(self) -> str:
        word = self.word if self.good else self.word.upper()
        return f"{word:6} {self.seconds:5.1f} s  {self.name}: {self.text}"


def belongs(node: str, test: str) -> bool:
    return node == test or node.startswith(f"{test}[")


def read_file(path: Path) -> tuple[Settings, list[Breakage]]:
    with path.open("rb") as file:
        data = tomllib.load(file)
    entries = []
    for entry in data.pop("breakage", []):
        tests = entry.pop("test")
        entries.append(Breakage(tests=(tests,) if isinstance(tests, str) else tuple(tests), **entry))
    names = [entry.name for entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SystemExit(f"{path.name}: two entries are called {twice[0]!r}")
    return Settings(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}), entries


def judge(entry: Breakage, outcome: Outcome) -> tuple[str, str]:
    """(red, green or error; why)."""
    expected = (entry.raises,) if entry.raises else ("AssertionError", "Failed")
    for test in entry.tests:
        kind = outcome.failure(test)
        if kind is None:
            if outcome.trouble:
                return "error", outcome.trouble[0]
            return (
                ("green", f"{test} does not notice")
                if outcome.ran(test)
                else ("error", f"{test} did not run")
            )
        if kind not in expected:
            return "error", f"{test} failed with {kind}, not with {' or '.join(expected)}"
    return "red", entry.rule


def restored(tests: tuple[str, ...], outcome: Outcome) -> tuple[str, str]:
    """Whether every named test passes where nothing is broken."""
    if outcome.trouble:
        return "error", outcome.trouble[0]
    if outcome.failed:
        return "red", f"{next(iter(outcome.failed))} fails though nothing is broken"
    if missing := [test for test in tests if not outcome.ran(test)]:
        return "error", f"{missing[0]} did not run"
    return "green", f"{len(tests)} named tests"


class Listener:
    """A pytest plugin that keeps what is needed to judge, and stops once every named test is red."""

    def __init__(self, copy: Path, packages: tuple[str, ...], tests: tuple[str, ...], stop: bool) -> None:
        self.copy, self.packages, self.tests, self.stop = copy, packages, tests, stop
        self.outcome = Outcome()
        self._kinds: dict[str, str] = {}
        self._session: Any = None

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.excinfo is not None:
            self._kinds[item.nodeid] = call.excinfo.type.__name__

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and report.when == "call":
            self.outcome.failed[report.nodeid] = self._kinds.get(report.nodeid, "?")
            if self.stop and all(self.outcome.failure(test) for test in self.tests):
                self._session.shouldstop = "every named test is red"
        elif report.failed:
            self.outcome.trouble.append(f"{report.nodeid}: {report.when} failed")
        elif report.passed and report.when == "call":
            self.outcome.passed.add(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.outcome.trouble.append(f"{report.nodeid or 'the tests'}: cannot be collected")

    def pytest_sessionstart(self, session: Any) -> None:
        self._session = session

    def pytest_sessionfinish(self, session: Any) -> None:
        if session.config.rootpath.resolve() != self.copy:
            self.outcome.trouble.insert(0, f"pytest's root was {session.config.rootpath}, not the copy")
        for name in self.packages:
            file = getattr(sys.modules.get(name), "__file__", None)
            if file is not None and not Path(file).resolve().is_relative_to(self.copy):
                self.outcome.trouble.insert(0, f"{name} was imported from {file}, not from the copy")


def run_child(
    pipe: Any, log: Path, copy: Path, settings: Settings, tests: tuple[str, ...], stop: bool
) -> None:
    """In a forked process: pytest on `tests` of `copy`; the outcome goes through `pipe`."""
    os.setsid()  # so that whatever the test starts can be killed with it
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # A child that is killed writes no buffers.
    sys.stdout.reconfigure(line_buffering=True)
    outcome = Outcome()
    try:
        import pytest

        os.chdir(copy)
        sys.path.insert(0, str(copy))
        os.environ["PYTHONPATH"] = str(copy)
        if stop:  # no bytecode of a broken text
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        listener = Listener(copy, settings.packages, tests, stop)
        outcome = listener.outcome
        quiet = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = pytest.main(
            [
                *quiet,
                f"--rootdir={copy}",
                f"--config-file={copy / 'pyproject.toml'}",
                *settings.options,
                *tests,
            ],
            plugins=[listener],
        )
        if not outcome.failed and not outcome.passed:
            outcome.trouble.append(f"no test ran (pytest: {getattr(code, 'name', code)}), see {log}")
    except BaseException as error:
        traceback.print_exc()
        outcome.trouble.append(f"the child stopped: {error!r}")
    pipe.send(outcome)
    pipe.close()
    sys.stdout.flush()
    os._exit(0)


@dataclass
class Job:
    """One child: an entry on a broken copy, or (entry None) some tests on a restored one."""

    tests: tuple[str, ...]
    entry: Breakage | None = None

    @property
    def name(self) -> str:
        return "nothing broken" if self.entry is None else self.entry.name


class Runner:
    """Copies of the repository, each lent to one child at a time."""

    def __init__(self, root: Path, settings: Settings, jobs: int, scratch: Path) -> None:
        self.settings, self.scratch = settings, scratch
        # Texts are taken from here, so that work going on in the repository does not mix with a run.
        self.whole = self._copied(root, scratch / "whole")
        self.free = [self._copied(self.whole, scratch / f"copy{number}") for number in range(jobs)]
        self.logs = 0

    def _copied(self, source: Path, copy: Path) -> Path:
        copy.mkdir()
        for name in self.settings.copy:
            path = source / name
            if path.is_dir():
                shutil.copytree(path, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
            else:
                shutil.copy2(path, copy / name)
        return copy.resolve()

    def share_bytecode(self) -> None:
        """Give every copy the bytecode that any of them has. Their texts are equally old, so it is valid in all."""
        for source in self.free:
            for folder in source.rglob("__pycache__"):
                for copy in self.free:
                    if copy != source:
                        shutil.copytree(folder, copy / folder.relative_to(source), dirs_exist_ok=True)

    def run(self, jobs: list[Job]) -> Iterator[Verdict]:
        """Verdicts as the children finish; entries that were late are tried again at the end, one by one."""
        late = []
        for job, verdict in self._tried(jobs):
            if verdict.late and job.entry is not None:
                late.append(job)
            else:
                yield verdict
        for job in late:
            for _, verdict in self._tried([job]):
                yield replace(verdict, text=f"{verdict.text} (second try: the first took too long)")

    def _tried(self, jobs: list[Job]) -> Iterator[tuple[Job, Verdict]]:
        waiting = list(reversed(jobs))
        running: dict[Any, tuple[Job, Path, Any, float, Path]] = {}
        try:
            while waiting or running:
                while waiting and self.free:
                    job = waiting.pop()
                    if job.entry is not None and (fault := job.entry.fault(self.whole)):
                        yield job, Verdict(job.name, "error", fault, 0.0, False)
                        continue
                    copy = self.free.pop()
                    pipe, process = self._start(job, copy)
                    running[pipe] = job, copy, process, time.monotonic(), self._log()
                for pipe in connection.wait(list(running), timeout=0.5):
                    job = running[pipe][0]
                    yield job, self._finish(pipe, *running.pop(pipe))
                for pipe, (job, copy, process, start, log) in list(running.items()):
                    if time.monotonic() - start > self._limit(job):
                        del running[pipe]
                        yield job, self._finish(pipe, job, copy, process, start, log, late=True)
        finally:
            for _, _, process, _, _ in running.values():
                _kill(process)

    def _log(self) -> Path:
        """The output of the child started last."""
        return self.scratch / f"{self.logs:03}.log"

    def _limit(self, job: Job) -> float:
        return self.settings.limit * (1 if job.entry is not None else 10)

    def _start(self, job: Job, copy: Path) -> tuple[Any, Any]:
        if job.entry is not None:
            path = copy / job.entry.file
            old = path.stat().st_mtime
            path.write_text(job.entry.broken(path.read_text(encoding="utf-8")), encoding="utf-8")
            # Bytecode knows its text by age in seconds and size.
            os.utime(path, (old + 10, old + 10))
        self.logs += 1
        context = get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        arguments = (sender, self._log(), copy, self.settings, job.tests, job.entry is not None)
        process = context.Process(target=run_child, args=arguments)
        process.start()
        sender.close()
        return receiver, process

    def _finish(
        self, pipe: Any, job: Job, copy: Path, process: Any, start: float, log: Path, late: bool = False
    ) -> Verdict:
        if late:
            # Pytest's faulthandler then writes where the test was.
            os.kill(process.pid, signal.SIGABRT)
            process.join(2)
        try:
            outcome = Outcome(trouble=[f"no end after {self._limit(job):g} s"]) if late else pipe.recv()
        except EOFError:
            outcome = Outcome(trouble=["the child died without a word"])
        _kill(process)
        pipe.close()
        if job.entry is not None:
            shutil.copy2(self.whole / job.entry.file, copy / job.entry.file)
        self.free.append(copy)
        word, text = judge(job.entry, outcome) if job.entry is not None else restored(job.tests, outcome)
        good = word == ("red" if job.entry is not None else "green")
        tail = "" if good or word == "green" else _tail(log)
        return Verdict(job.name, word, text, time.monotonic() - start, good, tail, late)


def _tail(log: Path) -> str:
    """The last lines of a child's output; of one that hung, the innermost calls, which come first there."""
    with contextlib.suppress(OSError):
        text = log.read_text(encoding="utf-8", errors="replace")
        _, hung, stack = text.rpartition("Fatal Python error: Aborted")
        return "\n".join((hung + stack).splitlines()[:TAIL] if hung else stack.splitlines()[-TAIL:])
    return ""


def _kill(process: Any) -> None:
    """A child, and whatever its test has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
    process.join()


def shared_out(tests: list[str], parts: int) -> list[tuple[str, ...]]:
    """`tests` in at most `parts` lots of about the same length, those of one file together where possible."""
    size = -(-len(tests) // parts)
    return [tuple(tests[start : start + size]) for start in range(0, len(tests), size)]


def part(text: str) -> tuple[int, int]:
    """``2/5`` -> 2, 5."""
    first, _, step = text.partition("/")
    if not (first.isdecimal() and step.isdecimal() and 1 <= int(first) <= int(step)):
        raise argparse.ArgumentTypeError(f"{text!r}: write K/N, such as 2/5")
    return int(first), int(step)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Break one rule at a time and see a test go red.")
    parser.add_argument("--only", action="append", metavar="NAME", help="entries whose name contains NAME")
    parser.add_argument("--part", type=part, metavar="K/N", help="every N-th entry, from the K-th on")
    parser.add_argument("--jobs", type=int, default=2, help="children at a time (default: 2)")
    parser.add_argument("--list", action="store_true", help="show the entries and stop")
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).resolve().parents[1], help="the repository"
    )
    parser.add_argument("--keep", action="store_true", help="keep the scratch folder with pytest's output")
    given = parser.parse_args(arguments)
    given.root = given.root.resolve()
    settings, entries = read_file(given.root / "tests" / "breakages.toml")
    if given.only:
        entries = [entry for entry in entries if any(part in entry.name for part in given.only)]
    if given.part:
        first, step = given.part
        entries = entries[first - 1 :: step]
    if not entries:
        raise SystemExit("no such entry; --list shows them")
    if given.list:
        for entry in entries:
            print(f"{entry.name}: {entry.rule} ({entry.file}; {', '.join(entry.tests)})")
        return 0

    start = time.monotonic()
    # So that children and scratch folder go when this is stopped from outside.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in settings.preload:
            importlib.import_module(name)
        for plugin in importlib.metadata.entry_points(group="pytest11"):
            plugin.load()
    # What is there before the forks need not be looked through by every child's garbage collection.
    gc.collect()
    gc.freeze()
    scratch = Path(tempfile.mkdtemp(prefix="breakages-"))
    try:
        runner = Runner(given.root, settings, max(1, given.jobs), scratch)
        tests = sorted({test for entry in entries for test in entry.tests})
        unbroken = []
        for verdict in runner.run([Job(lot) for lot in shared_out(tests, max(1, given.jobs))]):
            unbroken.append(verdict)
            print(verdict, flush=True)
        runner.share_bytecode()
        verdicts = []
        for verdict in runner.run([Job(entry.tests, entry) for entry in entries]):
            verdicts.append(verdict)
            print(verdict, flush=True)
    finally:
        if given.keep:
            print(f"pytest's output: {scratch}")
        else:
            shutil.rmtree(scratch)
    count = {word: sum(verdict.word == word for verdict in verdicts) for word in ("red", "green", "error")}
    print(
        f"{len(verdicts)} entries: {count['red']} red, {count['green']} stayed green, {count['error']} errors; "
        f"unbroken: {'green' if all(verdict.good for verdict in unbroken) else 'NOT green'}; "
        f"{time.monotonic() - start:.0f} s"
    )
    bad = [verdict for verdict in verdicts + unbroken if not verdict.good]
    for verdict in bad:
        print(f"\n{verdict}")
        for line in verdict.tail.splitlines():
            print(f"    | {line}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
