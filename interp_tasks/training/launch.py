"""Tells which of several processes this one is, as torchrun says in the environment. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from interp_tasks.errors import UserError

#: Where to meet, by torch's ``env://``.
MEETING = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """One of the processes that were started together.

    Attributes:
        rank: its number; the first one, 0, prints, locks and writes.
        count: how many there are.
        local_rank: its number on its machine, which is that of its GPU.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    def device(self, device: str) -> str:
        """Returns the device of this process, where all are given the same name.

        Raises:
            UserError: for one GPU that several processes would have.
        """
        if self.count == 1 or device == "cpu":
            return device
        if device != "cuda":
            raise UserError(f"--device {device} is one for {self.count} processes: write cpu or cuda")
        return f"cuda:{self.local_rank}"

    def check_batch(self, examples: int) -> None:
        """Refuses a batch that some process would have nothing of.

        Raises:
            UserError: in one line.
        """
        if examples < self.count:
            raise UserError(
                f"a batch of {examples} examples for {self.count} processes: at least one each, see train.batch_size"
            )


def launched() -> Launch:
    """Reads the launch from the environment; one process alone where it says nothing.

    Raises:
        UserError: if it says so much of it that another process must be meant.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return Launch()
    try:
        launch = Launch(
            rank=int(os.environ["RANK"]),
            count=int(os.environ["WORLD_SIZE"]),
            local_rank=int(os.environ.get("LOCAL_RANK", os.environ["RANK"])),
        )
        address, port = (os.environ[name] for name in MEETING)
        fits = 0 <= launch.rank < launch.count and bool(address) and 1 <= int(port) <= 65535
    except (KeyError, ValueError):
        fits = False
    if not fits:
        raise UserError(
            "WORLD_SIZE is set, but RANK, MASTER_ADDR and MASTER_PORT do not go with it: "
            "start several processes by torchrun, or unset WORLD_SIZE"
        )
    return launch


def follows() -> bool:
    """Returns whether this is one of several processes, and not the first."""
    try:
        return launched().rank > 0
    except UserError:
        return False
