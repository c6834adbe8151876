"""The page of the demo: a chapter for each model, with curves, matrices, bars, a ring of embeddings, and attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from circuits.figures.layout import Panel, draw
from circuits.figures.panels import Series, bars, curve, heat, scatter
from interp_tasks.checkpoints import find_marks
from interp_tasks.demo.measure import OPERANDS, WHEN, Demo, Outcome, guessing
from interp_tasks.measurement.table import shown_columns
from interp_tasks.pages import (
    Column,
    Figure,
    Fold,
    Page,
    Section,
    Table,
    Text,
    number,
    step_labels,
    stepped,
    three_digits,
)

if TYPE_CHECKING:
    import numpy as np
    import plotly.graph_objects

    from interp_tasks.demo.measure import Added, Completed, Ring

#: Words of the page that lead to a paper.
PAPERS = {
    "Abrupt Learning in Transformers: A Case Study on Matrix Completion": "https://arxiv.org/abs/2410.22244",
    "Progress measures for grokking via mechanistic interpretability": "https://arxiv.org/abs/2301.05217",
}
TITLE = "Two small transformers plateau, then learn: what do they need attention for?"
#: Pixels: how wide bars are at most.
BARS_WIDTH = 900
INTERVALS = "Whiskers are 95% intervals, by bootstrap over examples."
#: What the marks around a drop are called here; the braces are for "drop" or "rise".
MARKS = {"pre": "before the {}", "onset": "{} begins", "end": "{} ends", "post": "after the {}"}
#: What the unedited model and the edited one are called on the whole page.
TRAINED, UNIFORM = "as trained", "uniform attention"
#: The first digits, which are named beside the ring.
LABELLED = 5


def demo_page(found: Demo) -> Page:
    """Returns a page with a chapter for each model."""
    blanks, answers = found.matrices.row("post", "mse_masked"), found.sums.row("post", "accuracy")
    opening = Text(
        f"The first fills in the blanks of matrices, with an error of {number(blanks['baseline'])} after training. "
        "When every head is made to look at all positions equally (uniform attention) it errs by "
        f"{number(blanks['value'])}; always answering 0 errs by {number(guessing(found.matrices))}. The second adds "
        f"numbers: {answers['baseline']:.0%} of its answers are right, {answers['value']:.0%} under uniform attention. "
        "Move the sliders to see how that came about."
    )
    closing = Text(
        "The curves come from the training logs; `interp-run demo` has just measured everything else, on two models "
        "that ship with this package. `interp-run reproduce` judges the papers' claims by rules on many runs."
    )
    results = {one.task.name: one.result.config for one in (found.matrices, found.sums)}
    return Page(TITLE, [opening, *matrix_chapter(found), *sum_chapter(found), closing], results)


def matrix_chapter(found: Demo) -> list[Section]:
    """Returns the chapter of the page about matrix completion."""
    outcome, completed, task = found.matrices, found.completed, found.matrices.task
    rows, columns = completed.truth.shape
    published, level = type(task).Model().d_model, guessing(outcome)  # the task's defaults are the paper's
    before, after, given = (
        outcome.row(mark, metric)
        for mark, metric in (("pre", "mse_masked"), ("post", "mse_masked"), ("post", "mse_observed"))
    )
    intro = (
        f"The model sees a {rows}×{columns} matrix of rank {task.rank} with about {task.p_mask:.0%} of its entries "
        f"blank, and fills these in. It is {outcome.width} wide; the one that Gopalani, Lubana and Hu (NeurIPS 2024) "
        f"studied is {published} wide: Abrupt Learning in Transformers: A Case Study on Matrix Completion."
    )
    series = {"blanks": outcome.log.points("mse_masked"), "given entries": outcome.log.points("mse_observed")}
    loss = (
        f"{course(outcome, 'the error at the blanks', number)} Dashed: the variance of the entries, "
        f"{number(level)}, which is the error of answering 0."
    )
    picture = (
        f"Numbers at blanks are bold; the error above a picture is that at its blanks. Of {after['n']} test matrices "
        "this one has the median error after training."
    )
    errors = (
        f"On {after['n']} test matrices, uniform attention takes the error at the blanks from "
        f"{three_digits(before['baseline'])} to {three_digits(before['value'])} before the drop, and from "
        f"{three_digits(after['baseline'])} to {three_digits(after['value'])} after it, where always answering 0 errs "
        f"by {three_digits(level)} (dashed). At their given entries, after the drop, it goes from "
        f"{three_digits(given['baseline'])} to {three_digits(given['value'])}, {given['value'] / level:.1%} of the "
        f"variance. {INTERVALS}"
    )
    panels = {"at the blanks; dashed: always 0": "mse_masked", "at the given entries": "mse_observed"}
    return [
        Text(intro, "Filling in the blanks of a matrix", PAPERS),
        Figure(
            curve_figure(outcome, series, level, "mean squared error"),
            caption=loss,
            alt="error over training",
        ),
        Figure(
            over_steps(completed.steps, outcome, lambda at: matrix_figure(completed, at)),
            caption=picture,
            alt="a matrix, what the model makes of it, and with uniform attention",
        ),
        Figure(
            bars_figure(outcome, panels, level, "mean squared error"),
            caption=errors,
            alt="errors with and without uniform attention, before and after the drop",
            width=BARS_WIDTH,
        ),
        all_numbers(outcome),
    ]


def sum_chapter(found: Demo) -> list[Section]:
    """Returns the chapter of the page about modular addition."""
    outcome, added, ring = found.sums, found.added, found.ring
    modulus, chance = outcome.task.p, 1 / outcome.task.p
    intro = (
        f"The model sees two numbers below {modulus} and has to give their sum modulo {modulus}, the remainder after "
        f"division by {modulus}. It was trained on {outcome.task.train_fraction:.0%} of all pairs and is tested on the "
        "others. Nanda, Chan, Lieberum, Smith and Steinhardt (ICLR 2023) worked out how such a model does it: "
        "Progress measures for grokking via mechanistic interpretability."
    )
    train = outcome.log.points("accuracy", "train")
    series = {
        "sums it was not trained on": outcome.log.points("accuracy"),
        "sums it was trained on": train,
    }
    learnt = next((step for step, value in zip(*train, strict=True) if value >= 0.99), None)
    memorised = "" if learnt is None else f"By step {learnt:,} it has memorised its training sums. "
    rise = f"{memorised}{course(outcome, 'the share of right answers', '{:.1%}'.format)} Dashed: chance, {chance:.1%}."
    embedded = (
        f"Frequency {ring.frequency} holds {ring.shares[0]:.0%} of the variance of the embeddings at step "
        f"{added.steps[0]:,} and {ring.shares[-1]:.0%}, the largest share, at step {added.steps[-1]:,}. Colours follow "
        f"the angle: number x stands at {ring.frequency} · x / {modulus} of a turn, so that adding numbers adds angles."
    )
    row, operands = outcome.row("post", "accuracy"), outcome.row("post", "accuracy", OPERANDS)
    answers = (
        f"With uniform attention in every head, {row['value']:.1%} of {row['n']} sums that it was not trained on are "
        f"right instead of {row['baseline']:.1%}; with attention uniform over the two numbers alone, "
        f"{operands['value']:.1%}. {INTERVALS}"
    )
    looks = "Where each head looks when the model answers this sum, and with uniform attention in all heads."
    return [
        Text(intro, "Adding on a clock", PAPERS),
        Figure(
            curve_figure(outcome, series, chance, "share of right answers"),
            caption=rise,
            alt="share of right answers over training",
        ),
        Figure(
            over_steps(added.steps, outcome, lambda at: ring_figure(ring, at)),
            caption=embedded,
            alt="embeddings of the numbers along their key frequency",
            width=620,
        ),
        Figure(
            over_steps(added.steps, outcome, lambda at: attention_figure(added, at)),
            caption=looks,
            alt="attention of every head and the answer",
            width=BARS_WIDTH,
        ),
        Figure(
            bars_figure(
                outcome, {f"dashed: chance, {chance:.1%}": "accuracy"}, chance, "share of right answers"
            ),
            caption=answers,
            alt="share of right answers with and without uniform attention",
            width=BARS_WIDTH,
        ),
        all_numbers(outcome),
    ]


def turn(outcome: Outcome) -> str:
    """Returns what the sudden change of a run's own metric is: an error drops, a share of right answers rises."""
    return "drop" if outcome.log.direction == "down" else "rise"


