"""Circuits as values: sets of nodes or edges that are kept, cut and tested.

found = patch.edges(model, base, source, metric)
c = found.top(20) | circuit.edges(["0.1 -> 1.3.q"])          # also circuit.nodes, circuit.read, circuit.full(model)
run(model, base, c.keep(source))                             # all edges outside c hear the source
circuit.evaluate(model, {"IG": c}, base, source, metric)     # faithfulness, completeness, minimality
circuit.curve(model, {"IG": found}, base, source, metric)    # faithfulness over sizes
circuit.smallest(model, found, base, source, metric)         # the first members that are faithful enough
circuit.prune(model, found, base, source, metric)            # a better ranking, by joint effects
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from circuits.circuit._circuit import Circuit, edges, full, nodes, read

if TYPE_CHECKING:
    from circuits.circuit._circuit_edit import CircuitEdit
    from circuits.circuit._evaluation import Evaluation, evaluate
    from circuits.circuit._ranking_curve_and_pruning import MIB_SHARES, Curve, curve, prune, smallest

__all__ = ["MIB_SHARES", "Circuit", "CircuitEdit", "Curve", "Evaluation", "curve", "edges", "evaluate"]
__all__ += ["full", "nodes", "prune", "read", "smallest"]
__dir__ = __all__.copy
#: What runs models comes when it is asked for: names and files are read without torch.
_HOMES = {
    "MIB_SHARES": "_ranking_curve_and_pruning",
    "Curve": "_ranking_curve_and_pruning",
    "curve": "_ranking_curve_and_pruning",
    "smallest": "_ranking_curve_and_pruning",
    "Evaluation": "_evaluation",
    "evaluate": "_evaluation",
    "CircuitEdit": "_circuit_edit",
    "prune": "_ranking_curve_and_pruning",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
