"""Writes circuits as JSON, and reads them."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import fields
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from circuits.circuit._graph import Graph
from circuits.circuit._names import Effect, Member, Where, read_member
from circuits.errors import CircuitsError, said

FORMAT = 1
KEYS = ("format", "kind", "size", "graph", "members")


def write(described: dict[str, Any], path: str | PathLike[str]) -> None:
    """Writes the description of a circuit."""
    text = json.dumps({"format": FORMAT, **described}, indent=1, allow_nan=False)
    target = _path(path, "circuit.write")
    try:
        _replace(target.resolve(), text + "\n")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise CircuitsError(f"circuit.write: cannot write {path}: {reason or error}") from error


def _replace(target: Path, text: str) -> None:
    """Writes a file beside the target and renames it, so that what was there stays where the disk is full."""
    if target.exists() and not target.is_file():  # a pipe or a device
        target.write_text(text, encoding="utf-8")
        return
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def read_parts(
    path: str | PathLike[str],
) -> tuple[str, dict[Member, Where], Graph | None, dict[Member, Effect]]:
    """Returns what a file says of a circuit: its kind, members, graph and effects."""
    target, caller = _path(path, "circuit.read"), f"circuit.read: {path}"
    try:
        given = json.loads(target.read_text(encoding="utf-8"), object_pairs_hook=partial(_object, caller))
    except OSError as error:
        raise CircuitsError(f"{caller}: {error.strerror or error}") from error
    except CircuitsError:
        raise
    except (ValueError, RecursionError) as error:
        raise CircuitsError(f"{caller} is not JSON: {error}") from error
    if not isinstance(given, dict) or given.get("kind") not in ("nodes", "edges"):
        raise CircuitsError(f'{caller} is no circuit: an object whose kind is "nodes" or "edges" is needed')
    if given.get("format") != FORMAT:
        raise CircuitsError(f"{caller}: format {said(given.get('format'))}; this version reads {FORMAT}")
    _refuse_unknown(given, KEYS, "", caller)
    listed = given.get("members")
    if not isinstance(listed, list):
        raise CircuitsError(f"{caller}: members is not a list")
    where: dict[Member, Where] = {}
    effects: dict[Member, Effect] = {}
    for row in listed:
        if not isinstance(row, dict):
            raise CircuitsError(f"{caller}: a member is an object with a name; got {said(row)}")
        _refuse_unknown(row, ("name", *Effect._fields), " of a member", caller)
        member, at = read_member(row.get("name"), given["kind"], caller)
        if member in where:
            raise CircuitsError(f"{caller}: {member} is listed twice")
        where[member] = at
        if (effect := _read_effect(row, caller)) != Effect():
            effects[member] = effect
    graph = None
    if given.get("graph") is not None:
        if isinstance(given["graph"], dict):
            _refuse_unknown(given["graph"], [one.name for one in fields(Graph)], " of graph", caller)
        graph = Graph.read(given["graph"], caller)
        graph.fitted(where, given["kind"], caller)
    return given["kind"], where, graph, effects


def _object(caller: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of a file; refuses a key given twice, of which JSON keeps the last in silence."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise CircuitsError(f"{caller}: key {key!r} stands twice in one object")
        found[key] = value
    return found


def _path(path: Any, caller: str) -> Path:
    if not isinstance(path, str | PathLike):
        raise CircuitsError(f'{caller}: give a path, such as "circuit.json"; got {type(path).__name__}')
    return Path(path)


def _refuse_unknown(given: dict[str, Any], known: Iterable[str], place: str, caller: str) -> None:
    """Refuses keys that would be passed over: a misspelt one would be lost in silence."""
    known = list(known)
    for key in given:
        if key not in known:
            closest = difflib.get_close_matches(key, known, n=1)
            meant = f"did you mean {closest[0]!r}?" if closest else f"known: {', '.join(known)}"
            raise CircuitsError(f"{caller}: unknown key {key!r}{place}; {meant}")


def _read_effect(row: dict[str, Any], caller: str) -> Effect:
    metric = row.get("metric")
    if not isinstance(metric, str | None):
        raise CircuitsError(f"{caller}: metric is a name; got {said(metric)}")
    numbers: list[float | None] = []
    for name in ("estimate", "effect"):
        value = row.get(name)
        # `float` alone would read texts, and True; a whole number may be too large for it.
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and abs(value) <= sys.float_info.max
        ):
            numbers.append(float(value))
        elif value is None:
            numbers.append(None)
        else:
            raise CircuitsError(f"{caller}: {name} is a finite number; got {said(value)}")
    return Effect(metric, *numbers)