def course(outcome: Outcome, what: str, shown: Callable[[float], str]) -> str:
    """Returns a sentence on the drop of a run's own metric in validation."""
    drop, count = outcome.log.curve(outcome.log.drop_metric).drop, outcome.log.labels()["n"]
    examples = "" if count is None else f"On {count:,} other examples "
    if drop is None:
        return f"{examples}{what} shows no {turn(outcome)}."
    return (
        f"{examples}{what} stays near {shown(drop.plateau)} until step {drop.onset:,} and has made nine tenths of its "
        f"{turn(outcome)} by step {drop.end:,} (grey)."
    )


def over_steps(steps: Sequence[int], outcome: Outcome, at: Callable[[int], Any]) -> Any:
    """Returns a figure of each checkpoint behind a slider, which names the marks around the drop."""
    marks = find_marks(outcome.log.path, outcome.log.name)
    labels = step_labels(steps, {MARKS[mark].format(turn(outcome)): step for mark, step in marks.items()})
    return stepped({label: at(index) for index, label in enumerate(labels)})


def all_numbers(outcome: Outcome) -> Fold:
    frame = outcome.result.frame
    columns = [Column("checkpoint", "ref"), Column("step", "step"), *shown_columns(frame)]
    caption, name = " ".join(outcome.result.notes), f"demo-{outcome.task.name}"
    return Fold("All numbers", [Table(frame, caption=caption, columns=columns, name=name)])


