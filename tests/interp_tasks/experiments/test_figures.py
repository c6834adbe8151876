"""Every experiment's figure shows the numbers of its result."""

import numpy as np
import pytest

from interp_tasks import experiments as e

MATRIX = [f"zoo:matrix-completion-4x4-small-init@{mark}" for mark in ("pre", "post")]
ADDITION = "zoo:modular-addition-113@post"
N = 8


def value(result):
    return result.frame["value"], result.frame["baseline"]


def of_heads(result):
    """Of a head alone the effect, of heads together the value."""
    alone = result.frame["variant"] == result.frame["layer"].astype(str) + "." + result.frame["head"].astype(
        str
    )
    return result.frame["effect"][alone], result.frame["value"][~alone], result.frame["baseline"][~alone]


CASES = {
    "ablation": (lambda: e.ablation(MATRIX, samples=N), value),
    "heads": (lambda: e.heads(MATRIX, samples=N), of_heads),
    "permute": (lambda: e.permute(MATRIX[1], 3, samples=N), value),
    "transplant": (lambda: e.transplant(MATRIX, MATRIX[0], samples=N), value),
    "drops": (
        lambda: e.drops(MATRIX[0].partition("@")[0]),
        lambda result: [curve.values for curve in result.data["curves"].values()],
    ),
    "generalisation": (
        lambda: e.generalisation("zoo:miiii-113-small"),
        lambda result: [run.finite_values("accuracy_3")[1][1:] for run in result.data["runs"]],
    ),
    "attention": (
        lambda: e.attention(ADDITION, samples=N),
        lambda result: [one.mean for one in result.data["maps"].values()],
    ),
    "embeddings": (
        lambda: e.embeddings(MATRIX[1]),
        lambda result: [one["norm"] for tables in result.data["tables"].values() for one in tables],
    ),
    "probe": (
        lambda: e.probe(MATRIX[1], targets="true_element", samples=N),
        lambda result: [result.frame["value"]],
    ),
    "data": (lambda: e.data("modular-addition", {"p": 7}), lambda result: result.data["maps"].values()),
}


@pytest.mark.parametrize("name", CASES)
def test_every_experiments_figure_shows_its_numbers(name):
    make, numbers = CASES[name]
    result = make()
    figures = [section.figure for section in result.figures()]
    drawn = np.concatenate(
        [
            np.asarray(values, dtype=float).ravel()
            for figure in figures
            for trace in figure.data
            for values in (trace.z if trace.type == "heatmap" else trace.y,)
        ]
    )
    drawn = np.sort(drawn[np.isfinite(drawn)])
    for values in numbers(result):
        wanted = np.asarray(values, dtype=float).ravel()
        for each in wanted[np.isfinite(wanted)]:
            near = drawn[np.clip(np.searchsorted(drawn, each) + np.arange(-1, 1), 0, len(drawn) - 1)]
            assert np.isclose(near, each, rtol=1e-6, atol=1e-9).any(), each
    for figure in figures:
        titles = [axis.title.text for axis in (*figure.select_xaxes(), *figure.select_yaxes())]
        assert any(titles)
        assert figure.layout.height > 100
