"""Ranks the rows of a screening, and makes circuits of the first of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pandas as pd

from circuits.circuit._names import Effect, Member, Where, read_member
from circuits.circuit._value import Circuit
from circuits.errors import CircuitsError
from circuits.validate import is_whole, read_choice

BY = ("best", "estimate", "effect")


@runtime_checkable
class Screening(Protocol):
    """The result of a screening, as far as it is ranked."""

    @property
    def frame(self) -> pd.DataFrame: ...

    @property
    def settings(self) -> dict[str, Any]: ...


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
    effect, estimate = rows["effect"].abs(), rows["estimate"].abs()
    if found.settings.get("rank") == "size":
        effect, estimate = rows["effect_size"], rows["size"]
    size = {"best": effect.fillna(estimate), "estimate": estimate, "effect": effect}[by]
    rows = rows.assign(size=size)[size.notna()]
    return rows.iloc[np.argsort(-rows["size"].to_numpy(), kind="stable")]


def top(found: Screening, count: Any, metric: str | None, by: str) -> Circuit:
    """Makes a circuit of the largest rows of a screening; see `ScreenResult.top`."""
    caller = "top"
    if not is_whole(count, 0):
        raise CircuitsError(f"{caller}: {count!r}; give how many members the circuit has, from 0")
    rows = ranking(found, metric, by, caller)
    if count > len(rows):
        which = "were measured" if by == "effect" else "were screened"
        raise CircuitsError(f"{caller}: {count} members asked for; {len(rows)} {which}")
    return circuit_of(rows.iloc[:count], found.frame, caller)


def above(found: Screening, least: Any, metric: str | None, by: str) -> Circuit:
    """Makes a circuit of the rows of a screening of at least this size; see `ScreenResult.above`."""
    caller = "above"
    if isinstance(least, bool) or not isinstance(least, int | float | np.number) or not least >= 0:
        raise CircuitsError(f"{caller}: {least!r}; give the least size of an effect, from 0")
    rows = ranking(found, metric, by, caller)
    return circuit_of(rows[rows["size"] >= least], found.frame, caller)


def circuit_of(rows: pd.DataFrame, frame: pd.DataFrame, caller: str) -> Circuit:
    """Makes a circuit of some rows of a screening; the kind is that of the whole table `frame`."""
    kind = "edges" if "sender" in frame else "nodes"
    where: dict[Member, Where] = {}
    effects: dict[Member, Effect] = {}
    for name, row in zip(names(rows, kind, caller), rows.to_dict("records"), strict=True):
        member, at = read_member(name, kind, caller)
        if member in where:
            # Effects of a node's positions are those of patches that were made one by one, and do not add up.
            where[member], effects[member] = where[member] | at, Effect(row["metric"])
        else:
            where[member] = at
            effects[member] = Effect(row["metric"], _number(row["estimate"]), _number(row["effect"]))
    return Circuit.of(kind, where, None, effects)


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


def read_ranking(given: Any, caller: str, kind: str | None = None) -> tuple[Sequence[str], str]:
    """Returns the names of members in the order of a ranking, and their kind.

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
        return names(ranking(given, None, "best", caller), kind, caller), kind
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise CircuitsError(
            f"{caller}: a ranking is a screening or a list of names, largest first; got {given!r}"
        )
    kind = "edges" if "->" in str(given[0]) else "nodes"
    for name in given:
        read_member(name, kind, caller)
    if len(set(given)) < len(given):
        raise CircuitsError(f"{caller}: a ranking names a member twice")
    return list(given), kind


def _number(value: Any) -> float | None:
    return None if value is None or pd.isna(value) else float(value)
