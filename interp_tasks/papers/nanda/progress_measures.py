"""Losses of a model over every input of its task's grid, and a look inside: W_L by frequency, ways around layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import numpy
import torch
from torch import Tensor

from circuits import ablate, edit, heads, run
from circuits.fourier import (
    ModularSum,
    basis,
    clusters,
    frequencies,
    gini,
    regression,
    share,
    spectrum,
    transform,
    variance_explained,
)
from circuits.fourier_waves import cos_sin
from interp_tasks.errors import UserError
from interp_tasks.measurement.activations_in_passes import record_in_passes
from interp_tasks.measurement.options_and_examples import read_npy
from interp_tasks.measurement.result import Row
from interp_tasks.papers.input_grid_and_answers import AnswerOnGrid, GridInputs
from interp_tasks.papers.nanda import (
    ACCURACY,
    ALL,
    ALL_WEIGHTS,
    EXCLUDED,
    FITTED,
    GINI,
    HELD_OUT,
    LOSS,
    NONE,
    OF_W_E,
    RESTRICTED,
    SQUARES,
    TEST,
    TRAIN,
)

#: A pass of the model takes so many inputs: few enough that memory is used again.
INPUTS_PER_PASS = 2048
#: Held-out logits of each tenth of a split's inputs are fitted on the other nine tenths.
FOLDS = 10


@dataclass(frozen=True)
class GridModel:
    """A model over every input of its task's grid.

    Attributes:
        splits: ``grid`` (all of it), ``train`` and ``test`` -> rows of the grid; the last two only where it is known
            what the model was trained on.
        logits: ``[input output]`` where the output is read, float64.
        neurons: the last layer's, there, ``[input neuron]``.
        patterns: layer -> attention from there ``[input head key]``.
    """

    model: Any
    inputs: GridInputs
    splits: Mapping[str, Tensor]
    logits: Tensor
    neurons: Tensor
    patterns: Mapping[int, Tensor]

    @classmethod
    def of(cls, model: Any, inputs: GridInputs, splits: Mapping[str, Tensor]) -> GridModel:
        layers, at = range(model.cfg.n_layers), inputs.task.read_positions[-1]
        last, parts = f"mlp_post.{layers[-1]}", []
        device = next(model.parameters()).device
        for tokens in inputs.tokens.to(device).split(INPUTS_PER_PASS):
            output, seen = run(model, tokens, cache=[last, *(f"pattern.{layer}" for layer in layers)])
            patterns = [seen[f"pattern.{layer}"][:, :, at].cpu().clone() for layer in layers]
            parts.append((output[:, at].double().cpu(), seen[last][:, at].cpu().clone(), *patterns))
        logits, neurons, *patterns = (torch.cat(part) for part in zip(*parts, strict=True))
        return cls(model, inputs, splits, logits, neurons, dict(enumerate(patterns)))

    @property
    def read_position(self) -> int:
        """Returns the position where the output is read."""
        return int(self.inputs.task.read_positions[-1])

    def run(self, edits: Callable[[slice], Sequence[Any]], input_count: int | None = None) -> Tensor:
        """Returns the output ``[input output]`` under the edits that are made for each slice of the inputs.

        Args:
            input_count: run on so many inputs alone.
        """
        tokens, parts = self.inputs.tokens[:input_count].to(next(self.model.parameters()).device), []
        for start in range(0, len(tokens), INPUTS_PER_PASS):
            rows = slice(start, min(start + INPUTS_PER_PASS, len(tokens)))
            parts.append(run(self.model, tokens[rows], *edits(rows))[:, self.read_position].double().cpu())
        return torch.cat(parts)

    def loss_and_accuracy(self, logits: Tensor, answer: AnswerOnGrid) -> dict[tuple[str, str], float]:
        """Returns mean cross-entropy (in nats) and accuracy of logits ``[input remainder]``, by (metric, split)."""
        right = answer.sum.remainders
        losses = (logits.double().logsumexp(1) - logits.gather(1, right[:, None])[:, 0]).clamp(min=0)
        values = {LOSS: losses, ACCURACY: (logits.argmax(1) == right).double()}
        return {
            (metric, split): float(each[rows].mean())
            for metric, each in values.items()
            for split, rows in self.splits.items()
            if len(rows)
        }

    def metric_rows(
        self,
        answer: AnswerOnGrid,
        intervention: str,
        logits: Tensor,
        variant: str | None = None,
        **columns: Any,
    ) -> Iterator[Row]:
        """Yields a row per metric and split of logits ``[input remainder]``, beside the unedited model's.

        Args:
            variant: what the rows are about; the answer by default.
            columns: others of each row.
        """
        clean = self.loss_and_accuracy(self.logits[:, answer.classes], answer)
        for (metric, split), value in self.loss_and_accuracy(logits, answer).items():
            baseline = clean[metric, split]
            row: Row = {"variant": variant or answer.name, "intervention": intervention, "metric": metric}
            row |= {"split": split, "value": value, **columns}
            yield row if intervention == NONE else row | {"baseline": baseline, "effect": value - baseline}


def unedited_row(variant: str, metric: str, value: float, **columns: Any) -> Row:
    """Returns a row about the unedited model, over the complete grid."""
    return {"variant": variant, "intervention": NONE, "metric": metric, "value": value, **columns}


def frequency_label(answer: AnswerOnGrid, key: int) -> str:
    return f"{answer.name}, frequency {key}"


def neuron_logit_map(model: Any) -> Tensor:
    """Returns W_out·W_U of the last layer, ``[neuron output]``, float64: W_L of Nanda et al. 2023, transposed."""
    if model.cfg.attn_only:
        raise UserError("progress needs a model with an MLP: W_L is the map from its neurons to the logits")
    return (model.W_out[-1].detach().double() @ model.W_U.detach().double()).cpu()


# ---- the inputs that a model was trained on


def split_rows(inputs: GridInputs, train: Any = None, *, own_split: bool = True) -> dict[str, Tensor]:
    """Returns the rows of the grid in each split.

    Args:
        train: the training inputs, as ``progress`` takes them; ``None``: those of the task's own split.
        own_split: whether the model was trained on the task's own split.
    """
    rows = torch.arange(len(inputs.tokens))
    if train is not None:
        in_train = read_train_mask(train, len(rows))
        return {ALL: rows, TRAIN: rows[in_train], TEST: rows[~in_train]}
    own = (TRAIN, TEST) if own_split else ()
    return {ALL: rows} | {of: inputs.rows_on_grid(inputs.task.sample(None, split=of).tokens) for of in own}


def read_train_mask(train: Any, size: int) -> Tensor:
    """Returns a mask over the grid's inputs from indices, a mask, or the ``.npy`` file of either."""
    is_file = isinstance(train, (str, PathLike))
    array = read_npy(str(train), "--train-inputs") if is_file else numpy.asarray(train)
    if array.dtype == bool and array.size == size:
        return torch.from_numpy(array.reshape(-1).copy())
    are_indices = array.dtype.kind in "iu" and array.ndim == 1 and array.size
    if not are_indices or not 0 <= array.min() <= array.max() < size:
        raise UserError(
            f"--train-inputs: give indices 0 to {size - 1} of the grid's inputs, or a mask of all {size}; got "
            f"{array.dtype} {list(array.shape)}"
        )
    mask = torch.zeros(size, dtype=torch.bool)
    mask[torch.from_numpy(array.astype(numpy.int64))] = True
    return mask


