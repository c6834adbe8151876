"""The variants of a sweep as the fast engine runs them: lanes that leave the clean run, side by side in a stack."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from circuits.engine.replay import NotReplayed
from circuits.interventions.base import Cut, Replacement, Step, Swap, Write
from circuits.interventions.forward_pass import Call, replacement_for
from circuits.interventions.replacements import Computed, Uniform
from circuits.model.sites import KINDS

# Where a lane joins within a layer: before attention, between z and W_O, between attention and MLP.
BEFORE, AT_Z, BETWEEN = 0, 1, 2
_JOINS = {
    "resid_pre": BEFORE,
    "q": BEFORE,
    "k": BEFORE,
    "v": BEFORE,
    "scores": BEFORE,
    "pattern": BEFORE,
    "attn_out": BEFORE,
    "z": AT_Z,
    "resid_mid": BETWEEN,
    "mlp_pre": BETWEEN,
    "mlp_post": BETWEEN,
    "mlp_out": BETWEEN,
}
AFTER_ATTENTION = ("resid_mid", "mlp_pre", "mlp_post", "mlp_out", "resid_post")

Start = tuple[int, int]
Place = tuple[str, int | None]


@dataclass
class Lane:
    """One variant: what it writes where, and where in the forward pass it leaves the clean run.

    Attributes:
        calls: of each checkpoint, the run under way, and whether some activation is another than it was.
        changed: see `calls`.
    """

    index: int
    writes: dict[Place, list[Write]]
    start: Start
    calls: list[Call] = field(default_factory=list)
    changed: list[bool] = field(default_factory=list)

    def at(self, site: str, layer: int | None) -> list[Write]:
        return self.writes.get((site, layer), [])

    def writes_scores(self, layer: int) -> bool:
        """Whether the attention of this layer depends on edited scores or patterns."""
        edited = [w for w in self.at("pattern", layer) if not isinstance(w.replacement, Uniform)]
        return bool(edited or self.at("scores", layer))


def runs_nothing(lane: Lane) -> bool:
    """Whether its edits are sure not to run the model, which then need not have the weights of the lane."""
    replacements = [write.replacement for writes in lane.writes.values() for write in writes]
    return not any(
        isinstance(one, Computed) or type(one).prepare is not Replacement.prepare for one in replacements
    )


def lane_of(index: int, plan: Iterable[Step], n_layers: int) -> Lane:
    """Raises `NotReplayed` for a variant that is not for this engine."""
    writes: dict[Place, list[Write]] = {}
    for step in plan:
        if isinstance(step, Swap):
            raise NotReplayed("it edits weights")
        if isinstance(step, Cut):
            raise NotReplayed("what a path's receiver hears is computed along with a whole run")
        site = step.kind.name
        if site not in KINDS:
            raise NotReplayed(f"{step.hook} is not replayed")
        if step.replacement.reads(step) and not isinstance(step.replacement, Uniform):
            raise NotReplayed("it reads other activations of the same pass")
        writes.setdefault((site, step.layer), []).append(step)
    lane = Lane(index, writes, (n_layers, BEFORE))
    lane.start = min(_start(lane, site, layer) for site, layer in writes)
    return lane


def _start(lane: Lane, site: str, layer: int | None) -> Start:
    if layer is None:
        return (-1, BEFORE)
    if site == "resid_post":
        return (layer + 1, BEFORE)
    if site == "pattern" and not lane.writes_scores(layer):
        return (layer, AT_Z)
    return (layer, _JOINS[site])


class Stack:
    """Lanes in the order in which they join, and those that have, whose rows lie one after the other: those of the
    first checkpoint in all lanes, then those of the second.
    """

    def __init__(self, lanes: Sequence[Lane], size: int, copies: int) -> None:
        self.lanes, self.size, self.copies = list(lanes), size, copies
        self.members: list[Lane] = []

    def joining(self, start: Start) -> list[Lane]:
        return [lane for lane in self.lanes if lane.start == start]

    def join(self, start: Start) -> list[Lane]:
        joined = self.joining(start)
        self.members += joined
        return joined

    def tap(self, site: str, layer: int | None, x: Tensor) -> Tensor:
        return self.tap_of(self.members, site, layer, x)

    def tap_of(self, lanes: list[Lane], site: str, layer: int | None, x: Tensor) -> Tensor:
        if not any(lane.at(site, layer) for lane in lanes):
            if site == "scores":
                # For uniform attention in a layer that is computed in full.
                for copy, lane, scores in self.parts(lanes, x):
                    _show_scores(lane, copy, layer, scores)
            return x
        parts = []
        for copy, lane, part in self.parts(lanes, x):
            parts.append(lane_value(lane, copy, site, layer, part))
            if site == "scores":
                _show_scores(lane, copy, layer, parts[-1])
        return torch.cat(parts)

    def parts(self, lanes: list[Lane], x: Tensor) -> list[tuple[int, Lane, Tensor]]:
        """(checkpoint, lane, its rows)."""
        each = zip(product(range(self.copies), lanes), x.split(self.size), strict=True)
        return [(copy, lane, part) for (copy, lane), part in each]

    def start(self, clean: Tensor, count: int) -> Tensor:
        """Of what the clean pass kept, rows for so many lanes that join."""
        if self.copies == 1:
            return clean.repeat(count, *(1,) * (clean.ndim - 1))
        apart = clean.unflatten(0, (self.copies, 1, -1))
        return apart.expand(-1, count, *apart.shape[2:]).flatten(0, 2)

    def side_by_side(self, lanes: list[Tensor]) -> Tensor:
        """The rows of lanes that were computed one by one."""
        if self.copies == 1:
            return torch.cat(lanes)
        return torch.stack([lane.unflatten(0, (self.copies, -1)) for lane in lanes], 1).flatten(0, 2)

    def together(self, x: Tensor | None, more: Tensor) -> Tensor:
        """Rows of lanes that join, after those that have."""
        if x is None:
            return more
        if self.copies == 1:
            return torch.cat([x, more])
        return torch.cat([part.unflatten(0, (self.copies, -1)) for part in (x, more)], 1).flatten(0, 1)


def lane_value(lane: Lane, copy: int, site: str, layer: int | None, current: Tensor) -> Tensor:
    """The activation, of one checkpoint, after all that the lane writes there."""
    for write in lane.at(site, layer):
        # A user's function may call view on it, as on what the model computes.
        new, selected = replacement_for(write, lane.calls[copy], current.contiguous())
        new = torch.where(selected, new, current)
        lane.changed[copy] = lane.changed[copy] or not torch.equal(new, current)
        current = new
    return current


def _show_scores(lane: Lane, copy: int, layer: int | None, scores: Tensor) -> None:
    for write in lane.at("pattern", layer):
        if write.replacement.reads(write):
            lane.calls[copy].reads(write)["scores"] = scores
