"""The variants of a sweep as tails of the clean run, each from the block that it edits first, in rows of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from circuits.engine.receivers import DirectPaths, direct_paths
from circuits.engine.stacked_edits import edited_at_once
from circuits.interventions.apply import Plan
from circuits.interventions.base import ActivationEdit, Cut, Replacement, WeightEdit
from circuits.interventions.forward_pass import ForwardPass, replacement_for
from circuits.model.surface import Surface


class NotResumed(Exception):
    """The reason why a run of this model cannot go on from a block."""


@dataclass
class Tail:
    """One variant: the number of blocks that its run leaves out, and its edits by hook.

    Attributes:
        alone: whether it needs a run of its own: it edits weights, or paths that the stream takes along as it goes, or
            its edit looks at the whole batch.
        paths: the direct edges that it cuts, which begin at their receivers, where it does nothing else.
    """

    index: int
    plan: Plan
    start: int
    alone: bool = False
    writes: dict[str, list[ActivationEdit]] = field(default_factory=dict)
    paths: DirectPaths | None = None

    @classmethod
    def of(cls, index: int, plan: Plan, surface: Surface) -> Tail:
        """Finds the block from which a run differs from the clean one; raises `NotResumed` where none can be told."""
        paths = direct_paths(plan, surface)
        if paths is not None:
            if any(map(_prepares, paths.senders.values())):
                raise NotResumed("an edit makes passes of its own at the start of a run")
            start = min(_unchanged(one.site, one.hook, surface) for one in paths.heard)
            return cls(index, plan, start, paths=paths)
        places = [start for step in plan for start in _starts(step, surface)]
        # An edit of nothing, such as a full circuit that is kept, starts nowhere.
        tail = cls(index, plan, min(places, default=surface.n_layers))
        for step in plan:
            if not isinstance(step, ActivationEdit):
                tail.alone = True
                if isinstance(step, Cut) and _prepares(step.sender):
                    raise NotResumed("an edit makes passes of its own at the start of a run")
                continue
            tail.writes.setdefault(step.hook, []).append(step)
            # A bridge compares what is written there with the largest entry of the whole batch.
            tail.alone = tail.alone or (surface.bridged and step.kind.name == "resid_mid")
        if tail.alone and any(map(_prepares, chain.from_iterable(tail.writes.values()))):
            raise NotResumed("an edit makes passes of its own at the start of a run")
        return tail


def _prepares(write: ActivationEdit) -> bool:
    return type(write.replacement).prepare is not Replacement.prepare


def _starts(step: Any, surface: Surface) -> Iterator[int]:
    """Yields the number of blocks that come before each place that a step edits or reads."""
    if isinstance(step, WeightEdit):
        # A tied parameter stands under each of its names.
        same = [name for name, weight in surface.named_weights().items() if weight is step.parameter]
        yield from (blocks_before(name, surface) for name in same or [""])
        return
    write = step.sender if isinstance(step, Cut) else step
    if isinstance(step, Cut):
        yield blocks_before(write.hook, surface)
    else:
        yield _unchanged(write.kind.name, write.hook, surface)
    for hook in write.replacement.reads(write).values():
        yield blocks_before(hook, surface)


def _unchanged(site: str, hook: str, surface: Surface) -> int:
    """Returns the number of blocks that are as they were where something is changed at a hook."""
    ended = site == "resid_post" and ends_block(surface, hook)
    return blocks_before(hook, surface) + int(ended)


def blocks_before(name: str, surface: Surface) -> int:
    """Returns the number of blocks before a hook point or parameter; 0 where its place is unknown."""
    if inside := re.match(r"blocks\.(\d+)\.", name):
        return int(inside[1])
    return surface.n_layers if name.startswith(("unembed.", "ln_final.")) else 0


def ends_block(surface: Surface, hook: str) -> bool:
    """Tells whether nothing comes between the hook point of resid_post and the end of its block."""
    layer = blocks_before(hook, surface)
    return (
        not surface.post_norm
        and not surface.spliced
        and surface.hooks[hook] in surface.block_module(layer).children()
    )


@dataclass
class TailRun:
    """The run of one variant within a stack."""

    tail: Tail
    call: ForwardPass
    changed: bool = False
    unseen: set[str] = field(init=False)
    readers: dict[str, list[tuple[ActivationEdit, str]]] = field(init=False)

    def __post_init__(self) -> None:
        self.readers = {}
        for write in chain.from_iterable(self.tail.writes.values()):
            for name, hook in write.replacement.reads(write).items():
                self.readers.setdefault(hook, []).append((write, name))
        self.unseen = set(self.tail.writes)

    @property
    def hooks(self) -> list[str]:
        return [*self.tail.writes, *self.readers]

    def value(self, hook: str, current: Tensor) -> Tensor:
        """Returns the activation of this variant's rows after all its edits there."""
        self.unseen.discard(hook)
        # Contiguous, as a user's function may call view on it.
        before = current = current.contiguous() if hook in self.tail.writes else current
        for write in self.tail.writes.get(hook, ()):
            new, selected = replacement_for(write, self.call, current)
            current = torch.where(selected, new, current)
        self.changed = self.changed or (current is not before and not torch.equal(current, before))
        for write, name in self.readers.get(hook, ()):
            self.call.reads(write)[name] = current
        return current


def edited_rows(hook: str, members: Sequence[TailRun], size: int, activation: Tensor) -> Tensor | None:
    """Returns the activation of a stack with each variant's edits in its own rows; None where none is edited."""
    # Position embeddings may have one row for all examples.
    shared = len(activation) == 1 < size * len(members)
    if not shared and len(activation) != size * len(members):
        raise NotResumed(f"{hook} has no row for each example")
    written = [member.tail.writes.get(hook, []) for member in members]
    if not shared and not any(hook in member.readers for member in members):
        current = activation.unflatten(0, (len(members), size))
        at_once = edited_at_once(written, [member.call for member in members], current)
        if at_once is not None:
            new_rows, changed = at_once
            for member, was_changed in zip(members, changed, strict=True):
                member.unseen.discard(hook)
                member.changed = member.changed or was_changed
            return new_rows.flatten(0, 1)
    parts = [activation] * len(members) if shared else activation.split(size)
    new = [member.value(hook, part) for member, part in zip(members, parts, strict=True)]
    if not any(hook in member.tail.writes for member in members):
        return None
    return torch.cat([part.expand(size, *part.shape[1:]) if shared else part for part in new])
