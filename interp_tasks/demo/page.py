"""Draws the pictures of the demo: curves, matrices, errors, a ring of embeddings, where heads look."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from circuits.figures.layout import Panel, draw
from circuits.figures.panels import Series, bars, curve, heat, scatter
from interp_tasks.checkpoints import find_marks, resolve
from interp_tasks.checkpoints.meta import read_meta
from interp_tasks.demo.measure import OPERANDS, Demo, Outcome, guessing, judged_claims, reading
from interp_tasks.measurement.run_logs import Run, plateau_levels
from interp_tasks.measurement.table import shown_columns
from interp_tasks.pages import Column, Figure, Fold, Page, Section, Table, Text, number, stepped

if TYPE_CHECKING:
    import numpy as np
    import pandas
    import plotly.graph_objects

    from interp_tasks.demo.measure import Answered, Filled, Ring

#: Words of the page that lead to a paper.
PAPERS = {
    "Abrupt Learning in Transformers: A Case Study on Matrix Completion": "https://arxiv.org/abs/2410.22244",
    "Progress measures for grokking via mechanistic interpretability": "https://arxiv.org/abs/2301.05217",
}
TITLE = "Two small transformers plateau, then learn: what do they need attention for?"
#: Pixels: how wide bars are at most.
BARS_WIDTH = 900
#: What the whiskers of bars are.
INTERVALS = "Whiskers are 95% intervals, by bootstrap over examples."
#: What the marks around a drop are called here; the braces are for "drop" or "rise".
MARKS = {"pre": "before the {}", "onset": "{} begins", "end": "{} ends", "post": "after the {}"}


def demo_page(found: Demo) -> Page:
    """Returns a page with a chapter for each model."""
    results = {each.title: each.result.config for each in (found.matrices, found.sums)}
    opening = Text(f"{finding(found)} Move the sliders to see how that came about.")
    closing = Text(
        "The curves come from the training logs; `interp-run demo` has just measured everything else, on two models "
        "that ship with this package."
    )
    return Page(TITLE, [opening, *matrix_chapter(found), *sum_chapter(found), closing], results)


def finding(found: Demo) -> str:
    """Returns what uniform attention does to both models after their training, in numbers."""
    blanks = found.matrices.row("post", "mse_masked")
    answers = found.sums.row("post", "accuracy")
    meaning = (
        ", as much as always answering 0; what it is given it still copies"
        if holds_throughout(found.matrices)
        else ""
    )
    return (
        f"The first fills in the blanks of matrices, with an error of {short(blanks['baseline'])} after training. "
        "When every head is made to look at all positions equally (uniform attention) it errs by "
        f"{short(blanks['value'])}{meaning}. The second adds numbers: {answers['baseline']:.0%} of its answers "
        f"are right, {answers['value']:.0%} under uniform attention."
    )


def matrix_chapter(found: Demo) -> list[Section]:
    """Returns the chapter of the page about matrix completion."""
    import tasks

    outcome, filled = found.matrices, found.filled
    rows, columns = filled.truth.shape[1:]
    hidden = outcome.config["p_mask"]
    # The defaults of the task's model are the paper's.
    published, own = tasks.get("matrix-completion").Model().d_model, width(outcome)
    intro = Text(
        f"The model sees a {rows}×{columns} matrix of rank {outcome.config['rank']} with about {hidden:.0%} of its "
        f"entries blank, and fills these in. It is {own} wide; the one that Gopalani, Lubana and Hu (NeurIPS 2024) "
        f"studied is {published} wide: Abrupt Learning in Transformers: A Case Study on Matrix Completion.",
        "Filling in the blanks of a matrix",
        PAPERS,
    )
    return [
        intro,
        loss_curve(found),
        matrix_pictures(found),
        error_bars(found),
        Fold("The paper's claims, each by a rule that was written beforehand", [claims_table(outcome)]),
        Fold("All numbers", [numbers_table(outcome)]),
    ]


def sum_chapter(found: Demo) -> list[Section]:
    """Returns the chapter of the page about modular addition."""
    outcome, answered = found.sums, found.answered
    modulus = answered.modulus
    intro = Text(
        f"The model sees two numbers below {modulus} and has to give their sum modulo {modulus}, the remainder after "
        f"division by {modulus}. It was trained on {outcome.config['train_fraction']:.0%} of all pairs and is tested "
        "on the others. Nanda, Chan, Lieberum, Smith and Steinhardt (ICLR 2023) worked out how such a model does it: "
        "Progress measures for grokking via mechanistic interpretability.",
        "Adding on a clock",
        PAPERS,
    )
    return [
        intro,
        accuracy_curve(found),
        ring(found),
        heads_look(found),
        accuracy_bars(found),
        Fold("All numbers", [numbers_table(outcome)]),
    ]


def width(outcome: Outcome) -> int:
    return int(read_meta(resolve(f"{outcome.log.name}@last")[0].path)["model"]["d_model"])


def turn(outcome: Outcome) -> str:
    """Returns what the sudden change of a run's own metric is: an error drops, a share of right answers rises."""
    return "drop" if outcome.log.direction == "down" else "rise"


