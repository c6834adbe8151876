"""Writes a result: a table, JSON or CSV to stdout, files under ``--out``, a page with ``--plot``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.cli.terminal import note, write_data
from interp_tasks.measurement.experiment import EXPERIMENTS

if TYPE_CHECKING:
    from interp_tasks.experiments import Result

FORMATS = ("table", "json", "csv")
#: Experiments whose variant ``all`` is of all heads.
OF_HEADS = ("ablation", "patch")


def print_as(result: Result, format: str, metric: str | None = None) -> None:
    """Print a result; a table of one metric, the task's own if none is said, and JSON and CSV of all if none is."""
    from interp_tasks.measurement.table import compares_metrics, shown_columns, shown_rows

    compares = compares_metrics(result.frame)
    chosen = result.of_metric(metric) if metric is not None or (compares and format == "table") else result
    if format != "table":
        write_data(chosen.to_json() if format == "json" else chosen.to_csv())
        return
    from interp_tasks.cli.tables import print_result

    frame, notes = chosen.frame, list(chosen.notes)
    rows = shown_rows(frame)
    columns = shown_columns(rows)
    if compares:
        if result.experiment in OF_HEADS and rows["variant"].nunique() == 1:
            rows = rows.assign(variant=rows["variant"].map(named_heads))
        every = dict.fromkeys(shown_rows(result.frame)["metric"])
        left = [name for name in every if name not in set(frame["metric"])]
        notes += [f"--metric all: {', '.join(map(str, left))} too."] * bool(left)
        without = [ref for ref in dict.fromkeys(result.frame["ref"]) if ref not in set(frame["ref"])]
        notes += [f"No {metric}: {', '.join(map(str, without))}."] * bool(without)
    print_result(rows, columns, notes, header_parts(result.experiment, result.config), together=compares)


def named_heads(spec: str) -> str:
    """Returns a choice of heads that stands by itself: ``all heads``, ``heads 0.1``; one with a name as it is."""
    if spec == "all":
        return "all heads"
    return f"heads {spec}" if spec[:1].isdigit() else spec


def write_and_show(write: Callable[[], list[Path]], show: Callable[[], None], quiet: bool) -> None:
    """Writes the files first, so that a closed pipe cannot lose them, then stdout, even where a file fails."""
    try:
        written = write()
    except Exception:
        # Of two failures the first is told; rich makes an exit of a closed pipe.
        with contextlib.suppress(OSError, SystemExit):
            show()
            sys.stdout.flush()
        raise
    show()
    if written:
        sys.stdout.flush()
        note(f"wrote {', '.join(map(str, written))}", quiet)


#: Settings whose option has another name.
OPTIONS = {"sites": "site", "templates": "template"}


def header_parts(experiment: str, config: Mapping[str, Any]) -> list[str]:
    """Returns settings for a header, ``["mode uniform", "positions hidden"]``; of joined results those they share.

    Args:
        config: of a :class:`Result`.
    """
    known = EXPERIMENTS.get(experiment)
    says = {} if known is None else known.says
    each = [
        [
            *examined(part),
            *(
                phrase(name, part[name])
                for name, unsaid in says.items()
                if part.get(name) not in (None, unsaid)
            ),
        ]
        for part in config.get("parts", [config])
    ]
    return [one for one in each[0] if all(one in others for others in each)]


def examined(config: Mapping[str, Any]) -> list[str]:
    """Returns the task whose examples these are, where one was named in place of the checkpoint's own."""
    if config.get("task") is None:
        return []
    settings = ", ".join(f"{name} {value}" for name, value in config.get("task_config", {}).items())
    return [f"task {config['task']}" + (f" ({settings})" if settings else "")]


def phrase(name: str, value: Any) -> str:
    name = OPTIONS.get(name, name.replace("_", "-"))
    if value is True:
        return name
    several = isinstance(value, (list, tuple))
    text = ", ".join(map(str, value)) if several else f"{value:g}" if isinstance(value, float) else str(value)
    return f"{name} {text}"
