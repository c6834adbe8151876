"""``interp-run modular detector``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from interp_tasks.cli.checkpoint_command import ExperimentCommand
from interp_tasks.errors import UserError
from interp_tasks.experiments import Result, detector
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Detector(ExperimentCommand):
    """Read the remainders of a number together, and call it prime where none is 0: precision and recall.

    Over all inputs of every split, beside what right remainders would find.
    """

    name: ClassVar[str] = "detector"

    def check(self) -> None:
        for name in ("tokens", "samples", "split"):
            if getattr(self, name) is not None:
                raise UserError(f"detector looks at all inputs of every split: leave --{name} out")
        super().check()

    def measure(self, progress: Progress | None) -> Result:
        return detector(self.ckpt, **self.common(progress))
