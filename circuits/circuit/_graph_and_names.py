"""Names the nodes and edges of a model's graph, and reads these names.

A node is `embed`, `pos_embed`, a head `1.3` or an MLP `mlp1`. An edge leads from a node to an input of a later one:
`0.1 -> 1.3.q`, `embed -> mlp0`, `mlp1 -> output`; where heads share keys and values, to those of a group, `0.1 ->
1.k0.k`. Behind either, `@ 3,-1` limits it to positions, and `@ all but 3,-1` to the others. The names in the tables of
`patch.screen` and `patch.edges` are read too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from circuits.errors import CircuitsError, format_value
from circuits.model.sites import KINDS, Site

if TYPE_CHECKING:
    from circuits.model.hooked_model import HookedModel

NODES = "embed, pos_embed, a head (1.3) or an MLP (mlp1)"
INPUTS = "an input of a head (1.3.q), of a key-value group (1.k0.v), an MLP (mlp1) or output"

_HEAD = re.compile(r"[Ll]?(\d{1,6})[.Hh](\d{1,6})", re.ASCII)
_MLP = re.compile(r"mlp(?:_out\.|_pre\.)?(\d{1,6})", re.ASCII)
# Tables have the heads that a group serves behind its name.
_GROUP = re.compile(r"[Ll]?(\d{1,6})\.?[Kk](\d{1,6})\.([kv])(?: \(heads? [\d,]+\))?", re.ASCII)
_POSITIONS = re.compile(r"(all but )?(-?\d{1,6}(?:,-?\d{1,6})*)", re.ASCII)

#: Places in the order of computation: after the embeddings come, in each layer, heads and then the MLP.
_BEFORE, _STAGES, _AFTER = -1, 2, 10**9


class PositionSet(NamedTuple):
    """The positions at which a member belongs to a circuit: some of them, or (`inverted`) all but some.

    Negative ones count from a prompt's end; to `&` and `|` -1 and 8 are two, also where nine tokens make them one.
    """

    positions: frozenset[int]
    inverted: bool

    def __or__(self, other: PositionSet) -> PositionSet:
        return (self.complement & other.complement).complement

    def __and__(self, other: PositionSet) -> PositionSet:
        if self.inverted and other.inverted:
            return PositionSet(self.positions | other.positions, True)
        if self.inverted:
            return PositionSet(other.positions - self.positions, False)
        if other.inverted:
            return PositionSet(self.positions - other.positions, False)
        return PositionSet(self.positions & other.positions, False)

    @property
    def complement(self) -> PositionSet:
        return PositionSet(self.positions, not self.inverted)

    def count_positions(self, length: int) -> int:
        """Returns how many of a run's positions these are."""
        return length - len(self.positions) if self.inverted else len(self.positions)

    @property
    def name_suffix(self) -> str:
        """What stands behind a member's name."""
        if self == EVERYWHERE:
            return ""
        return f" @ {'all but ' if self.inverted else ''}{','.join(map(str, sorted(self.positions)))}"


EVERYWHERE, NOWHERE = PositionSet(frozenset(), True), PositionSet(frozenset(), False)


class Node(NamedTuple):
    """A component that writes to the residual stream, by the site of its output."""

    site: str  # embed, pos_embed, z or mlp_out
    layer: int | None = None
    head: int | None = None

    @property
    def computation_order(self) -> int:
        """Returns its place in the order of computation."""
        if self.layer is None:
            return _BEFORE
        return _STAGES * self.layer + (self.site == "mlp_out")

    @property
    def hook(self) -> str:
        return Site(self.site, self.layer).hook()

    @property
    def node_name(self) -> str:
        return str(self)

    @property
    def sort_key(self) -> tuple[int, str, int]:
        return self.computation_order, self.site, self.head or 0

    def __str__(self) -> str:
        if self.layer is None:
            return self.site
        return f"{self.layer}.{self.head}" if self.site == "z" else f"mlp{self.layer}"


class Input(NamedTuple):
    """What a component reads from the residual stream: q, k, v, mlp_pre, or resid_post for the output."""

    site: str
    layer: int | None = None
    head: int | None = None
    grouped: bool = False  # whether `head` counts key-value groups

    @property
    def computation_order(self) -> int:
        if self.layer is None:
            return _AFTER
        return _STAGES * self.layer + (self.site == "mlp_pre")

    @property
    def sort_key(self) -> tuple[int, int, str]:
        return self.computation_order, -1 if self.head is None else self.head, self.site

    @property
    def node_name(self) -> str:
        """Returns the name of the component that reads it."""
        if self.site == "mlp_pre":
            return f"mlp{self.layer}"
        return "output" if self.layer is None else f"{self.layer}.{'k' if self.grouped else ''}{self.head}"

    @property
    def input_kind(self) -> str:
        """Returns what it is to the component: q, k, v, MLP or output."""
        return {"mlp_pre": "MLP", "resid_post": "output"}.get(self.site, self.site)

    def __str__(self) -> str:
        return self.node_name if self.head is None else f"{self.node_name}.{self.site}"