def counted(log: Run, what: str) -> str:
    """Returns what a run's curve is over, with their number where the run says it."""
    number_of = log.labels()["n"]
    return what if number_of is None else f"{number_of:,} {what}"


def loss_curve(found: Demo) -> Section:
    """Draws the error of matrix completion over training, beside what answering 0 at the blanks errs by."""
    log, guess = found.matrices.log, guessing(found.matrices.config)
    level = plateau_levels(log).get("mse_masked", guess)
    drop = log.curve("mse_masked").drop
    figure = curve_figure(
        {"blanks": log.points("mse_masked"), "given entries": log.points("mse_observed")},
        None if drop is None else (drop.onset, drop.end),
        level,
        "mean squared error",
    )
    if drop is None:
        change = "The error shows no drop."
    else:
        change = (
            f"On {counted(log, 'new matrices')} the error at the blanks stays near {number(drop.plateau)} until step "
            f"{drop.onset:,} and has made nine tenths of its fall by step {drop.end:,} (grey)."
        )
    caption = (
        f"{change} Dashed: the variance of the entries, {number(level)}, which is the error of answering 0."
    )
    return Figure(figure, caption=caption, alt="error over training")


def matrix_pictures(found: Demo) -> Section:
    """Returns a matrix as it is given and as it is, as the model fills it in, and as it does with uniform attention."""
    filled, outcome = found.filled, found.matrices
    figure = over_steps(filled.steps, outcome, lambda at: matrix_figure(filled, at, 0))
    total = int(outcome.row("post", "mse_masked")["n"])
    caption = (
        "Numbers at blanks are bold; the error above a picture is that at its blanks. Of "
        f"{total} test matrices this one has the median error after training."
    )
    return Figure(
        figure, caption=caption, alt="a matrix, what the model makes of it, and with uniform attention"
    )


def over_steps(steps: Sequence[int], outcome: Outcome, at: Callable[[int], Any]) -> Any:
    """Returns a figure of each checkpoint behind a slider, which names the marks around the drop."""
    marks = {
        step: f" ({MARKS[mark].format(turn(outcome))})"
        for mark, step in find_marks(outcome.log.path, outcome.log.name).items()
    }
    return stepped({f"step {step:,}{marks.get(step, '')}": at(index) for index, step in enumerate(steps)})


def moments(outcome: Outcome, metric: str) -> list[str]:
    return [
        f"{'before' if mark == 'pre' else 'after'} {turn(outcome)}<br>step {outcome.row(mark, metric)['step']:,}"
        for mark in ("pre", "post")
    ]


def points(outcome: Outcome, metric: str, interventions: Sequence[str]) -> dict[str, list[Mapping[str, Any]]]:
    """Returns the unedited model and the edits, before and after the drop, as bars show them."""
    plain = [outcome.unedited[mark][metric] for mark in ("pre", "post")]
    names = {"uniform": UNIFORM, OPERANDS: "uniform over the two numbers alone"}
    edited: dict[str, list[Mapping[str, Any]]] = {
        names[name]: [outcome.row(mark, metric, name) for mark in ("pre", "post")] for name in interventions
    }
    return {TRAINED: plain, **edited}


