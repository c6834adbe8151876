"""Ranks edges with CircuitKIT, plainly and under GIM's backward pass: `rank_with_circuitkit.py FOLDER [PATTERN]`.

CircuitKIT reads texts; the tokens of a problem are put in the place of what its tokenizer would give. Scores of keys
and values that heads share are summed over the heads, which it keeps apart. Models without MLPs get MLPs of zeros, as
it needs some. Its EAP-GP and RelP rank nodes alone; with one head in each layer EAP fails.

`rank_with_circuitkit.py FOLDER PATTERN acdc` ranks by ACDC instead: by the smallest threshold at which an edge goes.
The scores that it returns are the wrong way round, infinite for edges that go and 0 for those that stay; hence a call
for each threshold.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import circuitkit.backends.eap.attribute as attribution
import circuitkit.backends.eap.evaluate as evaluation
import patchable
import torch
from circuitkit.backends.acdc.data import PromptDataLoader, PromptDataset
from circuitkit.backends.acdc.prune_algos.ACDC import acdc_prune_scores
from circuitkit.backends.acdc.utils.ablation_activations import src_ablations
from circuitkit.backends.acdc.utils.graph_utils import patch_mode, patchable_model
from circuitkit.backends.eap.graph import Graph
from gim import GIM
from ranking import Problem, each_problem, first, measured

METHODS = {"EAP": ("EAP", None), "EAP-IG": ("EAP-IG-inputs", 5)}
#: Thresholds of ACDC, power of ten and factor, each a forward for every edge: its own end at 0.05.
THRESHOLDS = list(product(range(-5, 2), (1, 5)))
#: Those of models with MANY edges.
MANY, FEWER = 100, [(power, 1) for power in range(-5, 0)]


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


def rank_by_acdc(problem: Problem) -> None:
    if problem.config.get("n_key_value_heads") is not None:
        # Keys and values are counted by their group here.
        problem = replace(problem, groups=problem.config["n_heads"])
    base, source, _ = problem.half("found")
    switches = {"use_attn_result": True, "use_split_qkv_input": True}
    if not problem.config["attn_only"]:
        switches["use_hook_mlp_in"] = True
    hooked = problem.model(**switches)
    for parameter in hooked.parameters():
        parameter.requires_grad = False
    last = "last_seq" if not problem.tensors["found.weight"][:, :-1].any() else None
    model = patchable_model(hooked, factorized=True, slice_output=last, separate_qkv=True)
    # A set, in another order in each process, which is the order that ACDC tries edges in.
    model.edges = sorted(model.edges, key=str)
    names = {edge: patchable.our_name(problem, edge) for edge in model.edges}
    answers = torch.zeros(len(base), 1)  # which it does not use
    data = PromptDataset(base, source, answers, answers)
    loader = PromptDataLoader(data, base.device, batch_size=len(base))
    target = "mse" if problem.config["d_vocab_out"] == 1 else "kl_div"

    def by_threshold() -> dict[str, float]:
        edges: dict[str, float] = {}
        for power, digit in THRESHOLDS if len(names) < MANY else FEWER:
            threshold = {"tao_exps": [power], "tao_bases": [digit]}
            scores = acdc_prune_scores(model, loader, None, **threshold, faithfulness_target=target)
            for edge, name in names.items():
                if edge.prune_score(scores) > 0:
                    edges.setdefault(name, digit * 10.0**power)
        return {name: edges.get(name, 1000.0) for name in names.values()}

    edges, spent = measured(hooked, len(base), by_threshold)
    value = patchable.own(problem, model, edges, patch_mode, src_ablations)
    problem.write("CircuitKIT: ACDC", edges, **spent, own=value)


if __name__ == "__main__":
    attribution.tokenize_batch_pair = evaluation.tokenize_batch_pair = as_given
    each_problem(rank_by_acdc if "acdc" in sys.argv[3:] else rank)
