"""What one row costs to follow: the project's functions, files and types that a call passes through.

    python benchmarks/walk.py            # interp-run ablation, and circuits.sweep on a HookedTransformer
    python benchmarks/walk.py --list     # the functions too, file by file

Counted by sys.setprofile over one call, once all is imported: functions that run (each once), the files they stand in,
how deep they call each other, project classes whose instances are handed from function to function ("carriers"), how
often the REF is resolved, and how often the same meta.json is opened at most.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformer_lens import HookedTransformer

import circuits
from circuits import ablate, heads, sweep
from interp_tasks.cli import main as interp_run

ROOT = Path(circuits.__file__).parent.parent
PACKAGES = tuple(f"{ROOT / name}/" for name in ("circuits", "tasks", "interp_tasks"))
COMMAND = "ablation --ckpt zoo:{}@post --samples 64"
MODEL = "matrix-completion-7x7"


@dataclass
class Walk:
    """What one call passed through."""

    functions: set[CodeType] = field(default_factory=set)
    carriers: set[type] = field(default_factory=set)
    resolved: int = 0
    opened: Counter[str] = field(default_factory=Counter)
    depth: int = 0

    @property
    def files(self) -> Counter[str]:
        return Counter(code.co_filename for code in self.functions)

    def saw(self, frame: FrameType) -> None:
        """Counts a call."""
        code = frame.f_code
        # What a module or class body, a comprehension or a lambda does is part of the function around it.
        if not code.co_filename.startswith(PACKAGES) or code.co_name.startswith("<"):
            return
        self.functions.add(code)
        self.resolved += code.co_name == "resolve" and code.co_filename.endswith(
            "checkpoints/checkpoint_refs.py"
        )
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            given = type(frame.f_locals.get(name))
            if given.__module__.split(".")[0] in ("circuits", "tasks", "interp_tasks"):
                self.carriers.add(given)
        depth, outer = 0, frame
        while outer is not None:
            depth += outer.f_code.co_filename.startswith(PACKAGES)
            outer = outer.f_back
        self.depth = max(self.depth, depth)


#: Audit hooks stay for the life of a process: one, which serves the walk that is being made.
_walking: list[Walk] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _walking and str(arguments[0]).endswith("meta.json"):
        _walking[-1].opened[str(arguments[0])] += 1


@contextlib.contextmanager
def walked() -> Iterator[Walk]:
    """Counts what runs in the block, in this thread."""
    walk = Walk()
    _walking.append(walk)

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            walk.saw(frame)

    sys.setprofile(profile)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        _walking.pop()


sys.addaudithook(_audit)


def ablation(model: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if interp_run(COMMAND.format(model).split()) != 0:
            raise SystemExit("the command failed")


def one_sweep() -> Callable[[], Any]:
    """Returns a sweep over the heads of a small model."""
    config = {
        "n_layers": 2,
        "d_model": 16,
        "n_ctx": 8,
        "d_head": 8,
        "n_heads": 2,
        "d_vocab": 11,
        "act_fn": "gelu",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = HookedTransformer({**config, "seed": 0})
    tokens = torch.randint(11, (6, 8), generator=torch.Generator().manual_seed(0))
    edits = ablate.each(ablate.zero, heads("all", model))

    def metric(output: torch.Tensor) -> torch.Tensor:
        return output[:, -1, 0]

    return lambda: sweep(model, tokens, edits, metric)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="show the functions, file by file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    swept = one_sweep()
    # What is measured once is not what is imported or kept by then: another model is taken first.
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        f"interp-run {COMMAND.format(MODEL)}": (
            lambda: ablation("matrix-completion-4x4"),
            lambda: ablation(MODEL),
        ),
        "circuits.sweep on a HookedTransformer": (swept, swept),
    }
    print(f"{'':70} functions files depth carriers resolve meta.json")
    for name, (first, call) in calls.items():
        first()
        with walked() as walk:
            call()
        reads = max(walk.opened.values(), default=0)
        print(
            f"{name:70} {len(walk.functions):9} {len(walk.files):5} {walk.depth:5} {len(walk.carriers):8} "
            f"{walk.resolved:7} {reads:9}"
        )
        if options.list:
            for file in sorted(walk.files):
                names = sorted(code.co_name for code in walk.functions if code.co_filename == file)
                print(f"  {Path(file).relative_to(ROOT)}: {', '.join(names)}")
            print(f"  carriers: {', '.join(sorted(kind.__qualname__ for kind in walk.carriers))}")


if __name__ == "__main__":
    main()
