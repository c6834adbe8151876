"""Paths and edges: patches the direct path from one component to another, with everything else as in the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from circuits.errors import CircuitsError, prefix_circuits_errors
from circuits.interventions.base import ActivationEdit, EdgePatch, Intervention, Receiver
from circuits.interventions.places_and_edits import Edit, Place
from circuits.model.hooked_model import HookedModel
from circuits.model.sites import Site


@dataclass(frozen=True)
class Path(Intervention):
    """A path from sender to receivers along the residual stream, directly or (`through`) by way of the MLPs."""

    sender: Edit
    receivers: tuple[Place | None, ...]  # None: the output
    through: str | None

    def plan(self, hooked: HookedModel) -> tuple[EdgePatch, ...]:
        """Returns an edge for each sender and receiver; refuses a receiver that is computed before the sender."""
        senders = self.sender.plan(hooked)
        with prefix_circuits_errors(self.label):
            output = Place(Site("resid_post", hooked.n_layers - 1))
            receivers = [output if place is None else place for place in self.receivers]
            places = [(place, *hook_heads) for place in receivers for hook_heads in place.resolve(hooked)]
        last = max(order_of_computation(write.kind.name, write.layer, SENDERS) for write in senders)
        table = receiver_site_order(hooked)
        for place, layer, _, _ in places:
            name = place.site.kind.name
            # Equal orders are refused too: z is computed from q, k and v, and mlp_post from mlp_pre.
            if order_of_computation(name, layer, table) <= last:
                parallel = hooked.parallel and order_of_computation(name, layer, RECEIVERS) > last
                beside = "this model runs attention and MLP of a layer in parallel"
                raise CircuitsError(
                    f"{self.label}: no path to {name}.{layer}: "
                    f"{beside if parallel else 'it is computed before the sender is'}"
                )
        return tuple(
            EdgePatch(
                self.label,
                write,
                Receiver(hook, place.site.kind, layer, heads, hooked.has_kv_groups(place.site.kind)),
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


def check_writes_and_reads_stream(sender: Site, receivers: Sequence[Site]) -> None:
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


#: Sites of senders and of receivers, with their order within a layer of serial blocks.
SENDERS = {"embed": -2, "pos_embed": -2, "z": 0, "attn_out": 1, "mlp_post": 2, "mlp_out": 3}
RECEIVERS = {"q": 0, "k": 0, "v": 0, "mlp_pre": 2, "resid_post": 4}
_PER_LAYER = 10
#: Sites of receivers that have heads.
BY_HEAD = ("q", "k", "v")


def order_of_computation(name: str, layer: int | None, table: dict[str, int]) -> int:
    """Returns a site's place in the order of computation, by `SENDERS` or `receiver_site_order`."""
    return table[name] + (_PER_LAYER * layer if layer is not None else -_PER_LAYER)


def receiver_site_order(hooked: HookedModel) -> dict[str, int]:
    """Returns the sites of receivers with their order within a layer of this model: where attention and MLP run in
    parallel, they read the same stream and neither hears the other.

    Raises `CircuitsError` for a model whose paths were not compared with a forward by hand.
    """
    hooked.check_path_patching_proved()
    return RECEIVERS | {"mlp_pre": RECEIVERS["q"]} if hooked.parallel else RECEIVERS


def check_no_overlapping_edges(edges: Sequence[EdgePatch], hooked: HookedModel) -> None:
    """Refuses edges that cannot be one edit: an edge that is patched twice, or different `through`."""
    receivers = receiver_site_order(hooked)
    # Sorted, so that a stream comes before its readers.
    edges = sorted(
        edges, key=lambda edge: order_of_computation(edge.receiver.kind.name, edge.receiver.layer, receivers)
    )
    ways = list(dict.fromkeys(edge.through for edge in edges))
    if len(ways) > 1:
        raise CircuitsError(
            f"{edges[0].label}: the paths of one run have one through=, here there are {' and '.join(map(repr, ways))}"
        )
    # By part of a sender and receiving head, the edge there; by part, the first stream that receives, and its order.
    known: dict[tuple[object, ...], EdgePatch] = {}
    streams: dict[object, tuple[EdgePatch, int]] = {}
    for edge in edges:
        if edge.sender.kind.name == "pos_embed" and "pos_embed" not in hooked.embeddings:
            raise CircuitsError(
                f"{edge.label}: pos_embed of this model is not added to the residual stream, but to what all queries "
                'and keys read; edit it with edit("pos_embed", ...)'
            )
        order = order_of_computation(edge.receiver.kind.name, edge.receiver.layer, receivers)
        for part in _sender_components(edge.sender, hooked):
            places = [(part, edge.receiver.hook, head) for head in receiving_heads(edge.receiver, hooked)]
            others = [known[place] for place in places if place in known]
            # All later receivers read a stream that receives, so the sender reaches them through it.
            others += [stream for stream, before in [streams.get(part, (edge, order))] if before < order]
            if others:
                raise CircuitsError(
                    f"{edge.label}: an edge is patched twice, by {others[0].label} too; give each edge one source"
                )
            known |= dict.fromkeys(places, edge)
            if edge.receiver.kind.name == "resid_post":
                streams.setdefault(part, (edge, order))


def _sender_components(
    sender: ActivationEdit, hooked: HookedModel
) -> list[tuple[str, int | None, int | None]]:
    """Returns the parts of a sender; two senders that share a part overlap there."""
    name, layer = sender.kind.name, sender.layer
    if name in ("z", "attn_out"):
        heads = range(hooked.n_heads) if sender.heads is None else sender.heads
        return [("z", layer, head) for head in heads]
    return [("mlp_out" if name == "mlp_post" else name, layer, None)]


def receiving_heads(receiver: Receiver, hooked: HookedModel) -> Iterable[int | None]:
    """Returns the heads of a receiver, by their place on the head axis; (None,) where it has none."""
    if receiver.kind.name not in BY_HEAD:
        return (None,)
    return range(hooked.head_count(receiver.kind)) if receiver.heads is None else receiver.heads
