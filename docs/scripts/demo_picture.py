"""docs/images/demo.png: a matrix that the shipped model fills in before and after its drop, below its training curve.

    python -P docs/scripts/demo_picture.py

measures as `interp-run demo` does. Needs kaleido and a Chrome or Chromium.
"""

from pathlib import Path
from typing import Any

import numpy as np
from plotly.subplots import make_subplots

from circuits.figures.panel_grid import COLOURS, DIVERGING, INK, TEMPLATE
from interp_tasks.demo import MATRIX_RUN, median_matrix_blanks_completions
from interp_tasks.measurement.logged_runs import declared_by_run, read_runs
from interp_tasks.measurement.options_and_examples import Examples

PICTURE = Path(__file__).parents[1] / "images" / "demo.png"
WIDTH, HEIGHT, SCALE = 900, 480, 1.35
#: The steps of the checkpoints before and after the drop.
BEFORE, AFTER = 4_000, 44_000
TITLES = (
    "",
    "the truth: the {hidden} outlined<br>entries are blank",
    f"what it fills in<br>at step {BEFORE:,}",
    f"what it fills in<br>at step {AFTER:,}",
    "the same with uniform<br>attention in every head",
)


def draw_curve(figure: Any) -> None:
    """Draws the error at the blanks over training, the error of answering 0 and both steps in the first row."""
    (log,) = read_runs(MATRIX_RUN)
    level = declared_by_run(log, "plateau_levels")["mse_masked"]
    steps, values = log.finite_as_lists("mse_masked")
    first = {"row": 1, "col": 1}
    figure.add_scatter(x=steps, y=values, mode="lines", line={"color": COLOURS[0], "width": 2}, **first)
    guess = f"answering 0 at every blank: {level:.4f}"
    dashes = {"dash": "dash", "color": INK, "width": 1.2}
    figure.add_hline(level, line=dashes, annotation={"text": guess, "xanchor": "right", "x": 0.985}, **first)
    for step, side in ((BEFORE, "right"), (AFTER, "left")):
        line = {"color": INK, "width": 2}
        figure.add_vline(step, line=line, annotation_text=f"step {step:,}", annotation_position=side, **first)
    figure.update_xaxes(title={"text": "training step"}, tickformat=",", range=[0, AFTER], **first)
    figure.update_yaxes(title={"text": "error at the blanks"}, range=[0, 0.29], **first)


def draw_matrices(figure: Any, matrices: Any, hidden: Any) -> None:
    """Draws matrices side by side in the second row, their blanks outlined and the other entries paler."""
    largest = float(max(abs(values).max() for values in matrices))
    for column, values in enumerate(matrices, start=1):
        cells = {"colorscale": DIVERGING, "zmin": -largest, "zmax": largest, "showscale": False}
        for entries, opacity in ((values, 0.45), (np.where(hidden, values, np.nan), 1.0)):
            figure.add_heatmap(z=entries, opacity=opacity, xgap=2, ygap=2, row=2, col=column, **cells)
        for row, entry in zip(*hidden.nonzero(), strict=True):
            box = {"x0": entry - 0.45, "x1": entry + 0.45, "y0": row - 0.45, "y1": row + 0.45}
            figure.add_shape(**box, line={"color": INK, "width": 1.6}, row=2, col=column)
        figure.update_xaxes(visible=False, row=2, col=column)
        figure.update_yaxes(visible=False, autorange="reversed", row=2, col=column)


def main() -> None:
    truth, hidden, made = median_matrix_blanks_completions(MATRIX_RUN, Examples(samples=256))
    figure = make_subplots(
        2,
        4,
        specs=[[{"colspan": 4}, None, None, None], [{}] * 4],
        row_heights=[0.38, 0.62],
        horizontal_spacing=0.035,
        vertical_spacing=0.22,
        subplot_titles=[title.format(hidden=hidden.sum()) for title in TITLES],
    )
    draw_curve(figure)
    draw_matrices(figure, [truth, made[BEFORE][0], *made[AFTER]], hidden)
    figure.update_annotations(font_size=13)
    margins = {"l": 70, "r": 20, "t": 16, "b": 16}
    figure.update_layout(template=TEMPLATE, showlegend=False, font_size=13, margin=margins)
    figure.write_image(PICTURE, width=WIDTH, height=HEIGHT, scale=SCALE)
    print(PICTURE, PICTURE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
