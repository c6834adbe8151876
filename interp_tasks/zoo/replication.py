"""The first steps of a shipped run, trained again by its recipe and compared with its log."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from interp_tasks.checkpoints.refs import find_run
from interp_tasks.checkpoints.run_files import METRICS_FILE, read_metrics, read_run
from interp_tasks.errors import UserError
from interp_tasks.training.provenance import processor
from interp_tasks.zoo.pack import shortened
from interp_tasks.zoo.shipped import recipe_of

ZOO = "zoo:"


@dataclass(frozen=True)
class Replication:
    """Says how the first lines of two logs compare.

    Attributes:
        lines: that were compared; ``equal``: of them, those that are the same digit for digit.
        largest: relative difference of a number, over all lines; 0 where all are equal.
        trained_on: the processor that the shipped run names; "" where it names none. ``here``: this one.
    """

    name: str
    recipe: str
    lines: int
    equal: int
    largest: float
    trained_on: str
    here: str

    @property
    def said(self) -> str:
        if self.equal == self.lines:
            return "the same to the last digit"
        return f"{self.equal} lines the same; numbers differ by {self.largest:.1g} of their size at most"

    @property
    def remark(self) -> str:
        """Says why logs differ that should not; empty where they are the same."""
        if self.equal == self.lines or self.trained_on == self.here:
            return ""
        return f"trained on {self.trained_on or 'a processor that it does not name'}; this is {self.here}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "said": self.said}


def replicate(name: str, steps: int, out: Path | None = None) -> Replication:
    """Train the first steps of a shipped run again, by its recipe, and compare the logs.

    Numbers agree to the last digit on the same kind of processor and build of torch, and differ by rounding on others.

    Args:
        name: ``zoo:NAME`` or ``NAME``.
        steps: how many; the run's own length at most.
        out: where to train; one that was stopped there goes on. Default: a folder that goes away.

    Raises:
        UserError: for a name that does not ship, or a run that logs nothing in so many steps.
    """
    from interp_tasks.training.trainer import train_resolved

    name = name.removeprefix(ZOO)
    shipped = find_run(ZOO + name)
    run = recipe_of(name)
    resolved = run.unit.resolved
    last_step = min(steps, resolved.train.steps)
    wanted = {line["step"]: line for line in read_metrics(shipped) if line["step"] <= last_step}
    if not wanted:
        raise UserError(f"{ZOO}{name} logs nothing in its first {steps:,} steps: compare more")
    with tempfile.TemporaryDirectory() as scratch:
        folder = out or Path(scratch) / "run"
        train_resolved(resolved, folder, steps=last_step)
        log = (folder / METRICS_FILE).read_text(encoding="utf-8")
    # A run logs its end, too, wherever that is.
    again = {
        line["step"]: line for line in map(json.loads, shortened(log).splitlines()) if line["step"] in wanted
    }
    pairs = [(line, again.get(step)) for step, line in wanted.items()]
    return Replication(
        name,
        run.recipe,
        len(pairs),
        sum(one == other for one, other in pairs),
        max(difference(one, other) for one, other in pairs),
        (read_run(shipped).get("hardware") or {}).get("processor", ""),
        processor(),
    )


def difference(one: Any, other: Any) -> float:
    """Returns the largest relative difference between the numbers of two JSON values; infinite where one lacks some."""
    if isinstance(one, dict) and isinstance(other, dict) and set(one) == set(other):
        return max((difference(one[key], other[key]) for key in one), default=0.0)
    if one == other:
        return 0.0
    numbers = all(isinstance(each, (int, float)) for each in (one, other))
    return abs(one - other) / max(abs(one), abs(other)) if numbers else float("inf")
