"""Patches the direct path from one component to another, with everything else as in the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from circuits.errors import CircuitsError
from circuits.interventions.base import Cut, Intervention, Receiver
from circuits.interventions.cuts import RECEIVERS, SENDERS, order_of, receivers_of
from circuits.interventions.edits import Edit, Place
from circuits.interventions.replacements import DIRECTION
from circuits.model.sites import Site
from circuits.model.surface import Surface


@dataclass(frozen=True)
class Path(Intervention):
    """A path from sender to receivers along the residual stream, directly or (`through`) by way of the MLPs."""

    sender: Edit
    receivers: tuple[Place, ...]
    through: str | None

    def plan(self, surface: Surface) -> tuple[Cut, ...]:
        senders = self.sender.plan(surface)
        try:
            # Without a receiver the path leads to the output.
            receivers = self.receivers or (Place(Site("resid_post", surface.n_layers - 1)),)
            places = [(place, *hook_heads) for place in receivers for hook_heads in place.on(surface)]
        except CircuitsError as error:
            raise CircuitsError(f"{self.label}: {error}") from error
        last = max(order_of(write.kind.name, write.layer, SENDERS) for write in senders)
        table = receivers_of(surface)
        for place, layer, _, _ in places:
            name = place.site.kind.name
            # Equal orders are refused too: z is computed from q, k and v, and mlp_post from mlp_pre.
            if order_of(name, layer, table) <= last:
                parallel = surface.parallel and order_of(name, layer, RECEIVERS) > last
                reason = "it is computed before the sender is"
                raise CircuitsError(
                    f"{self.label}: no path to {name}.{layer}: "
                    f"{'this model runs attention and MLP of a layer in parallel' if parallel else reason}"
                )
        return tuple(
            Cut(
                self.label,
                write,
                Receiver(hook, place.site.kind, layer, heads, surface.has_groups(place.site.kind)),
                self.through,
            )
            for place, layer, hook, heads in places
            if layer is not None
            for write in senders
        )

    def describe(self) -> dict[str, Any]:
        sender = self.sender.describe()
        return {
            "intervention": "patch.path",
            "sender": sender["places"],
            "positions": sender["positions"],
            "source": sender["source"],
            "receiver": [place.describe() for place in self.receivers] or "output",
            "through": self.through,
            "direction": DIRECTION,
        }

    @property
    def title(self) -> str:
        return f"{self.label} ({DIRECTION})"

    @property
    def label(self) -> str:
        sender = "; ".join(map(str, self.sender.places))
        receiver = "; ".join(map(str, self.receivers)) or "output"
        return f"patch.path({sender} -> {receiver})"


def check_ends(sender: Site, receivers: Sequence[Site]) -> None:
    """Refuses senders that do not write to the residual stream, and receivers that do not read from it."""
    if sender.kind.name not in SENDERS:
        raise CircuitsError(
            f"patch.path: {sender} does not write to the residual stream; senders are heads (z) and "
            f"{', '.join(name for name in SENDERS if name != 'z')}"
        )
    for site in receivers:
        if site.kind.name not in RECEIVERS:
            raise CircuitsError(
                f"patch.path: {site} does not read from the residual stream; receivers are heads (their q, k and "
                f"v), {', '.join(RECEIVERS)}"
            )