# ---- what every checkpoint is measured by


def restricted_loss_rows(on_grid: GridModel, answer: AnswerOnGrid, keys: Sequence[int]) -> Iterator[Row]:
    """Yields losses of the logits: unedited, restricted, without keys, and fitted by cosines.

    Restricted logits and cosines come a second time, held out: fitted on other inputs of the same split. Fitted on all
    inputs, they hold the right answers of a model that has only memorised its training inputs.
    """
    logits, total = on_grid.logits[:, answer.classes], answer.sum
    yield from on_grid.metric_rows(answer, NONE, logits)
    if not keys:
        return
    cosines = total.cosines(logits)
    yield from on_grid.metric_rows(answer, RESTRICTED, total.restricted(logits, keys))
    yield from on_grid.metric_rows(answer, EXCLUDED, total.excluded(logits, keys))
    yield from on_grid.metric_rows(answer, FITTED, cosines.fitted(keys))
    splits = {
        split: rows for split, rows in on_grid.splits.items() if split in (TRAIN, TEST) and len(rows) > 1
    }
    held_out = replace(on_grid, splits=splits)
    for name, fit in ((RESTRICTED, fitted_waves), (FITTED, fitted_cosines)):
        edited = logits.clone()
        for rows in splits.values():
            for part in random_folds(rows):
                edited[part] = fit(total, logits, keys, rows[~torch.isin(rows, part)], part)
        yield from held_out.metric_rows(answer, name + HELD_OUT, edited)
    yield unedited_row(answer.name, "variance of logits explained by cosines", cosines.explained(keys))


