"""Reads and writes the activations of a `TransformerBridge` (transformer-lens 3.9 to 4.3).

There a hook point is not always in line. Heads are hooked flat, and split here. A write at `resid_mid` (the input
of ln2) does not reach the skip connection, so the difference is put in at the end of the block.

In a native bridge the hook of `scores` fires after the fact, with the pattern, and on 3.9 so does that of `pattern`.
These two are recomputed (`_Recomputed`) from the outputs of the layer's q, k and v projections, and the edited
values are put in where the model takes them, as the pattern or, on 3.9, as z = pattern @ v. Every such forward first
checks that the recomputed values are the model's own. Bridges around Hugging Face models: bridge_huggingface.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.model.hooks import Function, Handle, Handles, before_module, bound, on_hook_point, passed
from circuits.model.sites import KINDS

FAMILY = "TransformerBridge"

# Largest difference allowed between the recomputed attention and the model's own, relative to the largest entry. Both
# come from the same operations on the same tensors, so on most machines they are equal.
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

# Promised accuracy of results, relative to the largest entry.
_PROMISED = {torch.float64: 1e-10, torch.float32: 1e-5}

# Sites at which the model has all heads on one flat axis.
_BY_HEAD = ("q", "k", "v", "z")

# Attributes that the wrapped attention must have for its scores to be recomputed.
_NEEDED = (
    "n_heads",
    "n_kv_heads",
    "d_head",
    "kv_repeats",
    "scale",
    "rotary",
    "attn_scores_soft_cap",
    "causal",
)


class Bridge(ABC):
    """Hooks one bridge at the sites of `KINDS`."""

    def __init__(self, model: nn.Module, hooks: Mapping[str, nn.Module], wrapped: nn.Module) -> None:
        self._wrapped = wrapped
        self._hooks = hooks
        self._blocks = list(model.get_submodule("blocks").children())
        self._sites = {
            kind.hook.format(layer): (kind.name, layer)
            for kind in KINDS.values()
            if kind.per_layer
            for layer in range(len(self._blocks))
        }

    @property
    @abstractmethod
    def key_heads(self) -> int:
        """The number of key-value heads."""

    @abstractmethod
    def _d_head(self, layer: int) -> int: ...

    @abstractmethod
    def block(self, layer: int) -> Any:
        """Returns the module whose attributes ln1, ln2 and mlp are the parts of a block, with their hook points."""

    def _recomputed(self, site: str, layer: int, function: Function) -> Handle | None:
        """Hooks a site that is recomputed; returns None where its hook point is in line."""
        return None

    def on_forward(self, hook: str, function: Function) -> Handle:
        module = self._hooks[hook]
        site, layer = self._sites.get(hook, (hook, None))
        given = self._when_used(layer, function)
        if layer is None:
            return on_hook_point(module, given)
        if site in _BY_HEAD:
            return on_hook_point(module, _by_head(given, self._d_head(layer)))
        if site == "resid_mid" and self.on_branch(site):
            return _StreamWrite(given, module, layer).put_on(
                self._hooks[KINDS["resid_post"].hook.format(layer)]
            )
        return self._recomputed(site, layer, given) or on_hook_point(module, given)

    def before(self, hook: str, function: Function) -> Handle:
        site, layer = self._sites.get(hook, (hook, None))
        given = self._when_used(layer, function)
        if layer is not None and site in _BY_HEAD:
            given = _by_head(given, self._d_head(layer))
        return before_module(self._hooks[hook], given)

    def through(self, hook: str, activation: Tensor) -> Tensor:
        site, layer = self._sites.get(hook, (hook, None))
        if layer is not None and site == "resid_mid" and self.on_branch(site):
            output = passed(self._hooks[hook], activation)
            if output is not activation:
                _refuse_other_writes(activation, _stream_writes.get(self._hooks[hook], []), output, layer)
            return output
        if layer is None or site not in _BY_HEAD:
            return passed(self._hooks[hook], activation)
        flat = activation.flatten(-2)
        output = passed(self._hooks[hook], flat)
        return activation if output is flat else output.unflatten(-1, activation.shape[-2:])

    def on_branch(self, site: str) -> bool:
        """Tells whether a hook point of the residual stream feeds only the MLP."""
        return site == "resid_mid"

    def on_run(
        self, begin: Callable[[tuple[Any, ...], Mapping[str, Any]], None], end: Callable[[], None]
    ) -> Handle:
        # `run_with_hooks` and `run_with_cache` bypass the bridge's own __call__; every run calls the wrapped model.
        return Handles(
            self._wrapped.register_forward_pre_hook(
                lambda module, args, kwargs: begin(*_for_bridge(module, args, kwargs)), with_kwargs=True
            ),
            self._wrapped.register_forward_hook(lambda module, inputs, output: end(), always_call=True),
        )

    def _when_used(self, layer: int | None, function: Function) -> Function:
        return lambda activation: function(activation) if self._uses(layer) else None

    def _uses(self, layer: int | None) -> bool:
        """Tells whether the run uses a layer. With `start_at_layer=` (4.x) the bridge computes what comes before that
        layer, and throws it away.
        """
        start = getattr(self._blocks[0], "_start_at_layer_idx", None)
        return start is None or (layer is not None and layer >= start)


class NativeBridge(Bridge):
    """Hooks one native bridge (boot_native)."""

    def __init__(self, model: nn.Module, hooks: Mapping[str, nn.Module], wrapped: nn.Module) -> None:
        super().__init__(model, hooks, wrapped)
        for layer, block in enumerate(self._blocks):
            _refuse_foreign(block, layer)

    @property
    def key_heads(self) -> int:
        return int(self._attention(0).n_kv_heads)

    def block(self, layer: int) -> Any:
        return _inner(self._blocks[layer])

    def _d_head(self, layer: int) -> int:
        return int(self._attention(layer).d_head)

    def _recomputed(self, site: str, layer: int, function: Function) -> Handle | None:
        attention = self._attention(layer)
        if site == "scores" or (site == "pattern" and not _pattern_in_line(attention)):
            return _Recomputed.of(attention, layer).listen(site, function)
        return None

    def _attention(self, layer: int) -> Any:
        return _inner(_inner(self._blocks[layer]).attn)


def wrapped_model(model: nn.Module) -> nn.Module:
    """Returns the model that a bridge is around."""
    wrapped: Any = model.__dict__.get("original_model")
    if not isinstance(wrapped, nn.Module):
        raise CircuitsError(f"this {type(model).__name__} has no original_model, and is not supported")
    return wrapped


def is_native(wrapped: nn.Module) -> bool:
    return _class_of(wrapped) == "NativeModel"


def _for_bridge(
    wrapped: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Converts the wrapped model's arguments into those of the bridge: the inputs, and all arguments by name."""
    given = bound(type(wrapped).forward, args, kwargs)
    vectors = given.pop("inputs_embeds", None)
    tokens = given.get("input_ids", args[0] if args else None)
    return (tokens if vectors is None else vectors,), given


