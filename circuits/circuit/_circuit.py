"""A circuit: a set of nodes or of edges, as a value and as a JSON file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from circuits.circuit._graph_and_names import (
    EVERYWHERE,
    NOWHERE,
    Edge,
    EstimateAndExactEffect,
    Graph,
    Member,
    PositionSet,
    parse_member,
)
from circuits.errors import CircuitsError, format_value

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from circuits.circuit._circuit_edit import CircuitEdit
    from circuits.model.types import Figure, TokensLike

FORMAT = 1


def read(path: str | PathLike[str]) -> Circuit:
    """Reads a circuit that `Circuit.write` has written; nothing but JSON is read.

    Raises `CircuitsError` for a file that cannot be read, is no circuit, or names what no model can have.
    """
    caller = f"circuit.read: {path}"
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
        kind, graph = given["kind"], Graph(**given["graph"]) if given["graph"] else None
        if given["format"] != FORMAT or kind not in ("nodes", "edges"):
            raise CircuitsError(f"{caller}: this version reads format {FORMAT}, of nodes or edges")
        where: dict[Member, PositionSet] = {}
        effects: dict[Member, EstimateAndExactEffect] = {}
        for row in given["members"]:
            member, at = parse_member(row.pop("name"), kind, caller)
            if member in where:
                raise CircuitsError(f"{caller}: {member} is listed twice")
            where[member], known = at, EstimateAndExactEffect(**row)
            if known != EstimateAndExactEffect():
                effects[member] = known
        if graph is not None:
            graph.check_members(where, kind, caller)
    except CircuitsError:
        raise
    except OSError as error:
        raise CircuitsError(f"{caller}: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CircuitsError(f"{caller}: no circuit that Circuit.write has written: {error!r}") from error
    return Circuit.of(kind, where, graph, effects)


_CALLER = "circuit"


@dataclass(frozen=True)
class Circuit:
    """A set of nodes or of edges of some model: frozen, without the model, equal to another with the same members.

    `|`, `&` and `-` of two circuits of one kind are circuits; `~` is one too where the graph is known (of circuits
    made from a screening, from `circuit.full` or with `model=`), and a model of another shape is then refused. `len`
    counts members, iteration yields their names in the order of computation, and `"0.1 -> 1.3.q" in c` tells whether
    the circuit has one, at all positions.

    Attributes:
        kind: "nodes" or "edges".
        members: the members with their positions, in the order of computation.
        graph: the graph of the model, if known; not compared.
        effects: what is known about the effects of members; not compared.
    """

    kind: str
    members: tuple[tuple[Member, PositionSet], ...]
    graph: Graph | None = field(default=None, compare=False)
    effects: Mapping[Member, EstimateAndExactEffect] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        kind: str,
        where: Mapping[Member, PositionSet],
        graph: Graph | None = None,
        effects: Mapping[Member, EstimateAndExactEffect] | None = None,
    ) -> Circuit:
        """Makes a circuit of members with their positions; the effects of other members are dropped."""
        present = [member for member, at in where.items() if at != NOWHERE]
        present.sort(key=lambda member: member.sort_key)
        known = {one: effects[one] for one in present if one in effects} if effects else {}
        return cls(kind, tuple((member, where[member]) for member in present), graph, known)

    @cached_property
    def where(self) -> dict[Member, PositionSet]:
        """The positions of each member."""
        return dict(self.members)

    # ---- As a set

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[str]:
        return (f"{member}{at.name_suffix}" for member, at in self.members)

    def __contains__(self, name: object) -> bool:
        member, at = parse_member(name, self.kind, _CALLER)
        return at & self.where.get(member, NOWHERE) == at

    def __or__(self, other: Any) -> Circuit:
        return self._combine_with("|", other, lambda one, two: one | two)

    def __and__(self, other: Any) -> Circuit:
        return self._combine_with("&", other, lambda one, two: one & two)

    def __sub__(self, other: Any) -> Circuit:
        return self._combine_with("-", other, lambda one, two: one & two.complement)

    def __invert__(self) -> Circuit:
        if self.graph is None:
            raise CircuitsError(
                "~: the graph is unknown, so what is outside the circuit is too; write circuit.full(model) - c"
            )
        return _make_full_circuit(self.graph, self.kind) - self

    def __le__(self, other: Any) -> bool:
        return not len(self._combine_with("<=", other, lambda one, two: one & two.complement))

    def _combine_with(
        self, sign: str, other: Any, combine: Callable[[PositionSet, PositionSet], PositionSet]
    ) -> Circuit:
        """Returns a circuit of both circuits' members, where each acts as `combine` says."""
        if not isinstance(other, Circuit):
            raise CircuitsError(
                f"circuit {sign} {type(other).__name__}: give a circuit on both sides, such as "
                f"circuit.{self.kind}(names) or found.top(20)"
            )
        if self.kind != other.kind:
            raise CircuitsError("one circuit is of nodes, the other of edges; they have no members in common")
        if None not in (self.graph, other.graph) and self.graph != other.graph:
            raise CircuitsError("the circuits are of models of different shapes")
        graph = self.graph or other.graph
        members = dict.fromkeys([*self.where, *other.where])
        if graph is not None and None in (self.graph, other.graph):
            graph.check_members(members, self.kind, _CALLER)
        first, second = self.where, other.where
        combined = {one: combine(first.get(one, NOWHERE), second.get(one, NOWHERE)) for one in members}
        return Circuit.of(self.kind, combined, graph, {**other.effects, **self.effects})

    # ---- As an intervention

    def keep(self, source: TokensLike | None = None, how: str = "resample") -> CircuitEdit:
        """Returns the intervention under which all edges outside the circuit carry the source's values.

        Those inside carry what the edited run computes. A node outside a circuit of nodes has all its outgoing edges
        cut. The empty circuit gives the source run, the full one the run without edits.

        Args:
            source: tokens [batch pos], of the run's batch or of 1, or a mapping from hook names to tensors (what
                `cache` gives); for "mean", tokens of any number; none for "zero".
            how: what an edge outside carries: "resample", what the sender writes on the source, row by row; "mean",
                its mean over the source's examples, per position; "zero", nothing.
        """
        from circuits.circuit._circuit_edit import CircuitEdit, parse_replacement

        return CircuitEdit(self, parse_replacement(source, how, "circuit.keep"), keep=True)

    def cut(self, source: TokensLike | None = None, how: str = "resample") -> CircuitEdit:
        """Returns the intervention under which the edges of the circuit carry the source's values, and no others.

        Arguments are those of `keep`.
        """
        from circuits.circuit._circuit_edit import CircuitEdit, parse_replacement

        return CircuitEdit(self, parse_replacement(source, how, "circuit.cut"), keep=False)

    # ---- As data

    @property
    def sha256(self) -> str:
        """The sum of the members' names, by which two circuits are told apart."""
        return hashlib.sha256("\n".join((self.kind, *self)).encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """Returns the circuit as JSON-able data, as `write` stores it."""
        members: list[dict[str, Any]] = []
        for member, at in self.members:
            known = self.effects.get(member, EstimateAndExactEffect())._asdict()
            given = {key: value for key, value in known.items() if value is not None}
            members.append({"name": f"{member}{at.name_suffix}", **given})
        graph = None if self.graph is None else asdict(self.graph)
        return {"kind": self.kind, "size": len(self), "graph": graph, "members": members}

    @property
    def frame(self) -> pd.DataFrame:
        """A row per member: its name, sender and receiver (of edges), positions, and what is known of its effect."""
        import pandas as pd

        rows: list[dict[str, Any]] = []
        for member, at in self.members:
            row: dict[str, Any] = {"name": str(member)}
            if isinstance(member, Edge):
                row |= {"sender": str(member.sender), "receiver": str(member.receiver)}
            row["positions"] = at.name_suffix.removeprefix(" @ ") or "all"
            rows.append(row | self.effects.get(member, EstimateAndExactEffect())._asdict())
        ends = ["sender", "receiver"] if self.kind == "edges" else []
        frame = pd.DataFrame(rows, columns=["name", *ends, "positions", *EstimateAndExactEffect._fields])
        return frame.astype({"estimate": float, "effect": float})

    def plot(self) -> Figure:
        """Returns a plotly figure: the graph by layers, embeddings below and the output on top.

        Lines are as wide as the effects that are known; hover for them. A click on the legend hides edges into q, k or
        v. `plots.save` writes it as a page, SVG or PNG.
        """
        from circuits.figures.circuit_graph import circuit_figure

        members = [member for member, _ in self.members]
        ends = {end.node_name: end for one in members for end in (one if isinstance(one, Edge) else (one,))}
        # Key-value groups stand behind heads.
        nodes = sorted(ends, key=lambda name: (".k" in name, ends[name].head or 0, name))
        receivers = [one.receiver for one in members if isinstance(one, Edge)]
        of_edges = {
            "node": [one.node_name for one in receivers],
            "input": [one.input_kind for one in receivers],
        }
        frame = self.frame.assign(**of_edges) if receivers else self.frame
        return circuit_figure(frame, {name: ends[name].computation_order for name in nodes})

    def write(self, path: str | PathLike[str]) -> None:
        """Writes the circuit as JSON, which `circuit.read` reads."""
        text = json.dumps({"format": FORMAT, **self.describe()}, indent=1, allow_nan=False) + "\n"
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise CircuitsError(f"circuit.write: cannot write {path}: {error.strerror}") from error

    def __repr__(self) -> str:
        shown = ", ".join(name for name, _ in zip(self, range(6), strict=False))
        members = self.kind.removesuffix("s") if len(self) == 1 else self.kind
        return f"Circuit({len(self)} {members}{': ' * bool(shown)}{shown}{', ...' if len(self) > 6 else ''})"


def edges(names: Iterable[str] | str, model: nn.Module | None = None) -> Circuit:
    """Makes a circuit of edges by name: sender -> receiver, such as "0.1 -> 1.3.q".

    Senders are embed, pos_embed, heads (0.1) and MLPs (mlp0); receivers are the inputs of heads (1.3.q, 1.3.k, 1.3.v),
    of key-value groups where heads share them (1.k0.k, 1.k0.v), MLPs and output. "0.1 -> 1.3.q @ 3,-1" is the edge at
    two positions, one counted from each prompt's end; "@ all but 3,-1" at the others.

    Args:
        names: a list, or a text with one in each line or between semicolons; the same one twice counts once.
        model: where given, edges that it lacks are refused here, and `~` is relative to its graph.
    """
    return _make_circuit_from_names(names, "edges", model)


def nodes(names: Iterable[str] | str, model: nn.Module | None = None) -> Circuit:
    """Makes a circuit of nodes by name: embed, pos_embed, heads (0.1) and MLPs (mlp0).

    Args:
        names: a list, or a text with one in each line or between semicolons; the same one twice counts once.
        model: where given, nodes that it lacks are refused here, and `~` is relative to its graph.
    """
    return _make_circuit_from_names(names, "nodes", model)


def full(model: nn.Module, kind: str = "edges") -> Circuit:
    """Returns the circuit of all edges of a model, or of all its nodes.

    Args:
        kind: "edges" or "nodes".
    """
    from circuits.arguments import parse_choice

    graph = _build_graph(model)
    return _make_full_circuit(graph, parse_choice(kind, ("edges", "nodes"), "circuit.full", "kind"))


def _make_full_circuit(graph: Graph, kind: str) -> Circuit:
    return Circuit.of(kind, dict.fromkeys(graph.all_members(kind), EVERYWHERE), graph)


def _build_graph(model: Any) -> Graph:
    from circuits.model.hooked_model import HookedModel

    return Graph.of_model(HookedModel(model))


def _make_circuit_from_names(names: Iterable[Any], kind: str, model: Any) -> Circuit:
    caller = f"circuit.{kind}"
    if isinstance(names, str):
        names = [name for name in names.replace("\n", ";").split(";") if name.strip()]
    if not isinstance(names, Iterable):
        raise CircuitsError(f"{caller}: give a list of names, got {format_value(names)}")
    where: dict[Member, PositionSet] = {}
    for name in names:
        member, at = parse_member(name, kind, caller)
        where[member] = where.get(member, NOWHERE) | at
    graph = None if model is None else _build_graph(model)
    if graph is not None:
        graph.check_members(where, kind, caller)
    return Circuit.of(kind, where, graph)
