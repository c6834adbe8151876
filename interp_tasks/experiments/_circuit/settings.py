"""Says what a search for circuits is asked for, and refuses what shows before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.experiments._circuit.halves import sources
from interp_tasks.measurement.options import check_choice, check_draws, unknown
from interp_tasks.measurement.subjects import PendingCheckpoint

if TYPE_CHECKING:
    from circuits.circuit import Circuit

KINDS = ("edges", "nodes")
METHODS = ("gradient", "integrated", "exact")
#: What ranks members: the size of the mean effect over examples, or the mean size.
RANKS = ("mean", "size")
#: Fewest examples: two to find by, and two to test on.
FEWEST = 4


@dataclass(frozen=True)
class Search:
    """How circuits are found and tested.

    Attributes:
        faithfulness: what the smallest circuit has at least, on the half it is found on.
        random: circuits of the same size, drawn at random.
        curve: whether faithfulness over sizes is measured.
        keep: a circuit of this kind to test instead of finding one.
    """

    source: str | None = None
    metric: str | None = None
    rank_by: str | None = None
    kind: str = "edges"
    method: str = "integrated"
    rank: str = "mean"
    faithfulness: float = 0.9
    random: int = 20
    curve: bool = True
    keep: Circuit | None = None

    def check(self) -> None:
        """Refuses what no checkpoint can be asked for.

        Raises:
            UserError: in one line.
        """
        check_choice("--kind", self.kind, KINDS)
        check_choice("--method", self.method, METHODS)
        check_choice("--rank", self.rank, RANKS)
        if not 0 < self.faithfulness <= 1:
            raise UserError(f"--faithfulness {self.faithfulness:g}: above 0 and at most 1")
        check_draws(self.random, "--random")

    def check_planned(self, planned: PendingCheckpoint) -> None:
        """Refuses what a checkpoint's task or examples do not have."""
        if len(planned.tokens) < FEWEST:
            raise UserError(
                f"{len(planned.tokens)} examples: one half finds the circuit and the other tests it; "
                f"give --samples {FEWEST} or more"
            )
        if planned.task is None:
            for option, name in (("--metric", self.metric), ("--rank-by", self.rank_by)):
                if name is not None:
                    raise UserError(f"{option} {name}: tokens of your own have no task with metrics")
            if planned.sizes.d_vocab_out == 1:
                raise UserError(
                    "tokens of your own have no task with metrics, and one output has no first and second choice "
                    "to compare: take --samples of the task, or patch.edges(metric=...) in Python"
                )
        else:
            for option, name in (("--metric", self.metric), ("--rank-by", self.rank_by)):
                known = planned.task.metric_names
                if name is not None and known and name not in known:
                    raise refused_metric(option, name, known)
        sources(planned, self.source)

    def describe(self) -> dict[str, Any]:
        keep = None if self.keep is None else self.keep.sha256
        return {**{name: value for name, value in vars(self).items() if name != "keep"}, "keep": keep}


def ranked_by(method: str) -> str:
    """Returns the size that a method ranks by: the exact effect, where measured, or the estimate."""
    return "effect" if method == "exact" else "estimate"


def refused_metric(option: str, name: str, known: Sequence[str]) -> UserError:
    """Returns the error for a metric that a task does not have."""
    error = unknown(option, name, known, "metrics")
    # One metric at a time: there is no "all" here.
    return UserError(str(error).removesuffix("; or write all"))
