"""Ranks edges with auto-circuit: `rank_with_auto_circuit.py FOLDER [PATTERN]`.

Its metrics are differences of answers at the last token, so that only such problems are ranked. Models with shared keys
and values are given with a copy for each head; the copies' scores are summed. ACDC gives edges the threshold at which
they go, so that many are equal; it runs on the small model alone, a forward for each edge and threshold.
"""

from __future__ import annotations

from functools import partial

from auto_circuit.data import PromptDataLoader, PromptDataset
from auto_circuit.prune_algos.ACDC import acdc_prune_scores
from auto_circuit.prune_algos.mask_gradient import mask_gradient_prune_scores
from auto_circuit.utils.ablation_activations import src_ablations
from auto_circuit.utils.graph_utils import patch_mode, patchable_model
from patchable import our_name, own
from ranking import Problem, each_problem, measured

#: ACDC measures every edge for each of its 20 thresholds.
FEW = 100


def rank(grouped: Problem) -> None:
    problem = grouped.ungrouped()
    base, source, _ = problem.half("found")
    weight = problem.tensors["found.weight"]
    if weight[:, :-1].any() or (weight[:, -1] == 1).sum() != len(base):
        raise ValueError("the metric is not a difference of two answers at the last token")
    switches = dict.fromkeys(("use_attn_result", "use_split_qkv_input", "use_hook_mlp_in"), True)
    hooked = problem.model(**switches)
    for parameter in hooked.parameters():
        parameter.requires_grad = False
    model = patchable_model(hooked, factorized=True, slice_output="last_seq", separate_qkv=True)
    right, wrong = weight[:, -1].argmax(-1), weight[:, -1].argmin(-1)
    data = PromptDataset(list(base), list(source), list(right[:, None]), list(wrong[:, None]))
    loader = PromptDataLoader(data, seq_len=base.shape[1], diverge_idx=0, batch_size=len(base), shuffle=False)
    of_masks = partial(mask_gradient_prune_scores, model, loader, None, "logit", "avg_diff")
    methods = {
        "gradient of masks": partial(of_masks, mask_val=0.0),
        "integrated over masks": partial(of_masks, integrated_grad_samples=5),
    }
    if len(model.edges) < FEW:
        methods["ACDC"] = partial(acdc_prune_scores, model, loader, None)
    for name, method in methods.items():
        scores, spent = measured(hooked, len(base), method)
        edges: dict[str, float] = {}
        for edge in model.edges:
            ours = our_name(problem, edge)
            edges[ours] = edges.get(ours, 0.0) + float(edge.prune_score(scores))
        value = own(problem, model, edges, patch_mode, src_ablations)
        problem.write(f"auto-circuit: {name}", edges, **spent, own=value)


if __name__ == "__main__":
    each_problem(rank)
