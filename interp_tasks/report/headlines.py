"""Tabulates the main numbers of one run or two, in plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement.table import value_text
from interp_tasks.pages import Column, Table, number, percent, signed, with_interval
from interp_tasks.report.snapshots import ALL, MODES, REMOVED

if TYPE_CHECKING:
    import pandas

    from interp_tasks.report.snapshots import View

MULTIPLIED = "×"
#: Tasks of one sum or product: what stands between the two numbers.
SUMS = {"modular-addition": "+", "modular-multiplication": "·"}


def sentences(view: View) -> list[str]:
    """Returns what matters most of a run, in two or three sentences."""
    lines = []
    curve, last, metric = view.source.curve, view.snapshots[-1], view.metrics[0]
    if curve is not None and curve.drop is not None:
        lines.append(
            f"Over training {curve.metric} goes from {level(curve.metric, curve.drop.plateau)} to "
            f"{level(curve.metric, curve.drop.final)}; four fifths of this change lie between steps "
            f"{curve.drop.onset:,} and {curve.drop.end:,}."
        )
    elif curve is not None:
        lines.append(f"Over training {curve.metric} shows no abrupt change up to step {curve.steps[-1]:,}.")
    effects = last.effects[last.effects["metric"] == metric]
    for row in records(effects[(effects["variant"] == ALL) & (effects["intervention"] == MODES[0])]):
        lines.append(
            f"At step {last.step:,} uniform attention in all heads takes {metric} from "
            f"{level(metric, row['baseline'])} to {level_text(row)} ({row['n']:,} examples)."
        )
    if len(strongest := strongest_heads(last.effects, metric)) == 2:
        (first, second), sizes = strongest, [change_text(row, metric) for row in strongest]
        lines.append(
            f"Of single heads removed (mode {REMOVED}, {first['n']:,} examples), heads {first['variant']} and "
            f"{second['variant']} move {metric} most, by {sizes[0]} and {sizes[1]}."
        )
    return lines


def strongest_heads(effects: pandas.DataFrame, metric: str) -> list[Any]:
    """Returns the rows of the two single heads whose removal moves a metric most, the larger effect first."""
    removed = effects["head"].notna() & (effects["intervention"] == REMOVED) & (effects["metric"] == metric)
    alone = effects[removed & effects["effect"].notna()]
    return records(alone.loc[alone["effect"].abs().sort_values(ascending=False, kind="stable").index].head(2))


def is_share(metric: str) -> bool:
    """Returns whether a metric is a share of examples, which percentages are easier to read of."""
    return "accuracy" in metric


def change(metric: str) -> str:
    """Returns what the sudden change of a metric is called: accuracies go up, all else comes down."""
    return "rise" if is_share(metric) else "drop"


def level(metric: str, value: float) -> str:
    return percent(value) if is_share(metric) else number(value)


def level_text(row: Mapping[str, Any]) -> str:
    """Returns the value of a row with its interval."""
    if not is_share(row["metric"]):
        return value_text(row)
    return with_interval(percent(row["value"]), row["value_ci_low"], row["value_ci_high"], percent)


def change_text(row: Mapping[str, Any], metric: str) -> str:
    """Returns the effect of a row with its interval, of shares in percentage points."""
    ends = [row[column] for column in ("effect", "effect_ci_low", "effect_ci_high")]
    if not is_share(metric):
        return with_interval(signed(ends[0]), *ends[1:])
    effect, low, high = (100 * end for end in ends)
    return f"{with_interval(f'{effect:+.1f}', low, high, lambda end: f'{end:.1f}')} points"


def records(frame: pandas.DataFrame) -> list[Any]:
    return frame.to_dict("records")


def architecture(view: View) -> str:
    return f"{heads_text(view)}, {width_text(view)}"


def heads_text(view: View) -> str:
    model = view.model
    return f"{model.n_layers} layer{'s' if model.n_layers > 1 else ''} {MULTIPLIED} {model.n_heads} heads"


def width_text(view: View) -> str:
    mlp = "no MLPs" if view.model.attn_only else f"MLPs {view.model.d_mlp} wide"
    return f"{view.model.d_model} wide, {mlp}"


def subject_line(view: View) -> str:
    """Returns what a page is about in one line: the task, with its modulus or its matrices, and the model's sizes."""
    model = view.model
    sizes = (
        f"{model.n_layers} layer{'s' if model.n_layers > 1 else ''}, {model.n_heads} "
        f"head{'s' if model.n_heads > 1 else ''}{' each' if model.n_layers > 1 else ''}, d {model.d_model}"
    )
    return f"{task_line(view)} · {sizes}"


