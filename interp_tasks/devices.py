"""Checks devices, how one is written and whether this machine has it, and says how CUDA devices multiply."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from interp_tasks.errors import UserError

DEVICE = re.compile(r"cpu|(cuda|mps)(:\d+)?", re.ASCII)


def check_device_name(device: str) -> str:
    """Returns a text that can name a device, and refuses any other. Imports no torch."""
    if not DEVICE.fullmatch(device):
        raise UserError(f"--device {device!r}: write cpu, cuda, cuda:1 or mps")
    return device


def check_device(device: Any) -> None:
    """Refuses a device that this machine does not have, by making a number on it."""
    import torch

    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        there = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        there += ["mps"] * torch.backends.mps.is_available()
        raise UserError(
            f"device {str(device)!r} is not available: this machine has {', '.join(there)}"
        ) from None


@contextlib.contextmanager
def float32_matmul_precision(*, rounded: bool) -> Iterator[None]:
    """Has CUDA devices round the factors of float32 products to tf32, or compute them as they are; restores what was
    set.
    """
    import torch

    matmul = torch.backends.cuda.matmul
    # Torch before 2.9 has the other; reading that one, where this one has been set, is an error.
    name, values = (
        ("fp32_precision", ("ieee", "tf32"))
        if hasattr(matmul, "fp32_precision")
        else ("allow_tf32", (False, True))
    )
    before = getattr(matmul, name)
    setattr(matmul, name, values[rounded])
    try:
        yield
    finally:
        setattr(matmul, name, before)
