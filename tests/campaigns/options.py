"""Options that nobody means: every command, with values that are empty, endless, no number, no text, no file.

The commands and their options are those that the Typer app has. A trial gives one of them a few options, each a value
that could be meant or one that could not (numbers of thousands of digits, NaN, control characters, devices, pipes), on
streams that work, or are closed, full, or read by nobody. Most are forks of a process that has imported everything;
some are interpreters of their own. Whatever is given: exit status 0 or 2, one short line for the second, nothing that
a terminal obeys, nothing left behind, nothing changed, no waiting for what never comes.
"""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.campaigns.alone import ended
from tests.campaigns.frame import Campaign, Trials, expect
from tests.campaigns.lives import Life, interp_run, preload, train_command

#: Seconds until what has not been refused is taken to hang; of a processor, until what is at work is stopped; bytes of
#: memory.
LIMIT, WORK, ROOM = 60.0, 3.0, 3 << 30
#: One trial of so many is an interpreter of its own.
FRESH = 40
#: "interp-run: " and a refusal.
LONGEST = len("interp-run: ") + 300
PROGRAM = "import sys; from interp_tasks.cli import main; sys.exit(main())"
#: What no terminal may be sent; what a line is made of, and the colours of a help, may.
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
TINY = ["task.p=5", "train.steps=2", "train.eval_samples=4", "model.d_model=8", "model.n_heads=2"]
CONTROL = "r\x1b[31m\x9b1m\u202eun"
GRID = '[train]\ntask = "modular-addition"\nset = {"task.p" = 5, "train.steps" = 2}\n'
FILES = {
    "grid.toml": GRID + '[[experiment]]\nname = "curve"\n',
    "space.toml": "[vary.train]\nlearning_rate = [0.001, 0.01]\n",
    "deep.toml": "a = " + "[" * 20_000,
    "digits.toml": f"{GRID}seeds = [{'9' * 5000}]\n",
    "control.toml": '[train]\ntask = "\\u001b[31m\\u202e"\n',
    "long.toml": f'[train]\ntask = "{"x" * 100_000}"\n',
    "kinds.toml": "train = 3\nexperiment = 2001-01-01\nruns = nan\n",
    "exits.py": "import sys\nsys.exit()\n",
    "fails.py": "raise ValueError('\\x1b[31m' + 'x' * 10_000)\n",
    "works.py": "",
}
PIPES = (
    "/dev/zero",
    "/dev/random",
    "/dev/full",
    "/dev/null",
    "/dev/stdin",
    "/proc/kmsg",
    "pipe",
    "pipe.toml",
)
SETTINGS = ("task.p", "train.seed", "train.steps", "model.d_model", "train.learning_rate", "nothing", "a.b")
HOSTILE: dict[str, Sequence[str]] = {
    "empty": ("", " ", "-", "--", "=", "=a", "a=", ":", ",", ",,", "@", "\\", "''", "[]", "null"),
    "number": (
        *("nan", "NaN", "inf", "-inf", "1e400", "-1e400", "0", "-1", "-0.0", "1_0", "0x10", "٣", "½", "０"),
        *(str(2**31), str(2**63), str(-(2**63) - 1), "9" * 19, f"1{'0' * 200}", "9" * 5000, f"-{'9' * 5000}"),
    ),
    "list": ("1,,2", "1,1", "0:0", "9:1", "0:99999999999999", "1:2:3:4", "1e9:1:log", "[1,", "[[]]", "[" * 5000),
    "long": ("x" * 70_000, "a b " * 3000, "'" * 300, "e\u0301" * 500, "folder/" * 40 + "x", "x" * 300 + ".toml"),
    "control": ("\x1b[31mred\x1b[0m", "\x9b31m", "\u202egnp.exe", "\u2066\u2028", "a\nb\r\tc", "\x7f", "\x07", CONTROL),
    "text": ("größe→😀", "\udcff", "%s%n", "{run}", "$HOME", "~", "true", '{"a": 1}', "each", "all", "last", "0.0"),
    "name": (
        *("x@y", "run@", "run@@last", f"run@{'9' * 5000}", "run@0:10:0", "run@all", f"{CONTROL}@last", "*", "[!"),
        *("zoo:", "zoo:nothing", "zoo:../..", "**/**", "..", "/", ".", "folder", "nowhere", "link", "99999.99999"),
    ),
    "pipe": PIPES,
    "file": ("tokens.npy", "huge.npy", "huge.toml", "/proc/self/mem", *FILES),
    "place": (
        *("dask", "dask://[::1", "dask://x:99999999", "dask://:1", "serial", "sqlite://", "sqlite:///pipe"),
        *("://", "a://b", "cuda:99", "cuda", "mps", "meta"),
    ),
    "setting": (
        *(
            f"{key}={value}"
            for key in SETTINGS
            for value in ("9" * 5000, f"1{'0' * 200}", "1e18", "NaN", "[[1]]", "\x1b[31m", "x" * 5000, "-1", str(10**9))
        ),
        *("train.checkpoint_at=[5,-1]", "train.steps=1e400", "task.\x1b=1", f"{'x' * 500}=1", "train.threads=99999"),
    ),
}  # fmt: skip
#: What could be meant, by how the help calls the value.
MEANT = {
    "TASK": ["modular-addition"],
    "REF": ["run@last", f"{CONTROL}@last", "run@0"],
    "RUN": ["run", CONTROL],
    "FILE.npy": ["tokens.npy"],
    "FILE.py": ["works.py"],
    "TOML": ["grid.toml", "space.toml"],
    "DIR": ["out", "new\x1b[31m/out"],
    "OUT": ["out"],
    "FILE.html": ["page.html"],
    "PAPER": ["grokfast"],
    "N": ["2", "8"],
    "GFLOPS": ["20"],
    "KEY=VALUE": TINY,
    "KEY=VALUES": ["train.learning_rate=0.001,0.01"],
}  # fmt: skip
CRASHED = 70
KEPT: list[Any] = []
STREAMS = ("read",) * 12 + ("closed", "full", "gone")


