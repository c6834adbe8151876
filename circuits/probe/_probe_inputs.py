"""Reads what a probe is asked for: its sites, its targets, and the entries (example, position) to fit and to score."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from circuits.arguments import is_whole, parse_choice, stringify_keys
from circuits.errors import CircuitsError, format_value
from circuits.frozen_tensors_and_positions import to_tensor_if_array
from circuits.interventions.places_and_edits import parse_place
from circuits.interventions.replacements import derangement
from circuits.model.generation_positions import parse_position_mask
from circuits.model.hooked_model import HookedModel
from circuits.model.prompts_with_mask import Prompts
from circuits.model.sites import Site

REGRESSION, CLASSIFICATION = "regression", "classification"
KINDS = (REGRESSION, CLASSIFICATION)

#: The split that every probe has.
ALL = "all"


@dataclass(frozen=True)
class ProbeSite:
    """A site in one layer: one head, or all (None)."""

    site: Site
    hook: str
    head: int | None = None

    @property
    def label(self) -> str:
        """Returns the label, such as `resid_post.2`; `z.1.3` for head 3 of `z.1`."""
        return str(self.site) if self.head is None else f"{self.site}.{self.head}"

    def vectors_of_activation(self, activation: Tensor, prompts: Prompts) -> Tensor:
        """Returns vectors [batch pos d] of an activation, each prompt's own tokens first: with heads concatenated; for
        patterns, the query's row.
        """
        kind = self.site.kind
        if activation.ndim < 3:
            raise CircuitsError(f"probe: {self.hook} is {list(activation.shape)}, not [batch pos ...]")
        activation = prompts.in_order(activation, kind.position_axes, lowest=True)
        if kind.head_axis == 1:
            activation = rearrange(activation, "batch head query key -> batch query head key")
        if self.head is not None:
            activation = activation[:, :, self.head]
        # In some models position embeddings have a batch of 1, shared by all examples.
        return activation.flatten(2).expand(len(prompts), -1, -1)


def parse_sites(hooked: HookedModel, sites: Any, heads: Any) -> tuple[ProbeSite, ...]:
    """Returns each (site, layer) and head at which a probe is fitted, in this order.

    Args:
        heads: None concatenates the heads of a site; else each chosen head has a probe of its own.
    """
    sites = [sites] if isinstance(sites, str | Site) else sites
    if not isinstance(sites, Iterable) or not (sites := list(sites)):
        raise CircuitsError(f'probe: sites are "resid_post", "z.2", ... or a list of them, got {sites!r}')
    probe_sites: list[ProbeSite] = []
    for site in sites:
        parsed = parse_place(site, heads, "probe")
        for layer, hook, chosen in parsed.resolve(hooked):
            layer_site = Site(parsed.site.name, layer)
            probe_sites += [ProbeSite(layer_site, hook, head) for head in chosen or (None,)]
    return tuple(dict.fromkeys(probe_sites))


@dataclass(frozen=True)
class Target:
    """The target of a probe at each position of each example.

    Attributes:
        values: float64 [batch pos d], or classes [batch pos]; pos is 1 where it is the same at all positions.
        width: d, or the number of classes.
        reached: [batch pos], where an example has a value; None: everywhere.
        order: [batch], or [batch pos] where lengths differ, the example whose target each example gets; None unless
            targets are shuffled.
    """

    name: str
    kind: str
    values: Tensor
    width: int
    reached: Tensor | None = None
    order: Tensor | None = None

    def at_entries(self, examples: Tensor, chosen: Tensor) -> Tensor:
        """Returns targets [entry d] or classes [entry] where `chosen` [example pos] is true, in row-major order."""
        sources = examples if self.order is None else self.order[examples]
        values = self.values[sources]
        if sources.ndim > 1:
            values = self.values[sources, torch.arange(sources.shape[1])]
        return values.expand(*chosen.shape, *values.shape[2:])[chosen]

    def shuffled(self, groups: list[Tensor], seed: int) -> Target:
        """Returns a copy in which each example has the whole target of another one of its group, drawn at random.

        Where lengths differ, a group stands in a circle, in random order, and at each position an example has the
        target of the next one that is as long: every target is used once, and padding has none. The only one as long
        keeps its own.
        """
        generator = torch.Generator().manual_seed(seed)
        order = torch.arange(len(self.values))
        if self.reached is not None:
            order = order[:, None].repeat(1, self.reached.shape[1])
            for group in groups:
                circle = group[torch.randperm(len(group), generator=generator)]
                for position, reached in enumerate(self.reached[circle].T):
                    order[circle[reached], position] = circle[reached].roll(-1)
            return replace(self, order=order)
        for group in groups:
            order[group] = group[derangement(len(group), generator)]
        return replace(self, order=order)


def parse_targets(targets: Any, kind: Any, prompts: Prompts) -> tuple[Target, ...]:
    """Reads a tensor, named "target", or a dict of several; `kind` is one for all, or a dict by name."""
    if not isinstance(targets, Mapping):
        targets = {"target": targets}
    if not targets:
        raise CircuitsError("probe: no targets; give a tensor or a dict of names and tensors")
    kinds = kind if isinstance(kind, Mapping) else dict.fromkeys(targets, kind)
    unknown = [name for name in kinds if name not in targets]
    if unknown:
        raise CircuitsError(f"probe, kind: no target {unknown[0]!r} among {', '.join(map(str, targets))}")
    stringify_keys(targets, "probe", "targets")
    return tuple(
        _parse_target(str(name), values, kinds.get(name, REGRESSION), prompts)
        for name, values in targets.items()
    )


def _parse_target(name: str, values: Any, kind: Any, prompts: Prompts) -> Target:
    """Returns a target once its values are checked against its kind and the prompts; those of padding become zero."""
    label = f"probe, target {name!r}"
    kind = parse_choice(kind, KINDS, label, "kind")
    # A list or a column of a table is an array; its fractions keep their digits.
    values = to_tensor_if_array(values if isinstance(values, Tensor) else np.asanyarray(values), label)
    values = values.detach().cpu()
    batch, pos = prompts.shape[:2]
    shape, classify = list(values.shape), kind == CLASSIFICATION
    fits = values.ndim in (1, 2, 3) and shape[0] == batch and (values.ndim == 1 or shape[1] in (1, pos))
    if not fits or not values.numel() or values.is_complex() or (classify and values.ndim == 3):
        vectors = "" if classify else ", [batch 1 d] or [batch pos d]"
        raise CircuitsError(
            f"{label}: {kind} targets are [batch], [batch pos]{vectors}; got {shape} for tokens [{batch}, {pos}]"
        )
    if values.ndim == 1:
        values = values[:, None]
    reached = prompts.reached if values.shape[1] > 1 and prompts.padded else None
    if reached is not None:
        # Of padding there need be none.
        values = prompts.in_order(values)
        values = torch.where(reached[(...,) + (None,) * (values.ndim - 2)], values, torch.zeros_like(values))
    if classify:
        classes = values if values.is_floating_point() else values.long()
        if values.is_floating_point() or bool((classes < 0).any()):
            raise CircuitsError(
                f"{label}: classes are whole numbers from 0, got {str(values.dtype)[6:]} from {classes.min().item()}"
            )
        return Target(name, kind, classes, int(classes.max()) + 1, reached)
    values = values.double()
    if not bool(values.isfinite().all()):
        raise CircuitsError(f"{label}: {int((~values.isfinite()).sum())} of {values.numel()} are not finite")
    values = values if values.ndim == 3 else values[..., None]
    return Target(name, kind, values, values.shape[2], reached)


@dataclass(frozen=True)
class ProbeEntries:
    """The entries (example, position) of a batch that a probe uses, each example's own tokens first.

    Attributes:
        used: boolean [batch pos], true where an entry is fitted or scored.
        fit: indices of the examples to fit, ascending.
        held_out: indices of the examples to score, which are all others.
        splits: name -> boolean [batch pos], "all" first; each split has scores of its own.
    """

    used: Tensor
    fit: Tensor
    held_out: Tensor
    splits: Mapping[str, Tensor]


def parse_entries(prompts: Prompts, positions: Any, splits: Any, test: Any, seed: int) -> ProbeEntries:
    """Reads the entries of a probe; held-out examples depend only on the seed and the number of examples."""
    batch = len(prompts)
    held_out = _parse_held_out_indices(test, batch, torch.Generator().manual_seed(seed))
    fit = torch.arange(batch)[~torch.isin(torch.arange(batch), held_out)]
    if len(held_out) < 2 or len(fit) < 2:
        raise CircuitsError(
            f"probe: {len(fit)} examples to fit and {len(held_out)} held out; it takes 2 to score, and 2 to fit"
        )
    used = (
        prompts.in_order(parse_position_mask(positions, prompts, "probe, positions") & prompts.real)
        & prompts.reached
    )
    if splits is not None and (not isinstance(splits, Mapping) or ALL in splits):
        raise CircuitsError(f"probe: splits are a dict of masks by name, none {ALL!r}; got {splits!r}")
    named = {ALL: None, **stringify_keys(splits or {}, "probe", "splits")}
    all_splits = {
        name: prompts.in_order(parse_position_mask(mask, prompts, f"probe, split {name!r}"))
        for name, mask in named.items()
    }
    for part, examples in (("fitted", fit), ("held-out", held_out)):
        if not bool(used[examples].any()):
            raise CircuitsError(f"probe: positions= selects nothing in the {part} examples")
    return ProbeEntries(used, fit, held_out, all_splits)


def _parse_held_out_indices(test: Any, batch: int, generator: torch.Generator) -> Tensor:
    """Reads the held-out examples: a fraction or number, drawn at random; a mask [batch], indices or a slice."""
    number = max(1, round(test * batch)) if isinstance(test, float) and 0 < test < 1 else test
    if is_whole(number, 1) and (number < batch or number is not test):
        return torch.randperm(batch, generator=generator)[: int(number)].sort().values
    try:
        if isinstance(number, slice | Sequence | np.ndarray | Tensor):
            return torch.arange(batch)[to_tensor_if_array(number, "probe: test")].unique()
    except (IndexError, TypeError, ValueError):
        pass
    raise CircuitsError(
        f"probe: test={format_value(test)}; hold out a fraction below 1, a number below {batch}, a slice, indices, or "
        f"a boolean mask [{batch}] of examples"
    )
