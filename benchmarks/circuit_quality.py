"""How faithful the circuits of a ranking are, by size, and what the ranking cost: ours and those of other libraries.

    python benchmarks/circuit_quality.py prepare FOLDER [--stories RUN] [--splits 3]
    python benchmarks/circuit_quality.py rank FOLDER
    PEER/bin/python benchmarks/alternatives/rank_with_NAME.py FOLDER      # each in its own environment
    python benchmarks/circuit_quality.py measure FOLDER
    python benchmarks/circuit_quality.py show FOLDER
    python benchmarks/circuit_quality.py draw FOLDER FILE.svg

`prepare` writes a folder for each model and split: weights, prompts that circuits are found on, others that they are
tested on, the source that edges outside a circuit carry, and the metric, a weight for each logit; without --stories no
language model. `rank` and the other libraries write a ranking each: edges by name with scores, the forwards (passes of
all prompts; backward passes are apart), and the processor seconds of one thread, the median of five calls. `measure`
tests all of them by `circuit.curve`, exactly, on the other prompts, and compares a circuit of each library with its own
number for it.
`show` prints a table for each model; where the circuit is known, with the AUROC of its edges.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from alternatives.ranking import Problem, first, measured
from circuit_problems import candidates, prepare
from known_circuits import scores
from torch import Tensor
from transformer_lens import HookedTransformer

from circuits import circuit, patch, plots
from circuits.figures.panel_grid import INK, draw_panels, untitled
from circuits.figures.panel_kinds import Series
from circuits.figures.panel_kinds import curve as lines

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8)
SHOWN = (0.05, 0.1, 0.2, 0.4)
#: Panels of the picture: model -> title, and the ranking of another library with the largest CPR there.
PANELS = {
    "stories": ("language model, 1,701 edges", "GIM's gradients in CircuitKIT's EAP"),
    "induction": ("induction, 81 edges", "GIM's gradients in CircuitKIT's EAP"),
    "addition": ("modular addition, 23 edges", "CircuitKIT: EAP-IG"),
    "completion": ("7×7 completion, 1,519 edges", "GIM's gradients in CircuitKIT's EAP-IG"),
}
#: Curves of the picture, the thin one above: ranking -> name, the number of its colour and symbol, width.
DRAWN = {
    "ours: removal from integrated": ("prune", 2, 3.5),
    "ours: gim, at base": ("gim, steps=0", 0, 3.0),
    "ours: integrated": ("integrated (default)", 1, 1.8),
}
PEER = "best other library"
Given = tuple[HookedTransformer, Tensor, Tensor, Any, Tensor]


def screened(given: Given, by: str = "estimate", exact: float | str = 0, **how: Any) -> list[str]:
    """Ranks by `patch.edges`; `exact` is a share of all edges, or all."""
    model, base, source, metric, rows = given
    count = exact if isinstance(exact, str) or not exact else max(1, round(exact * len(candidates(model))))
    options = {"batch": rows, "draws": 1, "flips": 1, "exact": count}
    # Measured edges come before those that are only estimated only where they are larger.
    names = patch.edges(model, base, source, metric, **options, **how).ranking(by=by)
    return [next(iter(circuit.edges([name], model))) for name in names]


def pruned(given: Given, **how: Any) -> list[str]:
    """Ranks by `circuit.prune`, from a ranking of `screened`."""
    model, base, source, metric, rows = given
    return circuit.prune(model, screened(given, **how), base, source, metric, batch=rows)


GIM_AT_BASE: dict[str, Any] = {"method": "gim", "steps": 0}
OURS: dict[str, Callable[[Given], list[str]]] = {
    "gradient": partial(screened, method="gradient"),
    "integrated": partial(screened, method="integrated"),
    "gim": partial(screened, method="gim"),
    "gim, at base": partial(screened, **GIM_AT_BASE),
    "gim, one point": partial(screened, method="gim", steps=1),
    "integrated, top 10% exact": partial(screened, by="best", exact=0.1, method="integrated"),
    "gim, top 10% exact": partial(screened, by="best", exact=0.1, method="gim"),
    "all exact": partial(screened, by="effect", exact="all", method="gradient"),
    "removal from integrated": partial(pruned, method="integrated"),
    "removal from gim": partial(pruned, **GIM_AT_BASE),
}


def rank(folder: Path, only: str, rankings: str) -> None:
    for path in sorted(folder.glob(only)):
        problem = Problem.load(path)
        model, (base, source, metric) = problem.model(), problem.half("found")
        given = model, base, source, metric, torch.arange(len(base))
        for name in fnmatch.filter(OURS, rankings):
            order, spent = measured(model, len(base), partial(OURS[name], given))
            by_place = {edge: float(len(order) - at) for at, edge in enumerate(order)}
            problem.write(f"ours: {name}", by_place, **spent)


def measure(folder: Path, only: str) -> None:
    """Writes points.csv and areas.csv of each problem: by ranking the curve, and what it cost."""
    for path in sorted(folder.glob(only)):
        problem = Problem.load(path)
        rankings = {
            each["method"]: each for each in (json.loads(file.read_text()) for file in path.glob("ranking.*"))
        }
        if not rankings:
            continue
        model, (base, source, metric) = problem.model(), problem.half("tested")
        orders = {name: first(each["edges"], len(each["edges"])) for name, each in sorted(rankings.items())}
        own = {name: each["own"] for name, each in rankings.items() if each["own"]}
        sizes = [*SHARES, *sorted({each["size"] for each in own.values()})]
        rows = torch.arange(len(base))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            curve = circuit.curve(model, orders, base, source, metric, batch=rows, sizes=sizes)
        values = curve.frame.set_index(["ranking", "size"])["value"]
        for name, theirs in own.items():
            ours = f"by circuit.curve {values[name, theirs['size']]:.5f}"
            print(
                f"{path.name:<24}{name:<40}first {theirs['size']}: {theirs['value']:.5f}, {ours}", flush=True
            )
        costs = curve.areas.assign(
            **{
                cost: [rankings[name][cost] for name in curve.areas["ranking"]]
                for cost in ("forwards", "seconds")
            }
        )
        if problem.truth is not None:
            sides = candidates(model), circuit.edges(problem.truth, model)
            costs["AUROC"] = [auroc(rankings[name]["edges"], *sides) for name in costs["ranking"]]
        for name, frame in (("points", curve.frame), ("areas", costs)):
            frame.assign(problem=path.name, model=problem.name).to_csv(path / f"{name}.csv", index=False)


def auroc(edges: dict[str, float], every: list[str], truth: circuit.Circuit) -> float:
    return scores({edge: abs(edges.get(edge, 0.0)) for edge in every}, truth)["AUROC"]


def gathered(folder: Path, name: str) -> pd.DataFrame:
    return pd.concat([pd.read_csv(file) for file in sorted(folder.glob(f"*/{name}.csv"))])


def show(folder: Path) -> None:
    """Prints a table for each model: means over splits, with the lowest and highest end of their 95% intervals.

    Costs are those of the first split.
    """
    points, areas = gathered(folder, "points"), gathered(folder, "areas")
    grouped = areas.groupby(["model", "ranking"])
    table = pd.DataFrame()
    for share in SHOWN:
        near = points.assign(off=(points["share"] - share).abs()).sort_values("off", kind="stable")
        nearest = near.groupby(["problem", "ranking"]).first().reset_index()
        table[f"{share:.0%}"] = nearest.groupby(["model", "ranking"])["faithfulness"].mean()
    for area in ("CPR", "CMD"):
        ends = grouped[area].mean(), grouped[f"{area}_ci_low"].min(), grouped[f"{area}_ci_high"].max()
        table[area] = [f"{mean:.3f} [{low:.3f}, {high:.3f}]" for mean, low, high in zip(*ends, strict=True)]
    for cost in ("forwards", "seconds"):
        table[cost] = grouped[cost].first()
    table["AUROC"] = grouped["AUROC"].mean() if "AUROC" in areas else float("nan")
    table["splits"] = grouped.size()
    for model, part in table.groupby(level="model"):
        shown = part.droplevel("model").sort_values("CPR", ascending=False)
        print(f"\n{model}\n{shown.dropna(axis=1, how='all').round(2).to_string()}")
    if "AUROC" in areas:
        known = areas.dropna(subset="AUROC").groupby("ranking")["AUROC"].agg(["mean", "min", "size"])
        print(f"\nAUROC, all known circuits\n{known.round(3).to_string()}")


def picture(folder: Path, file: Path) -> None:
    """Draws the curves of our rankings and of the best other, means over splits, a panel for each trained model."""
    points = gathered(folder, "points")
    shares = [1, 2, 5, 10, 20, 50, 100]
    ticks = {"tickvals": shares, "ticktext": [f"{share}%" for share in shares], "range": [-0.07, 2.07]}
    panels = []
    for model, (title, peer) in PANELS.items():
        part = points[(points["model"] == model) & points["share"].gt(0.009)]
        mean = part.groupby(["ranking", "size"])[["share", "faithfulness"]].mean()
        series = {}
        for ranking, (name, look, width) in DRAWN.items():
            style = {"line": {"width": width}, "marker": {"size": 8}}
            series[name] = along(mean.loc[ranking], look=look, style=style)
        # Open and dotted, so that a curve of ours that it coincides with is seen below it.
        grey = {"color": INK, "width": 1.5}
        style = {
            "line": grey | {"dash": "dot"},
            "marker": {"symbol": "circle-open", "size": 11, "line": grey},
        }
        series[PEER] = along(mean.loc[peer], style=style | {"marker_color": INK})
        panels.append(lines(series, title, x="edges kept", y="faithfulness", log_x=True, x_axis=ticks))
    figure = untitled(draw_panels(panels, columns=2, share_y=True, font_size=14))
    figure.update_yaxes(range=[-0.05, 1.05], dtick=0.2)
    plots.save(figure.update_annotations(font_size=15), file, width=720, scale=1)


def along(curve: pd.DataFrame, **more: Any) -> Series:
    """Returns faithfulness over the share of edges kept, in percent."""
    return Series((100 * curve["share"]).tolist(), curve["faithfulness"].tolist(), **more)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["prepare", "rank", "measure", "show", "draw"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path, nargs="?", help="of draw")
    parser.add_argument(
        "--stories", metavar="RUN", help="the language model, imported by `interp-run runs import`"
    )
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--only", default="*.*", help="pattern of problems to rank or measure")
    parser.add_argument("--rankings", default="*", help="pattern of ours to rank by")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.step == "prepare":
        prepare(given.folder, given.stories, given.splits)
    elif given.step == "rank":
        rank(given.folder, given.only, given.rankings)
    elif given.step == "measure":
        measure(given.folder, given.only)
    elif given.step == "show":
        show(given.folder)
    else:
        picture(given.folder, given.file)


if __name__ == "__main__":
    main()
