"""Checks devices: how one is written, and whether this machine has it."""

from __future__ import annotations

import re
from typing import Any

from interp_tasks.errors import UserError

DEVICE = re.compile(r"cpu|(cuda|mps)(:\d+)?", re.ASCII)


def check_written_device(device: str) -> None:
    """Refuses a text that cannot name a device. Imports no torch.

    Raises:
        UserError: in one line.
    """
    if not DEVICE.fullmatch(device):
        raise UserError(f"--device {device!r}: write cpu, cuda, cuda:1 or mps")


def check_device(device: Any) -> None:
    """Refuses a device that this machine does not have, by making a number on it.

    Raises:
        UserError: in one line, with the devices that there are.
    """
    import torch

    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise UserError(
            f"device {str(device)!r} is not available: this machine has {', '.join(devices())}"
        ) from None


def devices() -> list[str]:
    """Lists the devices of this machine."""
    import torch

    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]
