"""Runs that are killed, files that are mangled, verbs that are interrupted, by the hundred: docs/reliability.md.

    python -m tests.campaigns kill|mangle|interrupt --n 200 [--only NUMBER]

Each trial has a number that repeats it. A run that is killed, at a random moment or operation on the disk, has at every
time the checkpoints of the run that was left alone, and at its end all its bytes. A mangled file is refused in one
line, or gives the bits that were saved; `run.json` and the logs carry no digest, so of these only the form is checked.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import timeit
import warnings
from collections.abc import Callable
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

SETTINGS = {
    "task.p": 7,
    "model.d_model": 8,
    "model.n_heads": 2,
    "train.steps": 40,
    "train.batch_size": 6,
    "train.grokfast": "ema",
    "train.dropout": 0.2,
    "train.checkpoint_every": 8,
    "train.log_every": 3,
    "train.eval_samples": 8,
    "train.threads": 1,
}
#: What changes names or waits for the disk. The content of files is written in between.
OPERATIONS = ("open", "rename", "replace", "fsync", "unlink", "rmdir", "mkdir")


def train(run: Path) -> int:
    from interp_tasks.cli import main

    sets = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    return main(["train", "modular-addition", *sets, "--out", str(run), "--quiet"])


def exit_status(act: Callable[[], Any], output: Path, seconds: float | None = None) -> int:
    """Does something in a child, killed after so many seconds; returns its exit status (of a signal minus it)."""

    def child() -> None:
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        warnings.simplefilter("ignore")
        sys.exit(act())

    process = get_context("fork").Process(target=child)
    process.start()
    process.join(seconds)
    process.kill()
    process.join()
    return process.exitcode or 0


def die_at(number: int) -> None:
    """Kills this process before its disk operation of that number."""
    counted = itertools.count(1)

    def watched(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(counted) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*arguments, **options)

        return call

    for name in OPERATIONS:
        setattr(os, name, watched(getattr(os, name)))


def weights(run: Path) -> dict[str, bytes]:
    """Returns the weights of every checkpoint that is there, read as any reader would, by step."""
    from interp_tasks.checkpoints import stored_steps
    from interp_tasks.checkpoints.checkpoint import read_checked_tensors
    from interp_tasks.checkpoints.run_reader import read_checkpoint_meta

    folders = [run / "checkpoints" / f"{step:08d}" for step in stored_steps(run)]
    for folder in folders:
        read_checked_tensors(folder / "model.safetensors", read_checkpoint_meta(folder))
    return {folder.name: (folder / "model.safetensors").read_bytes() for folder in folders}


def killed(number: int, good: Path, scratch: Path) -> str:
    chance, run, output = random.Random(number), scratch / "run", scratch / "output"
    expected, deaths = weights(good), 0
    for _ in range(chance.randint(1, 3)):
        if chance.random() < 0.5:
            at = chance.randint(1, 150)
            status = exit_status(lambda at=at: (die_at(at), train(run))[1], output)
        else:
            status = exit_status(lambda: train(run), output, chance.uniform(0, 2))
        assert status in (0, -signal.SIGKILL), f"a life ended with {status}: {output.read_text()[-300:]}"
        deaths += status != 0
        for name, content in (weights(run) if run.exists() else {}).items():
            assert content == expected[name], f"checkpoint {name} has other weights after death {deaths}"
    status = exit_status(lambda: train(run), output)
    assert status == 0, f"the last life ended with {status}: {output.read_text()[-300:]}"
    assert weights(run) == expected, "the run ends with other checkpoints"
    logs = [(each / "metrics.jsonl").read_bytes() for each in (run, good)]
    assert logs[0] == logs[1], "the run ends with another log"
    assert not list(run.rglob("*.tmp-*")), "something unfinished was left behind"
    return f"{deaths} deaths"


class Canary(str):
    """Unpickled, it makes a folder of its name."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self),)


def spoilt(content: bytes, chance: random.Random, canary: str) -> bytes:
    """Returns a file's content with something in it that was not saved."""
    at = chance.randrange(len(content))
    ways: list[Callable[[], bytes]] = [
        lambda: content[:at],
        lambda: content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :],
        lambda: content[:at] + bytes(chance.randrange(1, 64)) + content[at:],
        lambda: content + chance.randbytes(chance.randrange(1, 64)),
        lambda: chance.randbytes(len(content)),
        lambda: pickle.dumps(Canary(canary)),
        lambda: chance.choice([b"", b"{", b"null", b"[" * 100_000, b"9" * 6000, b"\xff\xfe{\x00}\x00"]),
        lambda: b"\xff" * 8 + content[8:],
    ]
    return chance.choice(ways)()