def random_folds(rows: Tensor) -> Sequence[Tensor]:
    """Returns rows in parts of equal size, drawn at random, the same ones each time."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return rows[order].tensor_split(min(FOLDS, len(rows)))


def fitted_waves(total: ModularSum, logits: Tensor, keys: Sequence[int], fit: Tensor, rows: Tensor) -> Tensor:
    """Returns the logits of some rows by a constant and the keys' waves, by least squares on the rows ``fit``."""
    waves = torch.cat([torch.ones(len(logits), 1).double(), *(total.waves(key) for key in keys)], 1)
    # Waves of a small modulus may depend on each other.
    return waves[rows] @ torch.linalg.lstsq(waves[fit], logits[fit], driver="gelsd").solution


def fitted_cosines(
    total: ModularSum, logits: Tensor, keys: Sequence[int], fit: Tensor, rows: Tensor
) -> Tensor:
    """Returns the logits of some rows by the keys' cosines of r - c, by least squares on the rows ``fit``."""
    on_fit, on_rows = (
        replace(total, coordinates=total.coordinates[chosen]).cosines(logits[chosen])
        for chosen in (fit, rows)
    )
    return replace(on_rows, by_difference=on_fit.by_difference).fitted(keys)


def w_l_and_w_e_gini_rows(on_grid: GridModel, keys: Mapping[str, Sequence[int]]) -> Iterator[Row]:
    """Yields Gini coefficients of Fourier components: of W_L over each answer's classes, of W_E over the digits."""
    for name, answer in on_grid.inputs.answers.items():
        norms = transform(neuron_logit_map(on_grid.model)[:, answer.classes], 1).norm(dim=0)
        yield unedited_row(name, GINI, gini(norms), site="mlp_post")
        yield unedited_row(name, "key frequencies", float(len(keys[name])))
    norms = transform(on_grid.model.W_E[list(on_grid.inputs.axes[0].values)].detach()).norm(dim=1)
    yield unedited_row(OF_W_E, GINI, gini(norms), site="embed")


def squared_weights_rows(on_grid: GridModel) -> Iterator[Row]:
    """Yields the sum of all squared weights."""
    total = sum(float(weight.detach().double().square().sum()) for weight in on_grid.model.parameters())
    yield unedited_row(ALL_WEIGHTS, SQUARES, total)


#: Inputs on which the linear way from neurons to logits is checked against the model itself.
CHECKED = 64


def neuron_logit_map_rows(on_grid: GridModel, answer: AnswerOnGrid, keys: Sequence[int]) -> Iterator[Row]:
    """Yields the rows of W_L: what key frequencies leave of it, how the neurons' projections on its cosines and sines
    follow the answer, and whether the neurons of a frequency write to it alone.
    """
    waves, of_row, is_key = w_l_wave_projections_and_keys(on_grid, answer, keys)
    neurons, period = on_grid.neurons.double(), answer.sum.period
    residual = float((waves[~is_key].norm() / waves.norm()).nan_to_num())
    yield unedited_row(answer.name, "residual of W_L", residual, site="mlp_post")
    for key in keys:
        directions = zip(("cos", "sin"), waves[of_row == key], answer.sum.waves(key).T, strict=False)
        for wave, row, along in directions:
            share = float(variance_explained((neurons @ row)[:, None], along[:, None])[0])
            about = f"{wave} of {frequency_label(answer, key)}"
            yield unedited_row(about, "variance explained by the wave", share, site="mlp_post")
    if set(on_grid.inputs.grid.sizes) == {period}:
        # A neuron's column is what it writes to the classes.
        power, groups = waves.square(), clusters(spectrum(neurons, on_grid.inputs.grid.sizes))
        for label in groups.sizes:
            of_cluster = power[:, groups.neurons(label)]
            share = float(of_cluster[of_row == label].sum() / of_cluster.sum())
            about = frequency_label(answer, int(str(label)))
            yield unedited_row(about, "power of W_L in the frequency of its neurons", share, site="mlp_post")
    digits = list(on_grid.inputs.axes[0].values)
    if len(digits) == period:
        norms = spectrum(on_grid.model.W_E[digits]).total().power.sqrt()[1:]
        strong = [key for key, norm in enumerate(norms.tolist(), 1) if norm > float(norms.max()) / 4]
        yield unedited_row(answer.name, "frequencies of W_E", float(len(strong)), site="embed")
        shared = sum(key in strong for key in keys) / max(1, len(keys))
        yield unedited_row(answer.name, "share of key frequencies among those of W_E", shared)


