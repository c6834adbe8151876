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
import torch
from plotly.subplots import make_subplots

from circuits import run as run_model
from circuits.figures.panel_grid import COLOURS, INK, TEMPLATE, colour_and_symbol, draw_panels
from circuits.figures.panel_kinds import Series, curve, heatmap
from interp_tasks import experiments, load_checkpoint
from interp_tasks.checkpoints.checkpoint_refs import find_run_folder
from interp_tasks.checkpoints.run_reader import read_metrics, read_run
from interp_tasks.demo import median_matrix_blanks_completions
from interp_tasks.measurement.options_and_examples import Examples
from interp_tasks.reproduction import reproduce
from interp_tasks.reproduction.runs_and_records import read_records_file, shipped_records_file
from interp_tasks.reproduction.verdict_text import headline_verdicts

IMAGES, RESULTS = (Path(__file__).parents[1] / name for name in ("images", "results"))
FLAGSHIP, SEEDS = "zoo:matrix-completion-7x7", "zoo:matrix-completion-7x7-seeds/seed-{}"
TAUGHT = "zoo:matrix-completion-7x7-taught"
MIIII = [f"zoo:miiii-113-paper{rest}" for rest in ("", "-seeds/seed-1", "-seeds/seed-2")]
LAST = 65_536
SHOWN_PRIMES = [2, 3, 5, 7, 11, 17, 23, 31, 41, 47, 59, 67, 73, 83, 97, 103, 109]
#: The variance of an entry: the error of guessing 0.
VARIANCE = 2 / 9
#: What a matrix is shown at -> its name.
FILLED_AT = {4_000: "on the plateau", 11_500: "the fall begins", 44_000: "the end"}
#: Template -> what heads look at. Dense seeds are stored every 100 steps from `START` on; at `LONG` the flagship ends.
SCORES = {
    "row": "own row",
    "column": "own column",
    "mask_ignore": "observed entries",
    "hidden": "hidden (MASK)",
}
START, DENSE_UNTIL, LONG = 8_000, 13_000, 44_000
#: Arm -> what its student is given, where the label stands (step, height), colour; the control has no folder.
ARMS = {
    "post": ("maps of @post", 2_150, 0.2, COLOURS[0]),
    "post-layers-1-2": ("maps of @post,<br>layers 1, 2", 2_150, 0.37, COLOURS[1]),
    "query-key": ("all but query<br>and key weights", 170, 0.8, COLOURS[2]),
    "rest": ("all but MLPs<br>and read-out", 2_150, 0.54, COLOURS[3]),
    "onset": ("maps of<br>@onset", 15_500, 1.03, COLOURS[4]),
    "pre": ("maps of @pre (placebo)", 1_500, 1.06, INK),
    "": ("nothing", 20_500, 0.75, "#737373"),
}
#: A line to compare with.
THRESHOLD = {"dash": "dash", "color": INK, "width": 1}
DASHES = {"seed-0": "solid", "seed-1": "dot", "seed-2": "dash"}


def points(run: str, metric: str, every: int = 1) -> tuple[list[int], list[float]]:
    """Returns the steps and the values of a validation metric, one logged line in `every`."""
    lines = read_metrics(find_run_folder(run))[::every]
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
        line = {"color": COLOURS[seed], "width": 1.8}
        figure.add_scatter(x=steps, y=values, mode="lines", line=line, name=f"seed {seed}")
    return laid_out(figure, title)


def plateau_and_fall() -> Any:
    runs = [FLAGSHIP, *map(SEEDS.format, range(1, 5))]
    figure = curves(runs, "mse_masked", "error at hidden entries")
    drop = experiments.drops(FLAGSHIP).frame.set_index("metric")["value"]
    label = {"annotation_text": "10% to 90% of seed 0's fall", "annotation_position": "bottom right"}
    figure.add_vrect(drop["onset"], drop["end"], fillcolor=COLOURS[0], opacity=0.1, line_width=0, **label)
    return figure.add_hline(
        VARIANCE, line={"dash": "dot", "color": INK, "width": 1.5}, annotation_text="guessing 0: 0.2222"
    )


