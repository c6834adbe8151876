"""The edges that can be cut: the order of senders and receivers, and refusals of cuts that cannot be one edit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from circuits.errors import CircuitsError
from circuits.interventions.base import ActivationEdit, Cut, Receiver
from circuits.model.hooked_model import HookedModel
from circuits.tensors import Snapshot

#: Sites of senders and of receivers, with their order within a layer of serial blocks.
SENDERS = {"embed": -2, "pos_embed": -2, "z": 0, "attn_out": 1, "mlp_post": 2, "mlp_out": 3}
RECEIVERS = {"q": 0, "k": 0, "v": 0, "mlp_pre": 2, "resid_post": 4}
_PER_LAYER = 10
#: Sites of receivers that have heads.
BY_HEAD = ("q", "k", "v")


def order_of(name: str, layer: int | None, table: dict[str, int]) -> int:
    """Returns a site's place in the order of computation, by `SENDERS` or `receivers_of`."""
    return table[name] + (_PER_LAYER * layer if layer is not None else -_PER_LAYER)


def receivers_of(surface: HookedModel) -> dict[str, int]:
    """Returns the sites of receivers with their order within a layer of this model: where attention and MLP run in
    parallel, they read the same stream and neither hears the other.

    Raises `CircuitsError` for a model whose paths were not compared with a forward by hand.
    """
    surface.refuse_unproved_paths()
    return RECEIVERS | {"mlp_pre": RECEIVERS["q"]} if surface.parallel else RECEIVERS


def check_cuts(cuts: Sequence[Cut], surface: HookedModel) -> None:
    """Refuses cuts that cannot be one edit: an edge that is cut twice, or different `through`."""
    receivers = receivers_of(surface)
    # Sorted, so that a stream comes before its readers.
    cuts = sorted(cuts, key=lambda cut: order_of(cut.receiver.kind.name, cut.receiver.layer, receivers))
    ways = list(dict.fromkeys(cut.through for cut in cuts))
    if len(ways) > 1:
        raise CircuitsError(
            f"{cuts[0].label}: the paths of one run have one through=, here there are {' and '.join(map(repr, ways))}"
        )
    # Cuts by (part of a sender, receiving hook), with their heads; and by part, the cuts whose receiver is a stream.
    known: dict[tuple[object, ...], list[tuple[Cut, frozenset[int | None]]]] = {}
    streams: dict[object, list[Cut]] = {}
    for cut in cuts:
        order = order_of(cut.receiver.kind.name, cut.receiver.layer, receivers)
        heads = frozenset(receiving_heads(cut.receiver, surface))
        for part in _parts(cut.sender, surface):
            places = known.setdefault((part, cut.receiver.hook), [])
            others = [(other, heads & there) for other, there in places if not heads.isdisjoint(there)]
            # All later receivers read a stream that receives, so the sender reaches them through it.
            for other in streams.get(part, ()):
                if order_of("resid_post", other.receiver.layer, receivers) < order:
                    others.append((other, heads))
            for other, shared in others:
                if not _disjoint(cut, other):
                    raise CircuitsError(
                        f"{cut.label}: the edge from {_sender_name(cut.sender)} to "
                        f"{_receiver_name(cut.receiver, min(shared, key=lambda head: head or 0))} is cut twice; give "
                        "each edge one source"
                    )
            places.append((cut, heads))
            if cut.receiver.kind.name == "resid_post":
                streams.setdefault(part, []).append(cut)


def _parts(sender: ActivationEdit, surface: HookedModel) -> list[tuple[str, int | None, int | None]]:
    """Returns the parts of a sender; two senders that share a part overlap there."""
    name, layer = sender.kind.name, sender.layer
    if name in ("z", "attn_out"):
        heads = range(surface.n_heads) if sender.heads is None else sender.heads
        return [("z", layer, head) for head in heads]
    return [("mlp_out" if name == "mlp_post" else name, layer, None)]


def receiving_heads(receiver: Receiver, surface: HookedModel) -> Iterable[int | None]:
    """Returns the heads of a receiver, by their place on the head axis; (None,) where it has none."""
    if receiver.kind.name not in BY_HEAD:
        return (None,)
    return range(surface.head_count(receiver.kind)) if receiver.heads is None else receiver.heads


def _disjoint(one: Cut, other: Cut) -> bool:
    """Tells whether two cuts of an edge are sure to be at different positions."""
    first, second = one.sender.positions, other.sender.positions
    if isinstance(first, tuple) and isinstance(second, tuple):
        # The length is unknown without a run, so a negative position may be any of the others.
        same_end = min(*first, *second) >= 0 or max(*first, *second) < 0
        return same_end and not set(first) & set(second)
    if isinstance(first, Snapshot) and isinstance(second, Snapshot) and first.shape == second.shape:
        return not bool((first.tensor.cpu() & second.tensor.cpu()).any())
    return False


def _sender_name(sender: ActivationEdit) -> str:
    heads = "" if sender.heads is None else f", heads {','.join(map(str, sender.heads))}"
    return (sender.kind.name if sender.layer is None else f"{sender.kind.name}.{sender.layer}") + heads


def _receiver_name(receiver: Receiver, head: int | None) -> str:
    return f"{receiver.kind.name}.{receiver.layer}" + ("" if head is None else f", head {head}")