def curve_figure(
    outcome: Outcome, points: dict[str, tuple[list[int], list[float]]], level: float, axis: str
) -> plotly.graph_objects.Figure:
    """Returns metrics over training, with the span of the drop shaded and a dashed line at a level."""
    drop = outcome.log.curve(outcome.log.drop_metric).drop
    series = {
        name: Series(*each, style={"mode": "lines"}, look=2 * look)
        for look, (name, each) in enumerate(points.items())
    }
    lines: list[dict[str, Any]] = [{"y": level}]
    lines += [] if drop is None else [{"x0": drop.onset, "x1": drop.end}]
    figure = draw([curve(series, x="training step", y=axis, lines=lines, y_axis={"rangemode": "tozero"})])
    return figure.update_yaxes(tickformat=".0%") if turn(outcome) == "rise" else figure


def matrix_figure(completed: Completed, step: int) -> plotly.graph_objects.Figure:
    """Returns a matrix with its blanks, the whole one, and what a checkpoint makes of it as it is and edited."""
    import numpy as np

    hidden, truth = completed.hidden, completed.truth
    shown = {
        f"Given: {int(hidden.sum())} of {hidden.size} are blank": np.where(hidden, np.nan, truth),
        "The truth": truth,
    }
    for edit, name in enumerate(("Filled in", UNIFORM.capitalize())):
        error = three_digits(completed.error(step, edit))
        shown[f"{name}: error {error}"] = completed.outputs[step, edit]
    largest = float(abs(truth).max())
    return draw([matrix_panel(values, hidden, title, largest) for title, values in shown.items()], columns=2)


def matrix_panel(values: np.ndarray, hidden: np.ndarray, title: str, largest: float) -> Panel:
    """Returns a matrix as coloured cells with its numbers, those at blanks in bold."""
    text = [
        ["" if value != value else f"<b>{value:.2f}</b>" if blank else f"{value:.2f}" for value, blank in row]
        for row in (zip(*rows, strict=True) for rows in zip(values, hidden, strict=True))
    ]
    axes: dict[str, Any] = {"across": "column", "down": "row", "text": text, "bar": False}
    return heat(values, title, unit="entry", signed=True, end=largest, width=230, **axes)


