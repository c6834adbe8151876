"""``interp-run demo``: uniform attention in two shipped models before and after each has learned, and a page of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints import find_marks, resolve
from interp_tasks.checkpoints.steps_around_drop import task_of_run
from interp_tasks.measurement.loaded_checkpoints import subjects
from interp_tasks.measurement.logged_runs import Curve, LoggedRun, curves_panel, read_runs
from interp_tasks.measurement.options_and_examples import Examples, Progress
from interp_tasks.measurement.result import Result, join_results, readable_table
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
    import numpy as np
    import plotly.graph_objects
    from numpy.typing import NDArray

    from circuits.figures.panel_grid import Panel

    Array = NDArray[np.floating]

MATRIX_RUN = "zoo:matrix-completion-7x7"
MODULAR_RUN = "zoo:modular-addition-113"
#: What the table calls uniform attention over the two numbers of a sum alone.
OPERANDS = "uniform(keys=0,1)"
#: The error at the blanks before and after uniform attention, by Gopalani, Lubana, Hu 2024, sections 3.1.2 and 3.2.1.
PUBLISHED = {"pre": "0.2236 -> 0.2236", "post": "0.0128 -> 0.2183"}
#: When the marks of a table are.
WHEN = {"pre": "before", "post": "after"}


TITLE = "Two small transformers plateau, then learn: what do they need attention for?"
#: What the marks around a drop are called here; the braces are for "drop" or "rise".
MARKS = {"pre": "before the {}", "onset": "{} begins", "end": "{} ends", "post": "after the {}"}
#: What the unedited model and the edited one are called on the whole page.
TRAINED, UNIFORM = "as trained", "uniform attention"


@dataclass(frozen=True)
class ShippedRunOutcome:
    """A shipped run with its log and task, and what edits of all heads do to it.

    Attributes:
        result: uniform attention before and after its drop.
        pictures: by the step of every checkpoint, what it makes of one example.
    """

    log: LoggedRun
    task: Any
    width: int
    result: Result
    pictures: Mapping[int, plotly.graph_objects.Figure]

    def find_row(self, mark: str, metric: str, intervention: str = "uniform") -> dict[str, Any]:
        """Returns the one row of a checkpoint (``pre`` or ``post``), metric and edit."""
        frame = self.result.frame
        of_edit = (frame["metric"] == metric) & (frame["intervention"] == intervention)
        row: dict[str, Any] = frame[frame["ref"].str.endswith(f"@{mark}") & of_edit].to_dict("records")[0]
        return row

    @property
    def drop_or_rise_word(self) -> str:
        """What the sudden change of its metric is: an error drops, a share of right answers rises."""
        return "drop" if self.log.direction == "down" else "rise"


@dataclass(frozen=True)
class Demo:
    """Both models."""

    matrices: ShippedRunOutcome
    sums: ShippedRunOutcome


def demo(samples: int = 256, seed: int = 0, progress: Progress | None = None) -> Demo:
    """Ablate attention in shipped models before and after they learn abruptly: some twenty seconds."""
    examples = Examples.of({"samples": samples, "seed": seed, "progress": progress})
    truth, hidden, made = median_matrix_blanks_completions(MATRIX_RUN, examples)
    matrices = {step: matrix_figure(truth, hidden, each) for step, each in made.items()}
    return Demo(
        measure_shipped_run(MATRIX_RUN, [None], matrices, examples),
        measure_shipped_run(
            MODULAR_RUN, [None, (0, 1)], sum_attention_figures_by_step(MODULAR_RUN, examples), examples
        ),
    )


def measure_shipped_run(
    run: str, keys: Sequence[Sequence[int] | None], pictures: Mapping[int, Any], examples: Examples
) -> ShippedRunOutcome:
    """Returns what uniform attention in all heads does before and after a run's drop, over all keys or over some."""
    from interp_tasks import experiments

    refs = [f"{run}@{mark}" for mark in WHEN]
    given: Any = {"samples": examples.samples, "seed": examples.seed}
    results = [experiments.ablation(refs, keys=some, **given) for some in keys]
    (log,) = read_runs(run)
    width = resolve(refs[-1])[0].meta["model"]["d_model"]
    return ShippedRunOutcome(log, task_of_run(log.described), width, join_results(results), pictures)


def run_plain_and_uniform(model: Any, tokens: Any, **options: Any) -> list[Any]:
    """Returns what a model makes of tokens as it is, and with uniform attention in all heads."""
    from circuits import ablate, run

    return [run(model, tokens, *edits, **options) for edits in ((), (ablate.uniform("all"),))]


