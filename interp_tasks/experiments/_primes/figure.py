"""The figure of ``primes``: shares by tensor and answer, and a map for each kind of removal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from circuits.figures.layout import Panel, draw
from circuits.figures.palette import COLOURS
from circuits.figures.panels import Series, bars, heat
from interp_tasks.experiments._primes.table import ANSWER, DIGIT, DIGITS, SHARE, TOGETHER

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

#: Title -> the share of the accuracy above chance that is lost, and the same under the control: a row per answer that
#: was removed, a column per answer that was judged.
Maps = Mapping[str, "tuple[pandas.DataFrame, pandas.DataFrame]"]
#: Of embeddings there is one digit, of activations all of them: the same in one colour.
NAMES = {DIGIT: "digits mod q", DIGITS: "digits mod q", ANSWER: "the answer"}


def figure(frame: pandas.DataFrame, maps: Mapping[str, Maps]) -> plotly.graph_objects.Figure:
    """Draws for every checkpoint its shares, then maps of accuracy lost, without each answer and under the control.

    Args:
        frame: the tidy table.
        maps: REF -> its maps.
    """
    shares = frame[(frame["metric"] == SHARE) & (frame["variant"] != TOGETHER)]
    parts = shares["intervention"].str.partition(": ")
    shares = shares.assign(kind=parts[0], tensor=parts[2])
    shares = shares[shares["kind"].isin(NAMES)]
    panels: list[Panel] = []
    for ref in dict.fromkeys(frame["ref"]):
        for tensor, part in shares[shares["ref"] == ref].groupby("tensor", sort=False):
            panels.append(bars_panel(part, f"functions of the answer and of the digits in {tensor}<br>{ref}"))
        for title, (lost, at_random) in maps.get(ref, {}).items():
            for table, says in ((lost, title), (at_random, f"{title}: as much at random")):
                named = table.rename(index=modulus, columns=modulus)
                axes: dict[str, Any] = {
                    "across": "answer judged, modulo",
                    "down": "answer taken away, modulo",
                }
                unit = "share of accuracy above chance lost"
                panels.append(heat(named, f"{says}<br>{ref}", unit=unit, end=1.0, **axes))
    return draw(panels, barmode="group")


def bars_panel(part: pandas.DataFrame, title: str) -> Panel:
    """Returns a bar per answer of one tensor, for functions of the digits and of the answer, with their controls."""
    series: dict[str, Series] = {}
    for kind, rows in part.groupby("kind", sort=False):
        look, name = (0 if kind == ANSWER else 1), NAMES[str(kind)]
        answers = [modulus(each) for each in rows["variant"]]
        opened: dict[str, Any] = {
            "marker": {"color": "rgba(0,0,0,0)", "line": {"color": COLOURS["light"][look], "width": 1.5}}
        }
        series[name] = Series(answers, rows["value"].tolist(), look=look)
        series[f"{name}, digits shuffled"] = Series(
            answers, rows["baseline"].tolist(), style=opened, look=look
        )
    axis = {"type": "category"}
    return bars(series, title, x="answer modulo", y="share of variance", x_axis=axis)


def modulus(answer: str) -> str:
    """Returns what stands for an answer on an axis whose title says "modulo"."""
    return answer.removeprefix("mod_")
