"""``interp-run matrix decoding``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from interp_tasks.cli.checkpoint_command import ComparisonCommand
from interp_tasks.errors import UserError
from interp_tasks.experiments import Result, decoding
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Decoding(ComparisonCommand):
    """See what a language model of a task answers when it goes on from its own answers (greedy decoding).

    Beside the same with the true tokens before each answer (teacher forcing).
    """

    name: ClassVar[str] = "decoding"

    def check(self) -> None:
        if self.tokens is not None:
            raise UserError(
                "decoding needs a task that decodes: leave --tokens out, or give --task NAME instead"
            )
        super().check()

    def measure(self, progress: Progress | None) -> Result:
        return decoding(self.ckpt, **self.common(progress))