@dataclass(frozen=True)
class Leaf:
    """A command as the app has it."""

    path: tuple[str, ...]
    parameters: tuple[Any, ...]


@dataclass
class Call:
    """A trial: its words, and what becomes of its streams."""

    leaf: Leaf
    words: list[str] = field(default_factory=list)
    stdout: str = "read"
    stderr: str = "read"

    @property
    def reads_pipes(self) -> bool:
        return any(word in PIPES or "pipe" in word for word in self.words)


def leaves() -> list[Leaf]:
    """Return every command, those in groups too."""
    from interp_tasks.cli.app import program
    from interp_tasks.cli.groups import every_command

    return [
        Leaf(path, tuple(each for each in command.params if each.name != "help"))
        for path, command in every_command(program())
    ]


def meant(parameter: Any, chance: random.Random) -> str | None:
    """A value that somebody could give it; ``None`` where nothing says what that is."""
    name = str(parameter.metavar or "")
    found = next((values for key, values in MEANT.items() if key in name), None)
    if found is not None:
        return chance.choice(found)
    choices = re.findall(r"\b[a-z]\w+\b", str(getattr(parameter, "help", "") or ""))
    default = parameter.default
    if isinstance(default, (int, float, str)) and not isinstance(default, bool) and chance.random() < 0.5:
        return str(default)
    return chance.choice(choices) if choices else None


def is_setting(parameter: Any) -> bool:
    return str(parameter.metavar) == "KEY=VALUE"


def hostile(chance: random.Random) -> str:
    return chance.choice(HOSTILE[chance.choice(list(HOSTILE))])


def drawn(number: int, all_leaves: Sequence[Leaf]) -> Call:
    """The call of that number."""
    chance = random.Random(number)
    call = Call(chance.choice(all_leaves), stdout=chance.choice(STREAMS), stderr=chance.choice(STREAMS))
    call.words += call.leaf.path
    options = [each for each in call.leaf.parameters if each.param_type_name == "option"]
    odd = set(
        chance.sample(call.leaf.parameters, min(len(call.leaf.parameters), chance.choice((0, 1, 1, 1, 2, 4))))
    )
    of_a_task = any(each.metavar == "TASK" for each in call.leaf.parameters if each not in options)
    for each in call.leaf.parameters:
        # What every call needs: arguments, and a checkpoint or run where an option names one.
        needed = each not in options or "REF" in str(each.metavar) or (is_setting(each) and of_a_task)
        if each not in odd and not (needed and chance.random() < 0.95) and chance.random() > 0.1:
            continue
        if getattr(each, "is_flag", False):
            call.words += [chance.choice([*each.opts, *each.secondary_opts])] if each.name != "debug" else []
            continue
        given_to_all = "train." in str(each.help) if is_setting(each) else False
        several = [one for one in TINY if given_to_all or one.startswith("task.")]
        for given in several if is_setting(each) and each not in odd else [None]:
            value = hostile(chance) if each in odd else given or meant(each, chance)
            if value is None:
                continue
            if each not in options:
                call.words.append(value)
            else:
                spelled = chance.choice(each.opts)
                call.words += [f"{spelled}={value}"] if chance.random() < 0.5 else [spelled, value]
    if chance.random() < 0.03:
        call.words.insert(chance.randrange(len(call.words) + 1), hostile(chance))
    return call


