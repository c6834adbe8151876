"""The main numbers of a run, in plain words and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement.table import value_text
from interp_tasks.pages import Column, Table, number, percent, signed, with_interval
from interp_tasks.report.snapshots import ALL

if TYPE_CHECKING:
    import pandas

    from interp_tasks.report.snapshots import View

#: Tasks of one sum or product: what stands between the two numbers.
SUMS = {"modular-addition": "+", "modular-multiplication": "·"}
#: Settings of the training that are told.
TOLD = ("optimizer", "learning_rate", "schedule", "weight_decay", "batch_size", "seed")


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
    for row in records(effects[(effects["variant"] == ALL) & (effects["intervention"] == "uniform")]):
        lines.append(
            f"At step {last.step:,} uniform attention in all heads takes {metric} from "
            f"{level(metric, row['baseline'])} to {level_text(row)} ({row['n']:,} examples)."
        )
    alone = effects[effects["head"].notna() & (effects["intervention"] == "zero") & effects["effect"].notna()]
    strongest = records(alone.sort_values("effect", key=abs, ascending=False, kind="stable").head(2))
    if len(strongest) == 2:
        (first, second), sizes = strongest, [change_text(row) for row in strongest]
        lines.append(
            f"Of single heads removed (mode zero, {first['n']:,} examples), heads {first['variant']} and "
            f"{second['variant']} move {metric} most, by {sizes[0]} and {sizes[1]}."
        )
    return lines


def change(metric: str) -> str:
    """Returns what the sudden change of a metric is called: accuracies go up, all else comes down."""
    return "rise" if "accuracy" in metric else "drop"


def level(metric: str, value: float) -> str:
    return percent(value) if "accuracy" in metric else number(value)


def level_text(row: Mapping[str, Any]) -> str:
    """Returns the value of a row with its interval."""
    if "accuracy" not in row["metric"]:
        return value_text(row)
    return with_interval(percent(row["value"]), row["value_ci_low"], row["value_ci_high"], percent)


def change_text(row: Mapping[str, Any]) -> str:
    """Returns the effect of a row with its interval, of shares in percentage points."""
    effect, low, high = (row[column] for column in ("effect", "effect_ci_low", "effect_ci_high"))
    if "accuracy" not in row["metric"]:
        return with_interval(signed(effect), low, high)
    return f"{with_interval(f'{100 * effect:+.1f}', 100 * low, 100 * high, '{:.1f}'.format)} points"


def records(frame: pandas.DataFrame) -> list[Any]:
    return frame.to_dict("records")


def model_sizes(view: View) -> tuple[str, str]:
    """Returns layers and heads, and widths."""
    model = view.model
    mlp = "no MLPs" if model.attn_only else f"MLPs {model.d_mlp} wide"
    layers = f"{model.n_layers} layer{'s' if model.n_layers > 1 else ''}"
    return f"{layers} × {model.n_heads} heads", f"{model.d_model} wide, {mlp}"


def subject_line(view: View) -> str:
    """Returns what a page is about in one line: the task, with its modulus or its matrices, and the model's sizes."""
    task: Any = view.task
    if task is None:
        what = "tokens of your own"
    elif task.name in SUMS:
        what = f"(a {SUMS[task.name]} b) mod {task.p}"
    elif task.name == "matrix-completion":
        sizes = f"{task.n}×{task.m or task.n} matrices of rank {task.rank}"
        what = f"{sizes} with blanks (mse_masked: the mean squared error there)"
    else:
        settings = ", ".join(f"{name} {value}" for name, value in task_settings(view).items())
        what = f"{task.name} ({settings})" if settings else task.name
    return " · ".join([what, *model_sizes(view)])


def task_settings(view: View) -> dict[str, Any]:
    """Returns the settings in which a task differs from its defaults."""
    if view.task is None:
        return {}
    settings = view.task.model_dump(mode="json", exclude_defaults=True)
    return {name: value for name, value in settings.items() if value is not None}


def headline_rows(views: Sequence[View]) -> list[dict[str, str]]:
    """Returns one row per quantity, with one column per view."""
    columns = [quantities(view) for view in views]
    names = dict.fromkeys(name for column in columns for name in column)
    return [
        {"quantity": name}
        | {view.name: column.get(name, "–") for view, column in zip(views, columns, strict=True)}
        for name in names
    ]


def quantities(view: View) -> dict[str, str]:
    """Returns texts by name, a line each: of the task, the model, its training, the drop and the last checkpoint."""
    source, run, steps = view.source, view.source.run, view.steps
    rows = {"task": "tokens of your own" if view.task is None else str(view.task.name)}
    rows |= {f"task, {name}": str(value) for name, value in task_settings(view).items()}
    rows["model"], rows["model, width"] = model_sizes(view)
    if run is not None:
        train: Mapping[str, Any] = run.config.get("train", {})
        given = {key: train[key] for key in TOLD if train.get(key) is not None}
        rows |= {f"training, {key.replace('_', ' ')}": str(value) for key, value in given.items()}
        if run.last_step is not None:
            rows["trained for"] = f"{run.last_step:,} steps"
    span = f"steps {steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else f"step {steps[0]:,}"
    rows["checkpoints shown"] = f"{len(steps)}, {span}"
    if (curve := source.curve) is not None:
        metric, drop = curve.metric, curve.drop
        rows[f"{change(metric)} of {metric}"] = (
            "none found" if drop is None else f"steps {drop.onset:,} to {drop.end:,}"
        )
        if drop is not None:
            rows["half-way at"] = f"step {drop.crossing:,}"
            rows["before and after"] = f"{level(metric, drop.plateau)} and {level(metric, drop.final)}"
    for row in records(view.snapshots[-1].unedited) if view.task is not None else []:
        if row["metric"] in (*view.metrics, "accuracy"):
            rows[f"last {row['metric']}"] = level_text(row)
    effects = view.snapshots[-1].effects
    for row in records(effects[(effects["variant"] == ALL) & (effects["metric"] == view.metrics[0])]):
        rows[f"{view.metrics[0]}, all heads {row['intervention']}"] = level_text(row)
    return rows


def settings_table(views: Sequence[View]) -> Table:
    """Returns the settings and main numbers, a column for each view."""
    import pandas

    heads = {view.name: view.name if len(views) > 1 else "this run" for view in views}
    columns = [Column("", "quantity"), *(Column(head, name, sentences=True) for name, head in heads.items())]
    caption = (
        "Metrics of the last checkpoint shown, as it is and with attention edited, on test examples; 95% bootstrap "
        "intervals over examples."
    )
    return Table(pandas.DataFrame(headline_rows(views)), "", caption, columns, name="report-at-a-glance")
