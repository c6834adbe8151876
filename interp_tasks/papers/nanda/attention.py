"""Fits attention to the digits by waves of them, and measures losses without attention, MLPs or skip paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement.table import Row
from interp_tasks.papers.nanda.inputs import Answer, Inputs, measured, passes, put_at, scored

if TYPE_CHECKING:
    from torch import Tensor


def rows_of_attention(inputs: Inputs, patterns: Mapping[int, Tensor]) -> Iterator[Row]:
    """Yields, for each head, how much of its attention to the first operand waves of the two operands explain.

    A = constant + α(cos w m₁x₁ − cos w m₂x₂) + β(sin w m₁x₁ − sin w m₂x₂), w = 2πk/q, least squares (Nanda et al.
    2023, section 4.1, where the m are 1); k is the frequency that explains most.

    Args:
        patterns: layer -> attention from where the output is read ``[input head key]``.
    """
    import torch

    from circuits.fourier import variance_explained

    if len(inputs.operands) != 2:
        return
    for layer, pattern in patterns.items():
        seen = pattern[:, :, inputs.operands[0]].double()
        for head, mean in enumerate(pattern[:, :, inputs.position].double().mean(0).tolist()):
            yield measured("all inputs", "attention to itself", mean, layer=layer, head=head, site="pattern")
        for answer in inputs.answers:
            shares = torch.stack([variance_explained(seen, wave) for wave in operand_waves(answer)])
            for head, share in enumerate(shares.max(0).values.tolist()):
                labels = {"layer": layer, "head": head, "site": "pattern"}
                yield measured(answer.name, "attention explained", share, **labels)


def rows_of_waves(
    model: Any, inputs: Inputs, patterns: Mapping[int, Tensor], logits: Tensor
) -> Iterator[Row]:
    """Yields losses with each head's attention, where the output is read, replaced by its fit.

    Nanda et al. 2023's linearised softmax: the first operand gets the fit of ``rows_of_attention`` with its best
    frequency, positions beside the operands their mean over the inputs, and the second operand what is left.
    """
    import torch

    if len(inputs.operands) != 2:
        return
    first, second = inputs.operands
    for answer in inputs.answers:
        edited = {}
        for layer, pattern in patterns.items():
            new = pattern.double().mean(0).expand(pattern.shape).clone()
            new[:, :, first] = fitted(answer, pattern[:, :, first].double())
            new[:, :, second] = 0.0
            new[:, :, second] = 1.0 - new.sum(2)
            edited[layer] = new
        parts, start = [], 0
        for tokens in passes(model, inputs):
            rows = slice(start, start + len(tokens))
            chosen = {layer: new[rows] for layer, new in edited.items()}
            parts.append(output_with_patterns(model, inputs, tokens, chosen))
            start = rows.stop
        clean = inputs.scores(logits[:, answer.classes], answer)
        scores = inputs.scores(torch.cat(parts)[:, answer.classes], answer)
        yield from scored(answer.name, "attention: waves of the digits alone", scores, clean, "naive")


def fitted(answer: Answer, seen: Tensor) -> Tensor:
    """Fits attention to the first operand ``[input head]`` by a constant and waves of each head's best frequency."""
    import torch

    from circuits.fourier import regression, variance_explained

    waves = operand_waves(answer)
    best = torch.stack([variance_explained(seen, wave) for wave in waves]).argmax(0).tolist()
    return torch.cat([regression(seen[:, [head]], waves[at]) for head, at in enumerate(best)], 1)


def operand_waves(answer: Answer) -> list[Tensor]:
    """Returns of each frequency cos and sin of w m₁x₁ less those of w m₂x₂, ``[input wave]``."""
    from circuits.harmonics import cos_sin

    first, second = answer.sum.terms.T
    period = answer.sum.period
    return [cos_sin(first, key, period) - cos_sin(second, key, period) for key in answer.sum.frequencies]


def output_with_patterns(
    model: Any, inputs: Inputs, tokens: Tensor, patterns: Mapping[int, Tensor]
) -> Tensor:
    """Returns the output ``[input class]`` with attention, where it is read, set to ``patterns[layer]``."""
    from circuits import edit, run

    at = inputs.position
    edits = [edit(f"pattern.{layer}", put_at(at, new, 2), positions=[at]) for layer, new in patterns.items()]
    return run(model, tokens, *edits)[:, at].double().cpu()


def rows_of_skips(model: Any, inputs: Inputs, logits: Tensor) -> Iterator[Row]:
    """Yields losses where a layer's attention or the skip path is set to zero, or that around the MLP to its mean.

    The way around a layer is what the residual stream brings along: without it, the stream is what the layer adds.
    """
    import torch

    layers, sites = range(model.cfg.n_layers), ("resid_pre", "mlp_out", "resid_post")
    streams = [f"{site}.{layer}" for layer in layers for site in sites]
    means = mean_streams(model, inputs, streams)
    outputs: dict[tuple[int, str], list[Tensor]] = {}
    for tokens in passes(model, inputs):
        for key, output in outputs_without_parts(model, inputs, tokens, streams, means):
            outputs.setdefault(key, []).append(output)
    for (layer, name), parts in outputs.items():
        output = torch.cat(parts)
        for answer in inputs.answers:
            clean = inputs.scores(logits[:, answer.classes], answer)
            scores = inputs.scores(output[:, answer.classes], answer)
            yield from scored(answer.name, name, scores, clean, "naive", layer=layer)


def mean_streams(model: Any, inputs: Inputs, sites: list[str]) -> dict[str, Tensor]:
    """Returns the mean of each site over the grid ``[pos d_model]``."""
    from circuits import cache

    sums: dict[str, Tensor] = {}
    for tokens in passes(model, inputs):
        seen = cache(model, tokens, sites)
        sums = {site: seen[site].double().sum(0) + sums.get(site, 0.0) for site in sites}
    return {site: (total / len(inputs.tokens)).float() for site, total in sums.items()}


def outputs_without_parts(
    model: Any, inputs: Inputs, tokens: Tensor, streams: list[str], means: Mapping[str, Tensor]
) -> Iterator[tuple[tuple[int, str], Tensor]]:
    """Yields ((layer, name of the removed part), output ``[input class]``) for some inputs."""
    from circuits import ablate, cache, edit, heads, run

    seen = cache(model, tokens, streams)

    def less(direction: Tensor, rest: Tensor | float = 0.0) -> Any:
        return lambda after: (after - direction + rest).to(after.dtype)

    for layer in range(model.cfg.n_layers):
        at = "" if model.cfg.n_layers == 1 else f" of layer {layer}"
        before, added, after = f"resid_pre.{layer}", f"mlp_out.{layer}", f"resid_post.{layer}"
        layer_heads = heads([(layer, head) for head in range(model.cfg.n_heads)], model)
        # In a post-norm model the way around the MLP is not resid_mid, but what the LayerNorm makes of it.
        around, usual = seen[after] - seen[added], means[after] - means[added]
        edits = {
            f"attention{at} zeroed": ablate.zero(layer_heads),
            f"way around attention{at} zeroed": edit(f"resid_mid.{layer}", less(seen[before])),
            f"way around MLP{at} zeroed": edit(after, less(around)),
            f"way around MLP{at} at its mean": edit(after, less(around, usual)),
        }
        for name, edited in edits.items():
            yield (layer, name), run(model, tokens, edited)[:, inputs.position].double().cpu()
