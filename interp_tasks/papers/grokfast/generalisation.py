"""Measures when each answer of a run generalises: when its accuracy reaches a level, on both splits.

The ``variant`` is an accuracy as the run logs it, the ``split`` validation or train; the ``metric`` is ``step at
95%`` and ``step at 95% for good`` (interpolated between logged steps; empty for a run that is not there by its last
step, which is the ``step`` of the row), ``reached 95%`` (1 or 0), ``final level``, ``seconds at 95%`` of a run that
logs its clock (updates alone), ``rank correlation with its loss`` over logged steps up to that at which it first is
at its largest (later ones tie). Of validation, ``baseline`` is the step of train, ``effect`` the delay, and
``validation when train is at 95%`` is how far it has come by then: chance where a run memorises first, the level
where it does not. Variants that begin with ``order`` are about several accuracies ``accuracy_q`` of a run: ``place in
order`` of each, ``pairs in order`` (the share of pairs of which the smaller q comes first), ``last step / first
step``. Against others: ``ratio of steps``, and what it is ``at least`` and ``at most`` where one side never gets
there. Rows of several seeds have the median, the range (``..., smallest``, ``..., largest``) and, from three seeds
on, intervals: Student's t over runs, of ratios on a log scale; of ``reached`` the exact binomial one. A run that does
not get there counts as later than all others; the interval is then one of the median, from six seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.layout import Panel, draw
from circuits.figures.panels import Series, curve, heat
from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.intervals import interval_over_runs, share_interval
from interp_tasks.measurement.options import check_level
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.run_logs import Run, family, read_runs, shared_folder
from interp_tasks.measurement.table import Row, numbers, tidy
from interp_tasks.pages import Column, Figure, number, signed, with_interval
from interp_tasks.papers.grokfast.reaches import (
    ACCURACY,
    AT_LEAST,
    AT_MOST,
    FINAL,
    LEVEL,
    PAIRS,
    RATIO,
    SECONDS,
    SPLITS,
    SPREAD,
    THEN,
    Reach,
    named,
    order_rows,
    reach_rows,
    reaches_of,
)

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

#: Notes where there are several seeds, and where runs are compared with others.
SEVERAL = "Of several seeds: the median; a run that does not get there is later than all others."
COMPARED = (
    "Ratio of steps: paired by seed. Where one of a pair does not get there, its last step bounds the ratio from one "
    "side; where neither does, nothing is known and the pair is left out."
)
#: More answers than this, or more than one run with several answers, are a map.
MAX_LINES = 7
#: Steps are on a logarithmic axis.
STEPS = {"type": "log", "dtick": 1, "exponentformat": "none"}
LEVEL_OPTION = typer.Option("--level", help="Of an accuracy, above 0, at most 1.")
AGAINST = typer.Option(
    "--against",
    metavar="RUN",
    help="Compare steps with this run, seed by seed; also the end of the name of one given. Repeatable.",
)


@experiment("modular", says={"level": LEVEL, "against": []})
def generalisation(
    runs: str | Sequence[str],
    level: Annotated[float, LEVEL_OPTION] = LEVEL,
    against: Annotated[str | Sequence[str], AGAINST, list[str]] = (),
) -> Result:
    """Say at which step each accuracy of a run reaches a level, in training and validation, in which order.

    A line per answer; of RUN/seed-0, RUN/seed-1, ... lines more with the medians. A run that does not get there is said
    to be so by its last step. With --against, how many times as many steps it takes as another.

    Args:
        runs: run folders, globs of some, or ``zoo:NAME``; ``RUN/seed-0``, ``RUN/seed-1``, ... are also pooled.
        level: of an accuracy.
        against: runs to compare the steps with, seed by seed: as ``runs``, or what the names of some of ``runs`` end
            with.

    Raises:
        UserError: in one line.
    """
    check_level(level)
    logged_runs = read_runs(runs)
    reaches = [reach for run in logged_runs for reach in reaches_of(run, level)]
    compared, others = opponents(
        logged_runs, reaches, [against] if isinstance(against, str) else list(against), level
    )
    rows: list[Row] = []
    for run in logged_runs:
        run_reaches = [reach for reach in reaches if reach.run.name == run.name]
        rows += reach_rows(run, run_reaches, level)
        rows += order_rows(run, run_reaches, level)
    rows += [
        row
        for name, group in groups_of(logged_runs).items()
        if len(group) > 1
        for row in pooled(name, group, rows)
    ]
    if others:
        rows += ratio_rows(logged_runs, reaches, compared, others)
    import pandas

    frame = tidy(pandas.DataFrame(rows).assign(experiment="generalisation", intervention="none"))
    config = {
        "runs": [runs] if isinstance(runs, str) else list(runs),
        "found": [run.name for run in logged_runs],
        "level": level,
        "against": compared,
    }
    return Result(
        "generalisation",
        frame,
        config,
        (*notes(logged_runs, bool(others)), *unread(logged_runs)),
        data={"runs": logged_runs},
    )


def curves_of(runs: Sequence[Run], kind: str) -> pandas.DataFrame:
    """Returns a row per logged value of the metrics of a kind, validation before train."""
    import pandas

    rows = [
        (run.name, name, split, step, value)
        for split in SPLITS
        for run in runs
        for name in named(run, kind)
        for step, value in zip(*run.points(name, split), strict=True)
    ]
    return pandas.DataFrame(rows, columns=["run", "metric", "split", "step", "value"])


def notes(logged_runs: Sequence[Run], compared: bool) -> tuple[str, ...]:
    """Returns the notes below the table."""
    several = any(len(group) > 1 for group in groups_of(logged_runs).values())
    return (
        "Step: where the accuracy first is at the level, interpolated between logged steps; for good: after it the "
        "accuracy is never below again. Validation is a fixed sample, train the batch of the step.",
        "Delay: steps from train to validation.",
        *([SEVERAL] if several else []),
        *([COMPARED] if compared else []),
    )


def unread(logged_runs: Sequence[Run]) -> Iterator[str]:
    """Yields a note for each logged accuracy that is no number at some step."""
    for run in logged_runs:
        for split in SPLITS:
            for name in named(run, ACCURACY, split):
                steps = run.left_out(name, split)
                if steps:
                    yield (
                        f"{run.name}: {split} {name} is no number at {len(steps)} logged step"
                        f"{'s' if len(steps) > 1 else ''}, the first of them {steps[0]}: left out."
                    )


def groups_of(logged_runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Groups runs that are seeds of one configuration; any other run is a group by itself."""
    groups: dict[str, list[Run]] = {}
    for run in logged_runs:
        groups.setdefault(family(run.name) or run.name, []).append(run)
    return groups