def error_bars(found: Demo) -> Section:
    """Draws the errors before and after the drop, with and without uniform attention, as bars."""
    outcome = found.matrices
    level = guessing(outcome.config)
    panels = {
        "at the blanks; dashed: always 0": points(outcome, "mse_masked", ["uniform"]),
        "at the given entries": points(outcome, "mse_observed", ["uniform"]),
    }
    before, after, given = (
        outcome.row(mark, metric)
        for mark, metric in (("pre", "mse_masked"), ("post", "mse_masked"), ("post", "mse_observed"))
    )
    figure = bars_figure(panels, moments(outcome, "mse_masked"), level, "mean squared error")
    numbers = (
        f"With uniform attention, on {after['n']} test matrices, others than those of the training log, the error at "
        f"the blanks {moved(before)} before the drop, and {moved(after)} after it, where always answering 0 errs by "
        f"{short(level)} (dashed). At their given entries, after the drop, it {moved(given)}, "
        f"{given['value'] / given['baseline']:.1f} times as much and {given['value'] / level:.1%} of the "
        f"variance. {INTERVALS}"
    )
    meaning = (
        " So this model needs attention to fill in, and hardly to copy; two small shipped models do not copy without "
        "it."
        if holds_throughout(outcome)
        else ""
    )
    alt = "errors with and without uniform attention, before and after the drop"
    return Figure(figure, caption=f"{numbers}{meaning}", alt=alt, width=BARS_WIDTH)


def moved(row: Mapping[str, Any]) -> str:
    """Says where an error goes; what the page would show as the same number stays."""
    before, after = short(row["baseline"]), short(row["value"])
    return f"stays at {before}" if before == after else f"goes from {before} to {after}"


def holds_throughout(outcome: Outcome) -> bool:
    """Returns whether all published claims on uniform attention hold by their rules."""
    rows = [row for row in judged_claims(outcome) if row["edit"] == "uniform"]
    return all(row["verdict"] == "holds" for row in rows)


def accuracy_curve(found: Demo) -> Section:
    """Draws the share of right sums over training, of sums it was trained on and of others."""
    log, chance = found.sums.log, 1 / found.answered.modulus
    curve = log.curve("accuracy")
    train = log.points("accuracy", "train")
    figure = curve_figure(
        {"sums it was not trained on": log.points("accuracy"), "sums it was trained on": train},
        None if curve.drop is None else (curve.drop.onset, curve.drop.end),
        chance,
        "share of right answers",
    )
    figure.update_yaxes(tickformat=".0%")
    learnt = next((step for step, value in zip(*train, strict=True) if value >= 0.99), None)
    sentences = [] if learnt is None else [f"By step {learnt:,} it has memorised its training sums."]
    if curve.drop is None:
        sentences.append(f"On {counted(log, 'others')} its share of right answers shows no jump.")
    else:
        sentences.append(
            f"On {counted(log, 'others')} it gets few right until step {curve.drop.onset:,}, and has made nine "
            f"tenths of its rise by step {curve.drop.end:,} (grey)."
        )
    caption = f"{' '.join(sentences)} Dashed: chance, {chance:.1%}."
    return Figure(figure, caption=caption, alt="share of right answers over training")


def ring(found: Demo) -> Section:
    """Draws the embeddings of the numbers along their key frequency, at every checkpoint."""
    ring, steps = found.ring, found.answered.steps
    figure = over_steps(steps, found.sums, lambda at: ring_figure(ring, at))
    caption = (
        f"Frequency {ring.frequency} holds {ring.shares[0]:.0%} of the variance of the embeddings at step "
        f"{steps[0]:,} and {ring.shares[-1]:.0%}, the largest share, at step {steps[-1]:,}. Colours follow the angle: "
        f"number x stands at {ring.frequency} · x / {found.answered.modulus} of a turn, so that adding numbers adds "
        "angles."
    )
    return Figure(
        figure, caption=caption, alt="embeddings of the numbers along their key frequency", width=620
    )


def heads_look(found: Demo) -> Section:
    """Draws where each head looks when the model answers a sum, at every checkpoint, as it is and edited."""
    answered = found.answered
    figure = over_steps(answered.steps, found.sums, lambda at: attention_figure(answered, at, 0))
    caption = (
        "Where each head looks when the model answers this sum, and with uniform attention in all heads."
    )
    return Figure(figure, caption=caption, alt="attention of every head and the answer", width=BARS_WIDTH)


def accuracy_bars(found: Demo) -> Section:
    outcome = found.sums
    chance = 1 / found.answered.modulus
    panels = {f"dashed: chance, {chance:.1%}": points(outcome, "accuracy", ["uniform", OPERANDS])}
    figure = bars_figure(panels, moments(outcome, "accuracy"), chance, "share of right answers", percent=True)
    count = outcome.row("post", "accuracy")["n"]
    trained, other = found.mirrored
    order = (
        "Before the rise, with attention uniform over the two numbers, "
        f"{trained:.1%} are right of the sums whose other order it was trained on (b + a for a + b), {other:.2%} of "
        "the rest: memory, not addition."
    )
    meaning = reading(outcome)
    caption = f"{meaning} Over {count} sums it was not trained on. {order} {INTERVALS}"
    alt = "share of right answers with and without uniform attention"
    return Figure(figure, caption=caption, alt=alt, width=BARS_WIDTH)


