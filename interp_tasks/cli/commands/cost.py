"""``interp-run tasks cost``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.cli.output import FORMATS
from interp_tasks.cli.tables import print_rows
from interp_tasks.cli.training_command import RecipeCommand
from interp_tasks.errors import UserError
from interp_tasks.measurement.options import check_choice
from interp_tasks.settings import read_settings

if TYPE_CHECKING:
    from interp_tasks.training.cost import Cost

#: A larger rate than any machine's, in GFLOP per second.
FASTEST = 1e9


@dataclass(kw_only=True)
class CostCommand(RecipeCommand):
    """Say what training would take: parameters, FLOP, memory, disk, time.

    Counted without training: only the rate, unless --rate gives it, is measured by four updates on the --device.
    """

    rate: Annotated[
        float | None,
        typer.Option(
            "--rate", metavar="GFLOPS", help="GFLOP per second to reckon with, instead of measuring."
        ),
    ] = None
    format: Annotated[str, typer.Option("--format", help="table, json or csv, on stdout.")] = "table"

    def check(self) -> None:
        check_choice("--format", self.format, FORMATS)
        check_rate(self.rate)
        settings = self.check_recipe()
        if self.import_path is None:
            from interp_tasks.training.config import resolve_config

            resolve_config(self.task, self.preset, settings)

    def execute(self) -> None:
        """Prints what training would cost."""
        self.import_tasks()
        from interp_tasks.training.config import resolve_config
        from interp_tasks.training.cost import cost
        from tasks import get

        resolved = resolve_config(self.task, self.preset, read_settings(self.settings))
        estimate = cost(
            get(resolved.task_name, **resolved.task),
            settings=resolved.model,
            config=resolved.train,
            gflop_per_second=self.rate,
            device=self.device,
        )
        if self.format == "table":
            rows = [{"quantity": quantity, "amount": text} for quantity, text in sentences(estimate)]
            print_rows(rows, "table", ["quantity", "amount"])
        else:
            print_rows([estimate.to_dict()], self.format, [])


def check_rate(rate: float | None) -> None:
    if rate is not None and not 0 < rate < FASTEST:
        raise UserError(
            f"--rate {rate:g}: give GFLOP per second, more than 0 and below {FASTEST:g}, such as 20"
        )


def sentences(cost: Cost) -> list[tuple[str, str]]:
    """Returns the lines of the table: what, and how much of it."""
    frozen = cost.parameters - cost.trained
    rate = f"{float(f'{cost.gflop_per_second:.3g}'):,g} GFLOP/s, {'measured here' if cost.measured else 'as given'}"
    parts: list[Any] = [
        ("weights", cost.weights_bytes),
        ("gradients", cost.gradients_bytes),
        ("optimiser", cost.optimiser_bytes),
        ("Grokfast", cost.filter_bytes),
        ("activations", cost.activations_bytes),
    ]
    return [
        ("parameters", f"{cost.parameters:,}" + (f" ({frozen:,} of them frozen)" if frozen else "")),
        ("a step", f"{flop(cost.step_flop)}, {cost.examples:,} examples, {cost.forward} forward"),
        ("the run", f"{flop(cost.run_flop)}, {cost.steps:,} steps with the metrics logged between them"),
        ("memory", f"{size(cost.memory_bytes)}: " + ", ".join(f"{noun} {size(n)}" for noun, n in parts if n)),
        ("disk", f"{size(cost.disk_bytes)}, {cost.checkpoints} checkpoints"),
        ("time", f"{duration(cost.seconds)} at {rate}"),
    ]


def flop(count: int) -> str:
    """Formats FLOP as ``3.82 GFLOP``."""
    return scaled(count, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def size(count: int) -> str:
    """Formats bytes as ``3.82 MiB``."""
    return scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def scaled(count: int, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while count >= base ** (power + 1) and power < len(units) - 1:
        power += 1
    amount = count / base**power
    return f"{amount:.3g} {units[power]}" if amount < 1000 else f"{amount:.0f} {units[power]}"


def duration(seconds: float) -> str:
    """Formats seconds as ``45 s``, ``12 min``, ``3.4 h`` or ``12 days``: a forecast is worth two digits."""
    for unit, length, most in (("s", 1, 90), ("min", 60, 90), ("h", 3600, 48)):
        if seconds < most * length:
            return f"{seconds / length:.2g} {unit}"
    return f"{seconds / 86400:,.0f} days"
