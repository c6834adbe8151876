"""Measures how much of an activation's variance belongs to each modular answer.

It compares this with shuffled digits, and measures what each answer adds beyond the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from interp_tasks.measurement.activations import recorded
from interp_tasks.measurement.subjects import LoadedCheckpoint
from interp_tasks.papers.miiii.remainders import (
    ADJUSTED,
    ANSWER,
    BEST,
    DIGIT,
    DIGITS,
    NEURONS,
    OTHER_FORMS,
    SERVING,
    SEVERAL,
    SHARE,
    SPREAD,
    SPREAD_OF_ALL,
    TOGETHER,
    UNIQUE,
    Inputs,
)

if TYPE_CHECKING:
    from torch import Tensor

    from interp_tasks.measurement.embeddings import Array

#: Other linear forms of a modulus that are looked at.
MAX_FORMS = 6
#: Random assignments behind the counts that chance would give.
ASSIGNMENTS = 200


@dataclass(frozen=True)
class TensorValues:
    """A tensor of activations or weights, ``values [example feature]``, and its name and place in the model."""

    label: str
    site: str
    layer: int | None
    position: int | None
    values: Tensor


def tensors_of(subject: LoadedCheckpoint, inputs: Inputs) -> Iterator[TensorValues]:
    """Yields the outputs of attention and MLP of every layer, and the neurons, at the positions that the task reads."""
    model: Any = subject.model
    task: Any = subject.task
    sites = [
        (site, layer, hook)
        for layer in range(model.cfg.n_layers)
        for site, hook in (
            ("attn_out", f"blocks.{layer}.hook_attn_out"),
            ("mlp_post", f"blocks.{layer}.mlp.hook_post"),
            ("mlp_out", f"blocks.{layer}.hook_mlp_out"),
        )
        if hook in model.hook_dict
    ]
    read = list(task.read_positions)
    tokens, hooks = inputs.tokens.to(subject.tokens.device), [hook for _, _, hook in sites]
    activations = recorded(model, tokens, hooks, lambda values: values[:, read].cpu())
    for site, layer, hook in sites:
        joined = activations.pop(hook)
        for index, position in enumerate(read):
            at = f", position {position}" if len(read) > 1 else ""
            yield TensorValues(f"{site}.{layer}{at}", site, layer, position, joined[:, index])


def embedding_rows(subject: LoadedCheckpoint, inputs: Inputs, draws: int) -> Iterator[dict[str, Any]]:
    """Yields the share of each coordinate's token embedding that is a function of the digit modulo q."""
    import torch

    from circuits import variance

    tables = {axis.values: axis.name for axis in inputs.axes}
    for values, name in tables.items():
        weight = subject.model.W_E[list(values)].detach().cpu()
        digits = torch.arange(len(values))
        label = "W_E" if len(tables) == 1 else f"W_E ({name})"
        moduli = {
            one: answer.modulus for one, answer in inputs.answers.items() if answer.modulus < len(values)
        }
        if not moduli:
            continue
        orders = [shuffled(len(values), subject.seed, draw) for draw in range(draws)]
        place = TensorValues(label, "embed", None, None, weight)
        real = {one: digits % q for one, q in moduli.items()}
        permuted = {one: torch.stack([order % q for order in orders]) for one, q in moduli.items()}
        for one, q in moduli.items():
            share, control = float(variance.total(weight, real[one])), variance.total(weight, permuted[one])
            yield row(place, one, DIGIT, SHARE, share, control.numpy())
            yield row(place, one, DIGIT, ADJUSTED, variance.adjusted(share, len(weight), q - 1))
        yield from unique_share_rows(
            place,
            real,
            [{one: kinds[draw] for one, kinds in permuted.items()} for draw in range(draws)],
            DIGIT,
        )


def shuffled(size: int, seed: int, draw: int) -> Tensor:
    """Returns a random permutation of the digits 0 to ``size`` − 1."""
    import torch

    from tasks import generator

    return torch.randperm(size, generator=generator(seed, "shuffled digits", draw))


