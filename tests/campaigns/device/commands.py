"""What ``interp-run`` prints and logs on two devices: commands that take ``--device``, and training of every kind."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.campaigns.device.agreement import Check, Tolerance
from tests.campaigns.frame import Fault, expect

RUN, ADDITION, MIIII = "zoo:matrix-completion-4x4", "zoo:modular-addition-113", "zoo:miiii-113-small"
MC, ADD, MI = f"--ckpt {RUN}@20000", f"--ckpt {ADDITION}@3000", f"--ckpt {MIIII}@14000"
AUTO = "--ckpt zoo:matrix-completion-autoregressive@last"
GRID = """[train]
task = "modular-addition"
seeds = "0:2"
[train.set]
"task.p" = 7
"train.steps" = 6
"train.log_every" = 1

[[experiment]]
name = "curve"

[[experiment]]
name = "ablation"
at = "last"
settings = {samples = 8, heads = "each"}
"""
#: Command -> the rest of its calls. Shipped models compute in single precision.
COMMANDS = {
    "ablation": [
        f"{MC} --samples 16 --heads each",
        *(
            f"{MC} --samples 16 --heads each --mode {mode}"
            for mode in ("mean_pattern", "edited_mean_pattern", "zero", "mean", "resample")
        ),
        f"{MC} --samples 16 --heads 0.1 --queries hidden --keys 0,1",
        f"{ADD} --samples 16 --heads all --mode resample",
    ],
    "attention": [f"{MC} --samples 16", f"{ADD} --samples 16"],
    "circuit": [
        f"{ADD} --samples 8 --random 1 --method gradient",
        f"{ADD} --samples 8 --random 1 --method integrated --kind nodes",
        f"{ADD} --samples 8 --random 1 --method exact --no-curve",
        f"{MI} --samples 8 --random 1 --rank size --no-curve",
        f"{MC} --samples 8 --random 1 --kind nodes --no-curve",
    ],
    "fourier": [ADD, MI, f"{MC} --every --samples 16"],
    "grid": ["few.toml --executor serial"],
    "heads": [
        f"{MC} --samples 32 --random 1 --group some=0.0+1.1",
        f"{MC} --samples 32 --by-class --mode mean",
        f"{MI} --samples 32",
    ],
    "lens": [f"{MC} --samples 32", f"{ADD} --samples 32"],
    "matrix algorithm": [f"{MC} --samples 16"],
    "matrix baseline": [f"{MC} --samples 8"],
    "matrix copying": [f"{MC} --samples 16"],
    "matrix decoding": [f"{AUTO} --samples 8"],
    "matrix embeddings": [MC],
    "matrix influence": [f"{MC} --samples 8", f"{MC} --samples 8 --redraw"],
    "matrix ood": [f"{MC} --samples 8"],
    "matrix order": [f"--ckpt {RUN}@0,1000,8000,20000 --samples 16"],
    "modular detector": [MI],
    "modular neurons": [f"{ADD} --neurons 0,1 --draws 1", f"{ADD} --site pattern"],
    "modular primes": [f"{MI} --samples 8 --draws 1"],
    "modular progress": [ADD, MI],
    "modular weights": [ADD, f"{MI} --control {MIIII}@0"],
    "patch": [
        f"{MC} --samples 16 --heads each --source resample",
        f"{MC} --samples 16 --heads each --source negated",
        f"{MC} --samples 16 --site resid_pre --positions hidden --source resample",
        f"{MC} --samples 16 --heads each --by-class --source {RUN}@0",
        f"{ADD} --samples 16 --heads each --source same_sum",
        f"{MI} --samples 16 --heads each --source shifted",
    ],
    "permute": [f"{MC} --samples 16 --draws 2 --what all --what rows --what within-rows"],
    "probe": [
        f"{MC} --samples 64 --held-out 32 --no-untrained",
        f"{MC} --samples 256 --held-out 64 --ridge 1,10 --each-position --target true_element",
        f"{ADD} --samples 64 --intercept",
    ],
    "runs curve": [f"--ckpt {RUN} --samples 16"],
    "runs report": [f"--ckpt {RUN}@20000 --samples 4 --out page.html"],
    "runs search": [
        "modular-addition --trials 2 --vary train.learning_rate=0.001,0.01 --set train.steps=4 --set task.p=7"
    ],
    "transplant": [
        f"{MC} --samples 32 --source {RUN}@1000",
        f"{MC} --samples 32 --source {RUN}@1000 --components qkv --components mlp --components ln --layers 0,1",
    ],
}
#: Commands that take ``--device`` and are not compared by what they print, and why.
OTHERWISE = {
    "train": "its logs are compared",
    "tasks cost": "counts operations, and measures seconds",
    "reproduce": "trains and measures by the commands above",
}
SMALL = "model.d_model=16 model.n_heads=2 train.batch_size=16"
#: Name -> the task, and what is set.
TRAINED = {
    "matrix-completion": ("matrix-completion", f"task.n=3 model.n_layers=2 {SMALL}"),
    "post-norm": (
        "matrix-completion",
        f"task.n=3 model.n_layers=2 model.norm=post train.warmup_steps=5 train.clip_norm=1 {SMALL}",
    ),
    "matrix-completion-sizes": ("matrix-completion-sizes", f"task.sizes=3,4 model.n_layers=2 {SMALL}"),
    "matrix-completion-autoregressive": (
        "matrix-completion-autoregressive",
        f"task.n=3 model.n_layers=2 {SMALL}",
    ),
    "modular-addition": ("modular-addition", "task.p=13 train.l1=1e-6"),
    "modular-multiplication": ("modular-multiplication", "task.p=13"),
    "miiii": ("miiii", "task.p=13 task.primes=2,3,5"),
    "dropout": ("modular-addition", "task.p=13 train.dropout=0.1 train.batch_size=32 train.optimizer=adam"),
    "grokfast": ("modular-addition", "task.p=13 train.grokfast=ema train.gradient_norms_every=5"),
    "grokfast-ma": (
        "modular-addition",
        "task.p=13 train.grokfast=ma train.grokfast_window=4 train.observe=blocks.0.attn.hook_z train.observe_every=5",
    ),
    "sgd": (
        "modular-addition",
        "task.p=13 train.optimizer=sgd train.momentum=0.9 train.schedule=cosine train.schedule_start=5"
        " train.schedule_end=15 train.deterministic=true",
    ),
}
#: Runs whose updates a CUDA device does not capture either.
EAGER = ("grokfast-ma", "sgd")
STACKED = ("matrix-completion", "post-norm", "modular-addition", "dropout", "grokfast", "miiii")
RESUMED = ("matrix-completion", "modular-addition", "dropout", "grokfast")
STEPS = 20
#: A run that changes devices: on the CPU to step 6, on the other device to 12, which is long enough for updates to be
#: captured there, and on the CPU to the end.
CHANGES = (6, 12)
#: Single precision keeps seven digits; an update of Adam divides by a root, and STEPS of them follow one another.
SINGLE, LOGS = Tolerance(1e-3, 1e-4, 1e-7), Tolerance(2e-3, 1e-3, 1e-7)


def checks(scratch: Path) -> list[Check]:
    """Returns the checks of all commands and of training; each works in a folder of its own."""
    folders = (scratch / str(number) for number in itertools.count())
    return [
        *(printed(f"{name} {rest}", folders) for name, calls in COMMANDS.items() for rest in calls),
        *(trained(name, folders) for name in TRAINED),
        *(trained(name, folders, stacked=True) for name in STACKED),
        *(trained(name, folders, resumed=True) for name in RESUMED),
        trained("modular-addition", folders, stacked=True, resumed=True),
    ]


def printed(command: str, folders: Iterator[Path]) -> Check:
    def measured(device: str) -> Any:
        options = ("--format", "json", "--device", device)
        return json.loads(interp_run([*command.split(), *options], next(folders)))

    return Check("command", command, SINGLE, lambda: measured("cpu"), lambda device: [("", measured(device))])


def trained(name: str, folders: Iterator[Path], stacked: bool = False, resumed: bool = False) -> Check:
    """Returns the check of a run's log, or of the logs of three stacked runs."""

    def logged(*lives: tuple[int, str]) -> Mapping[str, Any]:
        folder = next(folders)
        for steps, device in lives:
            train(name, folder, device, steps, stacked)
            if device.startswith("cuda") and name not in EAGER:
                expect_captured(folder)
        return logs(folder)

    def there(device: str) -> list[tuple[str, Any]]:
        first, second = CHANGES
        crossing = ((first, "cpu"), (second, device), (STEPS, "cpu"))
        return [("", logged(*crossing) if resumed else logged((STEPS, device)))]

    # A run that stops on the way logs its last step: so does the one it is compared with.
    ends = (*CHANGES, STEPS) if resumed else (STEPS,)
    kind = " ".join(["training", *["stacked"] * stacked, *["resumed"] * resumed])
    return Check(kind, f"{kind} {name}", LOGS, lambda: logged(*((steps, "cpu") for steps in ends)), there)


