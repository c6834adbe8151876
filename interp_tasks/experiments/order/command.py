"""``interp-run matrix order``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.checkpoint_command import ExperimentCommand
from interp_tasks.errors import UserError
from interp_tasks.experiments import Result, order
from interp_tasks.experiments.order.measure import KINDS, STARTS, check_kinds
from interp_tasks.measurement.options import check_choice
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Order(ExperimentCommand):
    """See which quantity moves first over the checkpoints of a run, and how long before the drop.

    Metrics, effect of ablation, embeddings, positions, attention of the classes of heads, probes: the step at which
    each has made 10%, 50% and 90% of its way.
    """

    name: ClassVar[str] = "order"

    kind: Annotated[
        list[str],
        typer.Option(
            "--kind",
            metavar="NAME",
            help=f"Follow these: {', '.join(KINDS)}; repeat for several.",
            show_default="all",
        ),
    ] = field(default_factory=list)
    start: Annotated[str, typer.Option("--start", help=f"Count ways from: {' or '.join(STARTS)}.")] = (
        "plateau"
    )

    def check(self) -> None:
        check_kinds(self.kind)
        check_choice("--start", self.start, STARTS)
        if self.tokens is not None:
            raise UserError("order needs a task: leave --tokens out, or give --task NAME instead")
        super().check()

    def measure(self, progress: Progress | None) -> Result:
        return order(self.ckpt, self.kind, self.start, **self.common(progress))
