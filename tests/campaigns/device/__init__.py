"""The same numbers on another device: every command, training, and the verbs of ``circuits``.

    python -m tests.campaigns device --device cuda [--only probe "paths, llama"]

A trial measures one thing on the CPU and on the other device, and compares all numbers and words of it. Several
processes share the work by ``--seed`` and ``--n``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tests.campaigns.device.agreement import Check
from tests.campaigns.frame import Campaign, Trials


def mixed(checks: Sequence[Check]) -> list[Check]:
    """Returns checks of all kinds in turn, so that the first few are of every kind."""
    kinds: dict[str, list[Check]] = defaultdict(list)
    for check in checks:
        kinds[check.kind].append(check)
    return [check for turn in zip_longest(*kinds.values()) for check in turn if check is not None]


def on(device: str, planted: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Campaign:
    """Returns the campaign that compares the CPU with a device.

    Args:
        planted: opened while the device is at work: in a test, a difference that must be found.
    """

    @contextmanager
    def prepare(scratch: Path) -> Iterator[Trials]:
        import torch

        from tests.campaigns.device import commands, verbs, without_model

        torch.set_num_threads(1)
        checks = mixed([*commands.checks(scratch), *verbs.checks(scratch), *without_model.checks()])

        def trial(number: int) -> list[str]:
            return checks[number % len(checks)].make(device, planted)

        yield Trials(trial, len(checks), [f"{check.kind}: {check.name}" for check in checks])

    return Campaign("device", f"the same numbers on {device}", prepare)
