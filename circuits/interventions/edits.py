"""Edits of activations: places and replacements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from circuits.errors import CircuitsError
from circuits.interventions.base import ActivationEdit, Intervention, Replacement
from circuits.model.heads import HeadSpec, index_of
from circuits.model.hooked_model import HookedModel
from circuits.model.sites import Site
from circuits.tensors import Positions, Snapshot, Span, describe_positions


@dataclass(frozen=True)
class Place:
    """A part of an activation: a site, and some heads, neurons or features of it (None: the whole tensor)."""

    site: Site
    heads: HeadSpec | None = None
    neurons: tuple[int, ...] | None = None  # or features, where the last axis has these
    # Number of neurons or features that the site must have, where they were given as a mask.
    d_mlp: int | None = None

    def __post_init__(self) -> None:
        if self.heads is not None and self.site.kind.head_axis is None:
            raise CircuitsError(
                f"site {self.site} has no head axis, so heads {self.heads} cannot be edited there; "
                "heads are edited at z, q, k, v, scores and pattern"
            )
        if self.neurons is not None and self.site.kind.unit is None:
            raise CircuitsError(f"site {self.site} has no neurons; they are edited at mlp_pre and mlp_post")

    def on(self, surface: HookedModel) -> list[tuple[int | None, str, tuple[int, ...] | None]]:
        """Returns (layer, hook, head indices or None for the whole tensor) for each hook."""
        kind = self.site.kind
        if self.neurons is not None:
            self._check_neurons(surface)
        if self.heads is None:
            return [(layer, hook, None) for layer, hook in surface.at(self.site)]
        chosen = self.heads.on_axis(kind, surface)
        if self.site.layer is not None and self.heads.heads is None:
            chosen = tuple(head for head in chosen if head.layer == self.site.layer)
        layers = tuple(dict.fromkeys(head.layer for head in chosen))
        if self.site.layer is not None and layers != (self.site.layer,):
            raise CircuitsError(
                f"heads {self.heads} are not all in layer {self.site.layer}, which {self.site} names"
            )
        return [
            (layer, hook, tuple(index_of(head) for head in chosen if head.layer == layer))
            for layer, hook in surface.at(self.site, layers)
        ]

    def _check_neurons(self, surface: HookedModel) -> None:
        unit = f"{self.site.kind.unit}s"
        for _, hook in surface.at(self.site):
            size = surface.width(self.site.kind, hook)
            if size is None:
                continue
            if self.d_mlp not in (None, size):
                raise CircuitsError(f"the mask of {unit} is [{self.d_mlp}], the model has {size} {unit}")
            wrong = [neuron for neuron in self.neurons or () if not 0 <= neuron < size]
            if wrong:
                raise CircuitsError(f"no {unit[:-1]} {wrong[0]}: the model has {unit} 0-{size - 1}")

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {
            "site": str(self.site),
            "heads": self.heads.describe() if self.heads else None,
        }
        return (
            described
            if self.neurons is None
            else {**described, f"{self.site.kind.unit}s": list(self.neurons)}
        )

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
    # If true, places that a model lacks are passed over (a layer's MLP, in an attention-only model), unless none is
    # left.
    optional_places: bool = False

    def plan(self, surface: HookedModel) -> tuple[ActivationEdit, ...]:
        """Returns a write for each hook of the edit's places; refuses those that the model lacks and must have."""
        writes: list[ActivationEdit] = []
        try:
            replacement = self.replacement.on(surface)
        except CircuitsError as error:
            raise CircuitsError(f"{self.label}, {error}") from error
        refusal: CircuitsError | None = None
        for place in self.places:
            try:
                hooks = place.on(surface)
            except CircuitsError as error:
                if not self.optional_places:
                    raise CircuitsError(f"{self.name}: {error}") from error
                refusal = refusal or error
                continue
            writes += [
                ActivationEdit(
                    label=self.label,
                    hook=hook,
                    kind=place.site.kind,
                    layer=layer,
                    replacement=replacement,
                    heads=heads,
                    groups=surface.has_groups(place.site.kind),
                    neurons=place.neurons,
                    positions=self.positions,
                    masked_score=surface.masked_score(layer) if layer is not None else None,
                )
                for layer, hook, heads in hooks
            ]
        if not writes:
            raise CircuitsError(f"{self.name}: {refusal}")
        replacement.check(surface, self.label)
        return tuple(writes)

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
