"""Reads whole runs: resolves their names, their logs and their drops. Imports no torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from interp_tasks.checkpoints import Drop, read_run, resolve
from interp_tasks.checkpoints.checkpoint_refs import ZOO, find_run_folder, matching_zoo_runs
from interp_tasks.checkpoints.drop_detection import detect_drop_or_reason, final_level
from interp_tasks.checkpoints.run_reader import (
    METRICS_FILE,
    RUN_FILE,
    is_checkpoint_folder,
    log_file,
    read_metric_series_and_last_step,
)
from interp_tasks.checkpoints.steps_around_drop import detect_drop_of_run, task_of_run, theoretical_plateau
from interp_tasks.errors import UserError
from interp_tasks.measurement.confidence_intervals import binomial_interval, finite_or_nan, interval_over_runs
from interp_tasks.measurement.result import Row, number_columns

if TYPE_CHECKING:
    from circuits.figures.panel_grid import Panel
    from interp_tasks.checkpoints.run_reader import Steps, Values

#: What is said of a curve, in order.
QUANTITIES = ("drop", "onset", "crossing", "end", "length", "sharpness", "plateau", "final")


@dataclass(frozen=True)
class Curve:
    """A logged metric: its finite values at ascending steps, and its drop, ``None`` where there is none, with why."""

    metric: str
    steps: Steps
    values: Values
    drop: Drop | None
    why_none: str = ""

    def drop_quantities(self) -> dict[str, float]:
        """Returns what is said of it, in order; NaN of a drop where it has none."""
        found = {name: float(getattr(self.drop, name, math.nan)) for name in QUANTITIES}
        length = math.nan if self.drop is None else float(self.drop.end - self.drop.onset)
        return found | {
            "drop": float(self.drop is not None),
            "length": length,
            "final": final_level(self.values) if self.drop is None else self.drop.final,
        }


@dataclass(frozen=True)
class LoggedRun:
    """A run with its log.

    Attributes:
        name: as one types it: a folder, or ``zoo:NAME``.
        described: the content of ``run.json``.
        columns: of ``metrics.jsonl``, by split and metric: the steps that log the split, and its values, NaN for none.
        last_step: that was logged; ``None``: none.
    """

    name: str
    path: Path
    described: Mapping[str, Any]
    columns: Mapping[tuple[str, str], tuple[Steps, Values]]
    last_step: int | None

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration that made it."""
        config: Mapping[str, Any] = self.described["config"]
        return config

    @property
    def drop_metric(self) -> str:
        """The metric whose drop is the task's."""
        return str(self.described["drop_metric"]["name"])

    @property
    def direction(self) -> Literal["down", "up"]:
        """Which way the drop metric goes."""
        way: Literal["down", "up"] = self.described["drop_metric"]["direction"]
        return way

    def logged_metrics(self, split: str = "validation") -> tuple[str, ...]:
        """Returns the metrics that it logs of a split."""
        return tuple(name for of, name in self.columns if of == split)

    def finite_values(self, metric: str, split: str = "validation") -> tuple[Steps, Values]:
        """Returns steps and finite values of a metric, as arrays."""
        import numpy as np

        steps, values = self.columns.get((split, metric), (np.empty(0, np.int64), np.empty(0)))
        known = np.isfinite(values)
        return steps[known], values[known]

    def finite_as_lists(self, metric: str, split: str = "validation") -> tuple[list[int], list[float]]:
        """Returns steps and finite values of a metric."""
        steps, values = self.finite_values(metric, split)
        return steps.tolist(), values.tolist()

    def validation_curve(self, metric: str) -> Curve:
        """Returns a metric with its drop; accuracies go up, all else moves as the task's own metric does."""
        steps, values = self.finite_values(metric)
        if not len(values):
            has = (
                ", ".join(name for name in self.logged_metrics() if len(self.finite_values(name)[1]))
                or "nothing"
            )
            raise UserError(f"{self.name} logs no validation {metric!r}: it has {has}")
        way: Literal["down", "up"] = "up" if "accuracy" in metric else "down"
        if metric.startswith(self.drop_metric):
            way = self.direction
        theory = theoretical_plateau(self.described) if metric in self.drop_metric_and_parts() else None
        found = detect_drop_or_reason(steps, values, way, theory)
        if isinstance(found, Drop):
            return Curve(metric, steps, values, found)
        return Curve(metric, steps, values, None, found)

    def drop_metric_and_parts(self) -> tuple[str, ...]:
        """Returns the task's drop metric and, of a mixture, that of each part."""
        own = self.drop_metric
        return tuple(n for n in self.logged_metrics() if n == own or n.startswith(f"{own} (")) or (own,)

    def label_columns(self) -> dict[str, Any]:
        """Returns the columns that all rows of the run share."""
        train, counts = self.config.get("train", {}), self.described.get("validation_examples")
        # Of a mixture the examples of one of its kinds.
        known = counts.values() if isinstance(counts, dict) else [train.get("eval_samples")]
        n = max((count for count in map(int_or_none, known) if count is not None), default=None)
        seed = int_or_none(train.get("seed"))
        place = {"run": self.name, "ref": self.name, "step": self.last_step, "seed": seed}
        return {**place, "split": "validation", "n": n, "n_runs": 1}


