"""The fast engine of a sweep: one clean pass, then each variant from its first edit on, many of them stacked.

An edit of z (and uniform attention, which is one) moves the residual stream by (z' - z) @ W_O of its heads, so a
variant that begins there needs that layer's MLP and the later layers alone. What it computes is the model's own
forward, replayed from the weights, and is compared with it before use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from circuits.calls import Call, replacement_for
from circuits.lanes import AFTER_ATTENTION, AT_Z, BEFORE, BETWEEN, Lane, Stack, heads_at_z, lane_value
from circuits.recording import recording
from circuits.references import References
from circuits.replaying import NotReplayed, Replay
from circuits.sites import KINDS
from circuits.snapshots import Positions, select_positions
from circuits.state import State, state_of
from circuits.surface import Surface

#: What the replay may differ from the model by, relative to the largest entry.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11}

# Logits of a stack are computed in pieces of at most this many entries.
_LOGITS = 2**25


@dataclass
class Clean:
    """What one clean pass leaves behind, for the lanes that need it."""

    before: dict[int, Tensor] = field(default_factory=dict)  # resid_pre by layer; at n_layers the last stream
    between: dict[int, Tensor] = field(default_factory=dict)  # resid_mid
    z: dict[int, Tensor] = field(default_factory=dict)
    v: dict[int, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        held = [tensor for part in (self.before, self.between, self.z, self.v) for tensor in part.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


class Engine:
    """For one model with the weights it has now. Raises `NotReplayed` where it cannot be used at all."""

    def __init__(self, surface: Surface, tokens: Tensor, read: Positions | None) -> None:
        _refuse_hooks(surface.model)
        if tokens.is_floating_point() or tokens.ndim != 2:
            raise NotReplayed("inputs that are vectors are not replayed")
        if torch.is_autocast_enabled(surface.device.type):
            raise NotReplayed("autocast is on")
        self.surface = surface
        self.replay = Replay.of(surface)
        self.total = len(tokens)
        self.read: Tensor | None = None
        if read is not None:
            chosen = select_positions(read, tokens.shape[1], "sweep, positions").nonzero().flatten()
            self.read = chosen.to(surface.device) if len(chosen) < tokens.shape[1] else None
        #: Largest number of bytes that the clean pass of a chunk and a stack have held.
        self.bytes_held = 0
        # With other weights as well: what a model adds to its forward may be zero before training.
        self._check(tokens[:1].to(surface.device))

    def _check(self, tokens: Tensor) -> None:
        """Replay one example and compare every layer with the model itself."""
        last = self.surface.n_layers - 1
        names = [KINDS[name].hook.format(layer) for layer in range(last + 1) for name in ("z", "resid_post")]
        with recording(self.surface, names) as seen:
            output = self.surface.model(tokens)
        if not isinstance(output, Tensor) or any(name not in seen for name in names):
            raise NotReplayed("its output is no tensor, or some of its layers do not run")
        ours: dict[str, Tensor] = {}

        def keep(site: str, layer: int | None, x: Tensor) -> Tensor:
            ours[KINDS[site].hook.format(layer)] = x
            return x

        x = self.replay.embedded(tokens, keep)
        for layer in range(last + 1):
            x = keep("resid_post", layer, self.replay.mlp(layer, self.replay.block(layer, x, keep), keep))
        for name, own, found in [(name, seen[name], ours[name]) for name in names] + [
            ("the output", output, self.replay.output(x))
        ]:
            if own.shape != found.shape or own.dtype != found.dtype:
                raise NotReplayed(f"the replay differs from the model at {name} in shape or dtype")
            apart = float((own - found).abs().max() / own.abs().max().clamp(min=torch.finfo(own.dtype).tiny))
            # Written so that NaN is apart too.
            if not apart <= TOLERANCE[own.dtype]:
                raise NotReplayed(
                    f"the replay of one example differs from the model at {name} by {apart:.1e}"
                )

    def clean(self, tokens: Tensor, lanes: Sequence[Lane]) -> tuple[Tensor, Clean]:
        """The unedited output at the positions that are read, and what `lanes` start from."""
        starts = {lane.start for lane in lanes}
        mixed = {layer for lane in lanes for site, layer in lane.writes if site == "pattern"}
        kept = Clean()
        replay = self.replay

        def keep(site: str, layer: int | None, x: Tensor) -> Tensor:
            if (
                layer is not None
                and (layer, AT_Z) in starts
                and (site == "z" or (site == "v" and layer in mixed))
            ):
                # v is a part of q, k and v, all of which a view of it would hold.
                (kept.z if site == "z" else kept.v)[layer] = x if site == "z" else x.clone()
            return x

        x = replay.embedded(tokens, keep)
        for layer in range(replay.n_layers):
            if (layer, BEFORE) in starts:
                kept.before[layer] = x
            x = replay.block(layer, x, keep)
            if {(layer, AT_Z), (layer, BETWEEN)} & starts:
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
        lanes: Sequence[Lane],
        references: References,
        clean: Clean,
        width: int,
    ) -> Iterator[tuple[Lane, Tensor]]:
        """(lane, output at the positions that are read) of every lane, `width` of them in a stack.

        A lane whose edits left every activation as it was is not `changed`; its output is the clean one, up to
        rounding.
        """
        ordered = sorted(lanes, key=lambda lane: lane.start)
        for first in range(0, len(ordered), width):
            stack = ordered[first : first + width]
            for lane in stack:
                state = State(rows=rows, total=self.total)
                lane.call, lane.changed = Call(self.surface, references, state), False
                lane.call.begin([w for writes in lane.writes.values() for w in writes], (tokens,), {})
            yield from self._run_stack(Stack(stack, len(tokens)), tokens, clean)
            for lane in stack:
                lane.call = None

    def _run_stack(self, stack: Stack, tokens: Tensor, clean: Clean) -> Iterator[tuple[Lane, Tensor]]:
        replay, last = self.replay, self.replay.n_layers - 1
        x: Tensor | None = None
        if stack.joining((-1, BEFORE)):
            lanes = stack.join((-1, BEFORE))
            x = replay.embedded(tokens.repeat(len(lanes), 1), stack.tap)
        for layer in range(min(lane.start[0] for lane in stack.lanes), last + 1):
            if layer < 0:
                continue
            # In the last layer only what is read has to be computed, unless an edit says where by position.
            read = self.read if layer == last else None
            edited = {site for lane in stack.lanes for site, at in lane.writes if at == layer}
            x = self._joined_before(layer, x, stack, clean)
            sliced = read is not None and not edited & set(AFTER_ATTENTION)
            if x is not None:
                x = stack.tap("resid_pre", layer, x)
                queries = read if sliced and not edited - {"resid_pre", "k", "v"} else None
                explicit = any(lane.writes_scores(layer) for lane in stack.members)
                mix = None if explicit or "pattern" not in edited else partial(self._mixed, stack)
                x = replay.block(layer, x, stack.tap, explicit, mix, queries)
                x = x[:, read] if sliced and queries is None else x
            x = self._joined_at_z(layer, x, stack, clean, read if sliced else None)
            if joining := stack.join((layer, BETWEEN)):
                x = _together(x, _copies(_at(clean.between[layer], read if sliced else None), len(joining)))
            if x is not None:
                x = stack.tap("resid_mid", layer, x)
                x = stack.tap("resid_post", layer, replay.mlp(layer, x, stack.tap))
                x = self._at_read(x) if layer == last and not sliced else x
            self._note(x, clean)
        late = stack.joining((last + 1, BEFORE))
        if late:
            joined = self._joined_before(last + 1, None, stack, clean)
            assert joined is not None
            x = _together(x, self._at_read(joined))
        assert x is not None
        size = stack.size * (_LOGITS // max(1, stack.size * x.shape[1] * replay.unembed.shape[1]) or 1)
        outputs = (part for piece in x.split(size) for part in replay.output(piece).split(stack.size))
        yield from zip(stack.members, outputs, strict=True)

    def _joined_before(self, layer: int, x: Tensor | None, stack: Stack, clean: Clean) -> Tensor | None:
        joining = stack.joining((layer, BEFORE))
        if not joining:
            return x
        start = _copies(clean.before[layer], len(joining))
        # A lane that begins with an edit of the stream between two layers may name it from either side.
        start = stack.tap_of(joining, "resid_post", layer - 1, start)
        stack.join((layer, BEFORE))
        return _together(x, start)

    def _joined_at_z(
        self, layer: int, x: Tensor | None, stack: Stack, clean: Clean, read: Tensor | None
    ) -> Tensor | None:
        joining = stack.join((layer, AT_Z))
        if not joining:
            return x
        z, out = clean.z[layer], self.replay.blocks[layer].out
        streams = []
        for lane in joining:
            new = self._mixed_lane(lane, layer, z, clean.v[layer]) if lane.at("pattern", layer) else z
            new = lane_value(lane, "z", layer, new)
            moved = _at(new - z, read)
            heads = heads_at_z(lane, layer)
            if heads is None:
                change = moved.flatten(-2) @ out.flatten(0, 1)
            else:
                change = moved[:, :, heads].flatten(-2) @ out[heads].flatten(0, 1)
            streams.append(_at(clean.between[layer], read) + change)
        return _together(x, torch.cat(streams))

    def _mixed(self, stack: Stack, layer: int, z: Tensor, v: Tensor) -> Tensor:
        parts = zip(stack.members, z.split(stack.size), v.split(stack.size), strict=True)
        return torch.cat([self._mixed_lane(lane, layer, one, values) for lane, one, values in parts])

    def _mixed_lane(self, lane: Lane, layer: int, z: Tensor, v: Tensor) -> Tensor:
        """z where some heads attend to all keys alike: which keys those are does not depend on the example."""
        for write in lane.at("pattern", layer):
            assert lane.call is not None
            length = z.shape[1]
            visible = self.replay.visible(length, z.device)
            scores = torch.zeros(1, 1, length, length, dtype=z.dtype, device=z.device)
            scores = scores.masked_fill(~visible, -torch.inf)
            shape = (len(z), z.shape[2], length, length)
            lane.call.reads(write)["scores"] = scores
            pattern, selected = replacement_for(write, lane.call, scores.expand(shape), scores)
            heads = list(range(z.shape[2])) if write.heads is None else list(write.heads)
            new = torch.einsum("qk,bkhe->bqhe", pattern[0, 0], v[:, :, heads])
            # [batch head query 1] -> [batch query head 1]
            chosen = selected.expand(-1, z.shape[2], length, -1).transpose(1, 2)[:, :, heads]
            new = torch.where(chosen, new, z[:, :, heads])
            lane.changed |= bool((new != z[:, :, heads]).any())
            z = z.clone()
            z[:, :, heads] = new
        return z

    def _at_read(self, x: Tensor) -> Tensor:
        return _at(x, self.read)

    def _note(self, x: Tensor | None, clean: Clean) -> None:
        stack = 0 if x is None else x.numel() * x.element_size()
        self.bytes_held = max(self.bytes_held, clean.nbytes + stack)


def _copies(x: Tensor, count: int) -> Tensor:
    return x.repeat(count, 1, 1)


def _together(x: Tensor | None, more: Tensor) -> Tensor:
    return more if x is None else torch.cat([x, more])


def _at(x: Tensor, read: Tensor | None) -> Tensor:
    return x if read is None else x[:, read]


def _refuse_hooks(model: nn.Module) -> None:
    """Hooks may do anything, and are not replayed. A model class's own are part of its forward."""
    if state_of(model).suspended:
        raise NotReplayed("a clean pass is under way")
    everywhere = [hook for name in _GLOBAL_HOOKS for hook in getattr(nn.modules.module, name).values()]
    # torch's own, such as that of the FLOP counter, look on.
    if any(not str(getattr(hook, "__module__", "")).startswith("torch.utils.") for hook in everywhere):
        raise NotReplayed("there are hooks on all modules")
    wrapped = model.__dict__.get("original_model")
    inner = list(wrapped.named_modules()) if isinstance(wrapped, nn.Module) else []
    for name, module in [*model.named_modules(), *inner]:
        hooks: list[Callable[..., Any]] = [
            *module._forward_hooks.values(),
            *module._forward_pre_hooks.values(),
        ]
        point = name.split(".")[-1].startswith("hook_")
        if any(
            point or not str(getattr(hook, "__module__", "")).startswith("transformer_lens") for hook in hooks
        ):
            raise NotReplayed(f"there is a hook on {name or 'the model'}")


_GLOBAL_HOOKS = tuple(
    name
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks")
    if hasattr(nn.modules.module, name)
)
