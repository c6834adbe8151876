"""The two ends of edges: which components of a model send, which receive, and the stream that they read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from circuits.interventions.edits import Place
from circuits.interventions.paths import SENDERS, order_of, receivers_of
from circuits.model.heads import HeadSpec, at_index, index_of, label_in
from circuits.model.hooked_model import HookedModel
from circuits.model.sites import KINDS, Site


@dataclass(frozen=True)
class Endpoint:
    """A component as the sender or the receiver of an edge; without a site, the output."""

    name: str
    place: Place
    layer: int | None
    hook: str  # where it is read; for an MLP as receiver, the hook of its output
    order: int  # position in the order of computation

    @property
    def head(self) -> int | None:
        """The place on the head axis, of a head or a key-value group; None for a whole site."""
        chosen = None if self.place.heads is None else self.place.heads.heads
        return None if chosen is None else index_of(chosen[0])


def senders_of(surface: HookedModel, how: str = "resample") -> list[Endpoint]:
    """Lists the senders in the order in which they are computed."""
    senders: list[Endpoint] = []
    # Any two prompts, and so their mean, have the same position embeddings.
    for site in ("embed", *(["pos_embed"] if how == "zero" else []), "z", "mlp_out"):
        if KINDS[site].hook.format(0) in surface.hooks:
            senders += _endpoints(surface, site, SENDERS)
    return sorted(senders, key=lambda sender: sender.order)


def inputs_of(surface: HookedModel) -> list[Endpoint]:
    """Returns every place that receives an edge, in the order in which the model computes them."""
    receivers: list[Endpoint] = []
    table = receivers_of(surface)
    for site in ("q", "k", "v"):
        receivers += _endpoints(surface, site, table)
    if KINDS["mlp_pre"].hook.format(0) in surface.hooks:
        # The hook is the MLP's output, because in a gated MLP hook_pre is only one of its reads of the stream.
        receivers += [
            replace(receiver, hook=KINDS["mlp_out"].hook.format(receiver.layer))
            for receiver in _endpoints(surface, "mlp_pre", table)
        ]
    last = Site("resid_post", surface.n_layers - 1)
    order = order_of(last.name, last.layer, table)
    receivers.append(Endpoint("output", Place(last), last.layer, last.hook(), order))
    return sorted(receivers, key=lambda receiver: receiver.order)


def _endpoints(surface: HookedModel, name: str, table: dict[str, int]) -> list[Endpoint]:
    ends: list[Endpoint] = []
    kind = KINDS[name]
    for layer, hook in surface.at(Site(name)):
        order, site = order_of(name, layer, table), Site(name, layer)
        if kind.head_axis is None:
            ends.append(Endpoint(str(site), Place(site), layer, hook, order))
            continue
        for index in range(surface.head_count(kind)):
            head = at_index(kind, layer or 0, index, surface)
            label = label_in(head, surface, "" if name == "z" else name)
            ends.append(Endpoint(label, Place(Site(name), HeadSpec(str(head), (head,))), layer, hook, order))
    return ends


def stream_of(surface: HookedModel, receiver: Endpoint) -> Site:
    """Returns the site of the residual stream that a receiver reads."""
    before = {"resid_post": "resid_post", "mlp_pre": "resid_pre" if surface.parallel else "resid_mid"}
    return Site(before.get(receiver.place.site.name, "resid_pre"), receiver.layer)


def sums_of(surface: HookedModel) -> list[Site]:
    """Lists the sites of sums in the residual stream, in order; "embed" stands for the sum of the embeddings."""
    places = [Site(name, layer) for layer in range(surface.n_layers) for name in ("resid_mid", "resid_post")]
    return [Site("embed"), *(place for place in places if place.hook() in surface.hooks)]


def sum_of(surface: HookedModel, sender: Endpoint) -> Site:
    """Returns the site of the sum to which a sender is added."""
    site = sender.place.site.name
    if sender.layer is None:
        return Site("embed")
    between = Site("resid_mid", sender.layer)
    return between if site == "z" and between.hook() in surface.hooks else Site("resid_post", sender.layer)
