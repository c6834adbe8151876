"""docs/images/*.svg: training curves that the pages of results show, drawn from the logs that ship.

Run it as `python -P docs/scripts/result_figures.py`. Needs kaleido and a Chrome or Chromium.
"""

from pathlib import Path

import plotly.graph_objects as go

from interp_tasks.checkpoints.refs import find_run
from interp_tasks.checkpoints.run_files import read_metrics

IMAGES = Path(__file__).parents[1] / "images"
MATRIX = [
    "zoo:matrix-completion-7x7",
    *(f"zoo:matrix-completion-7x7-seeds/seed-{seed}" for seed in range(1, 5)),
]
ADDITION = [f"zoo:modular-addition-nanda/seed-{seed}" for seed in range(5)]
#: The best colours to tell apart, of Okabe and Ito.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")


def curves(runs: list[str], metric: str, title: str, log: bool = False) -> go.Figure:
    """Returns a curve of a validation metric for each run, by seed."""
    figure = go.Figure()
    for seed, (run, colour) in enumerate(zip(runs, COLOURS, strict=True)):
        lines = read_metrics(find_run(run))
        # A point in three is enough for the eye.
        points = [(line["step"], line["validation"][metric]) for line in lines[::3]]
        steps, values = zip(*points, strict=True)
        figure.add_scatter(
            x=steps, y=values, mode="lines", line={"color": colour, "width": 1.6}, name=f"seed {seed}"
        )
    figure.update_layout(
        template="simple_white",
        font={"size": 14, "family": "Arial, sans-serif"},
        width=760,
        height=340,
        margin={"l": 70, "r": 16, "t": 16, "b": 56},
        xaxis={"title": {"text": "step"}, "tickformat": ","},
        yaxis={"title": {"text": title}, "type": "log" if log else "linear", "rangemode": "tozero"},
    )
    return figure


if __name__ == "__main__":
    drop = curves(MATRIX, "mse_masked", "error at hidden entries")
    drop.add_hline(
        y=0.2222, line={"dash": "dot", "color": "#666", "width": 1.5}, annotation_text="guessing 0"
    )
    drop.write_image(IMAGES / "plateau-and-fall.svg")
    curves(ADDITION, "accuracy", "accuracy on held-out pairs").write_image(IMAGES / "grokking-seeds.svg")
