"""A run on one page: ``report("runs/x").page().write("report.html")``.

Importing this module imports neither torch nor pandas; making a report does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints import ResolvedCheckpoint, find_marks, resolve
from interp_tasks.checkpoints.run_reader import is_checkpoint_folder
from interp_tasks.errors import UserError
from interp_tasks.measurement.head_options_and_edits import (
    EACH,
    EACH_LAYER,
    head_groups_by_label,
    make_head_edits,
    parse_edit_options,
)
from interp_tasks.measurement.loaded_checkpoints import (
    LoadedCheckpoint,
    checkpoints_by_run,
    resolve_refs,
    subjects,
)
from interp_tasks.measurement.logged_runs import Curve, LoggedRun, curves_panel, declared_by_run, read_runs
from interp_tasks.measurement.measure_checkpoints import run_sweep
from interp_tasks.measurement.options_and_examples import Examples, Options
from interp_tasks.measurement.result import readable_table, tidy_frame, value_text
from interp_tasks.pages import (
    Column,
    Figure,
    Page,
    Section,
    Table,
    Text,
    format_percent,
    number,
    step_labels,
    step_slider,
    with_interval,
)

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
    from typing_extensions import Unpack

    from interp_tasks.measurement.token_and_position_embeddings import Array
    from tasks import Task

#: What is done to heads: the edit the matrix-completion paper describes, the one its code makes, and their removal.
MODES = ("uniform", "mean_pattern", "zero")
#: Metrics that are shown; the tables of the experiments have all.
MAX_METRICS = 3
#: What the effect of all heads is called.
ALL = "all"
#: The share of all effects of single heads that have a colour of their own: a few checkpoints of an untrained model
#: would take up the scale alone.
STRONGEST = 0.96
#: Numbers of attention maps that a page holds; of a run with more, checkpoints are left out evenly.
MOST_NUMBERS = 1_500_000
#: Settings of the training that are told.
TOLD = ("optimizer", "learning_rate", "schedule", "weight_decay", "batch_size", "seed")
TRAINING = "Validation. Bold: from onset to end of the detected drop or rise."
PLATEAU = " Dotted: the plateau by theory."
EFFECTS = (
    "The metric with the head edited minus without; orange: it rises, blue: it falls. Colours of a metric mean the "
    "same at every step and under every edit; the strongest 4% of effects of single heads have the colour of the end. "
    "Column all: the heads of a layer together. The table below has intervals and p-values."
)
ATTENTION = (
    "The mean attention map of every head: a row of a map is a query, a column a key. Colours mean the same at every "
    "step, and end at the largest share of a query that sees several keys."
)


@dataclass(frozen=True)
class CheckpointMeasures:
    """One checkpoint on one task: of a mixture there is one for each part.

    Attributes:
        part: of a mixture, by name; else empty.
        config: of the model.
        unedited: a row per metric, with its interval; none without a task.
        effects: tidy rows: each head alone, each layer's heads, all heads, under each of ``MODES``.
        maps: mean attention ``[layer head query key]``.
    """

    step: int
    part: str
    task: Task | None
    config: Any
    unedited: pandas.DataFrame
    effects: pandas.DataFrame
    maps: Array


@dataclass(frozen=True)
class Report:
    """A run, measured.

    Attributes:
        name: the run as one types it, or a checkpoint on its own.
        snapshots: by ascending step.
        run, curve: its log, and the logged metric whose drop is the task's; ``None`` where there is none.
        missing: why there is no curve, or no drop in it.
        config: what was asked for, JSON.
    """

    name: str
    snapshots: Sequence[CheckpointMeasures]
    run: LoggedRun | None
    curve: Curve | None
    missing: str
    config: Mapping[str, Any] = field(default_factory=dict)

    def effects(self) -> pandas.DataFrame:
        """Returns every effect of heads: a row per checkpoint, edit, heads and metric."""
        import pandas

        return pandas.concat([each.effects for each in self.snapshots], ignore_index=True)

    def headlines(self) -> list[dict[str, str]]:
        """Returns the settings and the main numbers, rows with ``quantity`` and ``value``."""
        last, steps = self.snapshots[-1], sorted({each.step for each in self.snapshots})
        model, train = last.config, {} if self.run is None else self.run.config.get("train", {})
        settings = {} if last.task is None else last.task.model_dump(mode="json", exclude_defaults=True)
        mlp = "no MLPs" if model.attn_only else f"MLPs {model.d_mlp} wide"
        told = {
            "task": "tokens of your own" if last.task is None else str(last.task.name),
            **{f"task, {name}": str(value) for name, value in settings.items() if value is not None},
            "model": f"{model.n_layers} × {model.n_heads} heads, {model.d_model} wide, {mlp}",
            **{
                f"training, {key.replace('_', ' ')}": str(train[key])
                for key in TOLD
                if train.get(key) is not None
            },
        }
        if self.run is not None:
            told["trained for"] = f"{self.run.last_step or 0:,} steps"
        span = f"steps {steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else f"step {steps[0]:,}"
        told["checkpoints shown"] = f"{len(steps)}, {span}"
        if self.curve is not None:
            metric, drop = self.curve.metric, self.curve.drop
            sudden = f"{'rise' if 'accuracy' in metric else 'drop'} of {metric}"
            told[sudden] = "none found" if drop is None else f"steps {drop.onset:,} to {drop.end:,}"
            if drop is not None:
                told["half-way at"] = f"step {drop.crossing:,}"
                levels = (metric_text(metric, each) for each in (drop.plateau, drop.final))
                told["before and after"] = " and ".join(levels)
        first = last.effects[last.effects["metric"] == last.effects["metric"].iloc[0]]
        alone = first[first["head"].notna() & (first["intervention"] == "zero") & first["effect"].notna()]
        strongest = alone.sort_values("effect", key=abs, ascending=False, kind="stable").head(2)
        for frame, name in (
            (last.unedited, "last {metric}, {n} {split} examples"),
            (first[first["variant"] == ALL], "{metric}, all heads {intervention}"),
            (strongest, "{metric}, head {variant} zero"),
        ):
            told |= {
                name.format_map(row): metric_value_with_interval(row) for row in frame.to_dict("records")
            }
        return [{"quantity": name, "value": value} for name, value in told.items()]

    def page(self) -> Page:
        """Returns one self-contained page: main numbers, training, effects and attention by checkpoint."""
        import pandas

        from interp_tasks.measurement.result_table_plots import table_figures

        sections: list[Section] = [Table(pandas.DataFrame(self.headlines()), name="report-headlines")]
        if self.run is not None and self.curve is not None:
            caption = TRAINING + PLATEAU * bool(declared_by_run(self.run, "plateau_levels"))
            sections.append(Figure(training_figure(self.run, self.curve), "Training", caption))
        if self.missing:
            sections.append(Text(self.missing))
        effects = self.effects()
        ends = effect_color_limits(effects)
        labels = step_labels(sorted({each.step for each in self.snapshots}), self.marks())
        for part in dict.fromkeys(each.part for each in self.snapshots):
            of_part, of = [each for each in self.snapshots if each.part == part], f", {part}" if part else ""
            together = pandas.concat([each.effects for each in of_part], ignore_index=True)
            together = together[together["variant"] == ALL]
            counts = together["n"].dropna().unique()
            examples = f"n = {int(counts[0]):,} examples." if len(counts) == 1 else ""
            (edited,) = table_figures(together.assign(variant=together["intervention"]), examples)
            by_head = step_slider(dict(zip(labels, effects_figures(of_part, ends), strict=True)))
            sections += [
                replace(edited, title=f"All heads edited at once{of}"),
                Figure(by_head, f"Effect of each head alone{of}", EFFECTS),
                Figure(attention_slider_figure(of_part, labels), f"Attention{of}", ATTENTION),
            ]
        sections += [effects_table(self.snapshots), metrics_table(self.snapshots)]
        return Page(f"Report on {self.name}", sections, self.config)

    def marks(self) -> Mapping[str, int]:
        """Returns the steps of the checkpoints around the drop; none where there is no drop."""
        if self.run is None or self.curve is None or self.curve.drop is None:
            return {}
        return find_marks(self.run.path, self.run.name)


def report(run: str, **options: Unpack[Options]) -> Report:
    """Measure a run for one page: metrics, head effects and attention at each of its checkpoints.

    Args:
        run: a run folder or ``zoo:NAME`` (all its checkpoints), a REF that names some of them, or a checkpoint folder.
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Examples`. All
            checkpoints of equal tasks see the same examples.

    Returns:
        A :class:`Report`; ``page()`` is the page, to be written with ``write(path)``.
    """
    found, examples = resolve_report_refs(run, options), Examples.of(options)
    log, curve, missing = read_log_and_drop_curve(found[0])
    snapshots = [measure_for_report(subject) for subject in subjects(found, examples)]
    config = {"run": run, "checkpoints": [each.ref for each in found], **examples.describe()}
    config["trained with"] = None if log is None else dict(log.config)
    return Report(found[0].run_name or run, snapshots, log, curve, missing, config)


def resolve_report_refs(run: str, options: Options) -> list[ResolvedCheckpoint]:
    """Returns the checkpoints that a report is of, by ascending step: of a run without ``@`` all.

    Raises:
        UserError: for none, for checkpoints of several runs, or without a task.
    """
    is_whole = "@" not in run and not is_checkpoint_folder(Path(run))
    (name, found), *others = checkpoints_by_run(resolve(f"{run}@all" if is_whole else run)).items()
    if others:
        names = f"{len(others) + 1} runs ({name} ... {others[-1][0]})"
        raise UserError(f"{run} names {names}: a report is of one")
    return resolve_refs(found, Examples.of(options))


def read_log_and_drop_curve(checkpoint: ResolvedCheckpoint) -> tuple[LoggedRun | None, Curve | None, str]:
    """Returns the log of a checkpoint's run, the curve of its task's metric, and what there is not, in words."""
    if checkpoint.run_path is None:
        return None, None, "A checkpoint on its own: no training curve, no drop."
    try:
        (run,) = read_runs(checkpoint.run_name or str(checkpoint.run_path))
        curve = run.validation_curve(run.drop_metric)
    except UserError as error:
        return None, None, f"No training curve: {error}."
    return run, curve, "" if curve.drop is not None else f"No drop in {curve.metric}: {curve.why_none}."


def measure_for_report(subject: LoadedCheckpoint) -> CheckpointMeasures:
    """Measures one checkpoint for the report: metrics, effects of heads, patterns."""
    import pandas

    from circuits import patterns
    from interp_tasks.experiments.drops_and_curve import checkpoint_metric_rows

    unedited = [] if subject.task is None else list(checkpoint_metric_rows(subject.stored.label, subject))
    part = str(subject.labels["ref"]).removeprefix(subject.stored.label).strip(" ()")
    maps = patterns.attention(subject.model, subject.tokens).mean.numpy()
    step, effects = int(subject.labels["step"]), sweep_edits_of_heads_and_layers(subject)
    return CheckpointMeasures(
        step, part, subject.task, subject.model.cfg, pandas.DataFrame(unedited), effects, maps
    )


def sweep_edits_of_heads_and_layers(subject: LoadedCheckpoint) -> pandas.DataFrame:
    """Returns every edit of every choice of heads, in one sweep."""
    chosen = head_groups_by_label([EACH, EACH_LAYER, ALL], subject.stored.model_config)
    edits = {
        f"{mode} {label}": edit
        for mode in MODES
        for label, edit in make_head_edits(subject, mode, parse_edit_options(mode), chosen).items()
    }
    task, metric = subject.task, None
    if task is not None:

        def metric(output: Any, batch: Any) -> Mapping[str, Any]:
            values = task.metrics(output, batch)
            return {name: values[name] for name in shown_metrics(values, task.drop_metric.name)}

    modes = {name: name.partition(" ")[0] for name in edits}
    frame = run_sweep(subject, edits, modes, metric, subject.batch).frame
    frame = frame.assign(variant=[name.partition(" ")[2] for name in frame["variant"]])
    return tidy_frame(frame, experiment="ablation", n_runs=1, **subject.labels)


def shown_metrics(names: Iterable[str], first: str) -> tuple[str, ...]:
    """Returns at most ``MAX_METRICS`` metrics, ``first`` first, without those of parts of others (``loss_7``)."""
    every = list(dict.fromkeys(map(str, names)))
    wholes = [name for name in every if not any(name.startswith((f"{of}_", f"{of} (")) for of in every)]
    return tuple(sorted(wholes, key=lambda name: name != first)[:MAX_METRICS])


def metric_text(metric: str, value: float) -> str:
    return format_percent(value) if "accuracy" in metric else number(value)


def metric_value_with_interval(row: Mapping[Any, Any]) -> str:
    """Returns the value of a row with its interval."""
    low, high = row.get("value_ci_low"), row.get("value_ci_high")
    value = metric_text(row["metric"], row["value"])
    return with_interval(value, low, high, share="accuracy" in row["metric"])


def training_figure(run: LoggedRun, drop_curve: Curve) -> plotly.graph_objects.Figure:
    """Draws the logged metrics over training, losses above accuracies, with the drop bold."""
    from circuits.figures.panel_grid import draw_panels

    names = shown_metrics(run.logged_metrics(), run.drop_metric)
    curves = {
        name: drop_curve if name == drop_curve.metric else Curve(name, *run.finite_values(name), None)
        for name in names
    }
    curves = {name: one for name, one in curves.items() if len(one.values)}
    panels = []
    for shares in (False, True):
        if chosen := {name: one for name, one in curves.items() if ("accuracy" in name) == shares}:
            (first, *more) = chosen
            title = "share of right answers" if shares else "metric" if more else first
            panels.append(curves_panel(chosen, title, declared_by_run(run, "plateau_levels")))
    return draw_panels(panels)


def effect_color_limits(effects: pandas.DataFrame) -> dict[str, float]:
    """Returns by metric the end of the colours of effects of single heads, the same at every step."""
    sizes = effects[effects["head"].notna()].set_index("metric")["effect"].abs().groupby(level=0)
    return {
        str(metric): float(part.quantile(STRONGEST)) or float(part.max()) or 1.0 for metric, part in sizes
    }


def effects_figures(snapshots: Sequence[CheckpointMeasures], ends: Mapping[str, float]) -> Iterator[Any]:
    """Yields for each checkpoint maps of the effect of every head under each edit, layer by head; last, all of them."""
    from circuits.figures.panel_grid import draw_panels
    from circuits.figures.panel_kinds import heatmap

    for each in snapshots:
        panels = []
        for metric, mode in product(dict.fromkeys(each.effects["metric"]), MODES):
            rows = each.effects[(each.effects["metric"] == metric) & (each.effects["intervention"] == mode)]
            of_heads = rows[rows["head"].notna()]
            grid = of_heads.pivot(index="layer", columns="head", values="effect").astype(float)
            together = rows.set_index("variant")["effect"]
            grid[ALL] = [float(together[f"layer {layer}"]) for layer in grid.index]
            text = grid.map(lambda value: "" if value != value else number(value, 3, sign=True))
            scale: dict[str, Any] = {"end": ends[metric], "signed": True, "bar": mode == MODES[-1]}
            panels.append(heatmap(grid, f"{metric}: {mode}", text=text, unit="effect", **scale))
        yield draw_panels(panels, columns=len(MODES), share_y=True)


def attention_slider_figure(
    snapshots: Sequence[CheckpointMeasures], labels: Sequence[str]
) -> plotly.graph_objects.Figure:
    """Draws the mean attention map of every head, with a slider over the checkpoints."""
    import numpy as np
    import torch

    from circuits.figures import results

    count, most = len(snapshots), max(2, MOST_NUMBERS // snapshots[0].maps.size)
    places = np.linspace(0, count - 1, min(count, most)).round().astype(int)
    maps = {labels[place]: torch.as_tensor(snapshots[place].maps) for place in places}
    largest = max(map(results.max_attention_with_several_keys, maps.values()))
    names = position_labels(snapshots[0].task, snapshots[0].maps.shape[-1])
    drawn = {label: results.attention_figure(mean, names, {}, "", largest) for label, mean in maps.items()}
    return step_slider(drawn)


def position_labels(task: Task | None, length: int) -> list[str]:
    """Returns the names of positions: their place on the task's grid, the input that stands there, or a number."""
    import numpy as np

    axes: Sequence[Any] = () if task is None else task.grid_axes()
    grid = [len(axis.values) for axis in axes if axis.position is None]
    if grid and int(np.prod(grid)) == length:
        return ["(" + ",".join(map(str, cell)) + ")" for cell in np.ndindex(*grid)]
    names = {axis.position: axis.name for axis in axes if axis.position is not None}
    return [f"{at} ({names[at]})" if at in names else str(at) for at in range(length)]


def effects_table(snapshots: Sequence[CheckpointMeasures]) -> Table:
    """Returns the effects of all heads at the last checkpoint; the download has all checkpoints."""
    import pandas

    frame = pandas.concat([each.effects for each in snapshots], ignore_index=True)
    last = frame[frame["step"] == snapshots[-1].step]
    tests = snapshots[-1].effects["p_value"].count()
    caption = (
        f"p adj.: sign-flip test, Holm's adjustment over the {tests} rows of a checkpoint. "
        "The download has all checkpoints."
    )
    columns = [Column("checkpoint", "ref"), *readable_table(last)[1]]
    title = "Effects of heads at the last checkpoint"
    return Table(last, title, caption, columns, "report-head-effects", frame, tall=True)


def metrics_table(snapshots: Sequence[CheckpointMeasures]) -> Section:
    """Returns the metrics of every checkpoint as a table."""
    import pandas

    frame, title = pandas.concat([each.unedited for each in snapshots]), "Metrics at every checkpoint"
    if frame.empty:
        return Text("No metrics: the checkpoints name no task.", title)
    columns = [Column(name, name) for name in ("step", "metric")]
    columns.append(Column("value [95% CI]", "value", value_text))
    return Table(frame, title, "The unedited model.", columns, "report-metrics", tall=len(frame) > 20)
