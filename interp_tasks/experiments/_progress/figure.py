"""The figure of ``progress``: measures over training, then frequencies at the last checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from circuits.figures.palette import COLOURS, SYMBOLS, template
from interp_tasks.experiments._progress import table
from interp_tasks.experiments._progress.inputs import ALL
from interp_tasks.experiments._progress.phases import MIN_STEPS, find_phases

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

#: Pixels: the height of a panel, the space between panels, the margins, and a legend between a panel and its title.
PANEL, GAP, TOP, BOTTOM, LEGEND = 280, 110, 110, 60, 24
#: Panels stand side by side where there are more answers than this.
MAX_IN_A_COLUMN, COLUMNS = 3, 2
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
    from plotly.subplots import make_subplots

    panels: list[tuple[str, Any]] = []
    for run, by_answer in curves.items():
        name = run.rsplit("/", 1)[-1]
        several = any(len(curve) > 1 for each in by_answer.values() for curve in each.values())
        for answer, of_answer in by_answer.items():
            losses = {quantity: of_answer[quantity] for quantity in LOSSES if quantity in of_answer}
            if several and losses:
                panels.append((f"{name}: {answer}", Lines(losses, "loss (nats)", log=True)))
        main_curves = by_answer.get("", {})
        if several and "gini of W_E" in main_curves:
            panels.append((f"{name}: Gini coefficients", Lines(ginis(by_answer), "Gini", log=False)))
        if several and table.SQUARES in main_curves:
            squares = {table.SQUARES: main_curves[table.SQUARES]}
            panels.append((f"{name}: weights", Lines(squares, "sum of squares", log=False)))
        if run in keys:
            refs = {ref: of_ref for ref, of_ref in coefficients.items() if runs_of[ref] == run}
            panels += frequencies(frame, refs, keys[run])
    columns = COLUMNS if len(panels) > 2 * MAX_IN_A_COLUMN else 1
    rows = max(1, -(-len(panels) // columns))
    whole_height = PANEL * rows + GAP * (rows - 1)
    figure = make_subplots(
        rows=rows,
        cols=columns,
        vertical_spacing=GAP / whole_height if rows > 1 else 0,
        horizontal_spacing=0.1,
        subplot_titles=[title for title, _ in panels],
    )
    for index, (_, panel) in enumerate(panels):
        panel.draw(figure, index // columns + 1, index % columns + 1)
    figure.update_layout(
        height=TOP + whole_height + BOTTOM,
        margin={"t": TOP, "b": BOTTOM},
        bargap=0.4,
        barmode="overlay",
        legend={"y": 1 + 50 / whole_height},
        template=template("light"),
    )
    figure.update_annotations(font_size=13)
    if columns == 1:
        legend_for_each_panel(figure, whole_height)
    return figure


def legend_for_each_panel(figure: Any, whole_height: int) -> None:
    """Gives panels that stand above each other a legend each: colours begin again in every one of them."""
    for row, (axis, title) in enumerate(
        zip(figure.select_yaxes(), figure.layout.annotations, strict=False), 1
    ):
        name = f"legend{row if row > 1 else ''}"
        inside = [trace for trace in figure.data if trace.yaxis == f"y{row if row > 1 else ''}"]
        for trace in inside:
            trace.update(legend=name, showlegend=len(inside) > 1)
        if len(inside) > 1:
            y = axis.domain[1] + 2 / whole_height
            figure.update_layout({name: {"orientation": "h", "x": 0, "y": y, "yanchor": "bottom"}})
            title.yshift = LEGEND
    figure.update_layout(margin={"t": TOP - 40}, height=figure.layout.height - 40)


def ginis(by_answer: Mapping[str, Curves]) -> dict[str, Mapping[int, float]]:
    """Returns the Gini coefficients of W_E, and of W_L by answer."""
    ginis_by_label = {"gini of W_E": by_answer[""]["gini of W_E"]}
    answers = [answer for answer, curves in by_answer.items() if answer and "gini of W_L" in curves]
    for answer in answers:
        label = "gini of W_L" if len(answers) == 1 else f"gini of W_L, {answer}"
        ginis_by_label[label] = by_answer[answer]["gini of W_L"]
    return ginis_by_label


class Lines:
    """A panel of curves over the steps; losses also have the boundaries of the phases."""

    def __init__(self, curves: Curves, title: str, *, log: bool) -> None:
        self.curves, self.title, self.log = curves, title, log

    def draw(self, figure: Any, row: int, column: int) -> None:
        """Draws each curve over steps into a panel, with the bounds of the phases."""
        shown = {trace.name for trace in figure.data}
        for index, (name, curve) in enumerate(self.curves.items()):
            steps = sorted(curve)
            values = [max(curve[step], SMALLEST) if self.log else curve[step] for step in steps]
            colour = index % len(COLOURS["light"])
            figure.add_trace(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    # The axis says that it is a loss.
                    "name": name.removesuffix(" loss"),
                    "legendgroup": name,
                    "showlegend": name.removesuffix(" loss") not in shown,
                    "x": steps,
                    "y": values,
                    "line": {
                        "color": COLOURS["light"][colour],
                        "dash": "solid" if index == colour else "dash",
                    },
                    "marker": {"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 6},
                },
                row=row,
                col=column,
            )
        figure.update_xaxes(title_text="step", row=row, col=column)
        axis = {"type": "log", "exponentformat": "power", "dtick": 2} if self.log else {}
        figure.update_yaxes(title_text=self.title, row=row, col=column, **axis)
        for step in self.boundaries():
            figure.add_vline(
                step, line={"dash": "dot", "width": 1, "color": COLOURS["light"][6]}, row=row, col=column
            )

    def boundaries(self) -> list[float]:
        """Returns the steps at which the phases of training begin and end, where they can be found."""
        if not {"train loss", "test loss"} <= set(self.curves):
            return []
        steps = sorted(self.curves["test loss"])
        if len(steps) < MIN_STEPS:
            return []
        train, test = ([self.curves[name][step] for step in steps] for name in ("train loss", "test loss"))
        phases = find_phases(steps, train, test)
        # A phase that did not begin is NaN.
        return [step for step in (phases.memorised, phases.cleanup, phases.end) if step == step]


class Bars:
    """A panel of bars: the coefficient of each frequency, key frequencies in the second colour."""

    def __init__(self, coefficients: Sequence[float], keys: Sequence[int]) -> None:
        self.coefficients, self.keys = coefficients, keys

    def draw(self, figure: Any, row: int, column: int) -> None:
        """Draws the coefficient of every frequency as bars into a panel, key frequencies in a colour of their own."""
        shown = {trace.name for trace in figure.data}
        every = range(1, len(self.coefficients))
        for index, (name, chosen) in enumerate(
            (
                ("other frequency", [key for key in every if key not in self.keys]),
                ("key frequency", list(self.keys)),
            )
        ):
            if chosen:
                figure.add_trace(
                    {
                        "type": "bar",
                        "width": 0.8,
                        "x": chosen,
                        "y": [self.coefficients[key] for key in chosen],
                        "marker": {"color": COLOURS["light"][index]},
                        "name": name,
                        "legendgroup": name,
                        "showlegend": name not in shown,
                    },
                    row=row,
                    col=column,
                )
        last = len(self.coefficients) - 1
        figure.update_xaxes(
            title_text="frequency", range=[0, last + 1], dtick=max(1, last // 10), row=row, col=column
        )
        figure.update_yaxes(title_text="coefficient (logits)", row=row, col=column)


class Points:
    """A panel of points: the loss without one key frequency, at logits and at neurons, beside the unedited model's."""

    def __init__(self, values: Mapping[str, Mapping[str, float]]) -> None:
        self.values = values

    def draw(self, figure: Any, row: int, column: int) -> None:
        """Draws the loss without each key frequency into a panel."""
        shown = {trace.name for trace in figure.data}
        for index, (name, by_key) in enumerate(self.values.items()):
            figure.add_trace(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": name,
                    "legendgroup": name,
                    "showlegend": name not in shown,
                    "x": list(by_key),
                    "y": [max(value, SMALLEST) for value in by_key.values()],
                    "marker": {
                        "symbol": SYMBOLS[index],
                        "size": 10,
                        "color": COLOURS["light"][(index + 2) % len(COLOURS["light"])],
                    },
                },
                row=row,
                col=column,
            )
        figure.update_xaxes(title_text="frequency taken out", type="category", row=row, col=column)
        figure.update_yaxes(title_text="loss (nats)", type="log", exponentformat="power", row=row, col=column)