def claims_table(outcome: Outcome) -> Table:
    """Returns the paper's claims with ours beside them, each with its rule and verdict."""
    import pandas

    rows = judged_claims(outcome)
    count = outcome.row("post", "mse_masked")["n"]
    columns = [
        Column("claim", "claim", sentences=True),
        Column("edit", "edit"),
        Column("published", "published", sentences=True),
        Column("here: as trained -> edited [95% CI of the edited]", "ours", sentences=True),
        Column("rule", "rule", sentences=True),
        Column("what the rule is about [95% CI]", "judged", sentences=True),
        Column("on this model", "verdict"),
    ]
    caption = (
        f"A claim holds on this model where the whole interval of what its rule is about, over the same {count} "
        "matrices with and without the edit, keeps the rule; effect is edited minus as trained. (A claim about "
        "training needs at least three runs: interp-run reproduce matrix-completion.) mse_masked is the error at the "
        "blanks, L_mask in the paper; mse_observed that at the given entries, L_obs. The paper's text says uniform "
        "attention; its code puts the mean map over the batch in its place (mean_pattern)."
    )
    return Table(pandas.DataFrame(rows), caption=caption, columns=columns, name="demo-claims")


def numbers_table(outcome: Outcome) -> Table:
    frame: pandas.DataFrame = outcome.result.frame
    columns = [Column("checkpoint", "ref"), Column("step", "step"), *shown_columns(frame)]
    name = f"demo-{outcome.title.lower().replace(' ', '-')}"
    return Table(frame, caption=" ".join(outcome.result.notes), columns=columns, name=name)


#: What the unedited model and the edited one are called on the whole page; digits that are named beside the ring.
TRAINED, UNIFORM, LABELLED = "as trained", "uniform attention", 5


def curve_figure(
    series: Mapping[str, tuple[Sequence[int], Sequence[float]]],
    span: tuple[int, int] | None,
    level: float,
    axis: str,
) -> plotly.graph_objects.Figure:
    """Returns metrics over training, with the span of the drop shaded and a dashed line at a level."""
    named = {
        name: Series(*points, style={"mode": "lines"}, look=2 * look)
        for look, (name, points) in enumerate(series.items())
    }
    lines: list[dict[str, Any]] = [{"y": level}]
    lines += [] if span is None else [{"x0": span[0], "x1": span[1]}]
    return draw([curve(named, x="training step", y=axis, lines=lines, y_axis={"rangemode": "tozero"})])


def matrix_figure(filled: Filled, step: int, index: int) -> plotly.graph_objects.Figure:
    """Returns a matrix with its blanks, the whole one, and what a checkpoint makes of it as it is and edited."""
    import numpy as np

    hidden, truth = filled.hidden[index], filled.truth[index]
    titles = [f"Given: {int(hidden.sum())} of {hidden.size} are blank", "The truth"]
    outputs = [filled.trained, filled.uniform]
    for name, made in zip(("Filled in", UNIFORM.capitalize()), outputs, strict=True):
        titles.append(f"{name}: error {short(filled.error(made, step, index))}")
    values = [np.where(hidden, np.nan, truth), truth, *(made[step, index] for made in outputs)]
    largest = float(abs(filled.truth).max())
    panels = [matrix_panel(each, hidden, title, largest) for each, title in zip(values, titles, strict=True)]
    return draw(panels, columns=2)


def matrix_panel(values: np.ndarray, hidden: np.ndarray, title: str, largest: float) -> Panel:
    """Returns a matrix as coloured cells with its numbers, those at blanks in bold."""
    text = [
        [
            "" if value != value else f"<b>{value:.2f}</b>" if blank else f"{value:.2f}"
            for value, blank in zip(*row, strict=True)
        ]
        for row in zip(values, hidden, strict=True)
    ]
    axes: dict[str, Any] = {"across": "column", "down": "row", "text": text, "bar": False}
    return heat(values, title, unit="entry", signed=True, end=largest, width=230, **axes)