def filled_in() -> Any:
    """Returns a matrix as the flagship fills it in, before its first step and at three stored ones, and the truth."""
    truth, hidden, made = median_matrix_blanks_completions(FLAGSHIP, Examples(samples=256))
    task, config = load_checkpoint(f"{FLAGSHIP}@pre").task, read_run(find_run_folder(FLAGSHIP))["config"]
    model = task.build_model(config["train"]["seed"], task.Model(**config["model"]))
    tokens = task.batch(*(torch.tensor(each).flatten()[None] for each in (truth, hidden))).tokens
    shown = {"step 0<br>before training": run_model(model, tokens)[0, :, 0].reshape(truth.shape)}
    shown |= {f"step {step:,}<br>{when}": made[step][0] for step, when in FILLED_AT.items()}
    shown["<br>the truth"] = truth
    look = {"unit": "entry", "signed": True, "end": float(abs(truth).max()), "numbers": False, "row": 20}
    panels = [heatmap(entries, name, bar=entries is truth, **look) for name, entries in shown.items()]
    figure = draw_panels(panels, columns=len(panels), share_y=True)
    for column in range(1, len(panels) + 1):
        for row, entry in zip(*hidden.nonzero(), strict=True):
            box = {"x0": entry - 0.5, "x1": entry + 0.5, "y0": row - 0.5, "y1": row + 0.5}
            figure.add_shape(**box, line={"color": INK, "width": 2}, row=1, col=column)
    figure.update_xaxes(visible=False).update_yaxes(visible=False)
    margins = {"l": 8, "r": 76, "t": 50, "b": 8}
    return figure.update_layout(width=760, height=190, margin=margins, font_size=14)


def recorded_scores(run: str) -> pandas.DataFrame:
    """Returns the largest scores of any head that the verdicts on a run rest on: a row for each step."""
    records = read_records_file(shipped_records_file("matrix-completion")).values()
    asked = ("attention-random-masks", run.removeprefix("zoo:"), "")
    (found,) = (one.row_dicts() for one in records if (one.study, one.on, one.control) == asked)
    table = pandas.DataFrame(found)
    table["metric"] = table["metric"].str.removeprefix("largest score: ")
    return table.pivot_table(index="step", columns="metric", values="value").reset_index()


def scores_by_share() -> dict[int, pandas.DataFrame]:
    """Returns the largest scores of any head and the share of the fall that is made, by seed of the flagship."""
    table = pandas.read_csv(RESULTS / "attention-and-loss.csv")
    ends = table[table["step"] == LONG].set_index("seed")["error"]
    found = {}
    for seed, rows in table.groupby("seed"):
        if seed < 5:
            run = SEEDS.format(seed) if seed else FLAGSHIP
            rows = recorded_scores(run) if seed else rows
            error = pandas.Series(dict(zip(*points(run, "mse_masked"), strict=True)))
            rows, start = rows.assign(error=rows["step"].map(error)), error[START]
        else:
            rows = rows[rows["step"] >= START]
            start = rows["error"].iloc[0]
        found[seed] = rows.assign(share=(start - rows["error"]) / (start - ends[seed]))
    return found


