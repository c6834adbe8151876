"""The fast engine of a sweep: one clean pass, then each variant from its first edit on, many of them stacked.

An edit of z (uniform attention is one) changes the layer's addition to the residual stream, z' @ W_O, so a variant that
begins there only needs that product, the layer's MLP and the later layers. The forward pass is replayed from the
weights. The replay is compared with the model before use, and so is the output of every clean pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from circuits.engine.branches import (
    AFTER_ATTENTION,
    AT_Z,
    BEFORE,
    BETWEEN,
    Branch,
    BranchBatch,
    branch_value,
    runs_nothing,
)
from circuits.engine.check import (
    TOLERANCE,
    Observed,
    compare,
    differs,
    few,
    observed,
    observed_together,
    observed_whole,
)
from circuits.engine.replay import NotReplayed, Replay
from circuits.interventions.forward_pass import ForwardPass, replacement_for
from circuits.interventions.reference_runs import References
from circuits.model.prompts import Prompts
from circuits.model.state import State
from circuits.model.surface import Surface
from circuits.tensors import Positions, select_positions

# Logits of a stack are computed in pieces of at most this many entries.
_LOGITS = 2**25
# Largest size of stacked weights, in bytes.
_WEIGHTS = 2**26


@dataclass
class CleanCache:
    """The activations of one clean pass from which branches start."""

    before: dict[int, Tensor] = field(default_factory=dict)  # input of a layer; at n_layers the last stream
    at_z: dict[int, Tensor] = field(default_factory=dict)  # resid_pre of layers where branches begin at z
    between: dict[int, Tensor] = field(default_factory=dict)  # resid_mid
    z: dict[int, Tensor] = field(default_factory=dict)
    v: dict[int, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        tensors = [
            tensor
            for part in (self.before, self.at_z, self.between, self.z, self.v)
            for tensor in part.values()
        ]
        # The same tensor in two places is counted once.
        return sum({id(one): one.numel() * one.element_size() for one in tensors}.values())


class Engine:
    """The engine for one model with its current weights. Raises `NotReplayed` where it cannot be used at all."""

    def __init__(
        self, surface: Surface, prompts: Prompts, read: Positions | None, step: int | None = None
    ) -> None:
        """
        Args:
            step: number of examples in a chunk; those of the first chunk are run here.
        """
        if prompts.padded:
            raise NotReplayed("its inputs have padding, which is masked")
        tokens = prompts.tokens
        if tokens.is_floating_point() or tokens.ndim != 2:
            raise NotReplayed("inputs that are vectors are not replayed")
        self.surface = surface
        self.total = len(tokens)
        self.read: Tensor | None = None
        if read is not None:
            chosen = select_positions(read, tokens.shape[1], "sweep, positions").nonzero().flatten()
            self.read = chosen.to(surface.device) if len(chosen) < tokens.shape[1] else None
        #: Largest number of bytes that the clean pass of a chunk and a stack have taken.
        self.bytes_held = 0
        self._first = tokens[:step].to(surface.device)
        self.replay = Replay.of(surface)
        #: The model's own output of the first chunk, until it is used.
        self.output: Tensor | None = self._compared(self.observed())
        #: Differences up to this count as rounding, relative to the largest entry.
        self.tolerance = TOLERANCE[self.replay.embed.dtype]

    def observed(self) -> Observed:
        """Runs the first chunk through the model itself, with its current weights."""
        return observed(self.surface, self._first)

    def observed_together(self, weights: Mapping[str, Tensor]) -> Observed | None:
        """Does the same with several checkpoints with stacked weights; None where they cannot share a pass."""
        return observed_together(self.surface, self._first, weights)

    def _compared(self, seen: Observed) -> Tensor:
        compare(seen.layers, self.replay, self._first[few(self._first)])
        return seen.output

    def check(self, tokens: Tensor, model_output: Tensor, clean: Tensor) -> None:
        """Refuses a replay whose clean output of a chunk is not the model's own.

        Args:
            model_output: output of the model [row pos out], at all positions.
            clean: output of the replay, at the positions that are read.
        """
        if not differs(self._at_read(model_output), clean, self.replay.copies):
            return
        if self.replay.copies > 1:
            raise NotReplayed("the replay of several checkpoints differs from the model")
        # In a deep model rounding may add up to more; then the layers are compared one by one.
        compare(observed_whole(self.surface, tokens), self.replay, tokens, "a chunk")

    def max_stacked(self, tokens: Tensor, branches: Sequence[Branch], chunk: int) -> int:
        """Returns how many checkpoints of this shape can be stacked, at `chunk` tokens in all their branches
        together.
        """
        if not all(map(runs_nothing, branches)):
            return 1
        rows = len(tokens) * len(branches)
        outputs = rows * (tokens.shape[1] if self.read is None else len(self.read))
        limits = (
            chunk // (rows * tokens.shape[1]),
            _WEIGHTS // self.replay.nbytes,
            _LOGITS // (outputs * self.replay.unembed.shape[-1]),
        )
        return max(1, min(limits))

    def of(self, weights: Mapping[str, Tensor], observed: Observed) -> Engine:
        """Returns this engine for the stacked weights of several checkpoints, given the model's own activations with
        each.
        """
        other = copy(self)
        other.replay, other.bytes_held = Replay.of(self.surface, weights), 0
        other.output = other._compared(observed)
        return other

    def clean(self, tokens: Tensor, branches: Sequence[Branch]) -> tuple[Tensor, CleanCache]:
        """Returns the unedited output at the positions that are read, and the activations from which `branches`
        start.
        """
        starts = {branch.start for branch in branches}
        mixed = {layer for branch in branches for site, layer in branch.writes if site == "pattern"}
        kept = CleanCache()
        replay = self.replay

        def keep(site: str, layer: int | None, x: Tensor) -> Tensor:
            if (
                layer is not None
                and (layer, AT_Z) in starts
                and (site == "z" or (site == "v" and layer in mixed))
            ):
                # Cloned, as a view would keep q, k and v in memory.
                (kept.z if site == "z" else kept.v)[layer] = x if site == "z" else x.clone()
            return x

        x = replay.embedded(tokens.repeat(replay.copies, 1), keep)
        for layer in range(replay.n_layers):
            if (layer, BEFORE) in starts:
                kept.before[layer] = x
            entered = replay.entering(layer, x)
            if (layer, AT_Z) in starts:
                kept.at_z[layer] = entered
            x = replay.block(layer, entered, keep)
            if (layer, BETWEEN) in starts:
                kept.between[layer] = x
            if layer == replay.n_layers - 1 and (layer + 1, BEFORE) not in starts:
                x = self._at_read(x)
            x = replay.mlp(layer, x, keep)
        if (replay.n_layers, BEFORE) in starts:
            kept.before[replay.n_layers] = x
            x = self._at_read(x)
        return replay.output(x), kept

    def run(
        self,
        tokens: Tensor,
        rows: slice,
        branches: Sequence[Branch],
        references: Sequence[References],
        clean: CleanCache,
        width: int,
    ) -> Iterator[tuple[int, Branch, Tensor]]:
        """Yields (checkpoint, branch, output at the positions that are read) for every branch, `width` of them in a
        stack.

        Args:
            references: by checkpoint. A branch whose edits left every activation as it was is not `changed`; its output
                is the clean one, up to rounding.
        """
        ordered = sorted(branches, key=lambda branch: branch.start)
        for first in range(0, len(ordered), width):
            batch = ordered[first : first + width]
            for branch in batch:
                states = [State(rows=rows, total=self.total) for _ in references]
                branch.calls = [
                    ForwardPass(self.surface, *each) for each in zip(references, states, strict=True)
                ]
                branch.changed = [False] * len(references)
                for call in branch.calls:
                    call.begin([w for writes in branch.writes.values() for w in writes], (tokens,), {})
            yield from self._run_batch(BranchBatch(batch, len(tokens), self.replay.copies), tokens, clean)
            for branch in batch:
                branch.calls = []

    def _run_batch(
        self, batch: BranchBatch, tokens: Tensor, clean: CleanCache
    ) -> Iterator[tuple[int, Branch, Tensor]]:
        replay, last = self.replay, self.replay.n_layers - 1
        x: Tensor | None = None
        if batch.joining((-1, BEFORE)):
            branches = batch.add((-1, BEFORE))
            x = replay.embedded(tokens.repeat(batch.copies * len(branches), 1), batch.tap)
        for layer in range(min(branch.start[0] for branch in batch.branches), last + 1):
            if layer < 0:
                continue
            # In the last layer only the positions that are read are computed, unless an edit selects positions there.
            read = self.read if layer == last else None
            edited = {site for branch in batch.branches for site, at in branch.writes if at == layer}
            x = self._joined_before(layer, x, batch, clean)
            sliced = read is not None and not edited & set(AFTER_ATTENTION)
            if x is not None:
                x = batch.tap("resid_pre", layer, replay.entering(layer, x))
                queries = read if sliced and not edited - {"resid_pre", "k", "v"} else None
                explicit = any(branch.writes_scores(layer) for branch in batch.members)
                mix = None if explicit or "pattern" not in edited else partial(self._mixed, batch)
                x = replay.block(layer, x, batch.tap, explicit, mix, queries)
                x = x[:, read] if sliced and queries is None else x
            x = self._joined_at_z(layer, x, batch, clean, read if sliced else None)
            if joining := batch.add((layer, BETWEEN)):
                between = _at(clean.between[layer], read if sliced else None)
                x = batch.append_rows(x, batch.start(between, len(joining)))
            if x is not None:
                x = batch.tap("resid_mid", layer, x)
                x = batch.tap("resid_post", layer, replay.mlp(layer, x, batch.tap))
                x = self._at_read(x) if layer == last and not sliced else x
            self._note(x, clean)
        joining_last = batch.joining((last + 1, BEFORE))
        if joining_last:
            last_stream = self._joined_before(last + 1, None, batch, clean)
            assert last_stream is not None
            x = batch.append_rows(x, self._at_read(last_stream))
        assert x is not None
        by_checkpoint = x.unflatten(0, (batch.copies, len(batch.members), batch.size))
        group_size = (
            _LOGITS // max(1, len(tokens) * batch.copies * x.shape[1] * replay.unembed.shape[-1]) or 1
        )
        for first in range(0, len(batch.members), group_size):
            piece = by_checkpoint[:, first : first + group_size].flatten(0, 2)
            yield from batch.parts(batch.members[first : first + group_size], replay.output(piece))

    def _joined_before(
        self, layer: int, x: Tensor | None, batch: BranchBatch, clean: CleanCache
    ) -> Tensor | None:
        joining = batch.joining((layer, BEFORE))
        if not joining:
            return x
        start = batch.start(clean.before[layer], len(joining))
        # An edit of the stream between two layers may be at resid_post of one or resid_pre of the next.
        start = batch.tap_of(joining, "resid_post", layer - 1, start)
        batch.add((layer, BEFORE))
        return batch.append_rows(x, start)

    def _joined_at_z(
        self, layer: int, x: Tensor | None, batch: BranchBatch, clean: CleanCache, read: Tensor | None
    ) -> Tensor | None:
        joining = batch.add((layer, AT_Z))
        if not joining:
            return x
        z, before, streams = clean.z[layer], _at(clean.at_z[layer], read), []
        for branch in joining:
            new = z
            if branch.at("pattern", layer):
                parts = zip(z.split(batch.size), clean.v[layer].split(batch.size), strict=True)
                new = _cat([self._mixed_branch(branch, k, layer, *part) for k, part in enumerate(parts)])
            new = _cat(
                [branch_value(branch, k, "z", layer, part) for k, part in enumerate(new.split(batch.size))]
            )
            # Computed from all heads: adding only the change of one to the old stream would lose digits.
            streams.append(before + self.replay.attn_out(layer, _at(new, read)))
        return batch.append_rows(x, batch.concat(streams))

    def _mixed(self, batch: BranchBatch, layer: int, z: Tensor, v: Tensor) -> Tensor:
        parts = zip(batch.parts(batch.members, z), v.split(batch.size), strict=True)
        mixed = [
            self._mixed_branch(branch, copy, layer, one, values) for (copy, branch, one), values in parts
        ]
        return torch.cat(mixed)

    def _mixed_branch(self, branch: Branch, copy: int, layer: int, z: Tensor, v: Tensor) -> Tensor:
        """Returns z where some heads have uniform attention, whose keys do not depend on the example."""
        for write in branch.at("pattern", layer):
            length = z.shape[1]
            visible = self.replay.visible(length, z.device)
            scores = torch.zeros(1, 1, length, length, dtype=z.dtype, device=z.device)
            scores = scores.masked_fill(~visible, -torch.inf)
            shape = (len(z), z.shape[2], length, length)
            branch.calls[copy].reads(write)["scores"] = scores
            pattern, selected = replacement_for(write, branch.calls[copy], scores.expand(shape), scores)
            heads = list(range(z.shape[2])) if write.heads is None else list(write.heads)
            new = torch.einsum("qk,bkhe->bqhe", pattern[0, 0], v[:, :, heads])
            # [batch head query 1] -> [batch query head 1]
            chosen = selected.expand(-1, z.shape[2], length, -1).transpose(1, 2)[:, :, heads]
            new = torch.where(chosen, new, z[:, :, heads])
            branch.changed[copy] = branch.changed[copy] or not torch.equal(new, z[:, :, heads])
            z = z.clone()
            z[:, :, heads] = new
        return z

    def _at_read(self, x: Tensor) -> Tensor:
        return _at(x, self.read)

    def _note(self, x: Tensor | None, clean: CleanCache) -> None:
        batch = 0 if x is None else x.numel() * x.element_size()
        # The weights of stacked checkpoints are in memory twice, here and to be copied into the model.
        weights = 2 * self.replay.nbytes if self.replay.copies > 1 else 0
        self.bytes_held = max(self.bytes_held, clean.nbytes + batch + weights)


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _at(x: Tensor, read: Tensor | None) -> Tensor:
    return x if read is None else x[:, read]
