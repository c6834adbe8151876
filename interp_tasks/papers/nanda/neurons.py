"""Measures how neurons make logits: W_L = W_U·W_out by frequency, losses with frequencies of the neurons removed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement.table import Row
from interp_tasks.papers.nanda.inputs import Answer, Inputs, measured, put_at, scored
from interp_tasks.papers.nanda.logits import GINI, of_frequency

if TYPE_CHECKING:
    from torch import Tensor

#: Inputs on which the linear way from neurons to logits is checked against the model itself.
CHECKED = 64


@dataclass(frozen=True)
class Neurons:
    """The last layer's neurons over the grid, and their linear map to the logits.

    Attributes:
        values: ``[input neuron]``, after the activation function, where the output is read.
        logits: ``[input output]`` of the unedited model, float64.
        to_logits: ``[neuron output]``, W_out·W_U.
        linear: whether logits change by just that much when neurons do (no normalisation between).
    """

    model: Any
    inputs: Inputs
    site: str
    values: Tensor
    logits: Tensor
    to_logits: Tensor
    linear: bool

    @classmethod
    def of(cls, model: Any, inputs: Inputs, logits: Tensor, values: Tensor) -> Neurons:
        site = f"mlp_post.{model.cfg.n_layers - 1}"
        neurons = cls(model, inputs, site, values.double(), logits.double(), w_l(model), linear=False)
        checked = slice(0, CHECKED)
        by_hand = neurons.logits[checked] - neurons.values[checked] @ neurons.to_logits
        logits_without = neurons.run(neurons.values * 0, checked)
        close = (by_hand - logits_without).abs().max() < 1e-4 * neurons.logits[checked].abs().max()
        return cls(model, inputs, site, neurons.values, neurons.logits, neurons.to_logits, linear=bool(close))

    def run(self, values: Tensor, rows: slice = slice(None)) -> Tensor:
        """Returns the logits of the whole model with these neurons ``[input neuron]``, ``[input output]``."""
        from circuits import edit, run

        tokens, at = self.inputs.tokens[rows], self.inputs.position
        put = edit(self.site, put_at(at, values[rows], 1), positions=[at])
        return run(self.model, tokens.to(next(self.model.parameters()).device), put)[:, at].double().cpu()

    def logits_of(self, values: Tensor, answer: Answer) -> Tensor:
        """Returns the answer's logits with these neurons ``[input neuron]``."""
        if not self.linear:
            return self.run(values)[:, answer.classes]
        change = (values - self.values) @ self.to_logits[:, answer.classes]
        return self.logits[:, answer.classes] + change


def w_l(model: Any) -> Tensor:
    """Returns W_out·W_U of the last layer, ``[neuron output]``, float64: W_L of Nanda et al. 2023, transposed."""
    if not hasattr(model, "W_out") or model.cfg.attn_only:
        from interp_tasks.errors import UserError

        raise UserError("progress needs a model with an MLP: W_L is the map from its neurons to the logits")
    return (model.W_out[-1].detach().double() @ model.W_U.detach().double()).cpu()


def rows_of_map(
    neurons: Neurons, answer: Answer, keys: Sequence[int], digits: Sequence[int]
) -> Iterator[Row]:
    """Yields the rows of W_L: what key frequencies leave of it, how the neurons' projections on its cosines and sines
    follow the answer, and whether the neurons of a frequency write to it alone.

    Args:
        digits: the tokens of the first coordinate, over which W_E is read where the answer has their period.
    """
    from circuits.fourier import clusters, spectrum, variance_explained

    waves, of_row, is_key = waves_of(neurons, answer, keys)
    residual = float((waves[~is_key].norm() / waves.norm()).nan_to_num())
    yield measured(answer.name, "residual of W_L", residual, site="mlp_post")
    for key in keys:
        directions = zip(("cos", "sin"), waves[of_row == key], answer.sum.waves(key).T, strict=False)
        for wave, row, along in directions:
            projected = neurons.values @ row
            share = float(variance_explained(projected[:, None], along[:, None])[0])
            which = f"{wave} of {of_frequency(answer.name, key)}"
            yield measured(which, "variance explained by the wave", share, site="mlp_post")
    if set(neurons.inputs.sizes) == {answer.sum.period}:
        # A neuron's column is what it writes to the classes.
        power = waves.square()
        groups = clusters(spectrum(neurons.values, neurons.inputs.sizes))
        for label in groups.sizes:
            cluster_power = power[:, groups.neurons(label)]
            of_cluster = float(cluster_power[of_row == label].sum() / cluster_power.sum())
            variant = of_frequency(answer.name, int(label))  # type: ignore[arg-type]
            yield measured(
                variant, "power of W_L in the frequency of its neurons", of_cluster, site="mlp_post"
            )
    if len(digits) == answer.sum.period:
        norms = spectrum(neurons.model.W_E[list(digits)]).total().power.sqrt()[1:]
        strong = [key for key, norm in enumerate(norms.tolist(), 1) if norm > float(norms.max()) / 4]
        yield measured(answer.name, "frequencies of W_E", float(len(strong)), site="embed")
        shared = sum(key in strong for key in keys) / max(1, len(keys))
        yield measured(answer.name, "share of key frequencies among those of W_E", shared)