def bars_figure(
    outcome: Outcome, metrics: dict[str, str], level: float, axis: str
) -> plotly.graph_objects.Figure:
    """Returns bars before and after the drop, as trained and edited: a panel for each metric, by its title.

    A dashed line stands at a level in the first.
    """
    shares = turn(outcome) == "rise"
    shown: Callable[[float], str] = "{:.0%}".format if shares else three_digits
    names = {"uniform": UNIFORM, OPERANDS: "uniform over the two numbers alone"}
    panels: list[Panel] = []
    for title, metric in metrics.items():
        rows = {
            name: [outcome.row(mark, metric, name) for mark in WHEN]
            for name in outcome.result.frame["intervention"].unique()
        }
        moments = [
            f"{when} {turn(outcome)}<br>step {row['step']:,}"
            for when, row in zip(WHEN.values(), rows["uniform"], strict=True)
        ]
        drawn: dict[str, list[Any]] = {TRAINED: [[row["baseline"] for row in rows["uniform"]], None, None]}
        drawn |= {
            names[name]: [[row[key] for row in of_edit] for key in ("value", "value_ci_low", "value_ci_high")]
            for name, of_edit in rows.items()
        }
        style: dict[str, Any] = {"textposition": "outside", "cliponaxis": False}
        series = {
            name: Series(moments, values, low, high, style={**style, "text": [*map(shown, values)]})
            for name, (values, low, high) in drawn.items()
        }
        lines, label = ([{"y": level}], axis) if not panels else ([], "")
        panels.append(bars(series, title, y=label, lines=lines, width=240))
    figure = draw(panels, columns=len(panels), barmode="group")
    return figure.update_yaxes(tickformat=".0%") if shares else figure


def ring_figure(ring: Ring, step: int) -> plotly.graph_objects.Figure:
    """Returns digits as points in a plane, joined in the order of their phases; the first ones are named."""
    points = ring.points[step]
    order = sorted(range(len(points)), key=lambda digit: ring.phases[digit])
    order.append(order[0])
    reach = 1.3 * float(abs(ring.points).max())
    names = [str(digit) for digit in range(len(points))]
    colours = {"size": 8, "color": list(ring.phases), "colorscale": "Phase", "cmin": 0, "cmax": 1}
    around = {
        "mode": "lines",
        "line": {"color": "rgba(128,128,128,0.5)", "width": 1},
        "hoverinfo": "skip",
    }
    bold = {"size": 13, "weight": "bold"}
    named = {"mode": "text", "text": names[:LABELLED], "hoverinfo": "skip", "textfont": bold}
    # Names stand outside the ring, where they lie on no point.
    outside = 1.17 * points[:LABELLED]
    style = {"marker": {**colours, "symbol": "circle"}}
    hover = [f"digit {name}" for name in names]
    series = {
        "order": Series(points[order, 0], points[order, 1], style=around),
        "digits": Series(points[:, 0], points[:, 1], hover=hover, style=style),
        "names": Series(outside[:, 0], outside[:, 1], style=named),
    }
    title = f"Embeddings of 0 to {len(points) - 1}: {ring.shares[step]:.0%} of their variance is seen here"
    across = f"cosine of frequency {ring.frequency}"
    panel = scatter(series, title, x=across, y="sine", square=True, height=340)
    hide: dict[str, Any] = {"range": [-reach, reach], "showticklabels": False, "zeroline": False}
    return draw([panel], showlegend=False).update_xaxes(constrain="domain", **hide).update_yaxes(**hide)


def attention_figure(added: Added, step: int) -> plotly.graph_objects.Figure:
    """Returns where each head looks when the model answers a sum, as it is and under uniform attention."""
    import pandas

    a, b = added.operands
    panels = []
    for edit, name in enumerate((TRAINED, UNIFORM)):
        given, looks = int(added.answers[step, edit]), added.looks[step, edit]
        judged = "right" if given == added.right else f"wrong: it is {added.right}"
        table = pandas.DataFrame(looks, columns=[f"a = {a}", f"b = {b}", "="][-looks.shape[1] :])
        title = f"{name.capitalize()}: {a} + {b} = {given}, {judged}"
        axes: dict[str, Any] = {
            "across": "attention from the last token to",
            "down": "head",
            "bar": bool(edit),
        }
        panels.append(heat(table, title, unit="attention", end=1.0, width=240, row=40, **axes))
    return draw(panels, columns=2)