def scores_and_fall() -> Any:
    """Returns the largest scores of any head over the share of the fall: lines, and dots where few steps are known."""
    panels, known = [], scores_by_share()
    dots = pandas.concat([known.pop(seed) for seed in range(1, 5)])
    axes = {"x": "share of the fall", "y": "highest score of any head", "y_axis": {"range": [-0.02, 1.05]}}
    ticks = {"tickvals": [0, 0.5, 1], "ticktext": ["0", "50%", "100%"], "range": [-0.06, 1.06]}
    for template, title in SCORES.items():
        series = {}
        for look, (seed, rows) in enumerate(known.items()):
            # Four steps are joined by dots.
            style = {} if seed else {"line": {"dash": "dot"}}
            series[f"seed {seed}"] = Series(rows["share"], rows[template], look=look, style=style)
        few = dots.dropna(subset=[template])
        style = {"mode": "markers", "marker": {"color": INK, "symbol": "circle-open", "size": 6}}
        series["seeds 1 to 4"] = Series(few["share"], few[template], style=style)
        panels.append(curve(series, title, x_axis=ticks, **axes))
    figure = draw_panels(panels, columns=len(panels), share_y=True)
    margins = {"l": 64, "r": 12, "t": 30, "b": 90}
    return figure.update_layout(width=760, height=340, margin=margins, font_size=14)


def grokking_seeds() -> Any:
    runs = [f"zoo:modular-addition-nanda/seed-{seed}" for seed in range(5)]
    figure = curves(runs, "accuracy", "accuracy on held-out pairs")
    # All five stay at 100% from there on.
    return figure.update_xaxes(range=[0, 20_500]).update_yaxes(tickformat=".0%")


def taught() -> Any:
    """Returns the error of students that are given a part of a trained model, beside their controls'."""
    figure = go.Figure()
    for arm, (given, step, height, colour) in reversed(ARMS.items()):
        label = {"x": math.log10(step), "y": height, "xanchor": "left", "align": "left", "showarrow": False}
        figure.add_annotation(text=given, font={"color": colour, "size": 13}, **label)
        runs = {name: f"{TAUGHT}/{arm}/{name}" for name in DASHES}
        runs = runs if arm else {"seed-0": FLAGSHIP, "seed-1": SEEDS.format(1), "seed-2": SEEDS.format(2)}
        for name, run in runs.items():
            steps, values = points(run, "mse_masked")
            drawn = [(step, value / VARIANCE) for step, value in zip(steps, values, strict=True)]
            x, y = zip(*(point for point in drawn if point[0] > 0), strict=True)
            line = {"color": colour, "width": 2.0, "dash": DASHES[name]}
            figure.add_scatter(x=x, y=y, mode="lines", line=line, showlegend=False)
    where = {"annotation_text": "0.9", "annotation_position": "top right"}
    figure.add_hline(0.9, line=THRESHOLD, **where)
    # Of the first steps, which are alike, the last are drawn.
    ticks = {"tickvals": [10, 100, 1_000, 10_000], "range": [1, math.log10(LONG)]}
    laid_out(figure, "error at blanks<br>(1: all blanks guessed 0)", 420, type="log", **ticks)
    return figure.update_yaxes(range=[0, 1.2])


