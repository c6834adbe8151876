"""Tabulates the main numbers of one run or two, in plain words, with the published ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement.table import value_text
from interp_tasks.pages import Beside, Column, Section, Table, Text, number, signed, with_interval
from interp_tasks.report.snapshots import ALL, MODES

if TYPE_CHECKING:
    import pandas

    from interp_tasks.report.published import Published
    from interp_tasks.report.snapshots import View

MULTIPLIED = "×"


def sentences(view: View) -> list[str]:
    """Returns a run in a few sentences."""
    lines = [f"{view.name}: {architecture(view)}, on {task_text(view)}."]
    curve, last = view.source.curve, view.snapshots[-1]
    if curve is not None and curve.drop is not None:
        lines.append(
            f"{curve.metric} changes abruptly between steps {curve.drop.onset:,} and {curve.drop.end:,}, from "
            f"{number(curve.drop.plateau)} to {number(curve.drop.final)}."
        )
    elif curve is not None:
        lines.append(f"{curve.metric} shows no abrupt change up to step {curve.steps[-1]:,}.")
    metric = view.metrics[0]
    for row in records(view.unedited()):
        if row["step"] == last.step and row["metric"] == metric and view.task is not None:
            lines.append(f"At step {last.step:,}, {metric} is {value_text(row)} on {row['n']:,} examples.")
    effects = last.effects[last.effects["metric"] == metric]
    together = effects[(effects["variant"] == ALL) & (effects["intervention"] == MODES[0])]
    for row in records(together):
        lines.append(
            f"There, uniform attention in all heads takes it from {number(row['baseline'])} to {value_text(row)}."
        )
    alone = effects[effects["head"].notna() & (effects["intervention"] == "zero")]
    if len(alone) > 1:
        row = alone.loc[alone["effect"].abs().idxmax()].to_dict()
        effect = with_interval(signed(row["effect"]), row["effect_ci_low"], row["effect_ci_high"])
        lines.append(
            f"Of single heads, {row['variant']} matters most: without its output {metric} moves by {effect}."
        )
    return lines


def records(frame: pandas.DataFrame) -> list[Any]:
    return frame.to_dict("records")


def architecture(view: View) -> str:
    model = view.model
    heads = f"{model.n_layers} layer{'s' if model.n_layers > 1 else ''} {MULTIPLIED} {model.n_heads} heads"
    mlp = "no MLPs" if model.attn_only else f"MLPs {model.d_mlp} wide"
    return f"{heads}, {model.d_model} wide, {mlp}"


def task_text(view: View) -> str:
    """Returns the task with the settings in which it differs from its defaults."""
    task = view.task
    if task is None:
        return "tokens of your own"
    fields = type(task).model_fields
    given = {
        name: value
        for name, value in task.model_dump(mode="json").items()
        if name in fields and value is not None and value != fields[name].default
    }
    settings = ", ".join(f"{name} {value}" for name, value in given.items())
    return f"{task.name} ({settings})" if settings else task.name


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
    source, run = view.source, view.source.run
    rows = [("task", task_text(view)), ("model", architecture(view))]
    train: Mapping[str, Any] = run.config.get("train", {}) if run is not None else {}
    if train:
        falls = train.get("schedule", "constant") != "constant"
        schedule = ("schedule", "schedule_start", "schedule_end", "schedule_floor") if falls else ()
        keys = ("optimizer", "learning_rate", *schedule, "weight_decay", "batch_size", "seed")
        rows.append(
            (
                "training",
                ", ".join(
                    f"{key.replace('_', ' ')} {train[key]}" for key in keys if train.get(key) is not None
                ),
            )
        )
    if run is not None and run.lines:
        rows.append(("trained for", f"{run.lines[-1]['step']:,} steps"))
    steps = view.steps
    span = f"{len(steps)}, steps {steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else f"1, step {steps[0]:,}"
    rows.append(("checkpoints shown", span))
    curve = source.curve
    if curve is not None and curve.drop is None:
        rows.append((f"drop of {curve.metric}", "none found"))
    elif curve is not None and curve.drop is not None:
        drop = curve.drop
        rows += [
            (
                f"drop of {curve.metric}",
                f"steps {drop.onset:,} to {drop.end:,}, half-way at {drop.crossing:,}",
            ),
            (f"{curve.metric} before and after it", f"{number(drop.plateau)} and {number(drop.final)}"),
        ]
    for row in records(view.snapshots[-1].unedited):
        if view.task is not None and row["metric"] in (*view.metrics, "accuracy"):
            rows.append((f"{row['metric']} at the last checkpoint [95% CI]", value_text(row)))
    effects = view.snapshots[-1].effects
    for row in records(effects[(effects["variant"] == ALL) & (effects["metric"] == view.metrics[0])]):
        rows.append((f"the same, {row['intervention']} in all heads", value_text(row)))
    return [(name.replace("the same", view.metrics[0]), value) for name, value in rows]


def headline_section(views: Sequence[View]) -> list[Section]:
    import pandas

    rows = headline_rows(views)
    lines = "\n".join(f"- {sentence}" for view in views for sentence in sentences(view))
    # The name of a run stands in the head of its column.
    columns = [
        Column("", "quantity"),
        *(Column(view.name if len(views) > 1 else "this run", view.name, sentences=True) for view in views),
    ]
    caption = "Metrics of the last checkpoint shown, on test examples; 95% bootstrap intervals over examples."
    table = Table(pandas.DataFrame(rows), "", caption, columns, name="report-at-a-glance")
    # The table of two runs needs the width of the page.
    return [Beside([Text(lines), table], narrowest=32)] if len(views) == 1 else [Text(lines), table]


def published_section(published_by_view: Mapping[str, Published]) -> list[Section]:
    """Returns tables of published claims beside ours; nothing where nothing is published."""
    import pandas

    rows = [
        {
            "run": name,
            "claim": outcome.claim.says,
            "source": f"{paper.name}, {outcome.claim.source}",
            "published": outcome.claim.published,
            "ours": outcome.value,
            "low": outcome.low,
            "high": outcome.high,
            "rule": outcome.claim.rule,
            "verdict": outcome.verdict,
            "note": outcome.reason,
            "departures": outcome.claim.departures,
        }
        for name, published in published_by_view.items()
        for paper, outcome in published.outcomes
    ]
    if not rows:
        return []
    frame = pandas.DataFrame(rows)
    several = frame["run"].nunique() > 1
    columns = [
        *([Column("run", "run")] if several else []),
        Column("claim", "claim", sentences=True),
        Column("where", "source", sentences=True),
        Column("published", "published", sentences=True),
        Column(
            "ours [95% CI]", "ours", lambda row: with_interval(number(row["ours"]), row["low"], row["high"])
        ),
        Column("rule", "rule", sentences=True),
        Column("verdict", "verdict"),
        Column("note", "note", sentences=True),
    ]
    caption = (
        "What training makes is decided on three training runs at least, and this page is of one. Ours is the number "
        "that the rule is about, often a share; rules were written before the first run on a trained model. Of the "
        "examples of this page: interp-run reproduce decides claims on more of them."
    )
    return [Table(frame, "Published beside ours", caption, columns, name="report-published")]


def metrics_frame(views: Sequence[View]) -> pandas.DataFrame:
    """Returns the metrics of every checkpoint of every view."""
    import pandas

    return pandas.concat([view.unedited().assign(run=view.name) for view in views], ignore_index=True)
