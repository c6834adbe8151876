"""Training killed at a random moment, and resumed: it ends with the bytes of a run that was left alone.

A trial is a run of one of the scenarios below. It is killed one to three times with SIGKILL, at a random moment or at a
random operation on the disk, or asked to stop with SIGTERM or Ctrl-C. After each death all that lies on the disk is
read, and must be what the uninterrupted run has there; then the same command goes on. At its end every checkpoint's
weights and the metrics log are the same bytes, and nothing unfinished is left.
"""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.campaigns.alone import (
    WHOLE,
    Known,
    Scenario,
    begin,
    check_disk,
    check_end,
    ended,
    left_alone,
    live,
)
from tests.campaigns.frame import Campaign, Trials, expect
from tests.campaigns.lives import at_operation, die, preload

SCENARIOS = (
    Scenario("all there is to lose", WHOLE),
    Scenario("extended", WHOLE, begun=24),
    # A checkpoint at every step: at each of them the oldest training state goes.
    Scenario("training states dropped", {**WHOLE, "train.checkpoint_every": 1, "train.steps": 24}),
    Scenario("Grokfast with a window", {**WHOLE, "train.grokfast": "ma", "train.grokfast_window": 7}),
)


def stop(run: Path, known: Known, number: int, chance: random.Random) -> bool:
    """SIGTERM or Ctrl-C once it has logged some line: exit status and word; False if it was done before."""
    from interp_tasks.checkpoints import stored_steps

    there, status = lines(run), None
    # What an earlier life logged says nothing of this one.
    line = chance.randrange(there, max(known.log.count(b"\n"), there + 1))
    life = live(run, known.scenario.settings)
    while status is None and lines(run) <= line:
        status = life.wait(0.001)
    if status is None:
        life.signal(number)
        status = life.end()
    if status == 0:
        return False
    said = life.said()
    if stored_steps(run)[-1:] == [known.scenario.settings["train.steps"]]:
        return False  # it was about to leave
    expect(status == 128 + number, f"{signal.Signals(number).name} gave status {status}: {said[-200:]}")
    expect(said.count("\n") == 0 and "stopped after step" in said, f"no clear word: {said[-300:]}")
    return True


def lines(run: Path) -> int:
    log = run / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def death(run: Path, known: Known, chance: random.Random) -> str | None:
    """One life that dies, and how; ``None`` if it was done before that."""
    how = chance.choices(["at a moment", "at a disk operation", "SIGTERM", "SIGINT"], [4, 4, 1, 1])[0]
    settings = known.scenario.settings
    if how == "at a disk operation":
        at, after = chance.randrange(known.operations), chance.random() < 0.5
        life = live(run, settings, lambda: at_operation(at, after, die))
        status = life.end()
        expect(status in (0, -signal.SIGKILL), f"a life ended with {status}: {life.said()[-300:]}")
        return how if status else None
    if how == "at a moment":
        life = live(run, settings)
        if life.wait(chance.uniform(known.began, known.seconds)) is not None:
            return None
        life.kill()
        return how
    return how if stop(run, known, signal.Signals[how].value, chance) else None


def trial(number: int, known: Sequence[Known], scratch: Path) -> list[str]:
    chance = random.Random(number)
    case = known[number % len(known)]
    run = scratch / f"killed-{number}"
    begin(run, case)
    deaths: list[str] = []
    wanted = chance.randint(1, 3)
    for _ in range(20):
        if len(deaths) >= wanted:
            break
        how = death(run, case, chance)
        check_disk(run, case)
        if how is None:
            check_end(run, case, deaths)
            begin(run, case)
        else:
            deaths.append(how)
    expect(bool(deaths), "it never died")
    ended(live(run, case.scenario.settings))
    check_disk(run, case)
    check_end(run, case, deaths)
    shutil.rmtree(run)
    return [f"{case.scenario.name}: {how}" for how in deaths]


@contextmanager
def prepare(scratch: Path) -> Iterator[Trials]:
    preload()
    known = [left_alone(scenario, scratch) for scenario in SCENARIOS]
    yield Trials(lambda number: trial(number, known, scratch))


CAMPAIGN = Campaign("kill", "training killed and resumed", prepare, usual=200)
