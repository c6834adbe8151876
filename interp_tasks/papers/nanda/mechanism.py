"""Looks inside one model: W_L by frequency, and losses without frequencies, attention or ways around layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from circuits import ablate, edit, heads
from circuits.fourier import basis, clusters, frequencies, regression, share, spectrum, variance_explained
from circuits.harmonics import cos_sin
from interp_tasks.measurement.activations import recorded
from interp_tasks.measurement.table import Row
from interp_tasks.papers.grid import Answer
from interp_tasks.papers.nanda.losses import GridModel, measured, of_frequency, w_l

#: Inputs on which the linear way from neurons to logits is checked against the model itself.
CHECKED = 64


def map_rows(on_grid: GridModel, answer: Answer, keys: Sequence[int]) -> Iterator[Row]:
    """Yields the rows of W_L: what key frequencies leave of it, how the neurons' projections on its cosines and sines
    follow the answer, and whether the neurons of a frequency write to it alone.
    """
    waves, of_row, is_key = waves_of(on_grid, answer, keys)
    neurons, period = on_grid.neurons.double(), answer.sum.period
    residual = float((waves[~is_key].norm() / waves.norm()).nan_to_num())
    yield measured(answer.name, "residual of W_L", residual, site="mlp_post")
    for key in keys:
        directions = zip(("cos", "sin"), waves[of_row == key], answer.sum.waves(key).T, strict=False)
        for wave, row, along in directions:
            share = float(variance_explained((neurons @ row)[:, None], along[:, None])[0])
            about = f"{wave} of {of_frequency(answer, key)}"
            yield measured(about, "variance explained by the wave", share, site="mlp_post")
    if set(on_grid.inputs.grid.sizes) == {period}:
        # A neuron's column is what it writes to the classes.
        power, groups = waves.square(), clusters(spectrum(neurons, on_grid.inputs.grid.sizes))
        for label in groups.sizes:
            of_cluster = power[:, groups.neurons(label)]
            share = float(of_cluster[of_row == label].sum() / of_cluster.sum())
            about = of_frequency(answer, int(str(label)))
            yield measured(about, "power of W_L in the frequency of its neurons", share, site="mlp_post")
    digits = list(on_grid.inputs.axes[0].values)
    if len(digits) == period:
        norms = spectrum(on_grid.model.W_E[digits]).total().power.sqrt()[1:]
        strong = [key for key, norm in enumerate(norms.tolist(), 1) if norm > float(norms.max()) / 4]
        yield measured(answer.name, "frequencies of W_E", float(len(strong)), site="embed")
        shared = sum(key in strong for key in keys) / max(1, len(keys))
        yield measured(answer.name, "share of key frequencies among those of W_E", shared)


def waves_of(on_grid: GridModel, answer: Answer, keys: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns W_L along cosines and sines over the classes ``[wave neuron]``, the frequency of each wave, and whether
    it is key.
    """
    waves, of_row = (
        basis(answer.sum.period) @ w_l(on_grid.model)[:, answer.classes].T,
        frequencies(answer.sum.period),
    )
    return waves, of_row, torch.isin(of_row, torch.tensor(list(keys), dtype=torch.long))


# ---- frequencies removed


def logits_of_neurons(on_grid: GridModel) -> tuple[str, Callable[[Tensor, Tensor], Tensor]]:
    """Returns an engine, and its function from neurons ``[input neuron]`` to the logits of some classes.

    ``linear`` where logits change by just what W_L makes of a change of the neurons; ``naive``, the whole model, where
    a normalisation stands between.
    """
    site, neurons, to_logits = (
        f"mlp_post.{on_grid.model.cfg.n_layers - 1}",
        on_grid.neurons.double(),
        w_l(on_grid.model),
    )

    def naive(values: Tensor, classes: Tensor) -> Tensor:
        return on_grid.run(lambda rows: [placed(on_grid, site, values[rows, None])])[:, classes]

    def linear(values: Tensor, classes: Tensor) -> Tensor:
        return on_grid.logits[:, classes] + (values - neurons) @ to_logits[:, classes]

    by_hand = on_grid.logits[:CHECKED] - neurons[:CHECKED] @ to_logits
    gap = (
        (by_hand - on_grid.run(lambda rows: [placed(on_grid, site, 0 * neurons[rows, None])], CHECKED))
        .abs()
        .max()
    )
    is_linear = gap < 1e-4 * on_grid.logits[:CHECKED].abs().max()
    return ("linear", linear) if is_linear else ("naive", naive)


def placed(on_grid: GridModel, site: str, values: Tensor) -> Any:
    """Returns an edit that puts values at the position where the output is read; its axis has length 1."""
    return edit(site, lambda old: values.to(old).expand_as(old), positions=[on_grid.at])