def task_line(view: View) -> str:
    task: Any = view.task
    name = "" if task is None else task.name
    if name in SUMS:
        return f"(a {SUMS[name]} b) mod {task.p}"
    if name == "matrix-completion":
        sizes = f"{task.n}×{task.m or task.n} matrices of rank {task.rank}"
        return f"{sizes} with blanks (mse_masked: the mean squared error there)"
    return task_text(view)


def task_text(view: View) -> str:
    """Returns the task with the settings in which it differs from its defaults."""
    if view.task is None:
        return "tokens of your own"
    settings = ", ".join(f"{name} {value}" for name, value in task_settings(view).items())
    return f"{view.task.name} ({settings})" if settings else str(view.task.name)


def task_settings(view: View) -> dict[str, Any]:
    """Returns the settings in which a task differs from its defaults."""
    if view.task is None:
        return {}
    fields = type(view.task).model_fields
    return {
        name: value
        for name, value in view.task.model_dump(mode="json").items()
        if name in fields and value is not None and value != fields[name].default
    }


def headline_rows(views: Sequence[View]) -> list[dict[str, str]]:
    """Returns one row per quantity, with one column per view."""
    columns = [dict(quantities(view)) for view in views]
    names = dict.fromkeys(name for column in columns for name in column)
    return [
        {"quantity": name}
        | {view.name: column.get(name, "–") for view, column in zip(views, columns, strict=True)}
        for name in names
    ]


def quantities(view: View) -> list[tuple[str, str]]:
    """Returns names and texts: of the task, the model, its training, the drop and the last checkpoint."""
    source, run = view.source, view.source.run
    # Each row is one line of a terminal.
    rows = [("task", task_text(view) if view.task is None else str(view.task.name))]
    rows += [(f"task, {name}", str(value)) for name, value in task_settings(view).items()]
    rows += [("model", heads_text(view)), ("model, width", width_text(view))]
    train: Mapping[str, Any] = run.config.get("train", {}) if run is not None else {}
    if train:
        falls = train.get("schedule", "constant") != "constant"
        schedule = ("schedule", "schedule_start", "schedule_end", "schedule_floor") if falls else ()
        keys = ("optimizer", "learning_rate", *schedule, "weight_decay", "batch_size", "seed")
        given = [(key.replace("_", " "), train[key]) for key in keys if train.get(key) is not None]
        rows += [(f"training, {name}", str(value)) for name, value in given]
    if run is not None and run.last_step is not None:
        rows.append(("trained for", f"{run.last_step:,} steps"))
    steps = view.steps
    span = f"{len(steps)}, steps {steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else f"1, step {steps[0]:,}"
    rows.append(("checkpoints shown", span))
    curve = source.curve
    if curve is not None and curve.drop is None:
        rows.append((f"{change(curve.metric)} of {curve.metric}", "none found"))
    elif curve is not None and curve.drop is not None:
        drop = curve.drop
        rows += [
            (f"{change(curve.metric)} of {curve.metric}", f"steps {drop.onset:,} to {drop.end:,}"),
            ("half-way at", f"step {drop.crossing:,}"),
            (
                "before and after",
                " and ".join(level(curve.metric, each) for each in (drop.plateau, drop.final)),
            ),
        ]
    for row in records(view.snapshots[-1].unedited):
        if view.task is not None and row["metric"] in (*view.metrics, "accuracy"):
            rows.append((f"last {row['metric']}", level_text(row)))
    effects = view.snapshots[-1].effects
    for row in records(effects[(effects["variant"] == ALL) & (effects["metric"] == view.metrics[0])]):
        rows.append((f"{view.metrics[0]}, all heads {row['intervention']}", level_text(row)))
    return rows


def settings_table(views: Sequence[View]) -> Table:
    """Returns the settings and main numbers, a column for each view."""
    import pandas

    # The name of a run stands in the head of its column.
    columns = [
        Column("", "quantity"),
        *(Column(view.name if len(views) > 1 else "this run", view.name, sentences=True) for view in views),
    ]
    caption = (
        "Metrics of the last checkpoint shown, as it is and with attention edited, on test examples; 95% bootstrap "
        "intervals over examples."
    )
    return Table(pandas.DataFrame(headline_rows(views)), "", caption, columns, name="report-at-a-glance")
