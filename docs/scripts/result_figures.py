"""docs/images/*.svg: figures of the pages of results, drawn from the logs that ship or from a page's own table.

Run it as `python -P docs/scripts/result_figures.py [NAME ...]`. Needs kaleido and a Chrome or Chromium.
"""

import math
import re
import sys
from pathlib import Path
from typing import Any

import pandas
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from circuits.figures.layout import COLOURS, INK, TEMPLATE, series_style
from interp_tasks import experiments
from interp_tasks.checkpoints.refs import find_run
from interp_tasks.checkpoints.run_files import read_metrics

IMAGES, RESULTS = (Path(__file__).parents[1] / name for name in ("images", "results"))
FLAGSHIP, SEEDS = "zoo:matrix-completion-7x7", "zoo:matrix-completion-7x7-seeds/seed-{}"
TAUGHT = "zoo:matrix-completion-7x7-taught"
MIIII = [f"zoo:miiii-113-paper{rest}" for rest in ("", "-seeds/seed-1", "-seeds/seed-2")]
LAST = 65_536
#: The variance of an entry: the error of guessing 0.
VARIANCE = 2 / 9
#: Arm -> what its student is given, and the height of the label beside its end; the control has no folder.
ARMS = {
    "post": ("maps of @post", 0.2),
    "post-layers-1-2": ("maps of @post, layers 1, 2", 0.35),
    "query-key": ("all but query and key weights", 0.74),
    "rest": ("all but MLPs and read-out", 0.83),
    "onset": ("maps of @onset", 0.94),
    "pre": ("maps of @pre (placebo)", 1.03),
    "": ("nothing: ends after 11,475", 1.12),
}
DASHES = {"seed-0": "solid", "seed-1": "dot", "seed-2": "dash"}
#: The last step of the arms.
LONGEST = 2_000


def points(run: str, metric: str, every: int = 1) -> tuple[list[int], list[float]]:
    """Returns the steps and the values of a validation metric, one logged line in `every`."""
    lines = read_metrics(find_run(run))[::every]
    return [line["step"] for line in lines], [line["validation"][metric] for line in lines]


def laid_out(figure: Any, y: str, height: int = 340, **axis: Any) -> Any:
    """Returns the figure in the library's template, with a legend below."""
    legend = {"orientation": "h", "x": 0, "y": -0.22, "yanchor": "top"}
    margins = {"l": 70, "r": 16, "t": 16, "b": 56}
    figure.update_layout(
        template=TEMPLATE, font_size=14, width=760, height=height, margin=margins, legend=legend
    )
    figure.update_xaxes(title={"text": "training step"}, tickformat=",", **axis)
    figure.update_yaxes(title={"text": y}, rangemode="tozero")
    return figure


def curves(runs: list[str], metric: str, title: str) -> Any:
    """Returns a curve of a validation metric for each run, by seed."""
    figure = go.Figure()
    for seed, run in enumerate(runs):
        # A point in three is enough for the eye.
        steps, values = points(run, metric, every=3)
        line = {"color": COLOURS[seed], "width": 1.6}
        figure.add_scatter(x=steps, y=values, mode="lines", line=line, name=f"seed {seed}")
    return laid_out(figure, title)


def plateau_and_fall() -> Any:
    runs = [FLAGSHIP, *map(SEEDS.format, range(1, 5))]
    figure = curves(runs, "mse_masked", "error at hidden entries")
    return figure.add_hline(
        VARIANCE, line={"dash": "dot", "color": INK, "width": 1.5}, annotation_text="guessing 0: 0.2222"
    )


def grokking_seeds() -> Any:
    runs = [f"zoo:modular-addition-nanda/seed-{seed}" for seed in range(5)]
    return curves(runs, "accuracy", "accuracy on held-out pairs")


