"""The graph of a model: which nodes write to the residual stream, and which inputs read what they write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from circuits.circuit._names import Edge, Input, Member, Node, Where
from circuits.errors import CircuitsError, said
from circuits.model.sites import KINDS, Site

if TYPE_CHECKING:
    from circuits.model.hooked_model import HookedModel


class Layer(NamedTuple):
    """The edges into the same input of a layer's heads, of an MLP or of the output."""

    site: str
    layer: int | None
    heads: tuple[int | None, ...]
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
    def of(cls, surface: HookedModel) -> Graph:
        return cls(
            surface.n_layers,
            surface.n_heads,
            surface.head_count(KINDS["k"]),
            KINDS["mlp_out"].hook.format(0) in surface.hooks,
            surface.parallel,
            Site("pos_embed").hook() in surface.hooks,
        )

    @classmethod
    def read(cls, given: Any, caller: str) -> Graph:
        """Reads what `describe` returns."""
        try:
            graph = cls(**given)
        except TypeError:
            raise CircuitsError(
                f"{caller}: graph is an object of n_layers, n_heads and so on; got {said(given)}"
            ) from None
        sizes, flags = (
            (graph.n_layers, graph.n_heads, graph.key_heads),
            (graph.mlps, graph.parallel, graph.positions),
        )
        if not (
            all(type(size) is int and size >= 1 for size in sizes)
            and all(isinstance(flag, bool) for flag in flags)
            and graph.n_heads % graph.key_heads == 0
        ):
            raise CircuitsError(
                f"{caller}: graph: sizes are whole numbers from 1, key_heads divides n_heads, the rest is true or "
                f"false; got {given}"
            )
        return graph

    def describe(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes in the order of computation."""
        return _nodes(self)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All edges, by what receives them."""
        return _layers(self)

    @property
    def edges(self) -> frozenset[Edge]:
        return _edges(self)

    def heads_of(self, layer_input: Input) -> list[Input]:
        """Returns the inputs of heads or groups that an input of a whole layer consists of; any other as it is."""
        if layer_input.site not in ("q", "k", "v") or layer_input.head is not None:
            return [layer_input]
        grouped = layer_input.site != "q" and self.key_heads != self.n_heads
        count = self.key_heads if grouped else self.n_heads
        return [Input(layer_input.site, layer_input.layer, head, grouped) for head in range(count)]

    def members(self, kind: str) -> frozenset[Member]:
        return frozenset(self.nodes) if kind == "nodes" else self.edges

    def __contains__(self, member: Member) -> bool:
        """Tells whether a model of these sizes has a node or an edge. None is listed: a file may give any sizes."""
        if isinstance(member, Node):
            if member.layer is None:
                return member.site == "embed" or self.positions
            in_layer = self.mlps if member.head is None else member.head < self.n_heads
            return in_layer and member.layer < self.n_layers
        sender, receiver = member
        beside = self.parallel and sender.layer is not None and sender.layer == receiver.layer
        return sender in self and self._has_input(receiver) and sender.stage < receiver.stage and not beside

    def _has_input(self, one: Input) -> bool:
        if one.layer is None:
            return True
        if one.site == "mlp_pre":
            return self.mlps and one.layer < self.n_layers
        shared = one.site != "q" and self.key_heads != self.n_heads
        fits = one.head is not None and one.head < (self.key_heads if shared else self.n_heads)
        return fits and one.grouped == shared and one.layer < self.n_layers

    def fitted(self, where: Mapping[Member, Where], kind: str, caller: str) -> Mapping[Member, Where]:
        """Returns the same members with inputs of whole layers resolved; refuses those that the model lacks."""
        if all(member in self for member in where):
            return where
        found: dict[Member, Where] = {}
        for member, at in where.items():
            parts: list[Any] = [member]
            if isinstance(member, Edge):
                parts = [Edge(member.sender, receiver) for receiver in self.heads_of(member.receiver)]
            for part in parts:
                if part not in self:
                    raise CircuitsError(f"{caller}: {self._missing(part)}")
                found[part] = found[part] | at if part in found else at
        return found

    def check_same(self, known: Graph | None, caller: str) -> None:
        """Refuses a circuit whose graph is known to be that of a model of another shape."""
        if known is not None and known != self:
            raise CircuitsError(
                f"{caller}: the circuit is of a model of another shape: {known.shape}; this one: {self.shape}"
            )

    @property
    def shape(self) -> str:
        """Says what nodes there are."""
        has = f"{self.n_layers} layers of {self.n_heads} heads"
        if not self.mlps:
            has += " and no MLPs"
        if not self.positions:
            has += ", and adds no position embeddings"
        if self.parallel:
            has += ", whose MLPs run beside the heads of their layer"
        return has if self.key_heads == self.n_heads else f"{has}, {self.key_heads} key-value groups"

    def _missing(self, member: Member) -> str:
        """Returns what to say of a member that the model does not have."""
        has = self.shape
        receiver = member.receiver if isinstance(member, Edge) else None
        shared = self.key_heads != self.n_heads
        if receiver is not None and receiver.site in ("k", "v") and shared and not receiver.grouped:
            return (
                f"no edge {member}: heads share {self.key_heads} key-value groups; name a group, "
                f"{receiver.layer}.k0.{receiver.site}"
            )
        if receiver is not None and receiver.grouped and not shared:
            has += ", each with its own keys and values"
        return f"no {'node' if receiver is None else 'edge'} {member}: the model has {has}"


# Graphs are few and small values, and their edges are many: each is listed once.
@lru_cache(maxsize=16)
def _nodes(graph: Graph) -> tuple[Node, ...]:
    nodes = [Node("embed"), *([Node("pos_embed")] if graph.positions else [])]
    for layer in range(graph.n_layers):
        nodes += [Node("z", layer, head) for head in range(graph.n_heads)]
        nodes += [Node("mlp_out", layer)] if graph.mlps else []
    return tuple(nodes)


@lru_cache(maxsize=16)
def _layers(graph: Graph) -> tuple[Layer, ...]:
    inputs = [Input(site, layer) for layer in range(graph.n_layers) for site in ("q", "k", "v")]
    inputs += [Input("mlp_pre", layer) for layer in range(graph.n_layers) if graph.mlps]
    layers: list[Layer] = []
    for one in [*inputs, Input("resid_post")]:
        parts = graph.heads_of(one)
        senders = [node for node in graph.nodes if node.stage < one.stage]
        if graph.parallel:
            senders = [node for node in senders if node.layer is None or node.layer != one.layer]
        edges = tuple((node, tuple(Edge(node, part) for part in parts)) for node in senders)
        layers.append(Layer(one.site, one.layer, tuple(part.head for part in parts), edges))
    return tuple(layers)


@lru_cache(maxsize=16)
def _edges(graph: Graph) -> frozenset[Edge]:
    return frozenset(edge for layer in graph.layers for _, edges in layer.edges for edge in edges)