def bars_figure(
    panels: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]],
    moments: Sequence[str],
    level: float,
    axis: str,
    percent: bool = False,
) -> plotly.graph_objects.Figure:
    """Returns bars with their intervals, panels with an axis each, and a dashed line at a level in the first.

    Args:
        panels: title -> name of an edit -> for each moment ``value``, ``value_ci_low`` and ``value_ci_high``.
        moments: names of what stands side by side.
    """
    drawn: list[Panel] = []
    for title, edits in panels.items():
        series = {}
        for look, (name, points) in enumerate(edits.items()):
            columns = [[point[key] for point in points] for key in ("value", "value_ci_low", "value_ci_high")]
            labels = [f"{value:.0%}" if percent else short(value) for value in columns[0]]
            style = {"text": labels, "textposition": "outside", "cliponaxis": False}
            values, low, high = columns
            series[name] = Series(list(moments), values, low, high, style=style, look=look)
        lines = [] if drawn else [{"y": level}]
        drawn.append(bars(series, title, y=axis if not drawn else "", lines=lines, width=240))
    figure = draw(drawn, columns=len(drawn), barmode="group")
    return figure.update_yaxes(tickformat=".0%") if percent else figure


def ring_figure(ring: Ring, step: int) -> plotly.graph_objects.Figure:
    """Returns digits as points in a plane, joined in the order of their phases; the first ones are named."""
    points = ring.points[step]
    order = sorted(range(len(points)), key=lambda digit: ring.phases[digit])
    order.append(order[0])
    reach = 1.3 * float(abs(ring.points).max())
    names = [str(digit) for digit in range(len(points))]
    colours: dict[str, Any] = {
        "size": 8,
        "color": list(ring.phases),
        "colorscale": "Phase",
        "cmin": 0,
        "cmax": 1,
        "symbol": "circle",
    }
    around: dict[str, Any] = {
        "mode": "lines",
        "line": {"color": "rgba(128,128,128,0.5)", "width": 1},
        "hoverinfo": "skip",
    }
    named = {
        "mode": "text",
        "text": names[:LABELLED],
        "hoverinfo": "skip",
        "textfont": {"size": 13, "weight": "bold"},
    }
    # Names stand outside the ring, where they lie on no point.
    outside = 1.17 * points[:LABELLED]
    series = {
        "order": Series(points[order, 0], points[order, 1], style=around),
        "digits": Series(
            points[:, 0], points[:, 1], hover=[f"digit {name}" for name in names], style={"marker": colours}
        ),
        "names": Series(outside[:, 0], outside[:, 1], style=named),
    }
    title = f"Embeddings of 0 to {len(points) - 1}: {ring.shares[step]:.0%} of their variance is seen here"
    panel = scatter(
        series, title, x=f"cosine of frequency {ring.frequency}", y="sine", square=True, height=340
    )
    hide: dict[str, Any] = {"range": [-reach, reach], "showticklabels": False, "zeroline": False}
    return draw([panel], showlegend=False).update_xaxes(constrain="domain", **hide).update_yaxes(**hide)


def attention_figure(answered: Answered, step: int, index: int) -> plotly.graph_objects.Figure:
    """Returns where each head looks when the model answers a sum, as it is and under uniform attention."""
    import pandas

    a, b = answered.operands[index]
    panels = []
    for edit, name in enumerate((TRAINED, UNIFORM)):
        given, right = int(answered.answers[step, edit, index]), int(answered.right[index])
        judged = "right" if given == right else f"wrong: it is {right}"
        looks = answered.looks[step, edit, index]
        table = pandas.DataFrame(looks, columns=[f"a = {a}", f"b = {b}", "="][-looks.shape[1] :])
        title = f"{name.capitalize()}: {a} + {b} = {given}, {judged}"
        axes: dict[str, Any] = {
            "across": "attention from the last token to",
            "down": "head",
            "bar": bool(edit),
        }
        panels.append(heat(table, title, unit="attention", end=1.0, width=240, row=40, **axes))
    return draw(panels, columns=2)


def short(value: float) -> str:
    """Returns a number with two significant digits, zeros included, and no exponent: 0.20, 0.000055; a dash for NaN."""
    if value != value:
        return "–"
    if value == 0 or abs(value) >= 10:
        return f"{value:.0f}"
    rounded = float(f"{value:.1e}")
    return f"{value:.{1 - math.floor(math.log10(abs(rounded)))}f}"