def _pattern_in_line(attention: Any) -> bool:
    return bool(getattr(attention, "accepts_pattern_fn", False))


# Hooks are lambdas: a deep copy of a model shares them, and does not copy the objects that they refer to.


def _by_head(function: Function, d_head: int) -> Function:
    # With `use_split_qkv_input` the heads are apart already.
    return lambda x: function(x) if x.ndim == 4 else _flattened(function(x.unflatten(-1, (-1, d_head))))


def _flattened(by_head: Tensor | None) -> Tensor | None:
    return None if by_head is None else by_head.flatten(-2)


class _StreamWrite:
    """Carries a write at resid_mid on to the residual stream. There the hook point is on the MLP's branch, so the
    change is added to the stream at the end of the block.
    """

    def __init__(self, function: Function, module: nn.Module, layer: int) -> None:
        self._function, self._module, self._layer = function, module, layer
        self.change: Tensor | None = None
        self._input: Tensor | None = None
        self._largest = 0.0  # entry of the stream that was replaced

    def put_on(self, block_end: nn.Module) -> Handle:
        streams = _stream_writes.setdefault(self._module, [])
        streams.append(self)
        return Handles(
            self._module.register_forward_pre_hook(lambda module, inputs: self._begin(inputs), prepend=True),
            self._module.register_forward_hook(lambda module, inputs, output: self._write(output)),
            block_end.register_forward_pre_hook(lambda module, inputs: self._carry(inputs)),
            _StreamWriteHandle(streams, self),
        )

    def _begin(self, inputs: tuple[Any, ...]) -> None:
        self._input = inputs[0]

    def _write(self, output: Tensor) -> Tensor | None:
        block_input, self._input = self._input, None
        new = self._function(output)
        if new is not None and block_input is not None:
            streams = _stream_writes[self._module]
            _refuse_other_writes(block_input, streams[: streams.index(self)], output, self._layer)
        self.change = None if new is None else new - output
        self._largest = 0.0 if new is None else float(output.detach().abs().nan_to_num().max())
        return new

    def _carry(self, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Returns the MLP's inputs with the change of the stream added; refuses one that rounding would blur."""
        # The change is kept until the next write: `through` may be called again with the stream that comes to the end
        # of the block.
        if self.change is None:
            return None
        # The MLP of some models has batch and positions on one axis.
        stream = inputs[0] + self.change.reshape(inputs[0].shape)
        # Digits lost by rounding next to a large old stream do not come back when that is removed. Half precision
        # promises less.
        rounding, least = torch.finfo(stream.dtype).eps * self._largest, float(stream.detach().abs().max())
        if rounding > _PROMISED.get(stream.dtype, torch.inf) * least:
            raise CircuitsError(
                f"resid_mid: of a residual stream with entries to {self._largest:.1e} a write that leaves {least:.1e} "
                "has too few digits on a TransformerBridge; run the model in float64, or edit attn_out and resid_pre"
            )
        return (stream, *inputs[1:])


# Active writes by hook point, in the order in which they act.
_stream_writes: WeakKeyDictionary[nn.Module, list[_StreamWrite]] = WeakKeyDictionary()


class _StreamWriteHandle:
    def __init__(self, streams: list[_StreamWrite], stream: _StreamWrite) -> None:
        self._stream_writes, self._stream = streams, stream

    def remove(self) -> None:
        if self._stream in self._stream_writes:
            self._stream_writes.remove(self._stream)


def _refuse_other_writes(block_input: Tensor, writes: list[_StreamWrite], output: Tensor, layer: int) -> None:
    """Refuses hooks of the user's at resid_mid: the MLP reads their output, but the residual stream does not carry it
    on.
    """
    with torch.no_grad():
        expected = sum((write.change for write in writes if write.change is not None), block_input)
        difference = (expected - output).abs().masked_fill(expected == output, 0).max()
        # The comparison is negated so that NaN counts as a difference.
        if not bool(difference <= _TOLERANCE.get(block_input.dtype, 3e-2) * output.abs().max()):
            raise CircuitsError(
                f"resid_mid.{layer}: a hook of yours changes it, which on a TransformerBridge reaches the MLP and not "
                "the residual stream, so the two differ; make that change with edit"
            )


class AttentionHooks(ABC):
    """Hooks scores and pattern of one layer, for as long as any function is hooked at them."""

    def __init__(self, attention: Any, layer: int) -> None:
        self._attention = attention
        self._layer = layer
        self._listeners: dict[str, dict[object, Function]] = {"scores": {}, "pattern": {}}
        self._hooks: Handles | None = None

    @classmethod
    def of(cls, attention: nn.Module, layer: int) -> AttentionHooks:
        if attention not in _attention_hooks:
            _attention_hooks[attention] = cls(attention, layer)
        return _attention_hooks[attention]

    @abstractmethod
    def _put_on(self) -> Handles: ...

    @abstractmethod
    def _forget(self) -> None:
        """Drops what is held of a forward pass."""

    def listen(self, site: str, function: Function) -> Handle:
        if self._hooks is None:
            self._hooks = self._put_on()
        key = object()
        self._listeners[site][key] = function
        return _AttentionHandle(self, site, key)

    def leave(self, site: str, key: object) -> None:
        self._listeners[site].pop(key, None)
        if self._hooks is not None and not any(self._listeners.values()):
            self._hooks.remove()
            self._hooks = None
            self._forget()
            _attention_hooks.pop(self._attention, None)


class _AttentionHandle:
    def __init__(self, hooks: AttentionHooks, site: str, key: object) -> None:
        self._hooks, self._site, self._key = hooks, site, key

    def remove(self) -> None:
        self._hooks.leave(self._site, self._key)


# The attention modules whose scores or pattern have a hook now.
_attention_hooks: WeakKeyDictionary[nn.Module, AttentionHooks] = WeakKeyDictionary()


class _Recomputed(AttentionHooks):
    """Recomputes scores and pattern of a native bridge from q, k and v."""

    def __init__(self, attention: Any, layer: int) -> None:
        super().__init__(attention, layer)
        self._signature = inspect.signature(type(attention).forward)
        # Values of the current forward pass: its arguments, the outputs of q, k and v, and then the edited pattern.
        self._seen: dict[str, Any] = {}

    def _forget(self) -> None:
        self._seen.clear()

    def _put_on(self) -> Handles:
        """Puts the hooks on by which attention is computed anew from q, k, v and z."""
        attention = self._attention
        return Handles(
            attention.register_forward_pre_hook(
                lambda module, args, kwargs: self._begin(args, kwargs), with_kwargs=True
            ),
            *(
                getattr(attention, name).register_forward_hook(
                    lambda module, inputs, output, name=name: self._seen.update({name: output})
                )
                for name in "qkv"
            ),
            attention.o.register_forward_pre_hook(lambda module, inputs: self._put_z(inputs), prepend=True),
            attention.register_forward_hook(lambda module, inputs, output: self._end(output)),
        )

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._seen.clear()
        self._seen.update(self._signature.bind(self._attention, *args, **kwargs).arguments)
        pattern_fn = kwargs.get("pattern_fn")
        if pattern_fn is None or not self._listeners["scores"]:
            return None
        return args, {**kwargs, "pattern_fn": lambda pattern: pattern_fn(self._put_pattern(pattern))}

    def _put_pattern(self, model_pattern: Tensor) -> Tensor:
        """Returns the pattern of the edited scores, for models that take a pattern (`pattern_fn`)."""
        scores, pattern = _recompute(self._attention, self._seen, self._layer)
        _check(pattern, model_pattern, self._layer)
        new = apply_in_order(self._listeners["scores"], scores)
        return model_pattern if new is None else pattern_of(new)

    def _put_z(self, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Replaces z, the input of the output projection, by pattern @ v, for models that take no pattern."""
        seen = self._seen
        if "hidden_states" not in seen or "pattern_fn" in seen or not any(self._listeners.values()):
            return None
        scores, pattern = _recompute(self._attention, seen, self._layer)
        v = _heads(seen["v"], self._attention.d_head).repeat_interleave(self._attention.kv_repeats, dim=1)
        _check(_joined(pattern @ v), inputs[0], self._layer)
        new_scores = apply_in_order(self._listeners["scores"], scores)
        if new_scores is not None:
            pattern = pattern_of(new_scores)
        new_pattern = apply_in_order(self._listeners["pattern"], pattern)
        if new_pattern is not None:
            pattern = new_pattern
        if new_scores is None and new_pattern is None:
            return None
        seen["pattern"] = pattern
        return (_joined(pattern @ v), *inputs[1:])

    def _end(self, output: Any) -> Any:
        """Replaces the pattern in the output of the attention, which reaches the model's own hook points among others,
        by the edited one.
        """
        pattern = self._seen.get("pattern")
        self._seen.clear()
        return None if pattern is None else (output[0], pattern, *output[2:])


def apply_in_order(listeners: Mapping[object, Function], value: Tensor) -> Tensor | None:
    """Applies the functions to a value one after the other; returns None where all of them only read."""
    changed = None
    for function in list(listeners.values()):
        new = function(value if changed is None else changed)
        changed = changed if new is None else new
    return changed


def _recompute(attention: Any, seen: Mapping[str, Any], layer: int) -> tuple[Tensor, Tensor]:
    """Recomputes scores (minus infinity where masked) and pattern [batch head query key] from q, k and the mask."""
    missing = [name for name in "qkv" if name not in seen]
    if missing:
        raise CircuitsError(_not_its_own(layer, f"{missing[0]} was not computed before the pattern"))
    q, k = (_heads(seen[name], attention.d_head) for name in "qk")
    batch, length = q.shape[0], q.shape[2]
    if attention.rotary is not None:
        q, k = attention.rotary.apply_rope(q, k, position_ids=seen.get("position_ids"))
    k = k.repeat_interleave(attention.kv_repeats, dim=1)
    scores = q @ k.transpose(-2, -1) / attention.scale
    cap = attention.attn_scores_soft_cap
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    hidden = attention.causal_mask[:length, :length]
    if not attention.causal:
        hidden = torch.zeros_like(hidden)
    mask = seen.get("attention_mask")
    if mask is not None:
        hidden = attention._combine_attention_mask(hidden, mask, batch=batch)
    scores = scores.masked_fill(hidden, -torch.inf)
    return scores, scores.softmax(-1).masked_fill(hidden, 0.0)


def pattern_of(scores: Tensor) -> Tensor:
    """Returns the softmax over keys; a query that sees no key gets zeros, and no NaN gradient."""
    fully_masked = torch.isneginf(scores).all(-1, keepdim=True)
    return scores.masked_fill(fully_masked, 0.0).softmax(-1).masked_fill(fully_masked, 0.0)


def _check(recomputed: Tensor, expected: Tensor, layer: int) -> None:
    with torch.no_grad():
        if recomputed.shape != expected.shape:
            raise CircuitsError(_not_its_own(layer, f"{list(recomputed.shape)}, not {list(expected.shape)}"))
        largest = expected.abs().nan_to_num().max()
        if not torch.allclose(
            recomputed,
            expected,
            rtol=0,
            atol=_TOLERANCE.get(expected.dtype, 3e-2) * float(largest),
            equal_nan=True,
        ):
            off = float((recomputed - expected).abs().max() / largest)
            raise CircuitsError(_not_its_own(layer, f"off by {off:.1e} of the largest entry"))


def _not_its_own(layer: int, what: str) -> str:
    return (
        f"blocks.{layer}.attn: attention rebuilt from q, k and v is not what the model computes ({what}); "
        "scores and pattern cannot be supported on this model, z can"
    )


def _heads(flat: Tensor, d_head: int) -> Tensor:
    """Splits the heads: [batch pos head*d_head] -> [batch head pos d_head]."""
    return flat.unflatten(-1, (-1, d_head)).transpose(1, 2)


def _joined(z: Tensor) -> Tensor:
    """Joins the heads: [batch head pos d_head] -> [batch pos head*d_head]."""
    return z.transpose(1, 2).flatten(-2)


def _inner(component: Any) -> Any:
    """Returns the wrapped module of a bridge component."""
    return component.get_submodule("_original_component")


def _class_of(module: Any) -> str:
    return type(module).__name__


def _refuse_foreign(block: nn.Module, layer: int) -> None:
    inner = _inner(block)
    attention = _inner(inner.attn)
    for module, wanted in ((inner, "NativeBlock"), (attention, "NativeAttention")):
        if _class_of(module) != wanted:
            raise CircuitsError(
                f"block {layer} of this TransformerBridge has a {_class_of(module)} where {wanted} is supported"
            )
    lacking = [name for name in _NEEDED if not hasattr(attention, name)]
    if lacking:
        raise CircuitsError(f"block {layer}: {_class_of(attention)} has no {lacking[0]}; it is not supported")
