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
    edited_together,
    runs_nothing,
)
from circuits.engine.check import (
    Observed,
    compare,
    differs,
    first_and_last,
    half_precision_tolerance,
    observed,
    observed_together,
    observed_whole,
    rounding_of_output,
)
from circuits.engine.memory import OUTPUTS, Meter
from circuits.engine.parts import HALF, Places
from circuits.engine.replay import NotReplayed, Replay
from circuits.interventions.forward_pass import ForwardPass, replacement_for
from circuits.interventions.reference_runs import References
from circuits.model.prompts import Prompts
from circuits.model.state import State
from circuits.model.surface import Surface
from circuits.tensors import Positions, select_positions

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
    mlp_out: dict[int, Tensor] = field(
        default_factory=dict
    )  # of parallel layers in which branches begin at z

    @property
    def nbytes(self) -> int:
        tensors = [
            tensor
            for part in (self.before, self.at_z, self.between, self.z, self.v, self.mlp_out)
            for tensor in part.values()
        ]
        # The same tensor in two places is counted once.
        return sum({id(one): one.numel() * one.element_size() for one in tensors}.values())


class Engine:
    """The engine for one model with its current weights. Raises `NotReplayed` where it cannot be used at all."""

    def __init__(
        self, surface: Surface, prompts: Prompts, read: Positions | None, first: slice | None = None
    ) -> None:
        """Compares the replay of the model with its first chunk of examples.

        Args:
            first: the examples of the first chunk, which are run here; None: all.
        """
        tokens = prompts.tokens
        if tokens.is_floating_point() or tokens.ndim != 2:
            raise NotReplayed("inputs that are vectors are not replayed")
        if prompts.extra:
            raise NotReplayed(f"its inputs have {', '.join(prompts.extra)}, which is not replayed")
        self.surface = surface
        self.prompts = prompts
        self.total = len(tokens)
        #: The positions at which the output is computed; of padded examples those that are read in any of them.
        self.read: Tensor | None = None
        # Where the output of padded examples is read, [example pos].
        self._kept = prompts.real if prompts.padded else None
        if read is not None:
            chosen = select_positions(read, tokens.shape[1], "sweep, positions", self._kept)
            self._kept = chosen if prompts.padded else None
            columns = (chosen.any(0) if prompts.padded else chosen).nonzero().flatten()
            self.read = columns.to(surface.device) if len(columns) < tokens.shape[1] else None
        #: Measures the memory until the first stack, which is the largest, has been run.
        self.meter: Meter | None = None
        self._first = prompts if first is None else prompts[first]
        self.replay = Replay.of(surface, length=tokens.shape[1])
        #: The model's own output of the first chunk, until it is used.
        self.output: Tensor | None = self._compared(self.observed())

    def observed(self) -> Observed:
        """Runs the first chunk through the model itself, with its current weights."""
        return observed(self.surface, self._first)

    def observed_together(self, weights: Mapping[str, Tensor]) -> Observed | None:
        """Does the same with several checkpoints with stacked weights; None where they cannot share a pass."""
        return observed_together(self.surface, self._first, weights)

    def _compared(self, seen: Observed) -> Tensor:
        rows = first_and_last(self._first.tokens)
        tokens, places = self._first.tokens[rows].to(self.surface.device), self._places(self._first[rows])
        compare(seen.layers, self.replay, tokens, places=places)
        #: By rounding the model's output and the replay's differ by at most this, relative to its largest entry.
        self._rounding = rounding_of_output(seen.layers, self.replay, tokens, places)
        #: Two replays of one example, in different stacks, differ by at most this.
        self.tolerance = self._rounding
        return seen.output

    def _places(self, prompts: Prompts) -> Places | None:
        return Places(prompts.real.to(self.surface.device)) if self.prompts.padded else None

    def check(self, tokens: Tensor, model_output: Tensor, clean: Tensor, rows: slice = slice(None)) -> None:
        """Refuses a replay whose clean output of a chunk is not the model's own.

        Args:
            model_output: output of the model [row pos out], at all positions.
            clean: output of the replay, at the positions that are read.
            rows: the examples of the chunk.
        """
        expected, found = self._at_read(model_output), clean
        if self._kept is not None:
            # Padding has an output too, which nobody reads.
            kept = self._at_read(self._kept[rows].to(clean.device)).repeat(self.replay.copies, 1)[..., None]
            expected, found = (torch.where(kept, one, 0.0) for one in (expected, found))
        if self.replay.dtype in HALF:
            # Two replays round in the same places, and so are no further apart than the model and a replay.
            self.tolerance = half_precision_tolerance(expected, found)
        if not differs(expected, found, self._rounding, self.replay.copies):
            return
        if self.replay.copies > 1:
            raise NotReplayed("the replay of several checkpoints differs from the model")
        # In a deep model rounding may add up to more; then the layers are compared one by one.
        prompts = self.prompts[rows]
        places = self._places(prompts)
        compare(observed_whole(self.surface, prompts), self.replay, tokens, "a chunk", places)

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
            OUTPUTS // (outputs * self.replay.unembed.weight.shape[-1]),
        )
        return max(1, min(limits))

    def of(self, weights: Mapping[str, Tensor], seen: Observed) -> Engine:
        """Returns this engine for the stacked weights of several checkpoints, given the model's own activations with
        each.
        """
        other = copy(self)
        other.replay, other.meter = Replay.of(self.surface, weights, self.prompts.shape[1]), None
        other.output = other._compared(seen)
        return other

    def clean(
        self, tokens: Tensor, branches: Sequence[Branch], rows: slice = slice(None)
    ) -> tuple[Tensor, CleanCache]:
        """Returns the unedited output at the positions that are read, and the activations from which `branches`
        start.

        Args:
            rows: the examples that these tokens are of.
        """
        starts = {branch.start for branch in branches}
        mixed = {layer for branch in branches for site, layer in branch.writes if site == "pattern"}
        kept = CleanCache()
        replay = self.replay
        last = replay.n_layers - 1
        # Whether nobody needs what the last MLP gives at other positions than those that are read.
        sliced = (replay.n_layers, BEFORE) not in starts and not (replay.parallel and (last, AT_Z) in starts)

        def keep(site: str, layer: int | None, x: Tensor) -> Tensor:
            if layer is not None and (layer, AT_Z) in starts:
                if site == "z":
                    kept.z[layer] = x
                elif site == "v" and layer in mixed:
                    # Cloned, as a view would keep q, k and v in memory.
                    kept.v[layer] = x.clone()
                elif site == "mlp_out" and replay.parallel:
                    kept.mlp_out[layer] = x
            return x

        places = self._places(self.prompts[rows])
        places = None if places is None else places.times(len(tokens) * replay.copies)
        x = replay.embedded(tokens.repeat(replay.copies, 1), keep, places)
        for layer in range(replay.n_layers):
            if (layer, BEFORE) in starts:
                kept.before[layer] = x
            entered = replay.entering(layer, x)
            if (layer, AT_Z) in starts or (replay.parallel and (layer, BETWEEN) in starts):
                kept.at_z[layer] = entered
            x = replay.block(layer, entered, keep, places=places)
            if (layer, BETWEEN) in starts:
                kept.between[layer] = x
            beside = entered if replay.parallel else None
            if layer == last and sliced:
                x, beside = self._at_read(x), None if beside is None else self._at_read(beside)
            x = replay.mlp(layer, x, keep, beside)
        if (replay.n_layers, BEFORE) in starts:
            kept.before[replay.n_layers] = x
        return replay.output(x if sliced else self._at_read(x)), kept

    def run(
        self,
        tokens: Tensor,
        rows: slice,
        branches: Sequence[Branch],
        references: Sequence[References],
        clean: CleanCache,
        chunk: int,
        outputs: int,
    ) -> Iterator[tuple[int, list[Branch], Tensor]]:
        """Yields (checkpoint, branches, their outputs at the positions that are read, one after the other) until all
        branches have run.

        Args:
            chunk: the number of tokens in a stack, of one branch at least.
            outputs: the number of tokens whose outputs are computed together.
            references: by checkpoint. A branch whose edits left every activation as it was is not `changed`; its output
                is the clean one, up to rounding.
        """
        prompts = self.prompts[rows]
        places = self._places(prompts)
        given = {} if places is None else {"attention_mask": places.mask.long()}
        for batch in self._stacks(branches, tokens, chunk):
            for branch in batch:
                states = [State(rows=rows, total=self.total) for _ in references]
                branch.calls = [
                    ForwardPass(self.surface, *each) for each in zip(references, states, strict=True)
                ]
                branch.changed = [False] * len(references)
                for call in branch.calls:
                    call.begin([w for writes in branch.writes.values() for w in writes], (tokens,), given)
            stack = BranchBatch(batch, len(tokens), self.replay.copies)
            yield from self._run_batch(stack, tokens, clean, places, outputs)
            for branch in batch:
                branch.calls = []
            if self.meter is not None:
                self.meter.stop()

    def _stacks(self, branches: Sequence[Branch], tokens: Tensor, chunk: int) -> Iterator[list[Branch]]:
        """Yields the branches that run together: in the order in which they begin, as many as have `chunk` tokens."""
        last = self.replay.n_layers - 1
        whole = read = tokens.numel() * self.replay.copies
        if self.read is not None and not any(
            at == last and site in AFTER_ATTENTION for branch in branches for site, at in branch.writes
        ):
            # Of those that begin at z of the last layer no other positions are computed than those that are read.
            read = len(tokens) * self.replay.copies * len(self.read)
        stack: list[Branch] = []
        size = 0
        for branch in sorted(branches, key=lambda branch: branch.start):
            more = whole if branch.start < (last, AT_Z) else read
            if stack and size + more > chunk:
                yield stack
                stack, size = [], 0
            stack.append(branch)
            size += more
        if stack:
            yield stack

    def _run_batch(
        self, batch: BranchBatch, tokens: Tensor, clean: CleanCache, places: Places | None, outputs: int
    ) -> Iterator[tuple[int, list[Branch], Tensor]]:
        """Runs branches of one batch together, each from where its edits begin, and yields logits of several."""
        replay, last = self.replay, self.replay.n_layers - 1
        x: Tensor | None = None
        if batch.joining((-1, BEFORE)):
            branches = batch.add((-1, BEFORE))
            many = tokens.repeat(batch.copies * len(branches), 1)
            x = replay.embedded(many, batch.tap, None if places is None else places.times(len(many)))
        for layer in range(min(branch.start[0] for branch in batch.branches), last + 1):
            if layer < 0:
                continue
            # In the last layer only the positions that are read are computed, unless an edit selects positions there.
            read = self.read if layer == last else None
            edited = {site for branch in batch.branches for site, at in branch.writes if at == layer}
            x, beside = self._joined_before(layer, x, batch, clean), None
            sliced = read is not None and not edited & set(AFTER_ATTENTION)
            kept = read if sliced else None
            if x is not None:
                x = batch.tap("resid_pre", layer, replay.entering(layer, x))
                beside = _at(x, kept)
                queries = read if sliced and not edited - {"resid_pre", "k", "v"} else None
                explicit = any(branch.writes_scores(layer) for branch in batch.members)
                mix = None if explicit or "pattern" not in edited else partial(self._mixed, batch, places)
                here = None if places is None else places.times(len(x))
                x = replay.block(layer, x, batch.tap, explicit, mix, queries, here)
                x = x[:, read] if sliced and queries is None else x
            if not replay.parallel:
                x = self._joined_at_z(layer, x, batch, clean, kept, places)
            if joining := batch.add((layer, BETWEEN)):
                between = batch.start(_at(clean.between[layer], kept), len(joining))
                x = batch.append_rows(x, between)
                if replay.parallel:
                    before = batch.start(_at(clean.at_z[layer], kept), len(joining))
                    beside = batch.append_rows(beside, before)
            if x is not None:
                x = batch.tap("resid_mid", layer, x)
                x = replay.mlp(layer, x, batch.tap, beside if replay.parallel else None)
            if replay.parallel:
                # In parallel blocks the MLP does not read z: branches that begin there join after it.
                x = self._joined_at_z(layer, x, batch, clean, kept, places)
            if x is not None:
                x = batch.tap("resid_post", layer, x)
                x = self._at_read(x) if layer == last and not sliced else x
        joining_last = batch.joining((last + 1, BEFORE))
        if joining_last:
            last_stream = self._joined_before(last + 1, None, batch, clean)
            assert last_stream is not None
            x = batch.append_rows(x, self._at_read(last_stream))
        assert x is not None
        by_checkpoint = x.unflatten(0, (batch.copies, len(batch.members), batch.size))
        group_size = max(1, outputs // max(1, len(tokens) * batch.copies * x.shape[1]))
        for first in range(0, len(batch.members), group_size):
            piece = by_checkpoint[:, first : first + group_size].flatten(0, 2)
            members = batch.members[first : first + group_size]
            yield from ((at, members, one) for at, one in enumerate(replay.output(piece).chunk(batch.copies)))

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
        self,
        layer: int,
        x: Tensor | None,
        batch: BranchBatch,
        clean: CleanCache,
        read: Tensor | None,
        places: Places | None,
    ) -> Tensor | None:
        """Returns the rows with those of the branches that begin at z of this layer, their heads' outputs edited."""
        joining = batch.add((layer, AT_Z))
        if not joining:
            return x
        z = clean.z[layer]
        together = self._edited_z(layer, z, joining, batch, clean, read, places)
        # Computed from all heads: adding only the change of one to the old stream would lose digits.
        stream = self.replay.attn_out(layer, together)
        by_branch = stream.unflatten(0, (batch.copies, len(joining), -1))
        for clean_part in (clean.at_z, clean.mlp_out) if self.replay.parallel else (clean.at_z,):
            by_branch += _at(clean_part[layer], read).unflatten(0, (batch.copies, 1, -1))
        return batch.append_rows(x, stream)

    def _edited_z(
        self,
        layer: int,
        z: Tensor,
        joining: list[Branch],
        batch: BranchBatch,
        clean: CleanCache,
        read: Tensor | None,
        places: Places | None,
    ) -> Tensor:
        """Returns z of the branches that begin at it, at the positions `read`."""
        if batch.copies == 1 and not any(branch.at("pattern", layer) for branch in joining):
            at_once = edited_together(joining, "z", layer, z[None], read)
            if at_once is not None:
                return at_once.flatten(0, 1)
        edited = list[Tensor]()
        for branch in joining:
            new = z
            if branch.at("pattern", layer):
                parts = zip(z.split(batch.size), clean.v[layer].split(batch.size), strict=True)
                new = _cat(
                    [self._mixed_branch(branch, k, layer, *part, places) for k, part in enumerate(parts)]
                )
            new = _cat(
                [branch_value(branch, k, "z", layer, part) for k, part in enumerate(new.split(batch.size))]
            )
            edited.append(_at(new, read))
        return batch.concat(edited)

    def _mixed(self, batch: BranchBatch, places: Places | None, layer: int, z: Tensor, v: Tensor) -> Tensor:
        parts = zip(batch.parts(batch.members, z), v.split(batch.size), strict=True)
        mixed = [
            self._mixed_branch(branch, copy, layer, one, values, places)
            for (copy, branch, one), values in parts
        ]
        return torch.cat(mixed)

    def _mixed_branch(
        self, branch: Branch, copy: int, layer: int, z: Tensor, v: Tensor, places: Places | None
    ) -> Tensor:
        """Returns z where some heads have uniform attention, whose keys depend on the example's padding alone."""
        attention = self.replay.blocks[layer].attention
        for write in branch.at("pattern", layer):
            length = z.shape[1]
            visible = attention.visible(length, z.device, places)
            scores = torch.zeros(1, 1, length, length, dtype=z.dtype, device=z.device)
            if visible is not None:
                scores = scores.masked_fill(~visible, -torch.inf)
            shape = (len(z), z.shape[2], length, length)
            branch.calls[copy].reads(write)["scores"] = scores
            pattern, selected = replacement_for(write, branch.calls[copy], scores.expand(shape), scores)
            heads = list(range(z.shape[2])) if write.heads is None else list(write.heads)
            values = v[:, :, [head * attention.groups // attention.heads for head in heads]]
            # A padded example has a mask, so a pattern, of its own; else one [query key] serves all.
            of_keys = "qk,bkhe->bqhe" if len(pattern) == 1 else "bqk,bkhe->bqhe"
            new = torch.einsum(of_keys, pattern[0, 0] if len(pattern) == 1 else pattern[:, 0], values)
            # [batch head query 1] -> [batch query head 1]
            chosen = selected.expand(-1, z.shape[2], length, -1).transpose(1, 2)[:, :, heads]
            new = torch.where(chosen, new, z[:, :, heads])
            branch.changed[copy] = branch.changed[copy] or not torch.equal(new, z[:, :, heads])
            z = z.clone()
            z[:, :, heads] = new
        return z

    def _at_read(self, x: Tensor) -> Tensor:
        return _at(x, self.read)


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _at(x: Tensor, read: Tensor | None) -> Tensor:
    return x if read is None else x[:, read]
