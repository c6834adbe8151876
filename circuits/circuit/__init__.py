"""Circuits as values: sets of nodes or edges that are kept, cut and tested.

found = patch.edges(model, base, source, metric)
c = found.top(20) | circuit.edges(["0.1 -> 1.3.q"])          # also circuit.nodes, circuit.read, circuit.full(model)
run(model, base, c.keep(source))                             # all edges outside c hear the source
circuit.evaluate(model, {"IG": c}, base, source, metric)     # faithfulness, completeness, minimality
circuit.curve(model, {"IG": found}, base, source, metric)    # faithfulness over sizes
circuit.smallest(model, found, base, source, metric)         # the first members that are faithful enough
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from os import PathLike
from typing import TYPE_CHECKING, Any

from circuits.circuit._graph import Graph
from circuits.circuit._value import Circuit, circuit_of_names, full_of, read_file

if TYPE_CHECKING:
    from circuits.circuit._curve import MIB_SHARES, Curve, curve, smallest
    from circuits.circuit._evaluation import Evaluation, evaluate
    from circuits.circuit._intervention import CircuitEdit

__all__ = [
    "MIB_SHARES",
    "Circuit",
    "CircuitEdit",
    "Curve",
    "Evaluation",
    "curve",
    "edges",
    "evaluate",
    "full",
    "nodes",
    "read",
    "smallest",
]
#: What runs models comes when it is asked for: names and files are read without torch.
_HOMES = {
    "MIB_SHARES": "_curve",
    "Curve": "_curve",
    "curve": "_curve",
    "smallest": "_curve",
    "Evaluation": "_evaluation",
    "evaluate": "_evaluation",
    "CircuitEdit": "_intervention",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def edges(names: Iterable[str] | str, model: Any = None) -> Circuit:
    """Makes a circuit of edges by name: sender -> receiver, such as "0.1 -> 1.3.q".

    Senders are embed, pos_embed, heads (0.1) and MLPs (mlp0); receivers are the inputs of heads (1.3.q, 1.3.k, 1.3.v),
    of key-value groups where heads share them (1.k0.k, 1.k0.v), MLPs and output. "0.1 -> 1.3.q @ 3,4" is the edge at
    two positions, "@ all but 3,4" at the others.

    Args:
        names: a list, or a text with one in each line or between semicolons.
        model: where given, edges that it lacks are refused here, and `~` is relative to its graph.
    """
    return circuit_of_names(names, "edges", None if model is None else _graph_of(model), "circuit.edges")


def nodes(names: Iterable[str] | str, model: Any = None) -> Circuit:
    """Makes a circuit of nodes by name: embed, pos_embed, heads (0.1) and MLPs (mlp0).

    Args:
        names: as in `edges`.
        model: as in `edges`.
    """
    return circuit_of_names(names, "nodes", None if model is None else _graph_of(model), "circuit.nodes")


def read(path: str | PathLike[str]) -> Circuit:
    """Reads a circuit that `Circuit.write` has written; nothing but JSON is read.

    Raises `CircuitsError` for a file that cannot be read, is no circuit, or names what no model can have.
    """
    return read_file(path)


def full(model: Any, kind: str = "edges") -> Circuit:
    """Returns the circuit of all edges of a model, or of all its nodes.

    Args:
        kind: "edges" or "nodes".
    """
    from circuits.validate import parse_choice

    parse_choice(kind, ("edges", "nodes"), "circuit.full", "kind")
    return full_of(_graph_of(model), kind)


def _graph_of(model: Any) -> Graph:
    from circuits.model.hooked_model import HookedModel

    return Graph.of(HookedModel.of(model))
