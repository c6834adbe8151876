"""Kill a training run with -9 again and again, resume it, and compare it with a run that was left alone.

    python benchmarks/kill_and_resume.py --kills 30 [--fork] [--seed 0]

Every life of the run is a process of its own that starts the same training and is killed at a random moment, so
that kills fall into updates, log lines, checkpoint writes and renames alike. The run has all the state there is to
lose: Adam moments, a Grokfast filter, dropout, warm-up, fresh batches. It must end with the same bytes in every
checkpoint's weights and in the metrics log. Exit status 1 if it does not.

--fork starts each life from a process that has imported torch already: seconds instead of minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

SETTINGS = {
    "task.p": "11",
    "model.d_model": "16",
    "train.steps": "1000",
    "train.batch_size": "16",
    "train.grokfast": "ema",
    "train.dropout": "0.1",
    "train.warmup_steps": "30",
    "train.clip_norm": "1.0",
    "train.weight_decay": "0.1",
    "train.log_every": "3",
    "train.checkpoint_every": "8",
    "train.threads": "1",
}


def train_here(out: Path) -> None:
    from interp_tasks.training import resolve_config, train
    from tasks import get

    resolved = resolve_config("modular-addition", "cpu", SETTINGS)
    task = get(resolved.task_name, **resolved.task)
    train(task, settings=resolved.model, config=resolved.train, out=out)


class Forked:
    """A life begun by ``fork`` from this process."""

    def __init__(self, out: Path) -> None:
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                train_here(out)
                status = 0
            finally:
                os._exit(status)

    def wait(self, timeout: float | None) -> int | None:
        """Exit status, or ``None`` if it is still alive after ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while end is None or time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.001)
        return None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


class Fresh:
    """A life as the command line gives it: ``interp-run train`` in a new interpreter."""

    def __init__(self, out: Path) -> None:
        sets = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
        run = "import sys; from interp_tasks.cli import main; sys.exit(main())"
        command = [
            sys.executable,
            "-c",
            run,
            "train",
            "modular-addition",
            *sets,
            "--out",
            str(out),
            "--quiet",
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def wait(self, timeout: float | None) -> int | None:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def finished(life: Forked | Fresh, run: Path) -> tuple[float, float]:
    """Let a life end by itself; seconds until it began to write its run, and until it ended."""
    start = time.monotonic()
    began = None
    while (status := life.wait(0.01)) is None:
        if began is None and (run / "run.json").exists():
            began = time.monotonic() - start
    if status != 0:
        sys.exit(f"a life that was not killed ended with status {status}")
    duration = time.monotonic() - start
    return (duration if began is None else began), duration


def fingerprint(run: Path) -> dict[str, str]:
    files = [*run.glob("checkpoints/*/model.safetensors"), run / "metrics.jsonl"]
    return {
        str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)
    }


def stored_step(run: Path) -> int:
    return max(
        (int(path.name) for path in run.glob("checkpoints/[0-9]*") if path.name.isdecimal()), default=-1
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--fork", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    options = parser.parse_args()
    SETTINGS["train.steps"] = str(options.steps)
    warnings.simplefilter("ignore", DeprecationWarning)
    begin = Forked if options.fork else Fresh
    moments = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        if options.fork:
            # Whatever the lives share is imported before the first of them begins.
            import transformer_lens  # noqa: F401

            import interp_tasks.training.trainer  # noqa: F401
        alone = Path(scratch) / "alone"
        began, duration = finished(begin(alone), alone)
        expected = fingerprint(alone)
        print(f"uninterrupted: {stored_step(alone)} steps, {len(expected) - 1} checkpoints, {duration:.1f} s")
        kills, runs = 0, 1
        run = Path(scratch) / "killed-1"
        while kills < options.kills:
            life = begin(run)
            # Not while it only imports. Some lives die before their first checkpoint, some run to the end.
            if life.wait(moments.uniform(began, duration)) is None:
                life.kill()
                kills += 1
                leftover = len(list(run.glob("checkpoints/.*"))) if run.exists() else 0
                print(
                    f"kill {kills:3}: run {runs} has step {stored_step(run)}, {leftover} unfinished write(s)"
                )
            else:
                compare(run, expected, runs)
                runs += 1
                run = Path(scratch) / f"killed-{runs}"
        finished(begin(run), run)
        compare(run, expected, runs)
        print(json.dumps({"kills": kills, "runs": runs, "identical": True}))


def compare(run: Path, expected: dict[str, str], number: int) -> None:
    found = fingerprint(run)
    different = [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]
    if different:
        sys.exit(f"run {number} differs from the uninterrupted run in {', '.join(different)}")
    print(f"run {number}: every weight file and the metrics log equal the uninterrupted run's, byte for byte")


if __name__ == "__main__":
    main()