def median_matrix_blanks_completions(
    run: str, examples: Examples
) -> tuple[Array, NDArray[np.bool_], dict[int, list[Array]]]:
    """Returns a matrix, the one whose error after training is the median, where it is blank, and its completions.

    Those are of every checkpoint, by its step: as it is and with uniform attention in all heads.
    """
    import numpy as np

    from circuits import run as run_model

    (last,) = subjects(f"{run}@last", examples)
    task, batch = last.task, last.batch
    assert task is not None
    assert batch is not None
    sums, counts = task.metrics(run_model(last.model, last.tokens), batch)["mse_masked"]
    # A matrix without blanks has no error, and counts as one of the largest.
    ranked = np.argsort((sums / counts).double().numpy(), kind="stable")
    median = batch[[int(ranked[len(ranked) // 2])]]
    shape = tuple(len(axis.values) for axis in task.grid_axes())
    truth = median.targets.double().numpy().reshape(shape)
    hidden = median.extras["hidden"].numpy().reshape(shape)
    made = {
        subject.stored.step: [
            each[0, :, 0].double().numpy().reshape(shape)
            for each in run_plain_and_uniform(subject.model, median.tokens)
        ]
        for subject in subjects(f"{run}@all", examples)
    }
    return truth, hidden, made


def sum_attention_figures_by_step(run: str, examples: Examples) -> dict[int, plotly.graph_objects.Figure]:
    """Draws what the checkpoints of a run answer to the first sum of a sample, and where their heads look."""
    drawn = {}
    for subject in subjects(f"{run}@all", examples):
        assert subject.batch is not None
        first, modulus = subject.batch[:1], subject.task.p  # type: ignore[union-attr]  # of modular addition
        made = [
            (int(output[0, -1, :modulus].argmax()), kept["pattern.0"][0, :, -1].double().numpy())
            for output, kept in run_plain_and_uniform(subject.model, first.tokens, cache=["pattern.0"])
        ]
        operands = first.extras["operands"][0].tolist()
        drawn[subject.stored.step] = sum_attention_figure(operands, int(first.targets[0]), made)
    return drawn


def error_of_guessing_zero(outcome: ShippedRunOutcome) -> float:
    """Returns the error of answering 0 at every blank: the variance of an entry, the plateau by theory."""
    return float(outcome.task.plateau_levels()["mse_masked"])


def summary_lines(found: Demo) -> list[str]:
    """Returns ten lines: both models over training, as trained and edited, and what is published."""
    outcome, sums = found.matrices, found.sums
    matrices, answers = outcome.find_row("post", "mse_masked")["n"], sums.find_row("post", "accuracy")["n"]
    lines = [
        f"Matrix completion (Gopalani et al. 2024): error at the blanks of {matrices} matrices",
        curve_sparkline(outcome, f"{number(error_of_guessing_zero(outcome))} is guessing 0"),
        table_line("", "as trained", "uniform attention", "published"),
        *(mark_line(outcome.find_row(mark, "mse_masked"), mark, number, PUBLISHED[mark]) for mark in WHEN),
        f"Modular addition (Nanda et al. 2023): right answers to {answers} sums mod {sums.task.p}",
        curve_sparkline(sums, f"chance is {1 / sums.task.p:.1%}"),
        table_line("", "as trained", "uniform attention", "over the numbers only"),
    ]
    for mark in WHEN:
        more = edited_value_text(sums.find_row(mark, "accuracy", OPERANDS), format_percent)
        lines.append(mark_line(sums.find_row(mark, "accuracy"), mark, format_percent, more))
    return lines


def mark_line(row: dict[str, Any], mark: str, format_value: Callable[[float], str], published: str) -> str:
    when = f"{WHEN[mark]}, step {row['step']:,}"
    return table_line(when, format_value(row["baseline"]), edited_value_text(row, format_value), published)


def table_line(when: str, trained: str, edited: str, published: str) -> str:
    return f"  {when:<19}{trained:<12}{edited:<25}{published}".rstrip()


def edited_value_text(row: dict[str, Any], format_value: Callable[[float], str]) -> str:
    ends = row["value_ci_low"], row["value_ci_high"]
    return with_interval(format_value(row["value"]), *ends, share=format_value is format_percent)


#: Characters of a curve, lowest first, and how many of them it takes.
BLOCKS, PLACES = "▁▂▃▄▅▆▇█", 24


def curve_sparkline(outcome: ShippedRunOutcome, label: str) -> str:
    """Returns the drop metric over training as a row of blocks, and where its drop begins."""
    import numpy as np

    curve = outcome.log.validation_curve(outcome.log.drop_metric)
    last = curve.steps[-1]
    # At each place the last value logged until there.
    ends = np.searchsorted(curve.steps, last * np.arange(1, PLACES + 1) / PLACES, side="right") - 1
    heights = curve.values[ends] / curve.values.max() * (len(BLOCKS) - 1)
    blocks = "".join(BLOCKS[round(height)] for height in heights.tolist())
    moves = "" if curve.drop is None else f", turns at {curve.drop.onset:,}"
    return f"  {label:<20} {blocks} {last:,} steps{moves}"


def demo_page(found: Demo) -> Page:
    """Returns a page with a chapter for each model."""
    blanks, answers = found.matrices.find_row("post", "mse_masked"), found.sums.find_row("post", "accuracy")
    zero = error_of_guessing_zero(found.matrices)
    opening = Text(
        f"The first fills in the blanks of matrices, with an error of {number(blanks['baseline'])} after "
        "training. When every head is made to look at all positions equally (uniform attention) it errs by "
        f"{number(blanks['value'])}; always answering 0 errs by {number(zero)}. "
        f"The second adds numbers: {answers['baseline']:.0%} of its answers are right, {answers['value']:.0%} under "
        "uniform attention. Move the sliders to see how that came about."
    )
    closing = Text(
        "The curves come from the training logs; `interp-run demo` has just measured everything else, on two models "
        "that ship with this package. `interp-run reproduce` judges the papers' claims by rules on many runs."
    )
    results = {one.task.name: one.result.config for one in (found.matrices, found.sums)}
    return Page(TITLE, [opening, *matrix_chapter(found.matrices), *sum_chapter(found.sums), closing], results)


def matrix_chapter(outcome: ShippedRunOutcome) -> list[Section]:
    """Returns the chapter of the page about matrix completion."""
    task, level, after = outcome.task, error_of_guessing_zero(outcome), outcome.find_row("post", "mse_masked")
    rows, columns = (len(axis.values) for axis in task.grid_axes())
    intro = (
        f"The model sees a {rows}×{columns} matrix of rank {task.rank} with about {task.p_mask:.0%} of its entries "
        f"blank, and fills these in. It is {outcome.width} wide; the one that Gopalani, Lubana and Hu (NeurIPS 2024) "
        f"studied is {type(task).Model().d_model} wide (https://arxiv.org/abs/2410.22244)."
    )
    picture = (
        f"Numbers at blanks are bold; the error above a picture is that at its blanks. Of {after['n']} test matrices "
        "this one has the median error after training."
    )
    given = Curve("mse_observed", *outcome.log.finite_values("mse_observed"), None)
    curves = {"blanks": outcome.log.validation_curve("mse_masked"), "given entries": given}
    dotted = f"the error of answering 0, {number(level)}"
    return [
        Text(intro, "Filling in the blanks of a matrix"),
        training_curve_figure(outcome, curves, level, "mean squared error", "Error over training", dotted),
        Figure(step_slider_figure(outcome), "A matrix, and what the model makes of it", picture),
        *before_and_after_sections(outcome),
    ]


def sum_chapter(outcome: ShippedRunOutcome) -> list[Section]:
    """Returns the chapter of the page about modular addition."""
    modulus, chance = outcome.task.p, 1 / outcome.task.p
    intro = (
        f"The model sees two numbers below {modulus} and has to give their sum modulo {modulus}. It was trained on "
        f"{outcome.task.train_fraction:.0%} of all pairs and is tested on the others. Nanda, Chan, Lieberum, Smith and "
        "Steinhardt (ICLR 2023) worked out how such a model does it (https://arxiv.org/abs/2301.05217)."
    )
    train = Curve("accuracy", *outcome.log.finite_values("accuracy", "train"), None)
    curves = {
        "sums it was not trained on": outcome.log.validation_curve("accuracy"),
        "sums it was trained on": train,
    }
    looks = "Where each head looks when the model answers this sum, and with uniform attention in all heads."
    dotted, axis = f"chance, {chance:.1%}", "share of right answers"
    return [
        Text(intro, "Adding two numbers"),
        training_curve_figure(outcome, curves, chance, axis, "Right answers over training", dotted),
        Figure(step_slider_figure(outcome), "Attention of every head and the answer", looks, width=900),
        *before_and_after_sections(outcome),
    ]


def before_and_after_sections(outcome: ShippedRunOutcome) -> list[Section]:
    """Returns the metrics as trained and edited, before and after the drop, and all numbers behind them."""
    frame = outcome.result.frame
    columns = [Column("checkpoint", "ref"), Column("step", "step"), *readable_table(frame)[1]]
    notes, name = " ".join(outcome.result.notes), f"demo-{outcome.task.name}"
    (drawn,) = outcome.result.figures()
    title = f"With and without attention, before and after the {outcome.drop_or_rise_word}"
    return [replace(drawn, title=title), Table(frame, "All numbers", notes, columns, name, tall=True)]


def step_slider_figure(outcome: ShippedRunOutcome) -> plotly.graph_objects.Figure:
    """Returns the pictures behind a slider, which names the marks around the drop."""
    marks = find_marks(outcome.log.path, outcome.log.name)
    named = {MARKS[mark].format(outcome.drop_or_rise_word): step for mark, step in marks.items()}
    labels = step_labels([*outcome.pictures], named)
    return step_slider(dict(zip(labels, outcome.pictures.values(), strict=True)))


def training_curve_figure(
    outcome: ShippedRunOutcome, curves: Mapping[str, Curve], level: float, axis: str, title: str, dotted: str
) -> Figure:
    """Returns metrics over training, the drop of the first in bold and a dotted line at its level."""
    from circuits.figures.panel_grid import draw_panels

    figure = draw_panels([curves_panel(curves, axis, {next(iter(curves)): level})])
    return Figure(
        figure, title, f"Bold: from onset to end of the {outcome.drop_or_rise_word}. Dotted: {dotted}."
    )


def matrix_figure(
    truth: Array, hidden: NDArray[np.bool_], completions: Sequence[Array]
) -> plotly.graph_objects.Figure:
    """Draws a matrix with its blanks, the whole one, and what a checkpoint makes of it as it is and edited."""
    import numpy as np

    from circuits.figures.panel_grid import draw_panels

    shown = {
        f"Given: {int(hidden.sum())} of {hidden.size} are blank": np.where(hidden, np.nan, truth),
        "The truth": truth,
    }
    for output, name in zip(completions, ("Filled in", UNIFORM.capitalize()), strict=True):
        errors = ((output - truth) ** 2)[hidden]
        error = number(float(errors.mean()) if errors.size else None, 3, zeros=True)
        shown[f"{name}: error {error}"] = output
    largest = float(abs(truth).max())
    return draw_panels(
        [matrix_panel(values, hidden, title, largest) for title, values in shown.items()], columns=2
    )


def matrix_panel(values: Array, hidden: NDArray[np.bool_], title: str, largest: float) -> Panel:
    """Returns a matrix as coloured cells with its numbers, those at blanks in bold."""
    import numpy as np

    from circuits.figures.panel_kinds import heatmap

    text = np.vectorize("{:.2f}".format, otypes=[object])(values)
    text = np.where(np.isnan(values), "", np.where(hidden, "<b>" + text + "</b>", text)).tolist()
    axes: dict[str, Any] = {"across": "column", "down": "row", "text": text, "bar": False}
    panel = heatmap(values, title, unit="entry", signed=True, end=largest, width=200, **axes)
    # Plotly would fit numbers to cells with their tags for bold counted as letters: too small to read.
    return replace(panel, traces=[{**trace, "textfont": {"size": 9}} for trace in panel.traces])


def sum_attention_figure(
    operands: Sequence[int], right_answer: int, answers: Sequence[tuple[int, Array]]
) -> plotly.graph_objects.Figure:
    """Draws where each head looks when the model answers a sum, as it is and under uniform attention."""
    import pandas

    from circuits.figures.panel_grid import draw_panels
    from circuits.figures.panel_kinds import heatmap

    (a, b), panels = operands, []
    for name, (given, looks) in zip((TRAINED, UNIFORM), answers, strict=True):
        judged = "right" if given == right_answer else f"wrong: it is {right_answer}"
        table = pandas.DataFrame(looks, columns=[f"a = {a}", f"b = {b}", "="][-looks.shape[1] :])
        title = f"{name.capitalize()}: {a} + {b} = {given}, {judged}"
        axes: dict[str, Any] = {"across": "attention from the last token to", "down": "head"}
        bar = name == UNIFORM
        panels.append(heatmap(table, title, unit="attention", end=1.0, width=240, row=40, bar=bar, **axes))
    return draw_panels(panels, columns=2)