def primes_in_order() -> Any:
    """Returns the step at which each prime's validation accuracy reaches 95%, for each seed of the published size."""
    figure = go.Figure()
    for seed, run in enumerate(MIIII):
        table = experiments.generalisation(run).frame
        table = table[(table["metric"] == "step at 95%") & (table["split"] == "validation")]
        table = table[table["variant"] != "accuracy"]
        primes = table["variant"].str.removeprefix("accuracy_")
        colour, symbol = colour_and_symbol(seed)
        reached = table["value"].notna()
        for kept, filled in ((reached, ""), (~reached, "-open")):
            # What never comes stands above the last step, one row for each seed.
            steps = table["value"].fillna(LAST * 1.25**seed * 1.15)[kept]
            look = {"color": colour, "symbol": symbol + filled, "size": 8}
            shown = {"name": f"seed {seed}", "showlegend": not filled}
            figure.add_scatter(x=primes[kept], y=steps, mode="markers", marker=look, **shown)
    figure.add_hline(LAST, line=THRESHOLD)
    label = {"x": 0.01, "xref": "paper", "y": math.log10(LAST), "yanchor": "bottom", "showarrow": False}
    figure.add_annotation(text="above the line: not by the last step", **label)
    laid_out(figure, "first step at 95% validation<br>accuracy (log scale)", 400)
    # At even distances: the small primes are the point, and no two marks of a seed overlap.
    order = {"categoryorder": "array", "categoryarray": sorted(primes, key=int), "range": [-0.7, 28.7]}
    figure.update_xaxes(title={"text": "prime"}, type="category", tickvals=[*map(str, SHOWN_PRIMES)], **order)
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
        colour, symbol = colour_and_symbol(at)
        ends = {"array": [b - a for a, b in zip(error, high, strict=True)], "symmetric": False}
        ends |= {"arrayminus": [a - b for a, b in zip(error, low, strict=True)], "thickness": 1.5}
        # Side by side: both forms were trained from the same three widths.
        x = [one * 1.03 ** (2 * at - 1) for one in width]
        look = {"color": colour, "symbol": symbol, "size": 10}
        figure.add_scatter(x=x, y=error, error_y=ends, mode="markers", marker=look, name=f"{norm}-norm")
    figure.add_hline(0.05, line=THRESHOLD)
    figure.add_annotation(
        text="bound: 0.05", x=0.02, xref="paper", y=math.log10(0.05), yshift=9, showarrow=False
    )
    laid_out(figure, "error at observed entries,<br>of the variance (log scale)")
    figure.update_yaxes(type="log", tickvals=[0.001, 0.01, 0.1, 1], range=[-3.3, 0])
    return figure.update_xaxes(
        type="log", tickvals=[0.11, 0.57, 1.13], title={"text": "std of the initial weights × √d (log scale)"}
    )


def panel_for_each_seed(titles: list[str], columns: int) -> Any:
    """Returns an empty figure of panels side by side, which share the vertical axis."""
    rows = math.ceil(len(titles) / columns)
    spacing = {"horizontal_spacing": 0.04, "vertical_spacing": 0.16}
    return make_subplots(rows, columns, shared_yaxes=True, subplot_titles=titles, **spacing)


