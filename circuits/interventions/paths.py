"""Patches the direct path from one component to another, with everything else as in the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from circuits.errors import CircuitsError
from circuits.interventions.base import Cut, Intervention, Receiver
from circuits.interventions.edges import RECEIVERS, SENDERS, order_of, receivers_of
from circuits.interventions.edits import Edit, Place
from circuits.model.heads import Head, group_of
from circuits.model.hooked_model import HookedModel
from circuits.model.sites import Site


@dataclass(frozen=True)
class Path(Intervention):
    """A path from sender to receivers along the residual stream, directly or (`through`) by way of the MLPs."""

    sender: Edit
    receivers: tuple[Place | None, ...]  # None: the output
    through: str | None

    def __post_init__(self) -> None:
        if not self.receivers:
            raise ValueError("a path without receivers changes nothing")

    def plan(self, surface: HookedModel) -> tuple[Cut, ...]:
        """Returns a cut for each sender and receiver; refuses a receiver that is computed before the sender."""
        senders = self.sender.plan(surface)
        try:
            output = Place(Site("resid_post", surface.n_layers - 1))
            receivers = [output if place is None else place for place in self.receivers]
            _refuse_shared_inputs(receivers, surface)
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
            **{key: value for key, value in sender.items() if key not in ("intervention", "places")},
            "receiver": "output"
            if self.receivers == (None,)
            else ["output" if place is None else place.describe() for place in self.receivers],
            "through": self.through,
        }

    @property
    def title(self) -> str:
        direction = self.sender.replacement.direction
        return self.label if direction is None else f"{self.label} ({direction})"

    @property
    def label(self) -> str:
        sender = "; ".join(map(str, self.sender.places))
        receiver = "; ".join("output" if place is None else str(place) for place in self.receivers)
        return f"patch.path({sender} -> {receiver})"


def _refuse_shared_inputs(receivers: Sequence[Place], surface: HookedModel) -> None:
    """Refuses heads as a whole where others share their keys and values, and says how to name their inputs."""
    asked = {place.site.name: place.heads for place in receivers if place.site.layer is None}
    chosen = asked.get("q")
    if not surface.has_groups(Site("k").kind) or chosen is None or asked.get("k") != chosen:
        return
    for head in chosen.heads or ():
        if isinstance(head, Head):
            group = group_of(head, surface)
            raise CircuitsError(
                f'head {head} shares its keys and values with others; write ("q", "{head}") for its queries, "{group}" '
                f'for the keys and values of its group, or [("q", "{head}"), "{group}"]'
            )


def check_ends(sender: Site, receivers: Sequence[Site]) -> None:
    """Refuses senders that do not write to the residual stream, and receivers that do not read from it."""
    if sender.kind.name not in SENDERS:
        raise CircuitsError(
            f"patch.path: {sender} does not write to the residual stream; senders are heads (z) and "
            f"{', '.join(name for name in SENDERS if name != 'z')}"
        )
    for site in receivers:
        if site.kind.name == "resid_post" and site.layer is None:
            raise CircuitsError(
                "patch.path: resid_post is that of every layer, and later ones would hear the sender twice; write "
                '"output" for the last, or "resid_post.1" for that of layer 1'
            )
        if site.kind.name not in RECEIVERS:
            raise CircuitsError(
                f"patch.path: {site} does not read from the residual stream; receivers are heads (their q, k and "
                f"v), {', '.join(RECEIVERS)}"
            )