def taught() -> Any:
    """Returns the error of students that are given a part of a trained model, beside their controls'."""
    figure = go.Figure()
    for colour, (arm, (given, height)) in zip(COLOURS, ARMS.items(), strict=True):
        label = {"x": 1.01, "xref": "paper", "xanchor": "left", "y": height, "showarrow": False}
        figure.add_annotation(text=given, font={"color": colour, "size": 13}, **label)
        runs = {name: f"{TAUGHT}/{arm}/{name}" for name in DASHES}
        runs = runs if arm else {"seed-0": FLAGSHIP, "seed-1": SEEDS.format(1), "seed-2": SEEDS.format(2)}
        for name, run in runs.items():
            steps, values = points(run, "mse_masked")
            drawn = [(step, value / VARIANCE) for step, value in zip(steps, values, strict=True)]
            x, y = zip(*(point for point in drawn if 0 < point[0] <= LONGEST), strict=True)
            line = {"color": colour, "width": 2.0, "dash": DASHES[name]}
            figure.add_scatter(x=x, y=y, mode="lines", line=line, showlegend=False)
    where = {"annotation_text": "plateau ends: 0.9", "annotation_position": "bottom left"}
    figure.add_hline(0.9, line={"dash": "dash", "color": INK, "width": 1}, **where)
    ticks = {"tickvals": [1, 10, 100, 1_000], "tickangle": 0}
    laid_out(figure, "error at blanks, of the variance", 400, type="log", **ticks)
    return figure.update_layout(margin_r=235).update_yaxes(range=[0, 1.3])


def primes_in_order() -> Any:
    """Returns the step at which each prime's validation accuracy reaches 95%, for each seed of the published size."""
    figure = go.Figure()
    for seed, run in enumerate(MIIII):
        table = experiments.generalisation(run).frame
        table = table[(table["metric"] == "step at 95%") & (table["split"] == "validation")]
        table = table[table["variant"] != "accuracy"]
        primes = table["variant"].str.removeprefix("accuracy_").astype(int)
        colour, symbol = series_style(seed)
        reached = table["value"].notna()
        for kept, name, filled in ((reached, f"seed {seed}", ""), (~reached, f"seed {seed}, never", "-open")):
            # What never comes stands above the last step, one row for each seed.
            steps = table["value"].fillna(LAST * 1.25**seed * 1.15)[kept]
            look = {"color": colour, "symbol": symbol + filled, "size": 8}
            figure.add_scatter(x=primes[kept], y=steps, mode="markers", marker=look, name=name)
    figure.add_hline(
        LAST, line={"dash": "dash", "color": INK, "width": 1}, annotation_text="last step: 65,536"
    )
    laid_out(figure, "step to 95% (log scale)", 400)
    figure.update_xaxes(title={"text": "prime"}, tickvals=[2, 11, 23, 37, 53, 67, 79, 97, 109])
    return figure.update_yaxes(
        type="log", tickvals=[300, 1_000, 3_000, 10_000, 30_000, 65_536], tickformat=","
    )


def copying_needs_attention() -> Any:
    """Returns the page's errors at copying under uniform attention, over the width of the initial weights."""
    page = (Path(__file__).parents[1] / "results" / "beyond-the-papers.md").read_text(encoding="utf-8")
    row = re.compile(
        r"^\| (pre|post) \| N.*? \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \[([\d.]+), ([\d.]+)\]", re.MULTILINE
    )
    figure = go.Figure()
    for at, norm in enumerate(("pre", "post")):
        width, error, low, high = zip(
            *([float(x) for x in found[1:]] for found in row.findall(page) if found[0] == norm), strict=True
        )
        colour, symbol = series_style(at)
        ends = {"array": [b - a for a, b in zip(error, high, strict=True)], "symmetric": False}
        ends |= {"arrayminus": [a - b for a, b in zip(error, low, strict=True)], "thickness": 1.5}
        # Side by side: both forms were trained from the same three widths.
        x = [one * 1.03 ** (2 * at - 1) for one in width]
        look = {"color": colour, "symbol": symbol, "size": 10}
        figure.add_scatter(x=x, y=error, error_y=ends, mode="markers", marker=look, name=f"{norm}-norm")
    figure.add_hline(0.05, line={"dash": "dash", "color": INK, "width": 1})
    figure.add_annotation(
        text="bound: 0.05", x=0.02, xref="paper", y=math.log10(0.05), yshift=9, showarrow=False
    )
    laid_out(figure, "error at observed entries,<br>of the variance (log scale)")
    figure.update_yaxes(type="log", tickvals=[0.001, 0.01, 0.1, 1], range=[-3.3, 0])
    return figure.update_xaxes(
        type="log", tickvals=[0.11, 0.57, 1.13], title={"text": "std of the initial weights × √d (log scale)"}
    )


