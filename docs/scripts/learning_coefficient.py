"""The table of docs/results/learning-coefficient.md, made from the CSV beside it; tables.py puts it into the page."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path

from interp_tasks.measurement.confidence_intervals import mean, t_interval

CSV = Path(__file__).parents[1] / "results" / "learning-coefficient.csv"
#: Steps of the table, by the column that each is of, and whether of its logarithm.
QUANTITIES = {
    "coefficient": ("coefficient", False),
    "held-out accuracy": ("accuracy", False),
    "held-out loss, its logarithm": ("held_out_loss", True),
    "training loss": ("training_loss", False),
    "logarithm of the coefficient": ("coefficient", True),
}
DIFFERENCES = [
    ("coefficient", "held-out accuracy"),
    ("coefficient", "held-out loss, its logarithm"),
    ("training loss", "held-out accuracy"),
    ("logarithm of the coefficient", "held-out accuracy"),
    ("logarithm of the coefficient", "held-out loss, its logarithm"),
]


def rows_by_seed() -> list[list[dict[str, float]]]:
    with CSV.open(encoding="utf-8") as file:
        rows = [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]
    seeds = sorted({row["seed"] for row in rows})
    return [[row for row in rows if row["seed"] == seed] for seed in seeds]


def half_way(rows: list[dict[str, float]], column: str, logarithm: bool) -> float:
    """Returns the step from which on a quantity has made half of its way, on lines between checkpoints that have it."""
    rows = [row for row in rows if column in row]
    scale: Callable[[float], float] = math.log if logarithm else float
    values = [scale(row[column]) for row in rows]
    middle = (values[0] + values[-1]) / 2
    rises = values[-1] > values[0]
    last = max(at for at, value in enumerate(values) if (value < middle) == rises)
    (start, before), (end, after) = ((rows[at]["step"], values[at]) for at in (last, last + 1))
    return start + (end - start) * (middle - before) / (after - before)


def integer(value: float) -> str:
    return f"{value:,.0f}".replace("-", "−")


def with_interval(values: list[float]) -> str:
    ends = t_interval(values)
    return f"{integer(mean(values))} [{', '.join(map(integer, ends or ()))}]"


def table() -> str:
    """Returns a line for each step, and for each difference with the interval of its mean over seeds."""
    runs = rows_by_seed()
    steps = {name: [half_way(rows, *of) for rows in runs] for name, of in QUANTITIES.items()}
    head = ["", *(f"seed {seed}" for seed in range(len(runs))), "mean [95% CI over seeds]", "of seeds 0 to 2"]
    lines = [head, ["---"] * len(head)]
    lines += [[name, *map(integer, values), "", ""] for name, values in steps.items()]
    for one, other in DIFFERENCES:
        values = [a - b for a, b in zip(steps[one], steps[other], strict=True)]
        name = f"{one} − {other.removeprefix('held-out ').removesuffix(', its logarithm')}"
        lines.append([name, *map(integer, values), with_interval(values), with_interval(values[:3])])
    ends = [f"{rows[0]['coefficient']:.0f}, {rows[-1]['coefficient']:.1f}" for rows in runs]
    lines.append(["coefficient on the plateau, at the end", *ends, "", ""])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
