"""Keeps a circuit, or cuts it: the intervention under which edges carry a source's values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from circuits.arguments import parse_choice
from circuits.circuit._graph_and_names import (
    EVERYWHERE,
    NOWHERE,
    Graph,
    IncomingEdges,
    Member,
    Node,
    PositionSet,
)
from circuits.errors import CircuitsError
from circuits.frozen_tensors_and_positions import Snapshot, positions_to_mask, to_tensor_if_array
from circuits.interventions.base import (
    ActivationEdit,
    EdgePatch,
    HookContext,
    Intervention,
    PassRequest,
    Receiver,
    Replacement,
)
from circuits.interventions.replacements import HOW, FromTensors, FromTokens, Mean, Zero
from circuits.model.hooked_model import HookedModel
from circuits.model.prompt_parsing import is_tokenizer_output, parse_tokens_or_texts
from circuits.model.prompts_with_mask import broadcast_mask
from circuits.model.sites import KINDS, Site

#: Up to this many members stand in the description of an intervention.
_LISTED = 500


@dataclass(frozen=True)
class CircuitEdit(Intervention):
    """Keeps a circuit, or cuts it: the edges outside, or inside, carry the values of the replacement."""

    circuit: Any  # a Circuit, which knows this module
    replacement: Replacement
    keep: bool

    def plan(self, hooked: HookedModel) -> tuple[ActivationEdit | EdgePatch, ...]:
        replacement = self.replacement.resolve(hooked, self)
        graph, kind = Graph.of_model(hooked), self.circuit.kind
        graph.check_same_sizes(self.circuit.graph, self.label)
        if self.circuit.graph is None:
            graph.check_members(self.circuit.where, kind, self.label)
        steps = _CircuitPlanBuilder(self, hooked, replacement, self.circuit.where, self.keep)
        if kind == "edges":
            return tuple(cut for layer in graph.edges_by_site for cut in steps.make_cuts_into(layer))
        # All outgoing edges of a node are cut where its output is replaced.
        cut_nodes = ((node, steps.get_cut_positions(node)) for node in graph.nodes)
        return tuple(steps.make_sender_edit(node, at) for node, at in cut_nodes if at != NOWHERE)

    def describe(self) -> dict[str, Any]:
        circuit: dict[str, Any] = {"kind": self.circuit.kind, "size": len(self.circuit)}
        circuit["sha256"] = self.circuit.sha256
        if len(self.circuit) <= _LISTED:
            circuit["members"] = list(self.circuit)
        return {"intervention": self.title, "circuit": circuit, **self.replacement.describe()}

    @property
    def label(self) -> str:
        return f"{self.title}({len(self.circuit)} {self.circuit.kind})"

    @property
    def title(self) -> str:
        return "circuit.keep" if self.keep else "circuit.cut"


class _CircuitPlanBuilder:
    """Makes the steps of one plan; edges that share a sender and its positions share the sender's step."""

    def __init__(
        self,
        owner: CircuitEdit,
        hooked: HookedModel,
        replacement: Replacement,
        where: Mapping[Member, PositionSet],
        keep: bool,
    ) -> None:
        """Finds where each member is cut: everywhere but there if it is kept, else there."""
        self._owner, self._label = owner, owner.label
        self._hooked, self._replacement = hooked, replacement
        # Of many thousand members nearly all are there at all positions, or at none.
        inverse = {member: NOWHERE if at == EVERYWHERE else at.complement for member, at in where.items()}
        self._cut_where, self._cut_elsewhere = (inverse, EVERYWHERE) if keep else (where, NOWHERE)
        self._senders: dict[tuple[Node, PositionSet], ActivationEdit] = {}
        self._replacements: dict[frozenset[int], Replacement] = {}

    def get_cut_positions(self, member: Member) -> PositionSet:
        """Returns the positions at which a node or an edge carries the source's values."""
        return self._cut_where.get(member, self._cut_elsewhere)

    def make_sender_edit(self, node: Node, at: PositionSet) -> ActivationEdit:
        """Returns the write that replaces a node's output at some positions, one for all edges from it."""
        if (node, at) not in self._senders:
            positions, replacement = None, self._replacement
            if not at.inverted:
                positions = tuple(sorted(at.positions))
            elif at.positions:
                replacement = self._replacements.setdefault(
                    at.positions, ReplacementOutsidePositions(self._replacement, at.positions)
                )
            self._senders[node, at] = ActivationEdit(
                self._owner,
                node.hook,
                KINDS[node.site],
                node.layer,
                replacement,
                heads=None if node.head is None else (node.head,),
                positions=positions,
            )
        return self._senders[node, at]

    def make_cuts_into(self, incoming: IncomingEdges) -> list[EdgePatch]:
        """Returns the cuts of edges into a layer: one for all heads from which a sender is cut off alike."""
        number = self._hooked.n_layers - 1 if incoming.layer is None else incoming.layer
        hook, kind = Site(incoming.site, number).hook(), KINDS[incoming.site]
        grouped = self._hooked.has_kv_groups(kind)
        cuts: list[EdgePatch] = []
        for node, edges in incoming.edges:
            heads_by_where: dict[PositionSet, list[int | None]] = {}
            for edge in edges:
                at = self._cut_where.get(edge, self._cut_elsewhere)
                if at is not NOWHERE and at != NOWHERE:
                    heads_by_where.setdefault(at, []).append(edge.receiver.head)
            for at, heads in heads_by_where.items():
                named = tuple(head for head in heads if head is not None) or None
                receiver = Receiver(hook, kind, number, named, grouped)
                cuts.append(EdgePatch(self._label, self.make_sender_edit(node, at), receiver))
        return cuts