def learning_coefficient() -> Any:
    """Returns the coefficient, as a fraction of the plateau's, beside held-out accuracy: a panel for each seed."""
    table = pandas.read_csv(RESULTS / "learning-coefficient.csv")
    seeds = sorted(table["seed"].unique())
    titles = [f"seed {seed}" for seed in seeds]
    figure = make_subplots(1, len(seeds), shared_yaxes=True, subplot_titles=titles, horizontal_spacing=0.03)
    named = {
        "coefficient": "coefficient, as a fraction of its first value",
        "accuracy": "accuracy on held-out pairs",
    }
    for at, seed in enumerate(seeds, 1):
        rows = table[table["seed"] == seed]
        for colour, (column, name) in zip(COLOURS, named.items(), strict=False):
            values = rows[column] / (rows[column].iloc[0] if column == "coefficient" else 1)
            look = {"line": {"color": colour, "width": 2}, "marker": {"size": 5}, "mode": "lines+markers"}
            figure.add_scatter(x=rows["step"], y=values, name=name, showlegend=at == 1, **look, row=1, col=at)
    laid_out(figure, "", 300)
    figure.update_xaxes(title={"text": ""}, tickvals=[0, 1_000, 2_000], range=[0, 2_550])
    figure.update_xaxes(title={"text": "training step"}, col=2)
    return figure.update_layout(margin_t=30)


def attention_and_loss() -> Any:
    """Returns how much of its way to the end a score, the norm of W_V and the error have gone, by step and seed."""
    table = pandas.read_csv(RESULTS / "attention-and-loss.csv")
    last = table["step"].max()
    ends = table[table["step"] == last].set_index("seed")
    figure = go.Figure()
    named = {"score": "best row or column score", "error": "error at blanks", "norm": "norm of W<sub>V</sub>"}
    for colour, (column, name) in zip(COLOURS, named.items(), strict=False):
        for dash, (seed, rows) in zip(
            DASHES.values(), table[table["seed"] >= 5].groupby("seed"), strict=False
        ):
            rows = rows[rows["step"] < last]
            end = ends[column].get(seed, ends[column].mean())
            share = (rows[column] - rows[column].iloc[0]) / (end - rows[column].iloc[0])
            look = {"line": {"color": colour, "width": 2, "dash": dash}, "mode": "lines"}
            figure.add_scatter(x=rows["step"], y=share, name=name, showlegend=dash == "solid", **look)
    figure.add_hline(
        0.1,
        line={"dash": "dash", "color": INK, "width": 1},
        annotation_text="started: a tenth",
        annotation_position="top left",
    )
    laid_out(figure, "share of its way to the end")
    return figure.update_yaxes(tickformat=".0%")


PICTURES = {
    "copying-needs-attention": copying_needs_attention,
    "primes-in-order": primes_in_order,
    "plateau-and-fall": plateau_and_fall,
    "grokking-seeds": grokking_seeds,
    "what-the-plateau-waits-for": taught,
    "attention-and-loss": attention_and_loss,
    "learning-coefficient": learning_coefficient,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]().write_image(IMAGES / f"{name}.svg")
        print(name, (IMAGES / f"{name}.svg").stat().st_size, "bytes")
