"""What the patchable models of auto-circuit, and those that CircuitKIT has from it for ACDC, have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ranking import Problem, first


def our_name(problem: Problem, edge: Any) -> str:
    """Returns A0.3->A1.2.Q as 0.3 -> 1.2.q."""
    ends = []
    for name in (edge.src.name, edge.dest.name):
        if name.startswith("A"):
            layer, head, *read = name[1:].split(".")
            name = problem.receiver(int(layer), int(head), read[0].lower()) if read else f"{layer}.{head}"
        ends.append({"Resid Start": "embed", "Resid End": "output"}.get(name, name.replace("MLP ", "mlp")))
    return " -> ".join(ends)


def own(
    problem: Problem, model: Any, edges: dict[str, float], patch_mode: Callable[..., Any], ablations: Any
) -> dict[str, Any]:
    """Returns the library's value of the first fifth of the edges on the prompts that are tested, and their number.

    Args:
        patch_mode: the library's context of this name.
        ablations: what the other edges carry, of the model and the source.
    """
    base, source, metric = problem.half("tested")
    kept = set(first(edges, len(edges) // 5))
    cut = {edge for edge in model.edges if our_name(problem, edge) not in kept}
    with patch_mode(model, ablations(model, source), cut), torch.inference_mode():
        value = metric(model(base), torch.arange(len(base))).mean()
    return {"size": len(kept), "value": float(value)}
