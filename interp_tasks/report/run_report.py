"""Makes a report: measures one run or two, and shows them on a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.measurement.subjects import Examples, Options, resolve_refs
from interp_tasks.measurement.table import effect_text, read_p, tests, value_text
from interp_tasks.pages import Column, Figure, Fold, Page, Section, Table, Text, p_value, versions
from interp_tasks.report.headlines import change, headline_rows, sentences, settings_table, subject_line
from interp_tasks.report.snapshots import MODES, Source, View, counted, measured_views, read_source

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Report:
    """A run, or two, measured.

    Attributes:
        views: of each run; of a mixture of tasks several.
        config: what was asked for, JSON.
    """

    views: Sequence[View]
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=versions)

    def headlines(self) -> list[dict[str, str]]:
        """Returns rows with ``quantity`` and a column for each view."""
        return headline_rows(self.views)

    def effects(self) -> pandas.DataFrame:
        """Returns every effect of heads: a row per view, checkpoint, edit, heads and metric."""
        import pandas

        return pandas.concat([view.effects().assign(run=view.name) for view in self.views], ignore_index=True)

    def page(self, title: str | None = None) -> Page:
        """Returns one self-contained page: words, training, all heads edited, effects and attention by checkpoint."""
        from interp_tasks.report import figures

        views = self.views
        names = " and ".join(dict.fromkeys(view.source.name for view in views))
        several = len(views) > 1
        sections: list[Section] = []
        for view in views:
            line = f"{view.name}: {subject_line(view)}" if several else subject_line(view)
            sections.append(Text("\n".join([line, "", *(f"- {each}" for each in sentences(view))])))
        training = figures.training_figure(views)
        if training is not None:
            sections.append(Figure(training, "Training", training_caption(views)))
        if missing := [caption for view in views for caption in view.source.missing]:
            sections.append(Text("\n\n".join(missing), "" if training is not None else "Training"))
        sections.append(Fold("Task, model, settings and main numbers", [settings_table(views)]))
        caption = f"Each metric with its 95% interval, over the same {counted(views)} at every checkpoint."
        edited = figures.ablation_figure(views)
        sections.append(Figure(edited, "All heads edited at once, over training", caption))
        ends = figures.largest_effects(views)
        of = {view.name: f", {view.name}" if several else "" for view in views}
        for view in views:
            effects = figures.effects_figure(view, ends)
            heading = f"Effect of each head alone{of[view.name]}"
            sections.append(Figure(effects, heading, EFFECTS.format(counted(views))))
        for view in views:
            maps = figures.attention_figure(view)
            sections.append(Figure(maps, f"Attention{of[view.name]}", ATTENTION.format(counted(views))))
        sections += [effects_table(self.effects(), views), metrics_table(views)]
        return Page(title or f"Report on {names}", sections, self.config, self.versions)


EFFECTS = (
    "The metric with the head edited minus without, on the same {}; orange: it rises, blue: it falls. Colours of a "
    "metric mean the same at every step and under every edit; the strongest 4% of effects of single heads have the "
    "colour of the end. Column all: the heads of a layer together. The table below has intervals and p-values."
)
ATTENTION = (
    "The mean attention map of every head over the {}: a row of a map is a query, a column a key. Colours mean the "
    "same at every step, and end at the largest share of a query that sees several keys."
)


def training_caption(views: Sequence[View]) -> str:
    curves = [view.source.curve for view in views if view.source.curve is not None]
    changes = " or ".join(dict.fromkeys(change(curve.metric) for curve in curves))
    return (
        "Validation, and faint the batch just trained on. Shaded: from onset to end of the detected "
        f"{changes}. Dotted: the plateau by theory, where there is one."
    )


def effects_table(frame: pandas.DataFrame, views: Sequence[View]) -> Table:
    """Returns the effects of all heads at the last checkpoint; the download has all checkpoints."""
    last = {view.name: view.steps[-1] for view in views}
    shown = frame[frame["step"] == frame["run"].map(last)]
    tested = " or ".join(map(str, sorted({tests(each.effects) for view in views for each in view.snapshots})))
    columns = [
        *([Column("run", "run")] if len(views) > 1 else []),
        Column("heads", "variant"),
        Column("edit", "intervention"),
        Column("metric", "metric"),
        Column("unedited", "baseline"),
        Column("edited [95% CI]", "value", value_text),
        Column("effect [95% CI]", "effect", effect_text),
        Column("p adj.", "p_adjusted", lambda row: p_value(read_p(row))),
    ]
    caption = (
        f"p adj.: sign-flip test, Holm's adjustment over the {tested} rows of a checkpoint. The download has all "
        f"checkpoints. Edits: {', '.join(MODES)}."
    )
    named = ["run", "step", *(name for name in frame.columns if name not in ("run", "step"))]
    title = "Effects of heads at the last checkpoint"
    return Table(shown, title, caption, columns, "report-head-effects", frame[named], tall=True)


def metrics_table(views: Sequence[View]) -> Section:
    """Returns the metrics of every checkpoint as a table."""
    import pandas

    frame = pandas.concat([view.unedited().assign(run=view.name) for view in views], ignore_index=True)
    title = "Metrics at every checkpoint"
    if "value_ci_low" not in frame:
        return Text("No metrics: the checkpoints name no task.", title)
    columns = [
        *([Column("run", "run")] if len(views) > 1 else []),
        Column("step", "step"),
        Column("metric", "metric"),
        Column("value [95% CI]", "value", value_text),
    ]
    return Table(frame, title, "The unedited model.", columns, "report-metrics", tall=len(frame) > 20)


def check_report(run: str, compare: str | None, options: Options) -> list[Source]:
    """Returns the sources of a report; fast, and refuses what cannot be.

    Raises:
        UserError: in one line.
    """
    examples = Examples.of(options)
    sources = [read_source(ref) for ref in ([run] if compare is None else [run, compare])]
    if len(sources) > 1 and sources[0].refs == sources[1].refs:
        raise UserError(f"--compare {compare} names the same checkpoints as {run}: name another run")
    for source in sources:
        resolve_refs(source.refs, examples)
    return sources


def report(run: str, compare: str | None = None, **options: Unpack[Options]) -> Report:
    """Measure a run for one page: metrics, head effects and attention at each of its checkpoints.

    Args:
        run: a run folder or ``zoo:NAME`` (all its checkpoints), a REF that names some of them, or a checkpoint folder.
        compare: another, shown beside it.
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Examples`. All
            checkpoints of equal tasks see the same examples.

    Returns:
        A :class:`Report`; ``page()`` is the page, to be written with ``write(path)``.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    sources = check_report(run, compare, options)
    total, progress = sum(len(source.checkpoints) for source in sources), options.get("progress")
    views: list[View] = []
    before = 0
    for source in sources:

        def shown(done: int, _: int, text: str, before: int = before) -> None:
            if progress is not None:
                progress(before + done, total, text)

        views += measured_views(source, options, shown)
        before += len(source.checkpoints)
    config = {"run": run, "compare": compare, **Examples.of(options).describe()}
    config["checkpoints"] = [source.refs for source in sources]
    config["trained with"] = {
        source.name: dict(source.run.config) for source in sources if source.run is not None
    }
    return Report(views, config)