def run_folders_by_name(given: str | Sequence[str]) -> dict[str, Path]:
    """Finds the runs of folders, globs and ``zoo:`` names: name -> folder, in order, each once."""
    runs: dict[str, Path] = {}
    for name in map(str, [given] if isinstance(given, str) else given):
        check_not_checkpoint(name)
        if name.startswith(ZOO):
            # They need no checkpoints, some being logs alone.
            found: Mapping[str, Path | None] = {run: find_run_folder(run) for run in matching_zoo_runs(name)}
        else:
            found = {str(each.run_name): each.run_path for each in resolve(f"{name}@last")}
        for run, path in found.items():
            if path is None:
                raise UserError(f"{name!r} is a checkpoint: name its run")
            for file in (RUN_FILE, METRICS_FILE):
                if not log_file(path, file).is_file():
                    raise UserError(f"{run} has no {file}: only runs of the trainer have curves")
            runs.setdefault(run, path)
    if not runs:
        raise UserError("no run: name a run folder, a glob of some, or zoo:NAME")
    return runs


def check_not_checkpoint(name: str) -> None:
    """Refuses what names a checkpoint of a run, or a checkpoint folder."""
    if "@" in name:
        raise UserError(f"{name!r}: name the run alone, {name.rpartition('@')[0]}")
    if not name.startswith(ZOO) and is_checkpoint_folder(Path(name)):
        raise UserError(f"{name!r} is a checkpoint: name its run")


def read_runs(given: str | Sequence[str]) -> list[LoggedRun]:
    """Returns the runs named, with their declarations and logs, checked."""
    runs = []
    for name, path in run_folders_by_name(given).items():
        described = read_run(path)
        metric, config = described.get("drop_metric"), described.get("config")
        if not (
            isinstance(metric, dict) and {"name", "direction"} <= set(metric) and isinstance(config, dict)
        ):
            raise UserError(
                f"{path / RUN_FILE} declares no drop_metric or no config: its curve cannot be read"
            )
        if not all(isinstance(section, dict) for section in config.values()):
            raise UserError(f"{path / RUN_FILE} is mangled: a section of its config is not an object")
        runs.append(LoggedRun(name, path, described, *read_metric_series_and_last_step(path)))
    return runs


def int_or_none(value: Any) -> int | None:
    """Returns a number that a column of whole numbers can hold, ``None`` for all else."""
    return value if type(value) is int and abs(value) < 2**63 else None


