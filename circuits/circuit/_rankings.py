"""Ranks the rows of a screening, and makes circuits of the first of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pandas as pd

from circuits.circuit._graph import Effect, Graph, Member, Where, parse_member
from circuits.circuit._value import Circuit
from circuits.errors import CircuitsError, said
from circuits.validate import is_whole, read_choice

BY = ("best", "estimate", "effect")


@runtime_checkable
class Screening(Protocol):
    """The result of a screening, as far as it is ranked."""

    @property
    def frame(self) -> pd.DataFrame: ...

    @property
    def settings(self) -> dict[str, Any]: ...

    @property
    def graph(self) -> Graph | None: ...


def ranking(found: Screening, metric: str | None, by: str, caller: str) -> pd.DataFrame:
    """Returns one metric's rows of a screening with a column `size`, the largest first.

    Args:
        by: "best", the size is the exact effect's where measured, else the estimate's; "estimate"; or "effect", and
            then only measured rows are returned.
    """
    frame = found.frame
    names = list(dict.fromkeys(frame["metric"]))
    if metric is None and len(names) > 1:
        raise CircuitsError(
            f"{caller}: name one metric of the screening: metric= {', '.join(map(repr, names))}"
        )
    metric = names[0] if metric is None else read_choice(metric, names, caller, "metric")
    read_choice(by, BY, caller, "by")
    rows = frame[frame["metric"] == metric]
    rows = rows.assign(size=sizes(rows, found.settings.get("rank"), by))
    return in_order(rows[rows["size"].notna()], rows["size"])


def sizes(rows: pd.DataFrame, rank: str | None, by: str = "best") -> pd.Series:
    """Returns the size of each row of a screening.

    Args:
        rank: "size" where mean sizes rank, else the size of means.
        by: as in `ranking`.
    """
    effect, estimate = rows["effect"].abs(), rows["estimate"].abs()
    if rank == "size":
        effect, estimate = rows["effect_size"], rows["size"]
    return {"best": effect.fillna(estimate), "estimate": estimate, "effect": effect}[by]


def in_order(rows: pd.DataFrame, size: pd.Series) -> pd.DataFrame:
    """Returns rows by their size, the largest first; of equal ones the larger estimate is first."""
    rows = rows.sort_values("rank", kind="stable")
    return rows.iloc[np.argsort(-size[rows.index].to_numpy(), kind="stable")]


def top(found: Screening, count: Any, metric: str | None, by: str) -> Circuit:
    """Makes a circuit of the largest rows of a screening; see `ScreenResult.top`."""
    caller = "top"
    if not is_whole(count, 0):
        raise CircuitsError(f"{caller}: {count!r}; give how many members the circuit has, from 0")
    rows = ranking(found, metric, by, caller)
    if count > len(rows):
        which = "were measured" if by == "effect" else "were screened"
        raise CircuitsError(f"{caller}: {count} members asked for; {len(rows)} {which}")
    return circuit_of(rows.iloc[:count], found, caller)


def above(found: Screening, least: Any, metric: str | None, by: str) -> Circuit:
    """Makes a circuit of the rows of a screening of at least this size; see `ScreenResult.above`."""
    caller = "above"
    if isinstance(least, bool) or not isinstance(least, int | float | np.number) or not least >= 0:
        raise CircuitsError(f"{caller}: {least!r}; give the least size of an effect, from 0")
    rows = ranking(found, metric, by, caller)
    made = circuit_of(rows[rows["size"] >= least], found, caller)
    if len(made) or rows.empty:
        return made
    name, size = rows["variant"].iloc[0], rows["size"].iloc[0]
    return replace(made, note=f"none reaches {least:g}, the largest is {name} with {size:.3g}")


def circuit_of(rows: pd.DataFrame, found: Screening, caller: str) -> Circuit:
    """Makes a circuit of some rows of a screening; its kind and its graph are those of the screening."""
    kind = "edges" if "sender" in found.frame else "nodes"
    where: dict[Member, Where] = {}
    effects: dict[Member, Effect] = {}
    for name, row in zip(names(rows, kind, caller), rows.to_dict("records"), strict=True):
        member, at = parse_member(name, kind, caller)
        if member in where:
            # Effects of a node's positions are those of patches that were made one by one, and do not add up.
            where[member], effects[member] = where[member] | at, Effect(row["metric"])
        else:
            where[member] = at
            effects[member] = Effect(row["metric"], _number(row["estimate"]), _number(row["effect"]))
    return Circuit.of(kind, where, found.graph, effects)


def names(rows: pd.DataFrame, kind: str, caller: str) -> list[str]:
    """Returns the members that rows of a screening are about, by name."""
    if kind == "edges":
        return [
            f"{sender} -> {receiver}"
            for sender, receiver in zip(rows["sender"], rows["receiver"], strict=True)
        ]
    found: list[str] = []
    for row in rows.to_dict("records"):
        if row["site"] not in ("embed", "pos_embed", "z", "mlp_out") or pd.notna(row.get("neuron")):
            raise CircuitsError(
                f"{caller}: {row['variant']} is no node of a circuit; screen embed, z and mlp_out, which write to the "
                "residual stream"
            )
        name = str(row["variant"]).partition(",")[0]
        position = row.get("position")
        found.append(name if position is None or pd.isna(position) else f"{name} @ {position}")
    return found


def parse_ranking(given: Any, caller: str) -> tuple[Sequence[str], str, Graph | None]:
    """Returns the names of members in the order of a ranking, their kind, and the graph of a screening.

    Args:
        given: a screening, or a list of names with the largest first.
    """
    table = getattr(given, "frame", None)
    if isinstance(given, Circuit):
        raise CircuitsError(
            f"{caller}: a circuit has no order; give a screening, or a list of names, largest first"
        )
    if isinstance(table, pd.DataFrame):
        kind = "edges" if "sender" in table else "nodes"
        return names(ranking(given, None, "best", caller), kind, caller), kind, given.graph
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise CircuitsError(
            f"{caller}: a ranking is a screening or a list of names, largest first; got {said(given)}"
        )
    kind = "edges" if "->" in str(given[0]) else "nodes"
    for name in given:
        parse_member(name, kind, caller)
    if len(set(given)) < len(given):
        raise CircuitsError(f"{caller}: a ranking names a member twice")
    return list(given), kind, None


def _number(value: Any) -> float | None:
    return None if value is None or pd.isna(value) else float(value)
