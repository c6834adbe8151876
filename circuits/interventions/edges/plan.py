"""Numbers the senders of cut edges, says which of them each receiving head is cut off from, and collects one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.base import ActivationEdit, EdgePatch
from circuits.interventions.forward_pass import ForwardPass, replacement_for
from circuits.interventions.paths import order_of, receivers_of, receiving_heads
from circuits.interventions.replacements import FromTensors, Zero
from circuits.model.contexts import model_block
from circuits.model.hooked_model import HookedModel
from circuits.model.sites import KINDS
from circuits.tensors import Span

Group = frozenset[int]  # numbers of the senders that a receiver is cut off from


@dataclass(eq=False)
class EdgeBlock:
    """The edges of one block that `blocks` opens, and the hooks at which something was received."""

    cuts: tuple[EdgePatch, ...]
    call: ForwardPass
    received: set[str] = field(default_factory=set)


@dataclass
class Sender:
    """What a cut edge replaces, and the forward pass that it belongs to."""

    label: str
    write: ActivationEdit
    call: ForwardPass


class EdgePlan:
    """The edges that are cut in one model, by sender and by receiver.

    Attributes:
        senders: by number.
        at: numbers of the senders at a hook.
        groups: by receiving hook and head, the senders that it is cut off from.
        heads: the receiving heads of a hook, in order; None where a receiver has no heads.
        last: by group, the order of its last receiver.
        zeroes: whether some sender is replaced by zeros.
    """

    def __init__(self, surface: HookedModel, blocks: Sequence[EdgeBlock]) -> None:
        """Numbers the senders; finds whom each receiving head is cut off from, and each group's last receiver."""
        self._surface, self._receivers = surface, receivers_of(surface)
        self.senders: list[Sender] = []
        self.at: dict[str, list[int]] = {}
        self.last: dict[Group, int] = {}
        self._labels: dict[Group, str] = {}
        numbers: dict[tuple[object, ...], int] = {}
        groups: dict[tuple[str, int | None], set[int]] = {}
        # By place, its order and the label of one of the cuts there.
        places: dict[tuple[str, int | None], tuple[int, str]] = {}
        for block in blocks:
            # Replacements are slow to compare by content, and many cuts share one sender.
            known: dict[int, int] = {}
            for cut in block.cuts:
                write, receiver = cut.sender, cut.receiver
                number = known.get(id(write), -1)
                if number < 0:
                    key = (id(block), write.hook, write.heads, write.positions, write.replacement)
                    number = known[id(write)] = numbers.setdefault(key, len(self.senders))
                if number == len(self.senders):
                    self.senders.append(Sender(cut.label, write, block.call))
                    self.at.setdefault(write.hook, []).append(number)
                about = self.order(receiver.kind.name, receiver.layer), cut.label
                for head in receiving_heads(receiver, self._surface):
                    place = receiver.hook, head
                    groups.setdefault(place, set()).add(number)
                    places[place] = about
        self.zeroes = any(_zeroes(sender.write) for sender in self.senders)
        self.groups: dict[tuple[str, int | None], Group] = {
            place: frozenset(numbers_there) for place, numbers_there in groups.items()
        }
        self.heads: dict[str, list[int | None]] = {}
        for hook, head in self.groups:
            self.heads.setdefault(hook, []).append(head)
        for heads in self.heads.values():
            # In their order, so that all heads of a layer are a slice of its weights and not a copy.
            heads.sort(key=lambda head: -1 if head is None else head)
        for place, (order, label) in places.items():
            group = self.groups[place]
            self.last[group] = max(order, self.last.get(group, order))
            self._labels[group] = label

    def order(self, receiver: str, layer: int) -> int:
        """Returns where a receiver stands in the order of a run."""
        return order_of(receiver, layer, self._receivers)

    def label(self, hook: str, head: int | None) -> str:
        """Returns the label of one of the edges into a receiving head."""
        return self._labels[self.groups[hook, head]]

    def cut_at(self, group: Group, layer: int, mlp_out: Tensor) -> Tensor:
        """Tells where a group is cut off from an MLP, boolean, broadcast to the stream."""
        mask = torch.zeros((1, 1, 1), dtype=torch.bool, device=mlp_out.device)
        for number in group:
            sender = self.senders[number]
            if sender.write.layer == layer and sender.write.kind.name in ("mlp_post", "mlp_out"):
                state = sender.call.state
                mask = mask | sender.write.selected(
                    mlp_out, state.rows, state.total, sender.call.frame.decode_step
                )
        return mask


def _zeroes(write: ActivationEdit) -> bool:
    """Tells whether an edit writes zeros, as `Zero` or as tensors of them."""
    given = write.replacement
    if isinstance(given, FromTensors):
        return not any(bool(x.tensor.any()) for hook, x in given.activations if hook == write.hook)
    return isinstance(given, Zero)


def hook_at(site: str, layer: int) -> str:
    """Returns the hook of a site in a layer."""
    return KINDS[site].hook.format(layer)


