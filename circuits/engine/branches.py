"""The variants of a sweep as branches of the clean run, which the fast engine stacks along the batch axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from circuits.engine.replay import NotReplayed
from circuits.engine.stacked_edits import edited_at_once
from circuits.interventions.base import ActivationEdit, Cut, Replacement, Step, WeightEdit
from circuits.interventions.forward_pass import ForwardPass, replacement_for
from circuits.interventions.replacements import Computed, Uniform
from circuits.model.sites import KINDS

# Points in a layer at which a branch leaves the clean run: before attention, between z and W_O, between attention and
# MLP.
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
class Branch:
    """One variant: its edits by site and layer, and the point in the forward pass at which it leaves the clean run.

    Attributes:
        calls: by checkpoint, the current run.
        changed: by checkpoint, whether some activation differs from the clean one.
    """

    index: int
    writes: dict[Place, list[ActivationEdit]]
    start: Start
    calls: list[ForwardPass] = field(default_factory=list)
    changed: list[bool] = field(default_factory=list)

    def at(self, site: str, layer: int | None) -> list[ActivationEdit]:
        return self.writes.get((site, layer), [])

    def writes_scores(self, layer: int) -> bool:
        """Tells whether the attention of this layer depends on edited scores or patterns."""
        edited = [w for w in self.at("pattern", layer) if not isinstance(w.replacement, Uniform)]
        return bool(edited or self.at("scores", layer))


def runs_nothing(branch: Branch) -> bool:
    """Tells whether its edits are sure not to run the model, which then need not have the weights of the branch."""
    replacements = [write.replacement for writes in branch.writes.values() for write in writes]
    return not any(
        isinstance(one, Computed) or type(one).prepare is not Replacement.prepare for one in replacements
    )


def branch_of(index: int, plan: Iterable[Step], n_layers: int, parallel: bool = False) -> Branch:
    """Returns the branch of a variant's plan; raises `NotReplayed` for a variant that this engine cannot run.

    Args:
        parallel: whether the MLP of a layer reads what its attention reads.
    """
    writes: dict[Place, list[ActivationEdit]] = {}
    for step in plan:
        if isinstance(step, WeightEdit):
            raise NotReplayed("it edits weights")
        if isinstance(step, Cut):
            raise NotReplayed("what a path's receiver hears is computed along with a whole run")
        site = step.kind.name
        if site not in KINDS:
            raise NotReplayed(f"{step.hook} is not replayed")
        if step.replacement.reads(step) and not isinstance(step.replacement, Uniform):
            raise NotReplayed("it reads other activations of the same pass")
        writes.setdefault((site, step.layer), []).append(step)
    branch = Branch(index, writes, (n_layers, BEFORE))
    # An edit of nothing, such as a full circuit that is kept, has no first layer.
    starts = {_start(branch, site, layer) for site, layer in writes}
    branch.start = min(starts, default=branch.start)
    layer, point = branch.start
    if parallel and point == AT_Z and (layer, BETWEEN) in starts:
        # The MLP of a branch that begins at z is taken from the clean run.
        branch.start = (layer, BEFORE)
    return branch


def _start(branch: Branch, site: str, layer: int | None) -> Start:
    if layer is None:
        return (-1, BEFORE)
    if site == "resid_post":
        return (layer + 1, BEFORE)
    if site == "pattern" and not branch.writes_scores(layer):
        return (layer, AT_Z)
    return (layer, _JOINS[site])


class BranchBatch:
    """Holds branches in the order in which they join, and the rows of those that have joined.

    Rows lie one after the other: those of the first checkpoint in all branches, then those of the second.
    """

    def __init__(self, branches: Sequence[Branch], size: int, copies: int) -> None:
        self.branches, self.size, self.copies = list(branches), size, copies
        self.members: list[Branch] = []

    def joining(self, start: Start) -> list[Branch]:
        return [branch for branch in self.branches if branch.start == start]

    def add(self, start: Start) -> list[Branch]:
        joined = self.joining(start)
        self.members += joined
        return joined

    def tap(self, site: str, layer: int | None, x: Tensor) -> Tensor:
        return self.tap_of(self.members, site, layer, x)

    def tap_of(self, branches: list[Branch], site: str, layer: int | None, x: Tensor) -> Tensor:
        if not any(branch.at(site, layer) for branch in branches):
            if site == "scores":
                # For uniform attention in a layer that is computed in full.
                for copy, branch, scores in self.parts(branches, x):
                    _show_scores(branch, copy, layer, scores)
            return x
        if self.copies == 1 and site != "scores":
            at_once = edited_together(branches, site, layer, x.unflatten(0, (len(branches), -1)))
            if at_once is not None:
                return at_once.flatten(0, 1)
        parts = []
        for copy, branch, part in self.parts(branches, x):
            parts.append(branch_value(branch, copy, site, layer, part))
            if site == "scores":
                _show_scores(branch, copy, layer, parts[-1])
        return torch.cat(parts)

    def parts(self, branches: list[Branch], x: Tensor) -> list[tuple[int, Branch, Tensor]]:
        """Returns (checkpoint, branch, its rows) for each branch of the stack."""
        each = zip(product(range(self.copies), branches), x.split(self.size), strict=True)
        return [(copy, branch, part) for (copy, branch), part in each]

    def start(self, clean: Tensor, count: int) -> Tensor:
        """Repeats the rows of a clean activation for `count` branches that join."""
        if self.copies == 1:
            return clean.repeat(count, *(1,) * (clean.ndim - 1))
        by_checkpoint = clean.unflatten(0, (self.copies, 1, -1))
        return by_checkpoint.expand(-1, count, *by_checkpoint.shape[2:]).flatten(0, 2)

    def concat(self, branches: list[Tensor]) -> Tensor:
        """Stacks the rows of branches that were computed one by one."""
        if self.copies == 1:
            return torch.cat(branches)
        return torch.stack([branch.unflatten(0, (self.copies, -1)) for branch in branches], 1).flatten(0, 2)

    def append_rows(self, x: Tensor | None, more: Tensor) -> Tensor:
        """Appends the rows of branches that join to those of the branches that have joined."""
        if x is None:
            return more
        if self.copies == 1:
            return torch.cat([x, more])
        return torch.cat([part.unflatten(0, (self.copies, -1)) for part in (x, more)], 1).flatten(0, 1)


def edited_together(
    branches: Sequence[Branch], site: str, layer: int | None, current: Tensor, read: Tensor | None = None
) -> Tensor | None:
    """Returns the activation of branches of one checkpoint [branch row ...] after their edits there, at the positions
    `read`; None where each takes its own (`edited_at_once`).
    """
    writes = [branch.at(site, layer) for branch in branches]
    found = edited_at_once(writes, [branch.calls[0] for branch in branches], current, read)
    if found is None:
        return None
    for branch, changed in zip(branches, found[1], strict=True):
        branch.changed[0] = branch.changed[0] or changed
    return found[0]


def branch_value(branch: Branch, copy: int, site: str, layer: int | None, current: Tensor) -> Tensor:
    """Returns the activation of one checkpoint after all edits of the branch there."""
    for write in branch.at(site, layer):
        # Contiguous, as a user's function may call view on it.
        new, selected = replacement_for(write, branch.calls[copy], current.contiguous())
        new = torch.where(selected, new, current)
        branch.changed[copy] = branch.changed[copy] or not torch.equal(new, current)
        current = new
    return current


def _show_scores(branch: Branch, copy: int, layer: int | None, scores: Tensor) -> None:
    for write in branch.at("pattern", layer):
        if write.replacement.reads(write):
            branch.calls[copy].reads(write)["scores"] = scores