def unique_share_rows(
    place: TensorValues, real: Mapping[str, Tensor], permuted: Sequence[Mapping[str, Tensor]], what: str
) -> Iterator[dict[str, Any]]:
    """Yields each answer's unique share, and that of all together; nothing where they span the whole space."""
    from circuits import variance

    degrees = sum(int(one.max()) for one in real.values())
    if degrees >= len(place.values) - 1:
        return
    parts = variance.partition(place.values, real)
    weights = squares(place.values)
    if weights.sum() == 0:
        return
    for at, name in enumerate(parts.names):
        yield row(place, name, what, UNIQUE, pooled(parts.unique[at], weights))
    control = [pooled(variance.partition(place.values, one).together, weights) for one in permuted]
    share = pooled(parts.together, weights)
    yield row(place, TOGETHER, what, SHARE, share, np.array(control))
    yield row(place, TOGETHER, what, ADJUSTED, variance.adjusted(share, len(place.values), degrees))


def squares(values: Tensor) -> Tensor:
    """Returns the sum over examples of each feature's squared distance from its mean."""
    values = values.double()
    total: Tensor = (values - values.mean(0)).square().sum(0)
    return total


def pooled(shares: Tensor, weights: Tensor) -> float:
    """Returns the share of variance of all features together; the weights are the features' variances."""
    return float(shares @ weights / weights.sum())


