"""The tables of docs/results/circuits.md, made from the JSON beside it; tables.py puts them into the page.

`python docs/scripts/circuit_tables.py FOLDER` puts into the JSON what `interp-run circuit --out FOLDER/NAME` wrote: of
each NAME what was asked for, and the rows about whole circuits. Other names stay as they are.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

from interp_tasks.measurement.confidence_intervals import mean, t_interval

RESULTS = Path(__file__).parents[1] / "results" / "circuits.json"
ASKED = (
    "refs",
    "source",
    "metric",
    "kind",
    "method",
    "rank",
    "faithfulness",
    "random",
    "samples",
    "seed",
    "split",
)
#: Of the rule at the top of the page: a circuit holds from here on, where no random one of its size does as well.
HOLDS = 0.8
HEADER = "| checkpoint | metric | of the model | size | faithfulness [95% CI] | best of random | holds |"


def stored(names: list[str]) -> list[dict[str, Any]]:
    """Returns the stored circuits of each NAME, one after the other."""
    return [circuit for circuits in stored_by_seed(names) for circuit in circuits]


def stored_by_seed(names: list[str]) -> list[list[dict[str, Any]]]:
    """Returns the stored circuits by NAME; of several seeds, each has its only one."""
    held = json.loads(RESULTS.read_text(encoding="utf-8"))
    return [held[name]["circuits"] for name in names]


def table(circuits: list[dict[str, Any]]) -> str:
    """One line per checkpoint."""
    return "\n".join([HEADER, "|---" * HEADER.count(" | ") + "|---|", *map(line, circuits)])


def over_seeds(found: list[list[dict[str, Any]]]) -> str:
    """One line per quantity: that of each seed's only circuit, and Student's t interval of the mean over seeds."""
    lines = ["| | each seed | mean [95% CI over seeds] |", "|---|---|---|"]
    for name, key, digits in (("edges", "size", 0), ("faithfulness", "faithfulness", 3)):
        values = [circuit[key] for (circuit,) in found]
        ends = t_interval(values)
        between = "" if ends is None else f" [{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]"
        each = ", ".join(f"{value:.{digits}f}" for value in values)
        lines.append(f"| {name} | {each} | {mean(values):.{digits}f}{between} |")
    return "\n".join(lines)


def line(circuit: dict[str, Any]) -> str:
    of_model = f"{circuit['clean']:.4g}"
    about = f"| `{circuit['ref'].removeprefix('zoo:')}` | {circuit['metric']} | {of_model} |"
    if circuit["size"] is None:
        return f"{about} no gap | – | – | – |"
    low, high = circuit["ci"]
    size = f"{circuit['size']:.0f} of {circuit['of']:.0f}"
    faithful = f"{circuit['faithfulness']:.3f} [{low:.3f}, {high:.3f}]"
    return f"{about} {size} | {faithful} | {circuit['best']:.3f} | {'yes' if holds(circuit) else 'no'} |"


def holds(circuit: dict[str, Any]) -> bool:
    """Whether a circuit holds, by the rule of the page."""
    return circuit["size"] is not None and circuit["faithfulness"] >= max(HOLDS, circuit["best"] + 1e-9)


def compact(folder: Path) -> dict[str, Any]:
    """What is stored of the files that the command wrote in a folder: numbers with two digits more than are shown."""
    config = json.loads((folder / "circuit.config.json").read_text(encoding="utf-8"))["config"]
    with (folder / "circuit.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["variant"] in ("circuit", "curve")]
    refs = dict.fromkeys(row["ref"] for row in rows)
    return {
        "asked": {name: config[name] for name in ASKED},
        "circuits": [circuit_of([row for row in rows if row["ref"] == ref]) for ref in refs],
    }


def circuit_of(rows: list[dict[str, str]]) -> dict[str, Any]:
    by_metric = {row["metric"]: row for row in rows}
    names = ("size", "gap", "CPR", "CMD")
    (metric,) = (name for name in by_metric if name not in names and not name.startswith("faithfulness"))

    def read(name: str, column: str = "value") -> float | None:
        text = by_metric.get(name, {}).get(column, "")
        value = float(text) if text else math.nan
        return None if math.isnan(value) else float(f"{value:.6g}")

    found = {
        "ref": rows[0]["ref"],
        "step": int(rows[0]["step"]),
        "n": int(rows[0]["n"]),
        "metric": metric,
        "clean": read(metric, "baseline"),
        "gap": [read("gap", column) for column in ("value", "value_ci_low", "value_ci_high")],
        "size": read("size"),
        "of": read("size", "baseline"),
    }
    if found["size"] is not None:
        found |= {
            "faithfulness": read("faithfulness"),
            "ci": [read("faithfulness", end) for end in ("value_ci_low", "value_ci_high")],
            "random": read("faithfulness", "baseline"),
            "best": read("faithfulness, best of random"),
            "finding": read("faithfulness, finding half"),
        }
    return found | {
        area: [read(area), read(area, "baseline")] for area in ("CPR", "CMD") if area in by_metric
    }


if __name__ == "__main__":
    folders = sorted(path.parent for path in Path(sys.argv[1]).glob("*/circuit.config.json"))
    held = json.loads(RESULTS.read_text(encoding="utf-8"))
    held |= {folder.name: compact(folder) for folder in folders}
    entries = (
        f'"{name}": {{"asked": {json.dumps(one["asked"])}, "circuits": [\n'
        + ",\n".join(map(json.dumps, one["circuits"]))
        + "]}"
        for name, one in sorted(held.items())
    )
    RESULTS.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")
