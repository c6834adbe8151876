"""Edits of activations: places, replacements, and the arguments that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from circuits.arguments import check_renamed_args, parse_integers
from circuits.errors import CircuitsError, prefix_circuits_errors
from circuits.frozen_tensors_and_positions import (
    Positions,
    Snapshot,
    Span,
    check_no_integer_mask,
    describe_positions,
    parse_positions,
    parse_positions_or_span,
)
from circuits.interventions.base import ActivationEdit, Intervention, Replacement
from circuits.interventions.replacements import FromFunction
from circuits.model.heads import HeadSpec, index_on_head_axis, looks_like_heads, parse_heads
from circuits.model.hooked_model import HookedModel
from circuits.model.sites import UNITS, Site
from circuits.model.types import HeadsLike, IndicesLike, PositionsLike, SiteLike


@dataclass(frozen=True)
class Place:
    """A part of an activation: a site, and some heads, neurons or features of it (None: the whole tensor)."""

    site: Site
    heads: HeadSpec | None = None
    neurons: tuple[int, ...] | None = None  # or features, where the last axis has these

    def __post_init__(self) -> None:
        if self.heads is not None and self.site.kind.head_axis is None:
            raise CircuitsError(
                f"site {self.site} has no head axis, so heads {self.heads} cannot be edited there; "
                "heads are edited at z, q, k, v, scores and pattern"
            )

    def resolve(self, hooked: HookedModel) -> list[tuple[int | None, str, tuple[int, ...] | None]]:
        """Returns (layer, hook, head indices or None for the whole tensor) for each hook."""
        if self.heads is None:
            places = hooked.hooks_at(self.site)
            for _, hook in places if self.neurons is not None else ():
                size, unit = hooked.unit_count(self.site.kind, hook), self.site.kind.unit
                wrong = [one for one in self.neurons or () if size is not None and not 0 <= one < size]
                if wrong:
                    raise CircuitsError(f"no {unit} {wrong[0]}: the model has {unit}s 0-{(size or 0) - 1}")
            return [(layer, hook, None) for layer, hook in places]
        chosen, only = self.heads.resolve_on_axis(self.site.kind, hooked), self.site.layer
        if only is not None and self.heads.heads is None:
            chosen = tuple(head for head in chosen if head.layer == only)
        layers = tuple(dict.fromkeys(head.layer for head in chosen))
        if only is not None and layers != (only,):
            raise CircuitsError(f"heads {self.heads} are not all in layer {only}, which {self.site} names")
        return [
            (layer, hook, tuple(index_on_head_axis(head) for head in chosen if head.layer == layer))
            for layer, hook in hooked.hooks_at(self.site, layers)
        ]

    def describe(self) -> dict[str, Any]:
        heads = self.heads.describe() if self.heads else None
        units = {} if self.neurons is None else {f"{self.site.kind.unit}s": list(self.neurons)}
        return {"site": str(self.site), "heads": heads} | units

    def __str__(self) -> str:
        text = str(self.site) if self.heads is None else f"{self.site}, heads {self.heads}"
        if self.neurons is None:
            return text
        shown = ",".join(map(str, self.neurons[:8])) + (",..." if len(self.neurons) > 8 else "")
        return f"{text}, {self.site.kind.unit}s {shown}"


@dataclass(frozen=True)
class Edit(Intervention):
    """Replaces an activation at some places and query positions."""

    name: str
    places: tuple[Place, ...]
    replacement: Replacement
    positions: Positions | Span | Snapshot | None = None

    def plan(self, hooked: HookedModel) -> tuple[ActivationEdit, ...]:
        """Returns a write for each hook of the edit's places; refuses those that the model lacks and must have."""
        replacement = self.replacement.resolve(hooked, self)
        with prefix_circuits_errors(self.name):
            return tuple(
                ActivationEdit(
                    self,
                    hook,
                    kind := place.site.kind,
                    layer,
                    replacement,
                    heads,
                    hooked.has_kv_groups(kind),
                    place.neurons,
                    self.positions,
                )
                for place in self.places
                for layer, hook, heads in place.resolve(hooked)
            )

    def describe(self) -> dict[str, Any]:
        return {
            "intervention": self.name,
            "places": [place.describe() for place in self.places],
            "positions": describe_positions(self.positions),
            **self.replacement.describe(),
        }

    @property
    def label(self) -> str:
        return f"{self.name}({'; '.join(map(str, self.places))})"

    @property
    def title(self) -> str:
        direction = self.replacement.direction
        return self.name if direction is None else f"{self.name} ({direction})"