def grid_rows(
    subject: LoadedCheckpoint, inputs: Inputs, place: TensorValues, draws: int
) -> tuple[list[dict[str, Any]], Mapping[str, Tensor]]:
    """Returns one tensor's rows over all inputs, and the features that serve each answer most, bool ``[feature]``."""
    import torch

    from circuits import variance

    orders = [inputs.shuffles(subject.seed + draw) for draw in range(draws)]
    weights = squares(place.values)
    rows: list[dict[str, Any]] = []
    if weights.sum() == 0:
        return rows, {}
    examples = len(place.values)
    real = {name: inputs.remainders(name) for name in inputs.answers}
    marginals = [Marginal.of(place.values, inputs, at) for at in range(len(inputs.axes))]
    by_feature, serving = {}, {}
    for name, answer in inputs.answers.items():
        q = answer.modulus
        permuted = [inputs.form(answer.coefficients, q, order) for order in orders]
        forms = [inputs.form(form, q) for form in inputs.other_forms(name, MAX_FORMS)]
        shares = variance.explained(place.values, torch.stack([real[name], *permuted, *forms]))
        each = (shares @ weights / weights.sum()).numpy()
        control = shares[1 : 1 + draws]
        rows.append(row(place, name, ANSWER, SHARE, float(each[0]), each[1 : 1 + draws]))
        rows.append(row(place, name, ANSWER, ADJUSTED, variance.adjusted(float(each[0]), examples, q - 1)))
        of_digits = np.sum(
            [one.shares(q, [order[at] for order in orders]) for at, one in enumerate(marginals)], axis=0
        )
        rows.append(row(place, name, DIGITS, SHARE, float(of_digits[0]), of_digits[1:]))
        if forms:
            rows.append(row(place, name, OTHER_FORMS, SHARE, float(each[1 + draws :].mean())))
        chance = (q - 1) / (examples - 1)
        by_feature[name] = (shares[0] - chance) / (1 - chance)
        serving[name] = shares[0] > control.max()
    if len(real) > 1:
        drawn_sets = [
            {name: inputs.form(one.coefficients, one.modulus, order) for name, one in inputs.answers.items()}
            for order in orders[: max(1, draws // 5)]
        ]
        rows += list(unique_share_rows(place, real, drawn_sets, ANSWER))
    if place.site == "mlp_post":
        rows += list(neuron_rows(subject, place, by_feature, serving))
    return rows, served_most(by_feature, serving)


@dataclass(frozen=True)
class Marginal:
    """The means of a tensor over all inputs with the same value of one coordinate.

    Attributes:
        means: ``[value feature]``.
        part: the share of the tensor's variance that is a function of this coordinate alone.
    """

    means: Tensor
    part: float

    @classmethod
    def of(cls, values: Tensor, inputs: Inputs, place: int) -> Marginal:
        import torch

        at = inputs.at[:, place]
        size = inputs.sizes[place]
        means = values.new_zeros(size, values.shape[1], dtype=torch.float64).index_add_(
            0, at, values.double()
        )
        means = means / (len(values) / size)
        return cls(means, float(squares(means).sum() * (len(values) / size) / squares(values).sum()))

    def shares(self, q: int, orders: Sequence[Tensor]) -> Array:
        """Returns the share of variance by the coordinate modulo q, then by each shuffled coordinate.

        On a complete grid the functions of different coordinates are orthogonal, and their shares add up.
        """
        import torch

        from circuits import variance

        digit = torch.arange(len(self.means))
        if q >= len(self.means):
            return np.full(1 + len(orders), self.part)
        kinds = torch.stack([digit % q, *(order % q for order in orders)])
        shares: Array = variance.total(self.means, kinds).numpy() * self.part
        return shares


def served_most(shares: Mapping[str, Tensor], serving: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the features that serve each answer and serve no other answer more, bool ``[feature]``."""
    import torch

    best = torch.stack(list(shares.values())).argmax(0)
    return {name: chosen & (best == at) for at, (name, chosen) in enumerate(serving.items())}


def neuron_rows(
    subject: LoadedCheckpoint,
    place: TensorValues,
    shares: Mapping[str, Tensor],
    serving: Mapping[str, Tensor],
) -> Iterator[dict[str, Any]]:
    """Counts the neurons that serve each answer, and several; chance assigns as many at random to each."""
    import torch

    served = torch.stack(list(serving.values())).numpy()
    strength = torch.stack(list(shares.values())).clamp(min=0).numpy()
    best = served_most(shares, serving)
    for name, chosen in serving.items():
        yield row(place, name, NEURONS, SERVING, float(chosen.sum()))
        yield row(place, name, NEURONS, BEST, float(best[name].sum()))
    if len(serving) < 2:
        return
    live = (squares(place.values) > 0).numpy()
    served, strength = served[:, live], strength[:, live]
    draws = np.random.default_rng([subject.seed, 3])
    several, spread = [], []
    for _ in range(ASSIGNMENTS):
        orders = draws.permuted(np.tile(np.arange(served.shape[1]), (len(served), 1)), axis=1)
        mixed = np.take_along_axis(served, orders, 1)
        several.append(float((mixed.sum(0) > 1).sum()))
        spread.append(spread_of(np.take_along_axis(strength, orders, 1), mixed))
    yield row(place, TOGETHER, NEURONS, SERVING, float(served.any(0).sum()))
    yield row(place, TOGETHER, NEURONS, SEVERAL, float((served.sum(0) > 1).sum()), np.array(several))
    spread_share = spread_of(strength, served)
    yield row(place, TOGETHER, NEURONS, SPREAD, spread_share, np.array(spread))
    yield row(place, TOGETHER, NEURONS, SPREAD_OF_ALL, spread_share / len(served))


def spread_of(strength: Array, served: Array) -> float:
    """Returns (Σ s)² / Σ s² over answers, averaged over neurons that serve one: 1 for a single answer."""
    is_alive = served.any(0) & (strength.sum(0) > 0)
    if not is_alive.any():
        return float("nan")
    chosen = strength[:, is_alive]
    return float((chosen.sum(0) ** 2 / (chosen**2).sum(0)).mean())


def row(
    place: TensorValues, variant: str, what: str, metric: str, value: float, control: Array | None = None
) -> dict[str, Any]:
    """Returns a row of the table; with a control, its mean, the difference, and the 95% range of its draws."""
    columns: dict[str, Any] = {
        "variant": variant,
        "intervention": f"{what}: {place.label}",
        "site": place.site,
        "layer": place.layer,
        "position": place.position,
        "metric": metric,
        "value": value,
        "n": len(place.values),
        "engine": "naive",
    }
    if control is not None and np.isfinite(control).any():
        low, high = np.nanquantile(control, [0.025, 0.975])
        middle = float(np.nanmean(control))
        as_far = np.abs(control - middle) >= abs(value - middle)
        columns |= {
            "baseline": middle,
            "effect": value - middle,
            "effect_ci_low": value - float(high),
            "effect_ci_high": value - float(low),
            "p_value": float(1 + as_far.sum()) / (1 + len(control)),
        }
    return columns