def learning_coefficient() -> Any:
    """Returns the coefficient, as a fraction of the plateau's, beside held-out accuracy: a panel for each seed."""
    table = pandas.read_csv(RESULTS / "learning-coefficient.csv")
    seeds = sorted(table["seed"].unique())
    figure = panel_for_each_seed([f"seed {seed}" if seed < 3 else f"seed {seed}, added" for seed in seeds], 3)
    named = {
        "coefficient": "coefficient,<br>as a fraction of<br>its first value",
        "accuracy": "accuracy on<br>held-out pairs",
    }
    for at, seed in enumerate(seeds):
        rows = table[table["seed"] == seed]
        place = {"row": 1 + at // 3, "col": 1 + at % 3}
        for look, (column, name) in enumerate(named.items()):
            values = rows[column] / (rows[column].iloc[0] if column == "coefficient" else 1)
            colour, symbol = colour_and_symbol(look)
            style = {"line": {"color": colour, "width": 2}, "marker": {"size": 6, "symbol": symbol}}
            figure.add_scatter(x=rows["step"], y=values, name=name, showlegend=not at, **style, **place)
    figure.update_traces(mode="lines+markers")
    figure.add_hline(0.5, line=THRESHOLD)
    laid_out(figure, "", 460).update_xaxes(tickvals=[0, 1_000, 2_000], range=[0, 2_550])
    figure.update_xaxes(title={"text": ""}, row=1)
    legend = {"orientation": "v", "x": 0.72, "y": 0.36, "yanchor": "top"}
    return figure.update_yaxes(range=[-0.03, 1.05]).update_layout(margin_t=30, legend=legend)


def attention_and_loss() -> Any:
    """Returns how much of its way a score, the norm of W_V and the error have gone: a panel for each seed."""
    table = pandas.read_csv(RESULTS / "attention-and-loss.csv")
    last = table["step"].max()
    ends = table[table["step"] == last].set_index("seed")
    named = {"score": "best row or column score", "error": "error at blanks", "norm": "norm of W<sub>V</sub>"}
    dense = table[(table["seed"] >= 5) & table["step"].between(START, DENSE_UNTIL)]
    seeds = sorted(dense["seed"].unique())
    figure = panel_for_each_seed([f"seed {seed}" for seed in seeds], len(seeds))
    for at, seed in enumerate(seeds, 1):
        rows = dense[dense["seed"] == seed]
        for colour, dash, (column, name) in zip(COLOURS, DASHES.values(), named.items(), strict=False):
            end = ends[column][seed]
            share = (rows[column] - rows[column].iloc[0]) / (end - rows[column].iloc[0])
            look = {"line": {"color": colour, "width": 2.5, "dash": dash}, "mode": "lines"}
            figure.add_scatter(x=rows["step"], y=share, name=name, showlegend=at == 1, **look, row=1, col=at)
    figure.add_hline(0.1, line=THRESHOLD)
    label = {"text": "started: a tenth", "yshift": 9, "xanchor": "left", "showarrow": False}
    figure.add_annotation(x=dense["step"].min(), y=0.1, **label, row=1, col=2)
    laid_out(figure, "", dtick=2_000).update_yaxes(tickformat=".0%")
    figure.update_yaxes(title={"text": "share of its way to the end"}, col=1)
    return figure.update_layout(margin_t=30)


#: Verdict -> colour and symbol.
VERDICTS = {
    "held": (COLOURS[0], "circle"),
    "undecided": (COLOURS[0], "circle-open"),
    "failed": (COLOURS[1], "diamond"),
}


def headline_dots() -> Any:
    """Returns matrix completion's headlines that are positive numbers: ours with its interval, bounds, published."""
    found = reproduce("matrix-completion")
    verdicts = found.frame.to_dict("records")
    every = [row for _, shown in headline_verdicts(found.paper, verdicts) for row in shown]
    # From the bottom up; a logarithm has no place for an interval around 0.
    rows = [row for row in reversed(every) if row["value_ci_low"] > 0]
    bounds = {claim.id: (claim.holds.above, claim.holds.below) for claim in found.paper.claim}
    figure = go.Figure()
    for verdict, (colour, symbol) in VERDICTS.items():
        of = [row for row in rows if row["verdict"] == verdict]
        spread = {
            "array": [row["value_ci_high"] - row["value"] for row in of],
            "arrayminus": [row["value"] - row["value_ci_low"] for row in of],
        }
        look = {"color": colour, "symbol": symbol, "size": 9, "line": {"width": 2}}
        x, y = [row["value"] for row in of], [row["claim"] for row in of]
        figure.add_scatter(x=x, y=y, mode="markers", marker=look, error_x=spread, name=verdict)
    ends = [(end, row["claim"]) for row in rows for end in bounds[row["claim"]] if end]
    published = [(row["published_number"], row["claim"]) for row in rows if row["published_number"]]
    for name, symbol, drawn in (
        ("bound of the rule", "line-ns-open", ends),
        ("published", "x-thin-open", published),
    ):
        x, y = zip(*drawn, strict=True)
        look = {"color": INK, "symbol": symbol, "size": 11, "line": {"width": 2}}
        figure.add_scatter(x=x, y=y, mode="markers", marker=look, name=name)
    laid_out(figure, "", 520, type="log", dtick=1).update_layout(margin_l=285, legend_y=-0.14)
    order = [row["claim"] for row in rows]
    figure.update_xaxes(
        title={"text": "fraction of the variance, the plateau or the baseline"}, tickformat="~g"
    )
    return figure.update_yaxes(categoryorder="array", categoryarray=order, rangemode="normal")


PICTURES = {
    "matrix-filled-in": filled_in,
    "scores-and-fall": scores_and_fall,
    "matrix-completion-headlines": headline_dots,
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