def setting_in_config(config: Mapping[str, Any], key: str) -> Any:
    """Returns a setting of a config by its dotted key, ``model.d_model``; ``None`` where there is none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def glob_of_seeds(name: str) -> str | None:
    """Returns ``RUN/seed-*`` for ``RUN/seed-3``; ``None`` for other names."""
    match = re.fullmatch(r"(.*[/:])seed-\d+", name)
    return f"{match[1]}seed-*" if match else None


def title_and_prefix(names: Sequence[str]) -> tuple[str, str]:
    """Returns what a table of runs is of, and what all names of runs in it begin with and need not say."""
    if len(names) == 1:
        return names[0], ""
    levels = zip(*(name.split("/")[:-1] for name in names), strict=False)
    folder = "/".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))
    count = sum("*" not in name for name in names)
    return f"{count} runs{' of ' + folder if folder else ''}", f"{folder}/" if folder else ""


def median_rows_over_seeds(
    runs: Sequence[LoggedRun],
    rows: Sequence[Row],
    is_share: Callable[[str], bool],
    is_late: Callable[[str], bool] = lambda metric: False,
    baselines: bool = False,
) -> list[Row]:
    """Returns rows that pool runs which are seeds of one, two at least, under ``RUN/seed-*``: medians and ranges.

    Args:
        is_share: of which metrics, 1 or 0 of a run, there is the mean.
        is_late: of which metrics a run without a value is later than all others.
        baselines: whether all seeds have the same baseline, which the pooled row then has.
    """
    import numpy as np

    seeds = Counter(glob_of_seeds(run.name) for run in runs)
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        name = glob_of_seeds(row["run"])
        if name is not None and seeds[name] > 1:
            groups.setdefault((name, row["split"], row["variant"], row["metric"]), []).append(row)
    pooled: list[Row] = []
    for (name, _, _, metric), of_seeds in groups.items():
        values = np.array([row["value"] for row in of_seeds])
        late = is_late(metric)
        values = np.where(np.isnan(values), np.inf, values) if late else values[~np.isnan(values)]
        share, first = is_share(metric), of_seeds[0]
        value = float((np.mean if share else np.median)(values)) if len(values) else math.nan
        ends = (binomial_interval if share else interval_over_runs)(values.tolist())
        shared = {**first, "run": name, "ref": name, "seed": None, "n_runs": len(values)}
        shared |= {"step": max(row["step"] for row in of_seeds), "baseline": None, "effect": None}
        baseline = first.get("baseline") if baselines else None
        pooled.append({**shared, **number_columns(finite_or_nan(value), ends, baseline)})
        if not share and len(values):
            for word, extreme in (("smallest", values.min()), ("largest", values.max())):
                pooled.append({**shared, "metric": f"{metric}, {word}", "value": finite_or_nan(extreme)})
    return pooled


def declared_by_run(run: LoggedRun, name: Literal["plateau_levels", "loss_shares"]) -> Mapping[str, float]:
    """Returns numbers by metric that the run's task declares; none for a task that is not known here."""
    numbers: Mapping[str, float] | None = run.described.get(name)
    if numbers is None:
        # Older runs do not say them.
        task = task_of_run(run.described)
        numbers = {} if task is None else getattr(task, name)()
    return numbers


def find_drop_or_none(run: Path) -> Drop | None:
    """Returns the drop that a run logged; ``None`` where there is none."""
    if not (run / RUN_FILE).is_file():
        return None
    try:
        return detect_drop_of_run(run, read_run(run), run.name)
    except UserError:
        return None


def curves_panel(
    curves: Mapping[str, Curve], y: str, levels: Mapping[str, float] | None = None, title: str = ""
) -> Panel:
    """Returns a line over steps for each curve; what lies between onset and end is bold.

    Args:
        levels: of the plateaus by theory, by the name of the curve.
    """
    from circuits.figures.panel_kinds import Series, curve

    series: dict[str, Series] = {}
    for index, (name, one) in enumerate(curves.items()):
        thin = {"mode": "lines", "line": {"width": 1.3}}
        series[name] = Series(one.steps.tolist(), one.values.tolist(), style=thin, look=index)
        if one.drop is not None:
            inside = (one.steps >= one.drop.onset) & (one.steps <= one.drop.end)
            bold = {"mode": "lines", "showlegend": False, "line": {"width": 4, "dash": "solid"}}
            points = one.steps[inside].tolist(), one.values[inside].tolist()
            series[f"{name}, drop"] = Series(*points, style=bold, look=index)
        if (level := (levels or {}).get(name, 0.0)) > 0:
            ends = [int(one.steps[0]), int(one.steps[-1])]
            dotted: Any = {"mode": "lines", "line": {"dash": "dot", "width": 1.3}, "showlegend": False}
            series[f"{name}, plateau by theory"] = Series(ends, [level, level], style=dotted, look=index)
    log = min(one.values.min() for one in curves.values()) > 0
    return curve(series, title, y=y, log_y=bool(log), height=300)
