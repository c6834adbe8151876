"""Ranks edges with CircuitKIT, plainly and under GIM's backward pass: `rank_with_circuitkit.py FOLDER [PATTERN]`.

CircuitKIT reads texts; the tokens of a problem are put in the place of what its tokenizer would give. Scores of keys
and values that heads share are summed over the heads, which it keeps apart. Models without MLPs get MLPs of zeros, as
it needs some. Its EAP-GP and RelP rank nodes alone; with one head in each layer it fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import circuitkit.backends.eap.attribute as attribution
import circuitkit.backends.eap.evaluate as evaluation
import torch
from circuitkit.backends.eap.graph import Graph
from gim import GIM
from ranking import Problem, each_problem, first, measured

METHODS = {"EAP": ("EAP", None), "EAP-IG": ("EAP-IG-inputs", 5)}


class Batches:
    """The prompts of one half, as CircuitKIT iterates over them: base, source and the numbers of their rows."""

    def __init__(self, problem: Problem, half: str) -> None:
        self.base, self.source, self.metric = problem.half(half)

    def __iter__(self) -> Iterator[Any]:
        yield self.base, self.source, torch.arange(len(self.base))

    def total(self, output: Any, clean: Any, lengths: Any, rows: Any) -> Any:
        return self.metric(output, rows).sum()

    def each(self, output: Any, clean: Any, lengths: Any, rows: Any) -> Any:
        return self.metric(output, rows)


def as_given(model: Any, base: Any, source: Any, **_: Any) -> tuple[Any, ...]:
    mask = torch.ones_like(base)
    return base, source, mask, mask, mask.sum(1), base.shape[1]


def our_name(problem: Problem, edge: Any) -> str:
    """Returns a1.h3->a2.h0<q> as 1.3 -> 2.0.q."""
    sender = {"i": "embed", "m": f"mlp{edge.parent.layer}"}.get(edge.parent.name[0])
    sender = sender or f"{edge.parent.layer}.{edge.parent.head}"
    receiver = {"l": "output", "m": f"mlp{edge.child.layer}"}.get(edge.child.name[0])
    return f"{sender} -> {receiver or problem.receiver(edge.child.layer, edge.child.head, edge.qkv)}"


def rank(problem: Problem) -> None:
    switches = dict.fromkeys(("use_attn_result", "use_split_qkv_input", "use_hook_mlp_in"), True)
    if problem.config.get("n_key_value_heads") is not None:
        switches["ungroup_grouped_query_attention"] = True
    model = problem.with_mlps().model(**switches)
    no_mlps = problem.config["attn_only"]
    found, tested = Batches(problem, "found"), Batches(problem, "tested")
    for (kind, (method, steps)), gim in product(METHODS.items(), (False, True)):
        graph = Graph.from_model(model)
        arguments = model, graph, found, found.total, method
        with GIM(model) if gim else nullcontext():
            attribute = partial(attribution.attribute, *arguments, ig_steps=steps, quiet=True)
            _, spent = measured(model, len(found.base), attribute)
        edges: dict[str, float] = {}
        for edge in graph.edges.values():
            name = our_name(problem, edge)
            if not (no_mlps and "mlp" in name):
                edges[name] = edges.get(name, 0.0) + float(edge.score)
        size = len(edges) // 5
        kept = set(first(edges, size))
        graph.reset(empty=False)
        for edge in graph.edges.values():
            edge.in_graph = our_name(problem, edge) in kept
        value = evaluation.evaluate_graph(model, graph, tested, tested.each, quiet=True).mean().item()
        label = f"GIM's gradients in CircuitKIT's {kind}" if gim else f"CircuitKIT: {kind}"
        problem.write(label, edges, **spent, own={"size": size, "value": value})


if __name__ == "__main__":
    attribution.tokenize_batch_pair = evaluation.tokenize_batch_pair = as_given
    each_problem(rank)
