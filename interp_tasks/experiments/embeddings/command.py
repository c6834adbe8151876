"""``interp-run matrix embeddings``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from interp_tasks.cli.checkpoint_command import ExperimentCommand
from interp_tasks.errors import UserError
from interp_tasks.experiments import Result, embeddings
from interp_tasks.experiments.embeddings.measure import check_largest
from interp_tasks.measurement.subjects import Progress


@dataclass(kw_only=True)
class Embeddings(ExperimentCommand):
    """See how token embeddings follow the values they stand for, and position embeddings the grid.

    Norms of v against -v, sign and size on two principal components, clusters of positions by row and column with a
    permutation test, norms of the middle row. Of several checkpoints of one run also how far each is on the way to
    the last.
    """

    name: ClassVar[str] = "embeddings"

    largest: Annotated[
        float | None,
        typer.Option("--largest", help="Only values up to ± this.", show_default="all the examples can hold"),
    ] = None
    untrained: Annotated[
        bool, typer.Option("--untrained/--no-untrained", help="Compare with an untrained model.")
    ] = True

    def check(self) -> None:
        check_largest(self.largest)
        if self.tokens is not None:
            raise UserError("embeddings needs a task that says what its tokens stand for: leave --tokens out")
        super().check()

    def measure(self, progress: Progress | None) -> Result:
        return embeddings(self.ckpt, self.largest, untrained=self.untrained, **self.common(progress))
