"""The figure of ``progress``: measures over training, then frequencies at the last checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from circuits.figures.layout import Panel, draw
from circuits.figures.panels import Series, curve, points, spectrum
from interp_tasks.experiments._progress import table
from interp_tasks.experiments._progress.inputs import ALL
from interp_tasks.experiments._progress.phases import MIN_STEPS, find_phases

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

#: Panels stand side by side where there are more than these.
MOST_IN_A_COLUMN = 6
LOSSES = ("train loss", "test loss", "restricted loss", "excluded loss", "held-out restricted loss")
#: Below it losses are drawn at the bottom: a loss of 0 has no logarithm.
SMALLEST = 1e-12

Curves = Mapping[str, Mapping[int, float]]


def figure(
    frame: pandas.DataFrame,
    curves: Mapping[str, Mapping[str, Curves]],
    coefficients: Mapping[str, Mapping[str, Sequence[float]]],
    keys: Mapping[str, Mapping[str, tuple[int, ...]]],
    runs_of: Mapping[str, str],
) -> plotly.graph_objects.Figure:
    """Draws per run losses of each answer, Gini coefficients, weights; then coefficients and single frequencies.

    Args:
        frame: the tidy table.
        curves: run -> answer (or ``""`` for the whole model) -> quantity -> step -> value.
        coefficients: REF -> answer -> frequency -> coefficient, of the last checkpoints.
        keys: run -> answer -> key frequencies.
        runs_of: REF -> run, of the last checkpoints.
    """
    panels: list[Panel] = []
    for run, by_answer in curves.items():
        if any(len(each) > 1 for of_answer in by_answer.values() for each in of_answer.values()):
            panels += training_panels(run.rsplit("/", 1)[-1], by_answer)
        if run in keys:
            refs = {ref: of_ref for ref, of_ref in coefficients.items() if runs_of[ref] == run}
            panels += frequency_panels(frame, refs, keys[run])
    return draw(panels, columns=2 if len(panels) > MOST_IN_A_COLUMN else 1, barmode="overlay")


def training_panels(name: str, by_answer: Mapping[str, Curves]) -> list[Panel]:
    """Returns the losses of each answer, Gini coefficients and weights of a run with several checkpoints."""
    panels = []
    for answer, of_answer in by_answer.items():
        losses = {quantity: of_answer[quantity] for quantity in LOSSES if quantity in of_answer}
        if losses:
            bounds = [{"x": step, "line": {"dash": "dot", "width": 1}} for step in boundaries(losses)]
            panels.append(lines(losses, f"{name}: {answer}", "loss (nats)", log_y=True, lines=bounds))
    whole = by_answer.get("", {})
    if "gini of W_E" in whole:
        panels.append(lines(ginis(by_answer), f"{name}: Gini coefficients", "Gini"))
    if table.SQUARES in whole:
        panels.append(lines({table.SQUARES: whole[table.SQUARES]}, f"{name}: weights", "sum of squares"))
    return panels


def lines(curves: Curves, title: str, y: str, log_y: bool = False, **panel: Any) -> Panel:
    series = {}
    for look, (name, values) in enumerate(curves.items()):
        steps = sorted(values)
        shown = [max(values[step], SMALLEST) if log_y else values[step] for step in steps]
        series[name] = Series(steps, shown, look=LOSSES.index(name) if name in LOSSES else look)
    return curve(series, title, y=y, log_y=log_y, height=280, width=300, **panel)


def ginis(by_answer: Mapping[str, Curves]) -> Curves:
    """Returns the Gini coefficients of W_E, and of W_L by answer."""
    found = {"gini of W_E": by_answer[""]["gini of W_E"]}
    answers = [answer for answer, curves in by_answer.items() if answer and "gini of W_L" in curves]
    for answer in answers:
        label = "gini of W_L" if len(answers) == 1 else f"gini of W_L, {answer}"
        found[label] = by_answer[answer]["gini of W_L"]
    return found


def boundaries(losses: Curves) -> list[float]:
    """Returns the steps at which the phases of training begin and end, where they can be found."""
    if not {"train loss", "test loss"} <= set(losses):
        return []
    steps = sorted(losses["test loss"])
    if len(steps) < MIN_STEPS:
        return []
    train, test = ([losses[name][step] for step in steps] for name in ("train loss", "test loss"))
    phases = find_phases(steps, train, test)
    # A phase that did not begin is NaN.
    return [step for step in (phases.memorised, phases.cleanup, phases.end) if step == step]


def frequency_panels(
    frame: pandas.DataFrame,
    coefficients: Mapping[str, Mapping[str, Sequence[float]]],
    keys: Mapping[str, tuple[int, ...]],
) -> list[Panel]:
    """Returns the coefficients of the last checkpoint's frequencies, and the loss without each key frequency."""
    panels = []
    rows = frame[
        frame["ref"].isin(list(coefficients)) & (frame["split"] == ALL) & (frame["metric"] == table.LOSS)
    ]
    for ref in dict.fromkeys(frame.loc[frame["ref"].isin(list(coefficients)), "ref"]):
        for answer, values in coefficients[ref].items():
            labels = list(range(1, len(values)))
            options: dict[str, Any] = {"y": "coefficient (logits)", "height": 280, "width": 300}
            panels.append(spectrum(labels, values[1:], keys[answer], f"{ref}: {answer}", **options))
            losses = without_one(rows[rows["ref"] == ref], answer)
            if losses:
                options = {
                    "x": "frequency taken out",
                    "y": "loss (nats)",
                    "height": 280,
                    "width": 300,
                }
                title = f"{ref}: {answer}, one frequency less"
                panels.append(points(losses, title, log_y=True, **options))
    return panels


def without_one(rows: pandas.DataFrame, answer: str) -> dict[str, Series]:
    """Returns the loss without each key frequency, at logits and at neurons, beside the unedited model's."""
    found: dict[str, Series] = {}
    for look, (label, intervention) in enumerate(
        (
            ("taken out of the logits", table.ONE_EXCLUDED),
            ("taken out of the neurons", "neurons: without one key frequency"),
        ),
        start=3,
    ):
        part = rows[rows["intervention"] == intervention]
        names = part["variant"].str.partition(", frequency ")
        part = part.assign(key=names[2])[names[0] == answer]
        if len(part):
            lowest = part[["value", "baseline"]].clip(lower=SMALLEST)
            found["unedited"] = Series(part["key"].tolist(), lowest["baseline"].tolist(), look=2)
            found[label] = Series(part["key"].tolist(), lowest["value"].tolist(), look=look)
    return found