def mangled(number: int, good: Path, scratch: Path) -> str:
    from interp_tasks.checkpoints import load_checkpoint, read_metrics, stored_steps
    from interp_tasks.errors import UserError
    from interp_tasks.training.config import resolve_config
    from interp_tasks.training.train import train_resolved
    from tasks.errors import TaskError

    chance, run, canary = random.Random(number), scratch / "run", scratch / "canary"
    shutil.copytree(good, run)
    file = chance.choice(sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size))
    file.write_bytes(spoilt(file.read_bytes(), chance, str(canary)))
    expected, outcome = weights(good), "read as saved"
    config = resolve_config("modular-addition", "cpu", {key: str(value) for key, value in SETTINGS.items()})
    reads: list[Callable[[], Any]] = [lambda: read_metrics(run), lambda: train_resolved(config, run)]
    reads += [lambda step=step: load_checkpoint(f"{run}@{step}") for step in stored_steps(run)]
    for read in reads:
        said = ""
        try:
            read()
        except (UserError, TaskError) as error:
            said, outcome = str(error), "refused"
        assert "\n" not in said, f"{file.name}: the refusal has several lines"
        assert not canary.exists(), f"{file.name}: code in it was run"
    for folder in (run / "checkpoints").iterdir():
        if file.parent != folder and folder.name in expected:
            same = (folder / "model.safetensors").read_bytes() == expected[folder.name]
            assert same, f"{file.name}: training went on to other weights at {folder.name}"
    return f"{file.name} {outcome}"


@cache
def interrupted_model() -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=2, n_heads=2, d_head=8, d_model=16, d_mlp=32, n_ctx=8, d_vocab=20, act_fn="gelu", seed=0
    )
    return HookedTransformer(config).train()


@cache
def verbs() -> dict[str, tuple[Callable[[], Any], float]]:
    """Returns calls by name, each with the seconds that it takes."""
    from circuits import ablate, intervene, lens, patch, probe, run, sweep, transplant

    model, tokens = interrupted_model(), torch.arange(48).reshape(6, 8) % 20
    other, source = copy.deepcopy(model), tokens.flip(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)

    def metric(logits: Any) -> Any:
        return logits[:, -1, 3] - logits[:, -1, 4]

    def block() -> None:
        with intervene(model, transplant.weights(other, "attn"), ablate.zero("0.1")):
            model(tokens)

    few = {"draws": 20, "flips": 20}
    variants = {"zero": ablate.zero("0.0"), "weights": transplant.weights(other, "mlp")}
    calls: dict[str, Callable[[], Any]] = {
        "run of other weights": lambda: run(model, tokens, transplant.weights(other, "attn")),
        "block": block,
        "run": lambda: run(model, tokens, ablate.zero("0.0"), ablate.uniform("1.0"), cache=["z"]),
        "sweep": lambda: sweep(model, tokens, variants, metric, **few),
        "lens": lambda: lens(model, tokens, metric),
        "attribution": lambda: patch.attribution(model, tokens, source, metric, **few),
        "edges": lambda: patch.edges(model, tokens, source, metric, exact=2, **few),
        "probe": lambda: probe.linear(model, tokens, tokens[:, 0], sites="resid_post"),
    }
    # The first of two calls warms up.
    return {name: (call, min(timeit.repeat(call, number=1, repeat=2))) for name, call in calls.items()}


def condition(model: Any) -> list[Any]:
    """Returns what a verb must leave as it was: weights, modes, gradients and hooks."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [
        {name: value.numpy().tobytes() for name, value in model.state_dict().items()},
        [(module.training, *(len(getattr(module, kind)) for kind in kinds)) for module in model.modules()],
        [parameter.requires_grad for parameter in model.parameters()],
        torch.is_grad_enabled(),
    ]


def interrupted(number: int, good: Path, scratch: Path) -> str:
    model, chance = interrupted_model(), random.Random(number)
    name, (call, seconds) = chance.choice(sorted(verbs().items()))
    before, came = condition(model), False
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    while not came:  # A call may end before its interrupt comes.
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, seconds))
                call()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            came = True
    kinds = ("weights", "modes or hooks", "gradients", "grad mode")
    for kind, one, other in zip(kinds, before, condition(model), strict=True):
        assert one == other, f"{name}: other {kind} than before"
    return name


CAMPAIGNS = {"kill": killed, "mangle": mangled, "interrupt": interrupted}


def perform(name: str, numbers: list[int]) -> dict[str, Any]:
    """Returns how often each kind of trial was made, and the failures by number."""
    kinds: dict[str, int] = {}
    failures: dict[int, str] = {}
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        scratch, output = Path(folder), Path(folder) / "output"
        # Nothing is differentiated here before a fork: autograd's threads do not survive it.
        import interp_tasks.checkpoints.checkpoint
        import interp_tasks.cli.command_dispatch
        import interp_tasks.training.train  # noqa: F401
        import tasks

        torch.set_num_threads(1)
        tasks.get("modular-addition")
        status = exit_status(lambda: train(scratch / "good"), output)
        assert status == 0, f"the run that is left alone ended with {status}: {output.read_text()[-300:]}"
        for number in numbers:
            shutil.rmtree(scratch / "run", ignore_errors=True)
            try:
                kind = CAMPAIGNS[name](number, scratch / "good", scratch)
                kinds[kind] = kinds.get(kind, 0) + 1
            except Exception as error:
                failures[number] = f"{type(error).__name__}: {error}"
    return {"campaign": name, "n": len(numbers), "kinds": dict(sorted(kinds.items())), "failures": failures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("campaign", choices=CAMPAIGNS)
    parser.add_argument("--n", type=int, default=100, help="trials (default: 100)")
    parser.add_argument("--only", type=int, nargs="+", help="trials by number")
    given = parser.parse_args()
    summary = perform(given.campaign, given.only or list(range(given.n)))
    print(json.dumps(summary, indent=1))
    return bool(summary["failures"])


if __name__ == "__main__":
    sys.exit(main())