def train(name: str, folder: Path, device: str, steps: int, stacked: bool) -> None:
    task, settings = TRAINED[name]
    common = f"train.steps={steps} train.log_every=2 train.eval_samples=32 train.checkpoint_every=10"
    sets = [part for each in f"{settings} {common}".split() for part in ("--set", each)]
    seeds = ["--seeds", "0:3", "--stacked"] if stacked else []
    interp_run(["train", task, "--out", "run", "--device", device, *sets, *seeds], folder)


def logs(folder: Path) -> dict[str, Any]:
    """Returns the lines of every log under a folder, by the run's place in it."""
    found = {
        str(path.parent.relative_to(folder)): [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.rglob("metrics.jsonl"))
    }
    expect(bool(found), "no log was written")
    return found


def expect_captured(folder: Path) -> None:
    """Raises Fault if ``run.json`` of a run, or what it says of an opening, tells of no updates that were captured."""
    for path in folder.rglob("run.json"):
        told = '"captured"' in path.read_text()
        expect(told, f"{path.parent.name}: no update was captured as a CUDA graph")


def interp_run(arguments: list[str], folder: Path) -> str:
    """Runs a command in a folder and returns what it prints.

    Raises:
        Fault: it failed, with what it said.
    """
    from interp_tasks.cli import main

    folder.mkdir(exist_ok=True)
    (folder / "few.toml").write_text(GRID)
    shown, said = io.StringIO(), io.StringIO()
    before = os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(said):
            status = main([*arguments, "--quiet"])
    finally:
        os.chdir(before)
    if status:
        raise Fault(f"status {status}: {said.getvalue().strip()[-300:]}")
    return shown.getvalue()