def pooled(name: str, group: Sequence[Run], rows: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yields rows that pool several seeds: medians, ranges and intervals."""
    import numpy as np

    from interp_tasks.measurement.crossings import finite_or_nan
    from interp_tasks.papers.grokfast.censored import median

    group_rows = [row for row in rows if row["run"] in {run.name for run in group}]
    for key in dict.fromkeys((row["split"], row["variant"], row["metric"]) for row in group_rows):
        same = [row for row in group_rows if (row["split"], row["variant"], row["metric"]) == key]
        values = np.array([row["value"] for row in same])
        steps = key[2].startswith(("step at", "seconds at"))
        if steps:
            values = np.where(np.isnan(values), np.inf, values)
        values = values[~np.isnan(values)]
        shared = {**same[0], "run": name, "ref": name, "seed": None, "n_runs": len(values)}
        shared |= {"step": max(row["step"] for row in same)}
        for column in ("baseline", "effect"):
            shared.pop(column, None)
        share = key[2].startswith("reached")
        if not len(values):
            yield {**shared, "value": math.nan}
            continue
        middle = values.mean() if share else median(values)
        low, high = (share_interval if share else interval_over_runs)(values.tolist())
        yield {**shared, "value": finite_or_nan(float(middle)), "value_ci_low": low, "value_ci_high": high}
        if not share:
            for word, extreme in (("smallest", values.min()), ("largest", values.max())):
                yield {**shared, "metric": f"{key[2]}, {word}", "value": finite_or_nan(extreme)}


def opponents(
    logged_runs: Sequence[Run], reaches: Sequence[Reach], against: Sequence[str], level: float
) -> tuple[list[str], list[Reach]]:
    """Returns the names of the runs to compare with, and the steps at which they reach the level."""
    if not against:
        return [], []
    names = {run.name: (family(run.name) or run.name).removesuffix("/seed-*") for run in logged_runs}
    chosen = [
        run
        for run, name in names.items()
        if any(f"/{name.replace(':', '/')}".endswith(f"/{end}") for end in against)
    ]
    if chosen:
        return chosen, [reach for reach in reaches if reach.run.name in chosen]
    others = read_runs(against)
    return [run.name for run in others], [reach for run in others for reach in reaches_of(run, level)]


def by_seed(others: Sequence[Reach]) -> dict[tuple[str, Any], Reach]:
    """Returns the runs to compare with by answer and seed.

    Raises:
        UserError: if two of them have the same.
    """
    found: dict[tuple[str, Any], Reach] = {}
    for other in others:
        seed = seed_of(other.run)
        same = found.setdefault((other.name, seed), other) if other.split == "validation" else other
        if same is not other:
            raise UserError(
                f"--against: {same.run.name} and {other.run.name} both have {other.name} under seed {seed}: compare "
                "with one of them at a time"
            )
    return found


def ratio_rows(
    logged_runs: Sequence[Run], reaches: Sequence[Reach], compared: Sequence[str], others: Sequence[Reach]
) -> list[Row]:
    """Returns every group of runs against the others, answer by answer, seed by seed.

    Raises:
        UserError: if no answer and seed is on both sides, or two of the others have the same.
    """
    opponent = by_seed(others)
    rows: list[Row] = []
    for name, group in groups_of([run for run in logged_runs if run.name not in compared]).items():
        ours = [reach for reach in reaches if reach.run in group and reach.split == "validation"]
        for variant in dict.fromkeys(reach.name for reach in ours):
            pairs = [
                (reach, opponent[variant, seed_of(reach.run)])
                for reach in ours
                if reach.name == variant and (variant, seed_of(reach.run)) in opponent
            ]
            if pairs:
                rows += ratios_of(name, variant, pairs)
    if not rows:
        raise UserError(
            f"--against {', '.join(compared)}: none of the runs has an accuracy of that name under the same seed; "
            "pairs are runs with one train.seed"
        )
    return rows


def ratios_of(name: str, variant: str, pairs: Sequence[tuple[Reach, Reach]]) -> Iterator[Row]:
    """Yields the median ratio of steps over pairs of runs, and between what bounds it lies."""
    import numpy as np

    from interp_tasks.measurement.crossings import finite_or_nan
    from interp_tasks.papers.grokfast.censored import median, ratio_of_steps

    ratios = np.array([ratio_of_steps(one.first, one.until, o.first, o.until) for one, o in pairs])
    ratios = ratios[~np.isnan(ratios[:, 0])]
    first, other = pairs[0]
    row = {**first.run.labels(), "run": name, "ref": name, "variant": variant, "step": int(first.until)}
    row |= {"n_runs": len(ratios), "seed": seed_of(first.run) if len(pairs) == 1 else None}
    row |= {"baseline": finite_or_nan(other.first)} if len(pairs) == 1 else {}
    if not len(ratios):
        yield from ({**row, "metric": metric, "value": math.nan} for metric in (RATIO, AT_LEAST, AT_MOST))
        return
    (least, lowest, *_), (most, _, highest) = found = [
        (float(median(values)), *interval_over_runs(values.tolist(), log=True)) for values in ratios.T[1:]
    ]
    # Known where both bounds are one: a 0 that stands for "at most" has no part in a mean of the middle two.
    known = (least, lowest, highest) if least == most else (math.nan,) * 3
    for metric, each in zip((RATIO, AT_LEAST, AT_MOST), (known, *found), strict=True):
        value, *ends = map(finite_or_nan, each)
        yield {**row, "metric": metric, **numbers(value, ends)}


def seed_of(run: Run) -> Any:
    return run.config.get("train", {}).get("seed")


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row per run and variant; where a level is not reached, the last step is shown."""
    import pandas

    level = next(metric for metric in frame["metric"] if metric.startswith("step at")).split()[2]
    rows: list[Row] = []
    for _, part in frame.groupby(["run", "variant"], sort=False):
        cells = {(row["split"], row["metric"]): row for row in part.to_dict("records")}
        first: dict[Any, Any] = part.to_dict("records")[0]
        train, valid = (cells.get((split, f"step at {level}")) for split in ("train", "validation"))
        shown = {
            "train": step_text(train, cells, "train", level),
            "validation": step_text(valid, cells, "validation", level),
            "good": step_text(
                cells.get(("validation", f"step at {level} for good")), cells, "validation", level
            ),
            "delay": "" if valid is None else delay_text(valid),
            "seconds": text(cells.get(("validation", SECONDS.format(level=level)))),
            "then": text(cells.get(("validation", THEN.format(level=level)))),
            "final": text(cells.get(("validation", FINAL))),
            "ratio": ratio_text(cells),
        }
        shown["order"] = order_text(cells) if ("validation", PAIRS) in cells else ""
        rows.append({**first, **shown})
    table = pandas.DataFrame(rows)
    names = list(table["run"].unique())
    folder = shared_folder(names) if len(names) > 1 else ""
    run = table["run"].str.removeprefix(f"{folder}/") if folder else table["run"]
    count = sum("*" not in name for name in names)
    title = names[0] if len(names) == 1 else f"{count} runs{' of ' + folder if folder else ''}"
    steps = " to ".join(str(step) for step in dict.fromkeys([frame["step"].min(), frame["step"].max()]))
    return table.assign(ref=title, run=run, step=steps, level=level)


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    """Returns the columns that people see; those without an entry are left out."""
    level = rows["level"].iloc[0]
    columns = [Column("run", "run")] if rows["run"].nunique() > 1 else []
    columns += [
        Column("accuracy", "variant"),
        Column(f"train at {level}", "train"),
        Column(f"validation at {level}", "validation"),
        Column("for good", "good"),
        Column("delay", "delay"),
        Column(f"validation when train is at {level}", "then"),
        Column("final", "final"),
    ]
    if (rows["order"] != "").any():
        columns.append(Column("order", "order"))
    if (rows["seconds"] != "").any():
        columns.append(Column(f"seconds to {level}", "seconds"))
    if (rows["ratio"] != "").any():
        columns.append(Column("steps / the other's", "ratio"))
    return columns


def step_text(
    row: Mapping[Any, Any] | None, cells: Mapping[Any, Mapping[Any, Any]], split: str, level: str
) -> str:
    """Formats a step; for several seeds with its range, and how many reach the level."""
    if row is None:
        return ""
    value = row["value"]
    shown = f"not by {row['step']}" if math.isnan(value) else f"{value:.0f}"
    several = cells.get((split, f"{row['metric']}, smallest"))
    if several is None:
        return shown
    low, high = several["value"], cells[split, f"{row['metric']}, largest"]["value"]
    if math.isnan(low):
        return shown
    share, runs = cells[split, f"reached {level}"]["value"], int(row["n_runs"])
    ends = f"{low:.0f} to {'?' if math.isnan(high) else format(high, '.0f')}"
    return f"{shown} ({ends}; {share * runs:.0f} of {runs})"


def delay_text(row: Mapping[Any, Any]) -> str:
    effect = row["effect"]
    if effect is None or math.isnan(effect):
        return ""
    return signed(effect) if abs(effect) < 1000 else f"{effect:+.0f}"


def order_text(cells: Mapping[Any, Mapping[Any, Any]]) -> str:
    pairs, spread = cells["validation", PAIRS]["value"], cells["validation", SPREAD]["value"]
    shown = "no pair to order" if math.isnan(pairs) else f"{pairs:.0%} of pairs in order"
    return shown if math.isnan(spread) else f"{shown}, last / first {number(spread)}"


def text(row: Mapping[Any, Any] | None) -> str:
    return "" if row is None else number(row["value"])


def ratio_text(cells: Mapping[Any, Mapping[Any, Any]]) -> str:
    row = cells.get(("validation", RATIO))
    if row is None:
        return ""
    if not math.isnan(row["value"]):
        return with_interval(number(row["value"]), row["value_ci_low"], row["value_ci_high"])
    least, most = (cells["validation", name]["value"] for name in (AT_LEAST, AT_MOST))
    if not math.isnan(most):
        return f"{number(least)} to {number(most)}" if least > 0 else f"below {number(most)}"
    return f"above {number(least)}" if least > 0 else "not known"


def figure(curves: pandas.DataFrame, kind: str, level: float | None) -> plotly.graph_objects.Figure:
    """Draws runs of a single answer in one panel, each run of several answers in its own; all that per split.

    Args:
        curves: a row per logged value: ``run``, ``metric``, ``split``, ``step`` and ``value``, in order.
        kind: what the metrics begin with, ``"accuracy"`` or ``"loss"``.
        level: of an accuracy, drawn as a line.
    """
    panels = []
    # A logarithm has no place for step 0.
    curves = curves[curves["step"] > 0]
    metrics = {
        str(run): list(dict.fromkeys(part["metric"])) for run, part in curves.groupby("run", sort=False)
    }
    single = [run for run, names in metrics.items() if len(names) == 1]
    for split in dict.fromkeys(curves["split"]):
        of_split = curves[curves["split"] == split]
        if single:
            panels.append(lines_panel(of_split, [(run, kind) for run in single], split, kind, level))
        for run, names in metrics.items():
            answers = [name for name in names if answer(name).isdecimal()]
            if len(names) > 1 and len(answers) > MAX_LINES:
                panels.append(map_panel(of_split, run, answers, split, kind))
            elif len(names) > 1:
                panels.append(lines_panel(of_split, [(run, name) for name in answers], split, kind, level))
    return draw(panels)


def lines_panel(
    curves: pandas.DataFrame, lines: Sequence[tuple[str, str]], split: str, kind: str, level: float | None
) -> Panel:
    """Returns a panel with a line for each (run, metric)."""
    runs = {run for run, _ in lines}
    series = {}
    for run, name in lines:
        part = curves[(curves["run"] == run) & (curves["metric"] == name)]
        called = f"modulo {answer(name)}" if len(runs) == 1 and len(lines) > 1 else short(run)
        series[called] = Series(part["step"].tolist(), part["value"].tolist())
    # Losses fall by powers of ten, and accuracies end at 1. Of several answers each loss is a share of its ln q.
    axis = "loss, chance = 1" if kind == "loss" and len(lines) > len(runs) else kind
    title = f"{split} {kind}" + (f", {short(lines[0][0])}" if len(runs) == 1 else "")
    bounds = {} if level is None else {"range": [-0.02, 1.02]}
    marked = [] if level is None else [{"y": level}]
    axes: dict[str, Any] = {"y": axis, "log_y": level is None, "x_axis": STEPS, "y_axis": bounds}
    return curve(series, title, lines=marked, height=260, **axes)


def map_panel(curves: pandas.DataFrame, run: str, names: Sequence[str], split: str, kind: str) -> Panel:
    """Returns a map with a row per answer, smallest modulus on top; colours are values, from chance to right."""
    table = (
        curves[curves["run"] == run]
        .pivot(index="metric", columns="step", values="value")
        .reindex(list(names))
    )
    table.index = table.index.map(answer)
    drawn = heat(
        table, f"{split} {kind}, {short(run)}", unit=kind, across="step", down="prime", end=1.0, row=17
    )
    trace = {**drawn.traces[0], "x": table.columns.tolist(), "xgap": 0, "ygap": 0}
    axis = {key: value for key, value in drawn.x.items() if key != "type"} | STEPS
    return Panel([trace], drawn.title, axis, drawn.y, drawn.height, drawn.width, bar=True)


def answer(name: str) -> str:
    return name.rpartition("_")[2]


def short(run: str) -> str:
    """Shortens a path to ``addition/seed-3``."""
    parts = run.split("/")
    return "/".join(parts[-2:] if parts[-1].startswith("seed-") else parts[-1:])


def figures(result: Result) -> list[Figure]:
    """Returns the accuracies, and the losses where they are logged by answer."""
    runs = result.data["runs"]
    caption = "Validation above, the batches trained on below. Steps on a logarithmic scale."
    accuracies = figure(curves_of(runs, ACCURACY), ACCURACY, result.config["level"])
    drawn = [Figure(accuracies, "Accuracy of every answer over training", caption)]
    if logged := [run for run in runs if any(named(run, "loss"))]:
        drawn.append(
            Figure(figure(curves_of(logged, "loss"), "loss", None), "Loss of every answer over training")
        )
    return drawn
