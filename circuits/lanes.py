"""The variants of a sweep as the fast engine runs them: lanes that leave the clean run, side by side in a stack."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from circuits.calls import Call, replacement_for
from circuits.interventions import Swap, Write
from circuits.replacements import Uniform
from circuits.replaying import NotReplayed
from circuits.sites import KINDS

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
    """One variant: what it writes where, and where in the forward pass it leaves the clean run."""

    index: int
    writes: dict[Place, list[Write]]
    start: Start
    changed: bool = False
    call: Call | None = None

    def at(self, site: str, layer: int | None) -> list[Write]:
        return self.writes.get((site, layer), [])

    def writes_scores(self, layer: int) -> bool:
        """Whether the attention of this layer depends on edited scores or patterns."""
        edited = [w for w in self.at("pattern", layer) if not isinstance(w.replacement, Uniform)]
        return bool(edited or self.at("scores", layer))


def lane_of(index: int, plan: Iterable[Write | Swap], n_layers: int) -> Lane:
    """Raises `NotReplayed` for a variant that is not for this engine."""
    writes: dict[Place, list[Write]] = {}
    for step in plan:
        if isinstance(step, Swap):
            raise NotReplayed("it edits weights")
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
    """Lanes in the order in which they join, and those that have, whose rows lie one after the other."""

    def __init__(self, lanes: Sequence[Lane], size: int) -> None:
        self.lanes, self.size = list(lanes), size
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
                for lane, scores in zip(lanes, x.split(self.size), strict=True):
                    _show_scores(lane, layer, scores)
            return x
        parts = []
        for lane, part in zip(lanes, x.split(self.size), strict=True):
            parts.append(lane_value(lane, site, layer, part))
            if site == "scores":
                _show_scores(lane, layer, parts[-1])
        return torch.cat(parts)


def lane_value(lane: Lane, site: str, layer: int | None, current: Tensor) -> Tensor:
    """The activation after all that the lane writes there."""
    for write in lane.at(site, layer):
        assert lane.call is not None
        # A user's function may call view on it, as on what the model computes.
        new, selected = replacement_for(write, lane.call, current.contiguous())
        new = torch.where(selected, new, current)
        lane.changed |= bool((new != current).any())
        current = new
    return current


def _show_scores(lane: Lane, layer: int | None, scores: Tensor) -> None:
    for write in lane.at("pattern", layer):
        assert lane.call is not None
        if write.replacement.reads(write):
            lane.call.reads(write)["scores"] = scores


def heads_at_z(lane: Lane, layer: int) -> list[int] | None:
    """The heads that a lane may change at z; None: all."""
    found: set[int] = set()
    for write in (*lane.at("pattern", layer), *lane.at("z", layer)):
        if write.heads is None:
            return None
        found |= set(write.heads)
    return sorted(found)