@dataclass
class EdgeRun:
    """The differences that one run has collected so far.

    It holds tensors and no plan, which refers to the forward pass that keeps this: they would hold each other.

    Attributes:
        changes: by sender, the difference to the stream: replacement − output in the run. Those from before the last
            edit of the stream are in `carried`, by group, as the edits have left them.
        seen: the senders that the run has passed.
        inner: by site (z, mlp_post), its value in the run, and by sender the difference to it.
        group_mlp_out: by group, the output of the current MLP on the group's stream.
        received: by hook, the heads that receive, their new values, where these differ from the run's (boolean), and
            the run's values as computed from its stream.
        into_mlp: the difference of the current MLP's input from the run's stream.
        left: the stream as the embeddings or the last block left it.
        positions: what a shortformer adds to all that queries and keys read.
        busy: whether modules are called now for another stream than the run's.
    """

    changes: dict[int, Tensor] = field(default_factory=dict)
    carried: dict[Group, Tensor] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    inner: dict[str, tuple[Tensor, dict[int, Tensor]]] = field(default_factory=dict)
    group_mlp_out: dict[Group, Tensor] = field(default_factory=dict)
    received: dict[str, tuple[slice | list[int], Tensor, Tensor, Tensor]] = field(default_factory=dict)
    into_mlp: Tensor | None = None
    left: Tensor | None = None
    positions: Tensor | None = None
    busy: bool = False

    @model_block
    def aside(self) -> Iterator[None]:
        """Lets modules be called inside the block for another stream than the run's."""
        busy, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = busy

    def changes_of(self, plan: EdgePlan, hook: str, output: Tensor) -> dict[int, Tensor]:
        """Returns, by sender at a site, its replacement − its output in the run."""
        differences = {}
        for number in plan.at.get(hook, ()):
            sender = plan.senders[number]
            new, selected = replacement_for(sender.write, sender.call, output)
            differences[number] = torch.where(selected, new - output, torch.zeros_like(output))
            self.seen.add(number)
            # In a part of a sweep's examples, prompts may all be shorter than those of other parts.
            if isinstance(sender.write.positions, Span) and sender.call.state.rows is None:
                reached = sender.call.reached if bool(selected.any()) else sender.call.missed
                reached.add(id(sender.write))
        return differences

    def carry(
        self,
        plan: EdgePlan,
        onward: Callable[[Tensor], Tensor],
        x: Tensor,
        after: Tensor,
        changes: dict[int, Tensor],
        order: int | None = None,
    ) -> None:
        """Adapts differences, group by group, to a function f of the stream or of what is added to it: d becomes
        f(x + d) − f(x).

        Args:
            onward: the function f (hooks, a norm, or a norm and the hooks after it); `after` is f(x).
            order: order of the site, where it is on the stream itself; then `carried` is adapted too.
        """
        for group, last in plan.last.items():
            if order is not None and last < order:
                continue
            parts = [changes[number] for number in group if number in changes]
            if order is not None and group in self.carried:
                parts.append(self.carried[group])
            if parts:
                difference = torch.stack([_like(part, x) for part in parts]).sum(0)
                difference = _settled(difference, x) if plan.zeroes else difference
                before = self.carried.get(group, 0) if order is None else 0
                self.carried[group] = before + onward(x + difference) - after

    def for_receivers(self, plan: EdgePlan, groups: Sequence[Group], stream: Tensor) -> Tensor:
        """Returns the differences between the streams that groups of receivers read and the run's, [group batch pos
        d_model]; refuses senders that the run has not passed.
        """
        for number in frozenset().union(*groups) - self.seen:
            sender = plan.senders[number]
            raise CircuitsError(
                f"{sender.label}: this run did not pass {sender.write.hook}, which is to send; call the whole model"
            )
        return self.differences(plan, groups, stream)

    def differences(self, plan: EdgePlan, groups: Sequence[Group], stream: Tensor) -> Tensor:
        """Returns the same differences, of the senders that the run has passed so far."""
        differences = stream.new_zeros(len(groups), *stream.shape)
        if groups and self.changes:
            changes = torch.stack([_like(change, stream) for change in self.changes.values()])
            member = stream.new_tensor([[number in group for number in self.changes] for group in groups])
            differences = torch.einsum("gs,sbpd->gbpd", member, changes)
        carried = [self.carried.get(group) for group in groups]
        if any(one is not None for one in carried):
            none = stream.new_zeros(())
            differences = differences + torch.stack(
                [_like(none if one is None else one, stream) for one in carried]
            )
        return _settled(differences, stream) if plan.zeroes else differences


def _settled(differences: Tensor, stream: Tensor) -> Tensor:
    """Returns differences that leave nothing of a stream [... pos d_model] where they leave its rounding, which a norm
    would make as large as any stream.
    """
    left, size = ((x.abs().amax(-1, keepdim=True)) for x in (stream + differences, stream))
    return torch.where(left <= 16 * torch.finfo(stream.dtype).eps * size, -stream, differences)


def _like(change: Tensor, stream: Tensor) -> Tensor:
    return change.to(stream.dtype).expand(stream.shape)
