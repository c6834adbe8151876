"""The sections of a report, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from interp_tasks.measurement.table import effect_text, read_p, tests, value_text
from interp_tasks.pages import Column, Section, Slider, SteppedTable, Table, Text, p_value
from interp_tasks.report.attention import attention_section
from interp_tasks.report.circuits import circuits_section
from interp_tasks.report.embeddings import embeddings_section
from interp_tasks.report.head_effects import ablation_section, effects_section
from interp_tasks.report.headlines import (
    change,
    headline_section,
    is_share,
    metrics_frame,
    published_section,
    settings_section,
)
from interp_tasks.report.spectra import spectra_section
from interp_tasks.report.training_curve import training_section

if TYPE_CHECKING:
    import pandas

    from interp_tasks.report.published import Published
    from interp_tasks.report.snapshots import View

#: Columns of a download; the others of the tidy table are empty here, or the same in every row.
COLUMNS = (
    *(
        "run",
        "step",
        "variant",
        "intervention",
        "layer",
        "head",
        "metric",
        "value",
        "value_ci_low",
        "value_ci_high",
        "n",
    ),
    *("baseline", "effect", "effect_ci_low", "effect_ci_high", "p_value", "p_adjusted", "null_effect"),
)


def sections(
    views: Sequence[View], published: Mapping[str, Published], effects: pandas.DataFrame
) -> list[Section]:
    """Returns the sections of a report.

    Args:
        published: by view, what is published on its task.
        effects: every effect of heads, of all views.
    """
    marks = {name: list(comparison.marks) for name, comparison in published.items()}
    curves = {name: [mark for mark in each if mark.of_curve] for name, each in marks.items()}
    levels = {name: [mark for mark in each if not mark.of_curve] for name, each in marks.items()}
    return [
        headline_section(views),
        slider(views),
        training_section(views, curves),
        settings_section(views),
        ablation_section(views, levels),
        effects_section(views),
        *circuits_section(views),
        attention_section(views),
        embeddings_section(views),
        spectra_section(views),
        *published_section(published),
        effects_table(effects, views),
        metrics_table(metrics_frame(views)),
    ]


def slider(views: Sequence[View]) -> Section:
    """Returns a slider with a step for each checkpoint of the first view, and its labels."""
    leading = views[0]
    marks: dict[str, int] = {
        mark: leading.steps.index(step)
        for mark, step in leading.source.marks.items()
        if step in leading.steps
    }
    labels = []
    for index, step in enumerate(leading.steps):
        names = [mark for mark, step_index in marks.items() if step_index == index]
        others = {
            f"step {view.steps[view.at[index]]:,}" for view in views[1:] if view.source != leading.source
        }
        label = f"step {step:,}" + (f" ({', '.join(names)})" if names else "")
        labels.append(" beside ".join([label, *sorted(others)]))
    return Slider(labels, marks, start=len(labels) - 1, meanings=mark_descriptions(views))


def mark_descriptions(views: Sequence[View]) -> dict[str, str]:
    """Returns what the marks of a run's drop are, for the buttons beside the slider."""
    curve = views[0].source.curve
    drop = "drop" if curve is None else change(curve.metric)
    return {
        "pre": f"well before the {drop}",
        "onset": f"the last checkpoint before the {drop} begins",
        "end": f"the first checkpoint after the {drop} ends",
        "post": "the last checkpoint",
    }


def effects_table(frame: pandas.DataFrame, views: Sequence[View]) -> Section:
    """Returns the effects at the slider's step, of all views."""
    import pandas

    parts: list[pandas.DataFrame] = []
    ends: list[tuple[int, int]] = []
    rows = 0
    placed: dict[tuple[int, ...], tuple[int, int]] = {}
    for index in range(len(views[0].at)):
        key = tuple(view.at[index] for view in views)
        if key not in placed:
            shown = pandas.concat(
                [
                    view.snapshots[at].effects.assign(run=view.name)
                    for view, at in zip(views, key, strict=True)
                ]
            )
            parts.append(shown)
            placed[key] = (rows, rows + len(shown))
            rows += len(shown)
        ends.append(placed[key])
    tested = " or ".join(map(str, sorted({tests(each.effects) for view in views for each in view.snapshots})))
    columns = [
        *([Column("run", "run"), Column("step", "step")] if len(views) > 1 else []),
        Column("heads", "variant"),
        Column("edit", "intervention"),
        Column("metric", "metric"),
        Column("unedited", "baseline"),
        Column("edited [95% CI]", "value", value_text),
        Column("effect [95% CI]", "effect", effect_text),
        Column("p adj.", "p_adjusted", lambda row: p_value(read_p(row))),
    ]
    table = Table(
        pandas.concat(parts, ignore_index=True),
        "Effects of heads at the slider's step",
        f"p adj.: sign-flip test, Holm's adjustment over the {tested} rows of a checkpoint. "
        f"The download has all checkpoints.{shares(frame)}",
        columns,
        name="report-head-effects",
        download=frame.reindex(columns=list(COLUMNS)),
        tall=True,
    )
    return SteppedTable(table, ends)


def shares(frame: pandas.DataFrame) -> str:
    """Returns what numbers of a table are shares, where there are such."""
    return " Accuracies are shares, 0 to 1." if any(map(is_share, frame["metric"].unique())) else ""


def metrics_table(frame: pandas.DataFrame) -> Section:
    """Returns the metrics of every checkpoint as a table."""
    columns = [
        *([Column("run", "run")] if frame["run"].nunique() > 1 else []),
        Column("step", "step"),
        Column("metric", "metric"),
        Column("value [95% CI]", "value", value_text),
    ]
    if "value_ci_low" not in frame:
        return Text("No metrics: the checkpoints name no task.", "Metrics at every checkpoint")
    kept_columns = [name for name in COLUMNS if name in frame]
    return Table(
        frame,
        "Metrics at every checkpoint",
        "The unedited model." + shares(frame),
        columns,
        "report-metrics",
        frame[kept_columns],
        tall=len(frame) > 20,
    )