def frequencies(
    frame: pandas.DataFrame,
    coefficients: Mapping[str, Mapping[str, Sequence[float]]],
    keys: Mapping[str, tuple[int, ...]],
) -> list[tuple[str, Any]]:
    """Returns the panels of a run's last checkpoint, by title."""
    panels: list[tuple[str, Any]] = []
    rows = frame[frame["ref"].isin(list(coefficients)) & (frame["split"] == ALL)]
    for ref in dict.fromkeys(rows["ref"]):
        part = rows[(rows["ref"] == ref) & (rows["metric"] == table.LOSS)]
        for answer, of_answer in coefficients[ref].items():
            panels.append((f"{ref}: {answer}", Bars(of_answer, keys[answer])))
            points: dict[str, dict[str, float]] = {"unedited": {}}
            for label, intervention in (
                ("taken out of the logits", table.ONE_EXCLUDED),
                ("taken out of the neurons", "neurons: without one key frequency"),
            ):
                for line in part[part["intervention"] == intervention].to_dict("records"):
                    of, _, key = line["variant"].partition(", frequency ")
                    if of == answer:
                        points.setdefault(label, {})[key] = line["value"]
                        points["unedited"][key] = line["baseline"]
            if points["unedited"]:
                panels.append((f"{ref}: {answer}, one frequency less", Points(points)))
    return panels