# ---- Where a call is made


def furnish(given: Path) -> None:
    """A folder with a small run, its twin of a name that a terminal would obey, and files that are none."""
    import numpy

    given.mkdir()
    for name, text in FILES.items():
        (given / name).write_text(text, encoding="utf-8")
    numpy.save(given / "tokens.npy", numpy.zeros((3, 3), int))
    with open(given / "huge.npy", "wb") as file:
        numpy.lib.format.write_array_header_1_0(
            file, {"descr": "<i8", "fortran_order": False, "shape": (10**14, 3)}
        )
    settings = dict(setting.split("=") for setting in [*TINY, "train.log_every=1", "train.threads=1"])
    ended(Life(lambda: interp_run(train_command(given / "run", settings)), given.with_suffix(".out")))
    shutil.copytree(given / "run", given / CONTROL)
    (given / "folder").mkdir()
    (given / "link").symlink_to("gone")


def place_of(given: Path, place: Path) -> None:
    shutil.copytree(given, place, symlinks=True)
    for name in ("pipe", "pipe.toml"):
        os.mkfifo(place / name)
    with open(place / "huge.toml", "wb") as file:
        file.truncate(1 << 40)


def listing(place: Path) -> dict[str, tuple[int, int]]:
    """What lies in a folder, and when it was last changed."""
    found = {}
    for folder, names, files in os.walk(place):
        for name in (*names, *files):
            entry = Path(folder, name)
            # Who is refused has taken the lock of a run to look at it.
            changed = 0 if name in (*names, ".lock") else entry.lstat().st_mtime_ns
            found[str(entry.relative_to(place))] = (entry.lstat().st_mode, changed)
    # Python keeps what it has compiled.
    return {name: about for name, about in found.items() if "__pycache__" not in name}


# ---- Making it


@dataclass
class Came:
    """What came of a call.

    Attributes:
        status: ``None``: it was stopped at work.
        began: it had found its options good.
        asleep: when it was stopped it was waiting for something, and not for a processor.
    """

    status: int | None
    out: str
    err: str
    began: bool
    asleep: bool = False


def stream(kind: str, file: Path) -> int:
    """A descriptor to write to; of a closed stream one that is to be closed."""
    if kind == "gone":
        reading, writing = os.pipe()
        os.close(reading)
        return writing
    return os.open("/dev/full" if kind == "full" else file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)


def forked(call: Call, place: Path, scratch: Path) -> Came:
    out, err, began = scratch / "out", scratch / "err", scratch / "began"
    for file in (out, err, began):
        file.unlink(missing_ok=True)

    def act() -> None:
        # Nothing may leave this process but by its end: what it would leave to is the campaign's own cleaning up.
        status = CRASHED
        try:
            os.setsid()
            os.chdir(place)
            stand_in(call, out, err)
            tell_beginning(began)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))
            status = interp_run(call.words)
        except BaseException:
            with open(err, "a", encoding="utf-8") as file:
                traceback.print_exc(file=file)
        finally:
            os._exit(status)

    life = Life(act, scratch / "life")
    start, asleep = time.monotonic(), False
    while (status := life.wait(0.25)) is None and time.monotonic() < start + LIMIT:
        # A processor that others use, too, makes nothing shorter; who waits uses none.
        asleep = time.monotonic() > start + WORK and is_asleep(life.pid)
        if began.exists() and (asleep or processor_seconds(life.pid) >= WORK):
            break
    status = life.wait(0) if status is None else status
    if status is None:
        os.killpg(life.pid, signal.SIGKILL)
        os.waitpid(life.pid, 0)
    return Came(status, content(out), content(err), began.exists(), asleep)