class Edge(NamedTuple):
    """The direct path from a node to an input that is computed later."""

    sender: Node
    receiver: Input

    @property
    def sort_key(self) -> tuple[tuple[int, int, str], tuple[int, str, int]]:
        return self.receiver.sort_key, self.sender.sort_key

    def __str__(self) -> str:
        return f"{self.sender} -> {self.receiver}"


Member = Edge | Node


class EstimateAndExactEffect(NamedTuple):
    """What a screening found out about a member: the estimate of its effect, and the exact one where measured."""

    metric: str | None = None
    estimate: float | None = None
    effect: float | None = None


def parse_member(text: object, kind: str, caller: str) -> tuple[Member, PositionSet]:
    """Returns the node or edge that a text names, and its positions.

    Args:
        kind: "nodes" or "edges".
    """
    if not isinstance(text, str):
        named = f"a node: {NODES}" if kind == "nodes" else 'an edge, such as "0.1 -> 1.3.q"'
        raise CircuitsError(f"{caller}: {format_value(text)} is not the name of {named}")
    name, at, positions = text.partition("@")
    where = _parse_positions(positions, text, caller) if at else EVERYWHERE
    if kind == "nodes":
        return _parse_node(name.strip(), text, caller), where
    sender, arrow, receiver = name.partition("->")
    if not arrow:
        raise CircuitsError(f'{caller}: {text!r} is no edge; write sender -> receiver: "0.1 -> 1.3.q"')
    edge = Edge(_parse_node(sender.strip(), text, caller), _parse_input(receiver.strip(), text, caller))
    # An MLP's stage is that of its input, and a head's too: neither receives from itself.
    if edge.sender.computation_order >= edge.receiver.computation_order:
        raise CircuitsError(f"{caller}: no edge {edge}: the receiver is computed before the sender is")
    return edge, where


def node_from_name(name: str) -> Node | None:
    """Returns the node that a name means, if it means one."""
    if name in ("embed", "pos_embed"):
        return Node(name)
    if match := _HEAD.fullmatch(name):
        return Node("z", int(match[1]), int(match[2]))
    if (match := _MLP.fullmatch(name)) and not name.startswith("mlp_pre"):
        return Node("mlp_out", int(match[1]))
    return None


def _parse_node(name: str, text: str, caller: str) -> Node:
    node = node_from_name(name)
    if node is not None:
        return node
    which = "" if name == text.strip() else f" of {text!r}"
    raise CircuitsError(f"{caller}: {name!r}{which} is no node that sends; those are {NODES}")


def input_from_name(name: str) -> Input | None:
    """Returns the input of a head or of a group, of an MLP, or the output, that a name means, if it means one."""
    if name == "output":
        return Input("resid_post")
    if (match := _MLP.fullmatch(name)) and not name.startswith("mlp_out"):
        return Input("mlp_pre", int(match[1]))
    if match := _GROUP.fullmatch(name):
        return Input(match[3], int(match[1]), int(match[2]), True)
    head, _, site = name.rpartition(".")
    if site in ("q", "k", "v") and (match := _HEAD.fullmatch(head)):
        return Input(site, int(match[1]), int(match[2]))
    return None


def _parse_input(name: str, text: str, caller: str) -> Input:
    """Reads the name of an edge's receiver."""
    found = input_from_name(name)
    if found is not None:
        return found
    if _HEAD.fullmatch(name):
        raise CircuitsError(f"{caller}: {text!r}: say which input: {name}.q, {name}.k or {name}.v")
    raise CircuitsError(f"{caller}: {name!r} of {text!r} receives nothing; receivers are {INPUTS}")


def _parse_positions(text: str, whole: str, caller: str) -> PositionSet:
    match = _POSITIONS.fullmatch(" ".join(text.split()).replace(", ", ","))
    if match is None:
        raise CircuitsError(f"{caller}: {whole!r}: behind @ stand positions, such as 3,-1 or all but 3,-1")
    return PositionSet(frozenset(map(int, match[2].split(","))), match[1] is not None)


class IncomingEdges(NamedTuple):
    """The edges into the same input of a layer's heads, of an MLP or of the output; layers in order of computation."""

    site: str
    layer: int | None
    #: By sender, its edges to each of the heads.
    edges: tuple[tuple[Node, tuple[Edge, ...]], ...]