def parse_places(what: Any, caller: str) -> tuple[Place, ...]:
    """Reads heads (edited at z), a site, or a layer number, which stands for its heads at z and its neurons at
    mlp_post, so that both output biases stay.
    """
    with prefix_circuits_errors(caller):
        if isinstance(what, bool):
            raise CircuitsError(f"expected heads, a site or a layer, got {what!r}")
        if isinstance(what, int | np.integer):
            return Place(Site("z", int(what))), Place(Site("mlp_post", int(what)))
        if isinstance(what, Site) or (isinstance(what, str) and not looks_like_heads(what)):
            return (Place(Site.parse(what)),)
        return (Place(Site("z"), parse_heads(what)),)


def parse_heads_at(spec: Any, site: str, caller: str) -> tuple[Place, ...]:
    with prefix_circuits_errors(caller):
        return (Place(Site(site), parse_heads(spec)),)


def parse_place(site: Any, heads: Any, caller: str, neurons: Any = None, features: Any = None) -> Place:
    """Reads a site, and heads, neurons or features of it where those are given."""
    unit, units = ("feature", features) if neurons is None else ("neuron", neurons)
    check_no_integer_mask(units, f"{caller}: {unit}s", "of them all")
    chosen = parse_integers(units, caller, f"{unit}s")
    with prefix_circuits_errors(caller):
        parsed = Site.parse(site)
    if units is not None:
        check_has_neurons_or_features(parsed, unit, caller)
    with prefix_circuits_errors(caller):
        return Place(parsed, None if heads is None else parse_heads(heads), chosen)


def check_has_neurons_or_features(site: Site, by: str, caller: str) -> None:
    """Refuses by="neuron" and by="feature" at a site that has others, or none."""
    if by in UNITS.values() and site.kind.unit != by:
        where = (
            "at mlp_pre and mlp_post" if by == "neuron" else 'of a spliced SAE, at "features.resid_post.1"'
        )
        raise CircuitsError(f"{caller}: site {site} has no {by}s; those are {where}")


def parse_source_positions(
    source_positions: Any, positions: Positions | Span | Snapshot | None, caller: str
) -> Positions | None:
    """Returns the positions of a source that go, in order, to those of the run."""
    at = parse_positions(source_positions, f"{caller}, source_positions", repeats=True)
    if at is None:
        return None
    if isinstance(at, Snapshot) or not isinstance(positions, tuple) or len(at) != len(positions):
        raise CircuitsError(
            f"{caller}: source_positions= are whole numbers, each for one of positions=, whole numbers too; got "
            f"positions={describe_positions(positions)} and source_positions={describe_positions(at)}"
        )
    return at


def parse_positions_without_mask(given: Any, caller: str, name: str = "keys") -> Positions | None:
    positions = parse_positions(given, f"{caller}, {name}")
    if isinstance(positions, Snapshot):
        raise CircuitsError(
            f"{caller}: {name} are positions, the same for every example; got a mask {list(positions.shape)}"
        )
    return positions


@check_renamed_args
def edit(
    site: SiteLike,
    fn: Callable[[Tensor], Tensor],
    heads: HeadsLike = None,
    positions: PositionsLike = None,
    *,
    neurons: IndicesLike = None,
    features: IndicesLike = None,
) -> Edit:
    """Replaces the activation at `site` by `fn(activation)`: steering, scaling, noise, anything.

    `fn` gets a copy of the whole activation (for z [batch pos head d_head]) and returns a tensor of the
    same shape; only the chosen heads, positions, neurons (at mlp_pre and mlp_post) and features (of a
    spliced SAE) of it are used. It must depend on nothing but its argument for results to be the same under every chunk
    size, and treat positions alike to be the same with and without a key-value cache.
    """
    if not callable(fn):
        raise CircuitsError(f"edit: fn must be a function of the activation, got {fn!r}")
    place = parse_place(site, heads, "edit", neurons, features)
    return Edit("edit", (place,), FromFunction(fn), parse_positions_or_span(positions, "edit"))
