"""Lays out the rows of ``attention`` for readers: a line per head, its class, its template, its movements.

Of many checkpoints there is a line each, with the number of heads in each class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from interp_tasks.pages import Column, number, with_interval

if TYPE_CHECKING:
    import pandas

#: What metrics of movement and of following begin with; the rest is what was changed, or what moved.
MOVED, FOLLOWS = "moved by ", "follows "
#: What metrics that count heads begin with; the rest is their class, or what they follow.
COUNTED, FOLLOWING = "heads: ", "heads that follow "
#: What metrics of the distribution of scores over heads begin with: of the template that each head comes closest to its
#: quantiles, and the largest score of each template.
BEST, LARGEST = "best score: ", "largest score: "
QUANTILES = {"smallest": 0.0, "10%": 0.1, "25%": 0.25, "median": 0.5, "75%": 0.75, "90%": 0.9, "largest": 1.0}
#: Their variant: they are about no single head.
ALL_HEADS = "all heads"
#: From so many checkpoints on people see counts by class and scores over steps.
MANY = 3


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row per head, with a (value, low, high) column for each movement; a row each of many checkpoints."""
    if frame["ref"].nunique() >= MANY:
        return counted(frame)
    possible = [
        str(name).removeprefix(COUNTED)
        for name in frame.loc[frame["variant"] == ALL_HEADS, "metric"]
        if str(name).startswith(COUNTED)
    ]
    frame = frame[frame["variant"] != ALL_HEADS]
    moving = frame["metric"].str.startswith((MOVED, FOLLOWS))
    # Templates that only keep others from being classes say little of a head, and have long names.
    templates = frame[frame["metric"].isin(possible)]
    corrected = templates["effect"] / (1 - templates["baseline"])
    # Its own template where the class is one, else the one that comes closest to it.
    order = templates.assign(corrected=corrected, own=templates["metric"] == templates["intervention"])
    order = order.sort_values(["own", "corrected"], ascending=False, kind="stable")
    rows = (
        order.groupby(["ref", "variant"], sort=False).head(1).sort_index().drop(columns=["corrected", "own"])
    )
    for change in dict.fromkeys(frame.loc[moving, "metric"]):
        of = frame[frame["metric"] == change].set_index(["ref", "variant"])
        keys = list(zip(rows["ref"], rows["variant"], strict=True))
        rows[change] = [
            tuple(of.loc[key, ["value", "value_ci_low", "value_ci_high"]].tolist())
            if key in of.index
            else None
            for key in keys
        ]
    return rows.reset_index(drop=True)


def counted(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row per checkpoint, with the number of heads in each class that occurs."""
    of_all = frame[(frame["variant"] == ALL_HEADS) & frame["metric"].str.startswith((COUNTED, FOLLOWING))]
    rows = of_all.drop_duplicates("ref").reset_index(drop=True)
    for metric in dict.fromkeys(of_all["metric"]):
        values = of_all[of_all["metric"] == metric].set_index("ref")["value"]
        if values.any():
            rows[metric] = [int(values.get(ref, 0)) for ref in rows["ref"]]
    steps = [str(step) for step in rows["step"]]
    return rows.assign(
        checkpoint=rows["ref"], ref=f"{len(rows)} checkpoints", step=f"{steps[0]} to {steps[-1]}"
    )


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    """Returns the columns that people see: of heads, or of counts of heads over checkpoints."""
    if "checkpoint" in rows:
        names = [str(name) for name in rows.columns if str(name).startswith((COUNTED, FOLLOWING))]
        short = {
            name: name.removeprefix(COUNTED).removeprefix("heads that ").replace("_", " ") for name in names
        }
        return [Column("checkpoint", "checkpoint"), *(Column(short[name], name) for name in names)]
    columns = [
        Column("head", "variant"),
        Column("class", "intervention", _words("intervention")),
        Column("template", "metric", _words("metric")),
        Column("chance", "baseline"),
        Column("score [95% CI]", "value", _interval("value", "value_ci_low", "value_ci_high")),
    ]
    moves = [name for name in rows.columns if str(name).startswith((MOVED, FOLLOWS))]
    return [*columns, *(Column(_in_lines(str(name)), str(name), _moved(str(name))) for name in moves)]


def _in_lines(name: str) -> str:
    """Breaks a header into lines, ``moved by`` above ``mask``, so that four columns of numbers fit."""
    first = MOVED if name.startswith(MOVED) else FOLLOWS
    return "\n".join([first.strip(), *name.removeprefix(first).split("_")])


def _interval(value: str, low: str, high: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: with_interval(number(row[value]), row[low], row[high])


def _words(key: str) -> Callable[[Mapping[str, Any]], str]:
    """Returns a name that can be broken into lines where room is short."""
    return lambda row: str(row[key]).replace("_", " ")


def _moved(name: str) -> Callable[[Mapping[str, Any]], str]:
    def text(row: Mapping[str, Any]) -> str:
        value = row[name]
        return with_interval(number(value[0]), value[1], value[2]) if isinstance(value, tuple) else ""

    return text
