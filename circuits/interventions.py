"""What an intervention is: a frozen value that names places and what to put there, without a model.

An intervention is turned into `Write`s when a model is at hand (`Intervention.plan`); `applying` carries
them out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.selection import Head, HeadSpec
from circuits.sites import Site, SiteKind
from circuits.snapshots import Positions, Snapshot, describe_positions, select_positions
from circuits.surface import Surface


@dataclass(frozen=True)
class Reference:
    """A clean pass that a replacement needs: on which tokens, and whether only its mean is kept."""

    tokens: Snapshot
    reduce: str | None = None  # None: every example | "batch": mean over examples | "batch,pos": over both


@dataclass(frozen=True)
class Firing:
    """One call of a hook, as a replacement sees it."""

    write: Write
    selected: Tensor  # boolean, broadcasts to the activation; true where it will be replaced
    reference: Tensor | None
    reads: dict[str, Tensor]
    rows: slice | None  # which rows of the whole batch these are; None: all of them
    total: int | None

    def per_example(self, whole: Tensor, size: int, what: str) -> Tensor:
        """The rows of a whole-batch tensor that belong to this call."""
        if whole.shape[0] != (self.total if self.total is not None else size):
            raise CircuitsError(
                f"{self.write.label}: {what} has a batch of {whole.shape[0]}, the run a batch of "
                f"{self.total if self.total is not None else size}"
            )
        return whole if self.rows is None else whole[self.rows]


class Replacement(ABC):
    """What is put in the place of an activation."""

    @property
    def reference(self) -> Reference | None:
        """The clean pass it needs, if any; its activation at the written hook arrives as
        `Firing.reference`.
        """
        return None

    def reads(self, write: Write) -> dict[str, str]:
        """Other hooks of the same forward pass whose activations it needs: name in `Firing.reads` -> hook."""
        return {}

    @abstractmethod
    def value(self, current: Tensor, firing: Firing) -> Tensor:
        """A tensor that broadcasts to `current`; only the selected entries of it are used."""

    @abstractmethod
    def describe(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Write:
    """One hook of one model, what is replaced there, and by what."""

    label: str
    hook: str
    kind: SiteKind
    layer: int | None
    heads: tuple[int, ...] | None
    positions: Positions | Snapshot | None
    replacement: Replacement
    masked_score: float | None = (
        None  # the finite value this model gives to masked attention scores, if it has one
    )

    def selected(self, current: Tensor, firing_rows: slice | None, total: int | None) -> Tensor:
        """The boolean mask of what is replaced; it broadcasts to `current`."""
        mask = torch.ones((1,) * current.ndim, dtype=torch.bool, device=current.device)
        axis = self.kind.head_axis
        if self.heads is not None and axis is not None:
            chosen = torch.zeros(current.shape[axis], dtype=torch.bool, device=current.device)
            chosen[list(self.heads)] = True
            mask = mask & _along(chosen, axis, current.ndim)
        axis = self.kind.query_axis
        if isinstance(self.positions, Snapshot):
            whole = self.positions.tensor.to(current.device)
            batch = current.shape[0] if total is None else total
            if whole.shape != (batch, current.shape[axis]):
                raise CircuitsError(
                    f"{self.label}: the mask is [batch pos] = {list(whole.shape)}, "
                    f"the run is {[batch, current.shape[axis]]}"
                )
            whole = whole if firing_rows is None else whole[firing_rows]
            shape = [1] * current.ndim
            shape[0], shape[axis] = whole.shape
            mask = mask & whole.reshape(shape)
        elif self.positions is not None:
            chosen = select_positions(self.positions, current.shape[axis], self.label)
            mask = mask & _along(chosen.to(current.device), axis, current.ndim)
        return mask


class Intervention(ABC):
    """A change to a forward pass. A value: frozen, without a model, compared by content."""

    @abstractmethod
    def plan(self, surface: Surface) -> tuple[Write, ...]:
        """The writes it means on this model; `CircuitsError` where it does not fit. Changes nothing."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What it does, as JSON-able data; tensors by shape, dtype and sha256."""

    @property
    @abstractmethod
    def label(self) -> str:
        """One short line for messages and tables."""


@dataclass(frozen=True)
class Place:
    """Which part of which activation: a site, and of it some heads (None: all of the tensor)."""

    site: Site
    heads: HeadSpec | None = None

    def __post_init__(self) -> None:
        if self.heads is not None and self.site.kind.head_axis is None:
            raise CircuitsError(
                f"site {self.site} has no head axis, so heads {self.heads} cannot be edited there; "
                "heads are edited at z, q, k, v, scores and pattern"
            )

    def on(self, surface: Surface) -> list[tuple[int | None, str, tuple[int, ...] | None]]:
        """(layer, hook, head indices or None for the whole tensor)."""
        kind = self.site.kind
        if self.heads is None:
            return [(layer, hook, None) for layer, hook in surface.at(self.site)]
        chosen = self.heads.resolve(surface)
        if surface.head_count(kind) != surface.n_heads:
            raise CircuitsError(
                f"site {self.site}: heads share {surface.head_count(kind)} key-value heads, "
                f"so head {chosen[0]} cannot be edited there alone; edit z"
            )
        layers = tuple(dict.fromkeys(head.layer for head in chosen))
        if self.site.layer is not None and self.heads.heads is None:
            chosen = tuple(Head(self.site.layer, head) for head in range(surface.n_heads))
            layers = (self.site.layer,)
        if self.site.layer is not None and layers != (self.site.layer,):
            raise CircuitsError(
                f"heads {self.heads} are not all in layer {self.site.layer}, which {self.site} names"
            )
        return [
            (layer, hook, tuple(head.head for head in chosen if head.layer == layer))
            for layer, hook in surface.at(self.site, layers)
        ]

    def __str__(self) -> str:
        return str(self.site) if self.heads is None else f"{self.site}, heads {self.heads}"


@dataclass(frozen=True)
class Edit(Intervention):
    """Replace, at some places and query positions, an activation by something else."""

    name: str
    places: tuple[Place, ...]
    replacement: Replacement
    positions: Positions | Snapshot | None = None
    # A place that a model lacks is passed over (a layer's MLP, in an attention-only model), unless none is
    # left.
    optional_places: bool = False

    def plan(self, surface: Surface) -> tuple[Write, ...]:
        writes: list[Write] = []
        refusal: CircuitsError | None = None
        for place in self.places:
            try:
                found = place.on(surface)
            except CircuitsError as error:
                if not self.optional_places:
                    raise CircuitsError(f"{self.name}: {error}") from error
                refusal = refusal or error
                continue
            writes += [
                Write(
                    label=self.label,
                    hook=hook,
                    kind=place.site.kind,
                    layer=layer,
                    heads=heads,
                    positions=self.positions,
                    replacement=self.replacement,
                    masked_score=surface.masked_score(layer) if layer is not None else None,
                )
                for layer, hook, heads in found
            ]
        if not writes:
            raise CircuitsError(f"{self.name}: {refusal}")
        return tuple(writes)

    def describe(self) -> dict[str, Any]:
        return {
            "intervention": self.name,
            "places": [
                {"site": str(place.site), "heads": place.heads.describe() if place.heads else None}
                for place in self.places
            ],
            "positions": describe_positions(self.positions),
            **self.replacement.describe(),
        }

    @property
    def label(self) -> str:
        return f"{self.name}({'; '.join(map(str, self.places))})"


def _along(chosen: Tensor, axis: int, ndim: int) -> Tensor:
    return chosen.reshape([-1 if index == axis else 1 for index in range(ndim)])