def waves_of(neurons: Neurons, answer: Answer, keys: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns W_L along cosines and sines over the classes ``[wave neuron]``, the frequency of each wave, and whether
    it is key.
    """
    import torch

    from circuits.fourier import basis, frequencies

    waves = basis(answer.sum.period) @ neurons.to_logits[:, answer.classes].T
    of_row = frequencies(answer.sum.period)
    return waves, of_row, torch.isin(of_row, torch.tensor(list(keys), dtype=torch.long))


def rows_of_gini(model: Any, answer: Answer, keys: Sequence[int]) -> Iterator[Row]:
    """Yields the Gini coefficient of W_L's Fourier components over the classes, and the number of key frequencies."""
    from circuits.fourier import gini, transform

    norms = transform(w_l(model)[:, answer.classes], 1).norm(dim=0)
    yield {**measured(answer.name, GINI, gini(norms)), "site": "mlp_post"}
    yield measured(answer.name, "key frequencies", float(len(keys)))


def rows_of_removal(neurons: Neurons, answer: Answer, keys: Sequence[int]) -> Iterator[Row]:
    """Yields losses with frequencies of the neurons, or of the logits, removed or kept."""
    import torch

    from circuits.fourier import clusters, share, spectrum

    inputs, total, values = neurons.inputs, answer.sum, neurons.values
    logits = neurons.logits[:, answer.classes]
    clean = inputs.scores(logits, answer)

    def of_neurons(variant: str, name: str, edited: Tensor) -> Iterator[Row]:
        scores = inputs.scores(neurons.logits_of(edited, answer), answer)
        found = scored(variant, f"neurons: {name}", scores, clean, "linear" if neurons.linear else "naive")
        return ({**row, "site": "mlp_post"} for row in found)

    def kept(of: Tensor, directions: Tensor) -> Tensor:
        return of.mean(0) + share(of, directions)

    yield from of_neurons(answer.name, "key frequencies alone", kept(values, total.block(keys)))
    yield from of_neurons(answer.name, "waves of the answer alone", kept(values, total.directions(keys)))
    for key in keys:
        variant, block = of_frequency(answer.name, key), total.block([key])
        yield from of_neurons(variant, "without one key frequency", values - share(values, block))
        scores = inputs.scores(logits - share(logits, block), answer)
        yield from scored(variant, "logits: without one key frequency", scores, clean)
    scores = inputs.scores(kept(logits, total.block(keys)), answer)
    yield from scored(answer.name, "logits: key frequencies alone", scores, clean)
    waves, _, is_key = waves_of(neurons, answer, keys)
    directions = torch.linalg.qr(waves[is_key].T).Q
    along = values @ directions @ directions.T
    yield from of_neurons(answer.name, "on the directions of W_L alone", along)
    yield from of_neurons(answer.name, "off the directions of W_L", values - along)
    if set(inputs.sizes) == {total.period}:
        found, edited = clusters(spectrum(values, inputs.sizes)), values.clone()
        for label in found.sizes:
            members = found.neurons(label)
            edited[:, members] = kept(values[:, members], total.block([int(label)]))  # type: ignore[arg-type]
        yield from of_neurons(answer.name, "own frequency of each alone", edited)
