"""Numbers the senders of cut edges, and says which of them each receiving head is cut off from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from circuits.interventions.base import ActivationEdit, Cut
from circuits.interventions.edges import order_of, receivers_of, receiving_heads
from circuits.interventions.forward_pass import ForwardPass
from circuits.model.hooked_model import HookedModel
from circuits.model.sites import KINDS

Group = frozenset[int]  # numbers of the senders that a receiver is cut off from


@dataclass(eq=False)
class CutBlock:
    """The edges of one block that `blocks` opens, and the hooks at which something was received."""

    cuts: tuple[Cut, ...]
    call: ForwardPass
    received: set[str] = field(default_factory=set)


@dataclass
class Sender:
    """What a cut edge replaces, and the forward pass that it belongs to."""

    label: str
    write: ActivationEdit
    call: ForwardPass


class CutPlan:
    """The edges that are cut in one model, by sender and by receiver.

    Attributes:
        senders: by number.
        at: numbers of the senders at a hook.
        groups: by receiving hook and head, the senders that it is cut off from.
        heads: the receiving heads of a hook, in order; None where a receiver has no heads.
        last: by group, the order of its last receiver.
        nodes: hooks of all that may send, cut or not.
    """

    def __init__(self, surface: HookedModel, blocks: Sequence[CutBlock]) -> None:
        """Numbers the senders; finds whom each receiving head is cut off from, and each group's last receiver."""
        self._surface, self._receivers = surface, receivers_of(surface)
        self.senders: list[Sender] = []
        self.at: dict[str, list[int]] = {}
        self.last: dict[Group, int] = {}
        self._labels: dict[Group, str] = {}
        self.nodes = {
            "hook_embed",
            "hook_pos_embed",
            *(hook_at(site, layer) for site in ("z", "mlp_out") for layer in range(surface.n_layers)),
        }
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
                    mlp_out, state.rows, state.total, sender.call.frame.window
                )
        return mask


def hook_at(site: str, layer: int) -> str:
    """Returns the hook of a site in a layer."""
    return KINDS[site].hook.format(layer)
