"""The same command gives the same bits: in another process, under another hash seed, on another executor.

Two interpreters that live side by side, with PYTHONHASHSEED 1 and 2, are given the same commands: a run of each task
to train, every command of ``interp-run`` that measures something, and a grid: in one process by the one, on processes
or Dask by the other. Weights and logs must be the same bytes, and tables the same text, in which numbers stand to the
last bit.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.campaigns.alone import WHOLE, fingerprint
from tests.campaigns.frame import Campaign, Fault, Trials, expect

REPOSITORY = Path(__file__).parents[2]
#: What trains, is compared by what it trained; what asks for none, shows nothing that is measured.
OTHERS = ("train", "grid", "schema", "tasks", "cost", "checkpoints", "report")
#: Without ``--format``.
PLAIN = ("demo",)
TRAINED = {
    "modular addition, all there is to lose": ("modular-addition", WHOLE),
    "modular addition, every batch the whole split": (
        "modular-addition",
        {**WHOLE, "train.batch_size": "null", "train.grokfast": "ma", "train.grokfast_window": 5},
    ),
    "matrix completion": (
        "matrix-completion",
        {"task.n": 4, "model.d_model": 16, "model.n_heads": 2, "train.steps": 20, "train.batch_size": 8},
    ),
    "MIIII": ("miiii", {"task.p": 13, "model.d_model": 16, "train.steps": 20}),
}
GRID = """[train]
task = "modular-addition"
seeds = "0:2"
[train.set]
"task.p" = 5
"train.steps" = 6
"train.log_every" = 1
"train.learning_rate" = [0.001, 0.01]

[[experiment]]
name = "curve"

[[experiment]]
name = "ablation"
at = "last"
settings = {samples = 8, heads = "each"}
"""


class Interpreter:
    """One that runs commands of ``interp-run`` as they are asked for."""

    def __init__(self, hash_seed: int, folder: Path) -> None:
        folder.mkdir()
        (folder / "grid.toml").write_text(GRID)
        environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(REPOSITORY)}
        self.folder = folder
        self.program = subprocess.Popen(
            [sys.executable, "-m", "tests.campaigns.bits"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            env=environment,
            text=True,
        )

    def run(self, arguments: Sequence[str]) -> str:
        """What it prints.

        Raises:
            Fault: if it fails.
        """
        assert self.program.stdin is not None
        assert self.program.stdout is not None
        print(json.dumps(list(arguments)), file=self.program.stdin, flush=True)
        found = json.loads(self.program.stdout.readline())
        expect(
            found["status"] == 0, f"{' '.join(arguments)}: status {found['status']}: {found['said'][-300:]}"
        )
        return str(found["shown"])

    def end(self) -> None:
        assert self.program.stdin is not None
        self.program.stdin.close()
        self.program.wait()


def serve() -> None:
    """A command a line, as a JSON list; what it gives, as a JSON object."""
    import torch

    from interp_tasks.cli import main

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        shown, said = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(said):
            status = main(json.loads(line))
        print(
            json.dumps({"status": status, "shown": shown.getvalue(), "said": said.getvalue()}),
            file=answers,
            flush=True,
        )


def commands() -> list[list[str]]:
    """Of every command that measures, the calls that the tests make."""
    from tests.interp_tasks.cli.test_every_command import CALLS

    return [
        [name, *rest.split(), "--quiet", *([] if name in PLAIN else ["--format", "json"])]
        for name, calls in CALLS.items()
        if name not in OTHERS
        for rest in calls
    ]


def same_run(name: str, both: tuple[Interpreter, Interpreter]) -> str:
    task, settings = TRAINED[name]
    sets = [
        part
        for key, value in {**settings, "train.threads": 1}.items()
        for part in ("--set", f"{key}={value}")
    ]
    found = []
    for each in both:
        each.run(["train", task, *sets, "--out", name.replace(" ", "-"), "--quiet"])
        found.append(fingerprint(each.folder / name.replace(" ", "-")))
    different = [file for file in found[0] if found[0][file] != found[1].get(file)]
    expect(found[0].keys() == found[1].keys() and not different, f"{name}: {different} differ")
    return "training"


def same_table(arguments: list[str], both: tuple[Interpreter, Interpreter]) -> str:
    one, other = (each.run(arguments) for each in both)
    if one != other:
        raise Fault(f"{' '.join(arguments)}: {difference(one, other)}")
    return f"interp-run {arguments[0]}"


def same_grid(executor: str, both: tuple[Interpreter, Interpreter]) -> str:
    tables = [
        each.run(
            ["grid", "grid.toml", "--executor", name, "--out", f"grid-{name}", "--quiet", "--format", "json"]
        )
        for each, name in zip(both, ("serial", executor), strict=True)
    ]
    if tables[0] != tables[1]:
        raise Fault(f"grid on {executor}: {difference(*tables)}")
    return f"grid on {executor}"


def difference(one: str, other: str) -> str:
    pairs: Iterator[tuple[Any, Any]] = zip(one.splitlines(), other.splitlines(), strict=False)
    return next(
        (f"{left.strip()} and {right.strip()}" for left, right in pairs if left != right), "lengths differ"
    )


@contextmanager
def prepare(scratch: Path) -> Iterator[Trials]:
    with ExitStack() as stack:
        both = (Interpreter(1, scratch / "one"), Interpreter(2, scratch / "other"))
        for each in both:
            stack.callback(each.end)
        every = [
            *((same_run, name) for name in TRAINED),
            *((same_grid, name) for name in ("processes", "dask")),
            *((same_table, arguments) for arguments in commands()),
        ]

        def trial(number: int) -> list[str]:
            check, what = every[number % len(every)]
            return [check(what, both)]  # type: ignore[operator]

        yield Trials(trial, len(every))


CAMPAIGN = Campaign("bits", "the same command gives the same bits", prepare)

if __name__ == "__main__":
    serve()
