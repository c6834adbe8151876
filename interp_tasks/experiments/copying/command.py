"""``interp-run matrix copying``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from interp_tasks.cli.checkpoint_command import ComparisonCommand
from interp_tasks.experiments import Result, copying
from interp_tasks.experiments.baseline.measure import no_tokens
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Copying(ComparisonCommand):
    """Put another token at hidden entries, and see whether the output there copies it.

    Inputs are the task's own matrices, and others of full rank that nobody could complete.
    """

    name: ClassVar[str] = "copying"

    def check(self) -> None:
        no_tokens(self.common(None), self.name)
        super().check()

    def measure(self, progress: Progress | None) -> Result:
        return copying(self.ckpt, **self.common(progress))