@dataclass(frozen=True)
class ReplacementOutsidePositions(Replacement):
    """Another replacement, but at some positions, which keep the activation of the run."""

    inner: Replacement
    positions: frozenset[int]

    def clean_passes(self, write: ActivationEdit) -> dict[str, PassRequest]:
        return self.inner.clean_passes(write)

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        axis, positions = context.write.kind.query_axis, tuple(sorted(self.positions))
        kept = positions_to_mask(positions, current.shape[axis], context.write.label, context.token_mask)
        mask = broadcast_mask(torch.atleast_2d(kept).to(current.device), axis, current.ndim)
        return torch.where(mask, current, self.inner.value(current, context))

    def describe(self) -> dict[str, Any]:
        return {**self.inner.describe(), "all but positions": sorted(self.positions)}


def parse_replacement(source: Any, how: Any, caller: str) -> Replacement:
    """Returns the replacement that edges carry."""
    parse_choice(how, HOW, caller, "how")
    if how == "zero":
        if source is not None:
            raise CircuitsError(f'{caller}: how="zero" has no source; leave source= out')
        return Zero()
    if source is None:
        raise CircuitsError(f"{caller}: how={how!r} needs source=, tokens [batch pos]")
    if how == "mean":
        return Mean(parse_tokens_or_texts(source, caller, "source"))
    if not hasattr(source, "keys") or is_tokenizer_output(source):
        return FromTokens(parse_tokens_or_texts(source, caller, "source"))
    names = [name for name in source.keys() if is_sender_hook(name)]  # noqa: SIM118 an ActivationCache iterates otherwise
    return replacement_from_cache({name: source[name] for name in names}, caller)


def is_sender_hook(hook: Any) -> bool:
    """Returns whether nodes write at a hook."""
    return (
        isinstance(hook, str)
        and "hook_" in hook
        and Site(hook).name in ("embed", "pos_embed", "z", "mlp_out")
    )


def replacement_from_cache(activations: dict[str, Any], caller: str) -> FromTensors:
    """Returns the replacement by activations of a source, by full hook name."""
    if not activations:
        raise CircuitsError(f"{caller}: the source has no sender (hook_embed, hook_z, hook_mlp_out)")
    tensors = {name: parse_stored_activation(given, name, caller) for name, given in activations.items()}
    return FromTensors(tuple((name, Snapshot(tensor)) for name, tensor in tensors.items()))


def parse_stored_activation(given: Any, name: str, caller: str) -> Tensor:
    """Returns an activation that the user has, by its hook name."""
    given = to_tensor_if_array(given, f"{caller}: the source's {name}")
    if not isinstance(given, Tensor) or not given.is_floating_point():
        raise CircuitsError(f"{caller}: the source's {name} is not a tensor of real numbers")
    return given