def processor_seconds(pid: int) -> float:
    """The seconds of a processor that a process has used so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def is_asleep(pid: int) -> bool:
    """Whether a process does nothing for half a second, nor wants to."""
    states = set()
    for _ in range(10):
        states.add(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
        time.sleep(0.05)
    return "R" not in states


def stand_in(call: Call, out: Path, err: Path) -> None:
    """Give this process the streams of a call, as the interpreter would find them at its start."""
    kept = sys.stdout, sys.stderr
    for number, kind, file in ((1, call.stdout, out), (2, call.stderr, err)):
        os.dup2(stream(kind, file), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    made = [os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2)]
    sys.stdout, sys.stderr = made
    if call.stdout == "closed":
        os.close(1)
        sys.stdout = None  # type: ignore[assignment]
    if call.stderr == "closed":
        os.close(2)
        sys.stderr = None  # type: ignore[assignment]
    # What is collected closes its descriptor, which by now is another's.
    KEPT.extend(kept)


def tell_beginning(marker: Path) -> None:
    """Leave a mark when a command has found its options good, and begins its work."""
    from interp_tasks.cli.base import Command

    def telling(execute: Callable[[Any], None]) -> Callable[[Any], None]:
        def executed(command: Any) -> None:
            marker.touch()
            execute(command)

        return executed

    waiting = [Command]
    while waiting:
        each: Any = waiting.pop()
        waiting += each.__subclasses__()
        if "execute" in vars(each):
            each.execute = telling(each.execute)


def fresh(call: Call, place: Path, scratch: Path) -> Came:
    """An interpreter of its own, as a shell starts it."""
    out, err = scratch / "out", scratch / "err"
    descriptors = [stream(call.stdout, out), stream(call.stderr, err)]
    closed = [number for number, kind in ((1, call.stdout), (2, call.stderr)) if kind == "closed"]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *call.words],
        stdin=subprocess.DEVNULL,
        stdout=descriptors[0],
        stderr=descriptors[1],
        cwd=place,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUTF8": "1"},
        preexec_fn=lambda: [os.close(number) for number in closed],
    )
    asleep = False
    try:
        status: int | None = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        asleep = is_asleep(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        status = None
    for descriptor in descriptors:
        os.close(descriptor)
    return Came(status, content(out), content(err), began=True, asleep=asleep)


def content(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


# ---- Looking at it


def check(
    call: Call, came: Came, before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]
) -> str:
    """The kind of end it came to.

    Raises:
        Fault: for one that it should not come to.
    """
    said = f"interp-run {' '.join(shown(word) for word in call.words)}"
    if (call.stdout, call.stderr) != ("read", "read"):
        said += f" (stdout {call.stdout}, stderr {call.stderr})"
    tail = came.err[-300:]
    expect("Traceback" not in came.err, f"{said}: traceback: {shown(came.err[-600:])}")
    if came.status is None:
        expect(
            came.began and not (call.reads_pipes and came.asleep), f"{said}: it waits for what never comes"
        )
        return "stopped at work"
    expected = (0, 2, 141) if call.stdout == "gone" else (0, 2)
    expect(came.status in expected, f"{said}: exit status {came.status}: {tail}")
    for text in (came.out, came.err):
        expect(not OBEYED.search(text), f"{said}: sends {OBEYED.findall(text)[:3]}")
    if came.status == 2:
        if call.stderr == "read":
            lines = came.err.splitlines()
            expect(len(lines) == 1 and lines[0].startswith("interp-run: "), f"{said}: not one line: {tail}")
            expect(len(lines[0]) <= LONGEST, f"{said}: {len(lines[0])} characters: {tail}")
            expect(not (call.reads_pipes and "not enough memory" in tail), f"{said}: takes all memory")
        # Files are written before a stream can fail; a search or run that ends badly keeps what it has.
        if call.stdout == "read" and not re.search("diverged|failed|did not end", tail):
            expect(before == after, f"{said}: leaves {sorted(after.items() ^ before.items())[:3]}: {tail}")
    left = [name for name in after.keys() - before.keys() if re.search(r"(^|/)\.[^/]*(tmp|\.)[^/]*$", name)]
    expect(not left, f"{said}: leaves {left}")
    changed = [name for name in before if after.get(name) != before[name]]
    expect(came.status == 0 or not changed, f"{said}: changes {changed[:3]}")
    return "done" if came.status == 0 else "refused"


def shown(text: str) -> str:
    short = text if len(text) <= 200 else f"{text[:40]}...({len(text)})...{text[-140:]}"
    return repr(short)


@contextmanager
def prepare(scratch: Path) -> Iterator[Trials]:
    preload()
    all_leaves = leaves()
    given = scratch / "given"
    furnish(given)

    def trial(number: int) -> list[str]:
        call, place = drawn(number, all_leaves), scratch / "place"
        place_of(given, place)
        try:
            before = listing(place)
            alone = number % FRESH == FRESH - 1
            came = (fresh if alone else forked)(call, place, scratch)
            kind = check(call, came, before, listing(place))
            return [f"{kind}{', in an interpreter of its own' if alone else ''}"]
        finally:
            shutil.rmtree(place)

    yield Trials(trial)


CAMPAIGN = Campaign("options", "options that nobody means", prepare, usual=2000)