@dataclass(frozen=True)
class Graph:
    """The sizes of a model that say which nodes and edges it has.

    Attributes:
        key_heads: number of key-value groups; n_heads where heads share none.
        mlps: whether blocks have MLPs.
        parallel: whether a block's MLP reads the same stream as its heads.
        positions: whether position embeddings are added to the stream.
    """

    n_layers: int
    n_heads: int
    key_heads: int
    mlps: bool = True
    parallel: bool = False
    positions: bool = True

    @classmethod
    def of_model(cls, hooked: HookedModel) -> Graph:
        return cls(
            hooked.n_layers,
            hooked.n_heads,
            hooked.head_count(KINDS["k"]),
            KINDS["mlp_out"].hook.format(0) in hooked.hooks,
            hooked.parallel,
            "pos_embed" in hooked.embeddings,
        )

    @property
    def is_grouped_query(self) -> bool:
        """Whether heads share keys and values."""
        return self.key_heads != self.n_heads

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes in the order of computation."""
        return _list_graph_nodes(self)

    @property
    def edges_by_site(self) -> tuple[IncomingEdges, ...]:
        """All edges, by what receives them."""
        return _group_edges_by_receiver(self)

    def inputs_at(self, site: str, layer: int | None) -> list[Input]:
        """Returns what reads at a site of a layer: each head or key-value group at q, k and v."""
        if site not in ("q", "k", "v"):
            return [Input(site, layer)]
        grouped = site != "q" and self.is_grouped_query
        count = self.key_heads if grouped else self.n_heads
        return [Input(site, layer, head, grouped) for head in range(count)]

    def all_members(self, kind: str) -> frozenset[Member]:
        return frozenset(self.nodes) if kind == "nodes" else _list_graph_edges(self)

    def check_members(self, members: Iterable[Member], kind: str, caller: str) -> None:
        """Refuses members that the model lacks."""
        known = self.all_members(kind)
        for member in members:
            if member not in known:
                raise CircuitsError(f"{caller}: {self._describe_missing_member(member)}")

    def check_same_sizes(self, known: Graph | None, caller: str) -> None:
        """Refuses a circuit whose graph is known to be that of a model of another shape."""
        if known is not None and known != self:
            raise CircuitsError(
                f"{caller}: the circuit is of a model of another shape: {known.sizes_text}; this one: {self.sizes_text}"
            )

    @property
    def sizes_text(self) -> str:
        """Describes what nodes there are."""
        has = f"{self.n_layers} layers of {self.n_heads} heads"
        has += "" if self.mlps else " and no MLPs"
        has += "" if self.positions else ", and adds no position embeddings"
        has += ", whose MLPs run in parallel to the heads of their layer" if self.parallel else ""
        return f"{has}, {self.key_heads} key-value groups" if self.is_grouped_query else has

    def _describe_missing_member(self, member: Member) -> str:
        """Returns what to say of a member that the model does not have."""
        advice, receiver = "", member.receiver if isinstance(member, Edge) else None
        if receiver is not None and receiver.site in ("k", "v") and receiver.grouped != self.is_grouped_query:
            group = f"; name a group, {receiver.layer}.k0.{receiver.site}"
            advice = group if self.is_grouped_query else ", each with its own keys and values"
        return (
            f"no {'node' if receiver is None else 'edge'} {member}: the model has {self.sizes_text}{advice}"
        )


# Graphs are few and small values, and their edges are many: each is listed once.
@lru_cache(maxsize=16)
def _list_graph_nodes(graph: Graph) -> tuple[Node, ...]:
    nodes = [Node("embed"), *([Node("pos_embed")] if graph.positions else [])]
    for layer in range(graph.n_layers):
        nodes += [Node("z", layer, head) for head in range(graph.n_heads)]
        nodes += [Node("mlp_out", layer)] if graph.mlps else []
    return tuple(nodes)


@lru_cache(maxsize=16)
def _group_edges_by_receiver(graph: Graph) -> tuple[IncomingEdges, ...]:
    places: list[tuple[str, int | None]] = []
    for layer in range(graph.n_layers):
        places += [(site, layer) for site in ("q", "k", "v", *(["mlp_pre"] if graph.mlps else []))]
    layers: list[IncomingEdges] = []
    for site, at in [*places, ("resid_post", None)]:
        parts = graph.inputs_at(site, at)
        senders = [node for node in graph.nodes if node.computation_order < parts[0].computation_order]
        if graph.parallel:
            senders = [node for node in senders if node.layer is None or node.layer != at]
        edges = tuple((node, tuple(Edge(node, part) for part in parts)) for node in senders)
        layers.append(IncomingEdges(site, at, edges))
    return tuple(layers)


@lru_cache(maxsize=16)
def _list_graph_edges(graph: Graph) -> frozenset[Edge]:
    return frozenset(edge for layer in graph.edges_by_site for _, edges in layer.edges for edge in edges)
