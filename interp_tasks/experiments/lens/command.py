"""``interp-run lens``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from interp_tasks.cli.checkpoint_command import ComparisonCommand
from interp_tasks.experiments import Result, lens
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Lens(ComparisonCommand):
    """Read the residual stream out after each layer, and the output without each component's direct effect.

    Every number is compared with the full output on the same examples.
    """

    name: ClassVar[str] = "lens"

    def measure(self, progress: Progress | None) -> Result:
        return lens(self.ckpt, **self.common(progress))