def removal_rows(on_grid: GridModel, answer: Answer, keys: Sequence[int]) -> Iterator[Row]:
    """Yields losses with frequencies of the neurons, or of the logits, removed or kept."""
    total, sizes = answer.sum, on_grid.inputs.grid.sizes
    values, logits = on_grid.neurons.double(), on_grid.logits[:, answer.classes]
    engine, logits_of = logits_of_neurons(on_grid)

    def of_neurons(name: str, edited: Tensor, variant: str | None = None) -> Iterator[Row]:
        about: dict[str, Any] = {"engine": engine, "site": "mlp_post", "variant": variant}
        return on_grid.scored(answer, f"neurons: {name}", logits_of(edited, answer.classes), **about)

    def kept(of: Tensor, directions: Tensor) -> Tensor:
        return of.mean(0) + share(of, directions)

    yield from of_neurons("key frequencies alone", kept(values, total.block(keys)))
    yield from of_neurons("waves of the answer alone", kept(values, total.directions(keys)))
    for key in keys:
        about, block = of_frequency(answer, key), total.block([key])
        yield from of_neurons("without one key frequency", values - share(values, block), about)
        without = logits - share(logits, block)
        yield from on_grid.scored(answer, "logits: without one key frequency", without, about)
    yield from on_grid.scored(answer, "logits: key frequencies alone", kept(logits, total.block(keys)))
    waves, _, is_key = waves_of(on_grid, answer, keys)
    directions = torch.linalg.qr(waves[is_key].T).Q
    along = values @ directions @ directions.T
    yield from of_neurons("on the directions of W_L alone", along)
    yield from of_neurons("off the directions of W_L", values - along)
    if set(sizes) == {total.period}:
        found, edited = clusters(spectrum(values, sizes)), values.clone()
        for label in found.sizes:
            members = found.neurons(label)
            edited[:, members] = kept(values[:, members], total.block([int(str(label))]))
        yield from of_neurons("own frequency of each alone", edited)


# ---- attention, and ways around layers


def attention_rows(on_grid: GridModel) -> Iterator[Row]:
    """Yields, for each head, how much of its attention to the first operand waves of the two operands explain, and
    losses with the attention of every head replaced by its best fit.

    A = constant + α(cos w m₁x₁ − cos w m₂x₂) + β(sin w m₁x₁ − sin w m₂x₂), w = 2πk/q, least squares (Nanda et al.
    2023, section 4.1, where the m are 1); k is the frequency that explains most. In their place (the published
    linearised softmax) the first operand gets the fit, positions beside the operands their mean over the inputs, and
    the second operand what is left.
    """
    if len(on_grid.inputs.operands) != 2:
        return
    first, second = on_grid.inputs.operands
    for layer, pattern in on_grid.patterns.items():
        for head, mean in enumerate(pattern[:, :, on_grid.at].double().mean(0).tolist()):
            yield measured("all inputs", "attention to itself", mean, layer=layer, head=head, site="pattern")
    for answer in on_grid.inputs.answers.values():
        waves, edited = operand_waves(answer), {}
        for layer, pattern in on_grid.patterns.items():
            seen = pattern[:, :, first].double()
            shares, best = best_waves(waves, seen)
            for head, explained in enumerate(shares):
                labels = {"layer": layer, "head": head, "site": "pattern"}
                yield measured(answer.name, "attention explained", explained, **labels)
            new = pattern.double().mean(0).expand(pattern.shape).clone()
            fits = [regression(seen[:, [head]], waves[at]) for head, at in enumerate(best)]
            new[:, :, first], new[:, :, second] = torch.cat(fits, 1), 0.0
            new[:, :, second] = 1.0 - new.sum(2)
            edited[layer] = new

        def edits(rows: slice, edited: dict[int, Tensor] = edited) -> list[Any]:
            return [placed(on_grid, f"pattern.{layer}", new[rows, :, None]) for layer, new in edited.items()]

        logits = on_grid.run(edits)[:, answer.classes]
        yield from on_grid.scored(answer, "attention: waves of the digits alone", logits, engine="naive")


def operand_waves(answer: Answer) -> list[Tensor]:
    """Returns of each frequency cos and sin of w m₁x₁ less those of w m₂x₂, ``[input wave]``."""
    first, second = answer.sum.terms.T
    period = answer.sum.period
    return [cos_sin(first, key, period) - cos_sin(second, key, period) for key in answer.sum.frequencies]


def best_waves(waves: Sequence[Tensor], seen: Tensor) -> tuple[list[float], list[int]]:
    """Returns how much of each head's attention ``[input head]`` the best of the waves explains, and which that is."""
    best = torch.stack([variance_explained(seen, wave) for wave in waves]).max(0)
    return best.values.tolist(), best.indices.tolist()


def skip_rows(on_grid: GridModel) -> Iterator[Row]:
    """Yields losses where a layer's attention or the skip path is set to zero, or that around the MLP to its mean.

    The way around a layer is what the residual stream brings along: without it, the stream is what the layer adds.
    """
    model = on_grid.model
    layers = range(model.cfg.n_layers)
    streams = [f"{site}.{layer}" for layer in layers for site in ("resid_pre", "mlp_out", "resid_post")]
    seen = recorded(model, on_grid.inputs.tokens.to(next(model.parameters()).device), streams, lambda at: at)

    def added(site: str, change: Tensor) -> Callable[[slice], list[Any]]:
        return lambda rows: [edit(site, lambda old: (old + change[rows]).to(old.dtype))]

    def unchanging(one: Any) -> Callable[[slice], list[Any]]:
        return lambda rows: [one]

    for layer in layers:
        at = "" if model.cfg.n_layers == 1 else f" of layer {layer}"
        # In a post-norm model the way around the MLP is not resid_mid, but what the LayerNorm makes of it.
        around = seen[f"resid_post.{layer}"] - seen[f"mlp_out.{layer}"]
        mean = around.double().mean(0).float()
        zeroed = ablate.zero(heads([(layer, head) for head in range(model.cfg.n_heads)], model))
        edits = {
            f"attention{at} zeroed": unchanging(zeroed),
            f"way around attention{at} zeroed": added(f"resid_mid.{layer}", -seen[f"resid_pre.{layer}"]),
            f"way around MLP{at} zeroed": added(f"resid_post.{layer}", -around),
            f"way around MLP{at} at its mean": added(f"resid_post.{layer}", mean - around),
        }
        for name, edit_rows in edits.items():
            output = on_grid.run(edit_rows)
            for answer in on_grid.inputs.answers.values():
                logits = output[:, answer.classes]
                yield from on_grid.scored(answer, name, logits, engine="naive", layer=layer)