def w_l_wave_projections_and_keys(
    on_grid: GridModel, answer: AnswerOnGrid, keys: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns W_L along cosines and sines over the classes ``[wave neuron]``, the frequency of each wave, and whether
    it is key.
    """
    waves = basis(answer.sum.period) @ neuron_logit_map(on_grid.model)[:, answer.classes].T
    of_row = frequencies(answer.sum.period)
    return waves, of_row, torch.isin(of_row, torch.tensor(list(keys), dtype=torch.long))


# ---- frequencies removed


def engine_and_logits_from_neurons(on_grid: GridModel) -> tuple[str, Callable[[Tensor, Tensor], Tensor]]:
    """Returns an engine, and its function from neurons ``[input neuron]`` to the logits of some classes.

    ``linear`` where logits change by just what W_L makes of a change of the neurons; ``naive``, the whole model, where
    a normalisation stands between.
    """
    site = f"mlp_post.{on_grid.model.cfg.n_layers - 1}"
    neurons, to_logits = on_grid.neurons.double(), neuron_logit_map(on_grid.model)

    def by_whole_model(values: Tensor, classes: Tensor) -> Tensor:
        return on_grid.run(lambda rows: [edit_at_read(on_grid, site, values[rows, None])])[:, classes]

    def by_linear_map(values: Tensor, classes: Tensor) -> Tensor:
        return on_grid.logits[:, classes] + (values - neurons) @ to_logits[:, classes]

    by_hand = on_grid.logits[:CHECKED] - neurons[:CHECKED] @ to_logits
    zeroed = on_grid.run(lambda rows: [edit_at_read(on_grid, site, 0 * neurons[rows, None])], CHECKED)
    gap = (by_hand - zeroed).abs().max()
    is_linear = gap < 1e-4 * on_grid.logits[:CHECKED].abs().max()
    return ("linear", by_linear_map) if is_linear else ("naive", by_whole_model)


def edit_at_read(on_grid: GridModel, site: str, values: Tensor) -> Any:
    """Returns an edit that puts values at the position where the output is read; its axis has length 1."""
    return edit(site, lambda old: values.to(old).expand_as(old), positions=[on_grid.read_position])


def frequency_removal_rows(on_grid: GridModel, answer: AnswerOnGrid, keys: Sequence[int]) -> Iterator[Row]:
    """Yields losses with frequencies of the neurons, or of the logits, removed or kept."""
    total, sizes = answer.sum, on_grid.inputs.grid.sizes
    values, logits = on_grid.neurons.double(), on_grid.logits[:, answer.classes]
    engine, logits_of = engine_and_logits_from_neurons(on_grid)

    def edited_neuron_rows(name: str, edited: Tensor, variant: str | None = None) -> Iterator[Row]:
        about: dict[str, Any] = {"engine": engine, "site": "mlp_post", "variant": variant}
        return on_grid.metric_rows(answer, f"neurons: {name}", logits_of(edited, answer.classes), **about)

    def kept(of: Tensor, directions: Tensor) -> Tensor:
        return of.mean(0) + share(of, directions)

    yield from edited_neuron_rows("key frequencies alone", kept(values, total.block(keys)))
    yield from edited_neuron_rows("waves of the answer alone", kept(values, total.directions(keys)))
    for key in keys:
        about, block = frequency_label(answer, key), total.block([key])
        yield from edited_neuron_rows("without one key frequency", values - share(values, block), about)
        without = logits - share(logits, block)
        yield from on_grid.metric_rows(answer, "logits: without one key frequency", without, about)
    yield from on_grid.metric_rows(answer, "logits: key frequencies alone", kept(logits, total.block(keys)))
    waves, _, is_key = w_l_wave_projections_and_keys(on_grid, answer, keys)
    directions = torch.linalg.qr(waves[is_key].T).Q
    along = values @ directions @ directions.T
    yield from edited_neuron_rows("on the directions of W_L alone", along)
    yield from edited_neuron_rows("off the directions of W_L", values - along)
    if set(sizes) == {total.period}:
        found, edited = clusters(spectrum(values, sizes)), values.clone()
        for label in found.sizes:
            members = found.neurons(label)
            edited[:, members] = kept(values[:, members], total.block([int(str(label))]))
        yield from edited_neuron_rows("own frequency of each alone", edited)


# ---- attention, and ways around layers


def attention_wave_fit_and_loss_rows(on_grid: GridModel) -> Iterator[Row]:
    """Yields, for each head, how much of its attention to the first operand waves of the two operands explain, and
    losses with the attention of every head replaced by its best fit.

    A = constant + α(cos w m₁x₁ − cos w m₂x₂) + β(sin w m₁x₁ − sin w m₂x₂), w = 2πk/q, least squares (Nanda et al.
    2023, section 4.1, where the m are 1); k is the frequency that explains most. In their place (the published
    linearised softmax) the first operand gets the fit, positions beside the operands their mean over the inputs, and
    the second operand what is left.
    """
    if len(on_grid.inputs.operand_positions) != 2:
        return
    first, second = on_grid.inputs.operand_positions
    for layer, pattern in on_grid.patterns.items():
        for head, mean in enumerate(pattern[:, :, on_grid.read_position].double().mean(0).tolist()):
            yield unedited_row(
                "all inputs", "attention to itself", mean, layer=layer, head=head, site="pattern"
            )
    for answer in on_grid.inputs.answers.values():
        waves, edited = differences_of_operand_waves(answer), {}
        for layer, pattern in on_grid.patterns.items():
            seen = pattern[:, :, first].double()
            shares, best = torch.stack([variance_explained(seen, wave) for wave in waves]).max(0)
            for head, explained in enumerate(shares.tolist()):
                labels = {"layer": layer, "head": head, "site": "pattern"}
                yield unedited_row(answer.name, "attention explained", explained, **labels)
            new = pattern.double().mean(0).expand(pattern.shape).clone()
            fits = [regression(seen[:, [head]], waves[at]) for head, at in enumerate(best.tolist())]
            new[:, :, first], new[:, :, second] = torch.cat(fits, 1), 0.0
            new[:, :, second] = 1.0 - new.sum(2)
            edited[layer] = new

        def edits(rows: slice, edited: dict[int, Tensor] = edited) -> list[Any]:
            return [
                edit_at_read(on_grid, f"pattern.{layer}", new[rows, :, None]) for layer, new in edited.items()
            ]

        logits = on_grid.run(edits)[:, answer.classes]
        yield from on_grid.metric_rows(answer, "attention: waves of the digits alone", logits, engine="naive")


def differences_of_operand_waves(answer: AnswerOnGrid) -> list[Tensor]:
    """Returns of each frequency cos and sin of w m₁x₁ less those of w m₂x₂, ``[input wave]``."""
    first, second = answer.sum.terms.T
    period = answer.sum.period
    return [cos_sin(first, key, period) - cos_sin(second, key, period) for key in answer.sum.frequencies]


def attention_and_skip_ablation_rows(on_grid: GridModel) -> Iterator[Row]:
    """Yields losses where a layer's attention or the skip path is set to zero, or that around the MLP to its mean.

    The way around a layer is what the residual stream brings along: without it, the stream is what the layer adds.
    """
    model = on_grid.model
    layers = range(model.cfg.n_layers)
    streams = [f"{site}.{layer}" for layer in layers for site in ("resid_pre", "mlp_out", "resid_post")]
    seen = record_in_passes(
        model, on_grid.inputs.tokens.to(next(model.parameters()).device), streams, lambda at: at
    )

    def edits_adding_change(site: str, change: Tensor) -> Callable[[slice], list[Any]]:
        return lambda rows: [edit(site, lambda old: (old + change[rows]).to(old.dtype))]

    def edits_of_every_slice(one: Any) -> Callable[[slice], list[Any]]:
        return lambda rows: [one]

    for layer in layers:
        at = "" if model.cfg.n_layers == 1 else f" of layer {layer}"
        # In a post-norm model the way around the MLP is not resid_mid, but what the LayerNorm makes of it.
        around = seen[f"resid_post.{layer}"] - seen[f"mlp_out.{layer}"]
        mean = around.double().mean(0).float()
        zeroed = ablate.zero(heads([(layer, head) for head in range(model.cfg.n_heads)], model))
        edits = {
            f"attention{at} zeroed": edits_of_every_slice(zeroed),
            f"way around attention{at} zeroed": edits_adding_change(
                f"resid_mid.{layer}", -seen[f"resid_pre.{layer}"]
            ),
            f"way around MLP{at} zeroed": edits_adding_change(f"resid_post.{layer}", -around),
            f"way around MLP{at} at its mean": edits_adding_change(f"resid_post.{layer}", mean - around),
        }
        for name, edit_rows in edits.items():
            output = on_grid.run(edit_rows)
            for answer in on_grid.inputs.answers.values():
                logits = output[:, answer.classes]
                yield from on_grid.metric_rows(answer, name, logits, engine="naive", layer=layer)
