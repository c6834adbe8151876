"""The smallest faithful circuit at every checkpoint: its size and faithfulness over training, beside the metric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from circuits.figures.palette import COLOURS
from interp_tasks.experiments._circuit.rows import CIRCUIT, FAITHFULNESS, LARGEST_RANDOM, SIZE
from interp_tasks.experiments._circuit.settings import Search
from interp_tasks.experiments._circuit.table import faithfulness_text, share
from interp_tasks.pages import Beside, Column, Section, Table
from interp_tasks.report.draw import move_line, rounded, step_line, stepped
from interp_tasks.report.head_effects import value_axis

if TYPE_CHECKING:
    import pandas

    from interp_tasks.report.snapshots import View

TITLE = "The smallest faithful circuit over training"
#: Pixels: of a panel, between panels, below.
PANEL, GAP, BOTTOM = 190, 30, 45


def circuits_frame(views: Sequence[View]) -> pandas.DataFrame:
    """Returns a row per checkpoint with a circuit looked for: its size, share, faithfulness, and the clean metric."""
    import pandas

    rows: list[dict[str, Any]] = []
    for view in views:
        for snapshot in view.snapshots:
            if (found := snapshot.circuit) is None:
                continue
            size = found.value(SIZE)
            rows.append(
                {
                    "run": view.name,
                    "step": snapshot.step,
                    "size": size,
                    "total": found.total,
                    "share": size / found.total,
                    "faithfulness": found.value(FAITHFULNESS),
                    "faithfulness_ci_low": found.value(FAITHFULNESS, "value_ci_low"),
                    "faithfulness_ci_high": found.value(FAITHFULNESS, "value_ci_high"),
                    "random": found.value(LARGEST_RANDOM),
                    "metric": found.metric,
                    "clean": found.value(found.metric, "baseline"),
                    "n": next(row["n"] for row in found.rows if row["variant"] == CIRCUIT),
                }
            )
    return pandas.DataFrame(rows)


def circuits_section(views: Sequence[View]) -> list[Section]:
    """Returns figures and a table of the circuits; nothing where none was looked for."""
    frame = circuits_frame(views)
    if frame.empty:
        return []
    n = ", ".join(str(one) for one in dict.fromkeys(frame["n"]))
    least = Search().faithfulness
    caption = (
        f"Edges of the smallest circuit, along the ranking by integrated gradients, that has faithfulness {least:g} on "
        f"one half of the examples; faithfulness on the other half ({n} examples), with 95% intervals. All other edges "
        "carry a source's values. No point: the metric of clean and source run does not surely differ on the half that "
        "finds, so that there is nothing to be faithful to. Each checkpoint has a circuit of its own: whether the last "
        "one is at work earlier, interp-run circuit --keep tests. A click goes to the nearest checkpoint."
    )
    columns = [
        *([Column("run", "run")] if frame["run"].nunique() > 1 else []),
        Column("step", "step"),
        Column("edges", "size", lambda row: size_text(row["size"], row["total"])),
        Column("faithfulness [95% CI]", "faithfulness", faithfulness_text),
        Column("best of 20 random", "random", lambda row: share(row["random"])),
        Column("metric", "metric"),
        Column("unedited", "clean"),
    ]
    table = Table(
        frame, "", "Circuits at every checkpoint.", columns, "report-circuits", tall=len(frame) > 20
    )
    return [
        Beside(
            [circuit_figure(view, frame) for view in views if view.name in set(frame["run"])], TITLE, caption
        ),
        table,
    ]


def size_text(size: float, total: int) -> str:
    return "no gap" if size != size else f"{size:.0f} of {total}"


def circuit_figure(view: View, frame: pandas.DataFrame) -> Section:
    """Draws the size of the smallest faithful circuit, its faithfulness and the metric over checkpoints."""
    from plotly.subplots import make_subplots

    rows = frame[frame["run"] == view.name].sort_values("step")
    (metric,) = dict.fromkeys(rows["metric"])
    panels = {"edges": "size", "faithfulness": "faithfulness", metric: "clean"}
    total_height = PANEL * len(panels) + GAP * (len(panels) - 1)
    figure = make_subplots(rows=len(panels), cols=1, shared_xaxes=True, vertical_spacing=GAP / total_height)
    steps = rows["step"].tolist()
    for row, (name, column) in enumerate(panels.items(), start=1):
        values = rounded(rows[column].to_numpy(dtype=float))
        error: dict[str, Any] = {}
        if column == "faithfulness":
            ends = {
                "array": rows["faithfulness_ci_high"] - rows[column],
                "arrayminus": rows[column] - rows["faithfulness_ci_low"],
            }
            error = {
                "error_y": {"type": "data", "symmetric": False}
                | {end: rounded(lengths.to_numpy(dtype=float)) for end, lengths in ends.items()}
            }
        figure.add_scatter(
            x=steps,
            y=values,
            mode="lines+markers",
            line={"color": COLOURS["light"][row - 1], "width": 1.6},
            marker={"size": 7},
            showlegend=False,
            hovertemplate=f"{name}: %{{y:.4g}}<extra></extra>",
            **error,
            row=row,
            col=1,
        )
        axis = value_axis(metric, values) if column == "clean" else {"rangemode": "tozero"}
        figure.update_yaxes(title_text=name, row=row, col=1, **axis)
    figure.update_xaxes(title_text="step", rangemode="tozero", row=len(panels), col=1)
    top = 60 if view.beside else 20
    figure.update_layout(
        shapes=[step_line()], hovermode="x", margin={"l": 65, "r": 15, "t": top, "b": BOTTOM}
    )
    alt = f"edges of the smallest faithful circuit, its faithfulness and {metric} at every checkpoint"
    return stepped(view, figure, move_line(view), alt, top + total_height + BOTTOM, picks=view.steps)
