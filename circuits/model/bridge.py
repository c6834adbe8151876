"""Reads and writes the activations of a `TransformerBridge` (transformer-lens 3.9 to 4.3).

There a hook point is not always in line. Heads are hooked flat, and split here. A write at `resid_mid` (the input
of ln2) does not reach the skip connection, so the difference is put in at the end of the block (`stream_writes`).

Hooks here and beside are lambdas: a deep copy of a model shares them, and does not copy the objects that they refer to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.model.hooks import Function, Handle, Handles, before_module, bound, on_hook_point, passed
from circuits.model.sites import KINDS

BRIDGE = "TransformerBridge"

# Between the recomputed attention, or a sum of the stream, and the model's own. Both come from the same operations on
# the same tensors, so on most machines they are equal.
RECOMPUTED = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# The same where the dtype is none of these.
COARSEST = 3e-2

# Of results, where that is promised.
PROMISED = {torch.float64: 1e-10, torch.float32: 1e-5}

# Sites at which the model has all heads on one flat axis.
_BY_HEAD = ("q", "k", "v", "z")


class Inputs(Protocol):
    """What a model is run on, as `circuits.model.prompts.Prompts` holds it."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def mask(self) -> Tensor | None: ...
    @property
    def extra(self) -> Mapping[str, Tensor]: ...
    @property
    def padded(self) -> bool: ...
    @property
    def real(self) -> Tensor: ...
    @property
    def lengths(self) -> Tensor: ...


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
            return StreamWrite(given, module, layer).register(
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
                refuse_other_writes(activation, self._hooks[hook], output, layer)
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


def wrapped_model(model: nn.Module) -> nn.Module:
    """Returns the model that a bridge is around."""
    wrapped: Any = model.__dict__.get("original_model")
    if not isinstance(wrapped, nn.Module):
        raise CircuitsError(f"this {type(model).__name__} has no original_model, and is not supported")
    return wrapped


def is_native(wrapped: nn.Module) -> bool:
    """Tells whether the model that a bridge is around is TransformerLens's own."""
    return type(wrapped).__name__ == "NativeModel"


def _for_bridge(
    wrapped: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Converts the wrapped model's arguments into those of the bridge: the inputs, and all arguments by name."""
    given = bound(type(wrapped).forward, args, kwargs)
    vectors = given.pop("inputs_embeds", None)
    tokens = given.get("input_ids", args[0] if args else None)
    return (tokens if vectors is None else vectors,), given


def _by_head(function: Function, d_head: int) -> Function:
    # With `use_split_qkv_input` the heads are apart already.
    return lambda x: function(x) if x.ndim == 4 else _flattened(function(x.unflatten(-1, (-1, d_head))))


def _flattened(by_head: Tensor | None) -> Tensor | None:
    return None if by_head is None else by_head.flatten(-2)


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
    def _register(self) -> Handles: ...

    @abstractmethod
    def _forget(self) -> None:
        """Drops what is held of a forward pass."""

    def listen(self, site: str, function: Function) -> Handle:
        if self._hooks is None:
            self._hooks = self._register()
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


def apply_in_order(listeners: Mapping[object, Function], value: Tensor) -> Tensor | None:
    """Applies the functions to a value one after the other; returns None where all of them only read."""
    changed = None
    for function in list(listeners.values()):
        new = function(value if changed is None else changed)
        changed = changed if new is None else new
    return changed


def pattern_of(scores: Tensor) -> Tensor:
    """Returns the softmax over keys; a query that sees no key gets zeros, and no NaN gradient."""
    fully_masked = torch.isneginf(scores).all(-1, keepdim=True)
    return scores.masked_fill(fully_masked, 0.0).softmax(-1).masked_fill(fully_masked, 0.0)


class StreamWrite:
    """Carries a write at resid_mid on to the residual stream. There the hook point is on the MLP's branch, so the
    change is added to the stream at the end of the block.
    """

    def __init__(self, function: Function, module: nn.Module, layer: int) -> None:
        self._function, self._module, self._layer = function, module, layer
        self.change: Tensor | None = None
        self._input: Tensor | None = None
        self._largest = 0.0  # entry of the stream that was replaced

    def register(self, block_end: nn.Module) -> Handle:
        writes = _writes.setdefault(self._module, [])
        writes.append(self)
        return Handles(
            self._module.register_forward_pre_hook(lambda module, inputs: self._begin(inputs), prepend=True),
            self._module.register_forward_hook(lambda module, inputs, output: self._write(output)),
            block_end.register_forward_pre_hook(lambda module, inputs: self._carry(inputs)),
            _WriteHandle(writes, self),
        )

    def _begin(self, inputs: tuple[Any, ...]) -> None:
        self._input = inputs[0]

    def _write(self, output: Tensor) -> Tensor | None:
        block_input, self._input = self._input, None
        new = self._function(output)
        if new is not None and block_input is not None:
            refuse_other_writes(block_input, self._module, output, self._layer, before=self)
        self.change = None if new is None else new - output
        self._largest = 0.0 if new is None else float(output.detach().abs().nan_to_num().max())
        return new

    def _carry(self, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Returns the input of the block's end with the change added; refuses one that rounding would blur."""
        # The change is kept until the next write: `through` may be called again with the stream that comes to the end
        # of the block.
        if self.change is None:
            return None
        # The MLP of some models has batch and positions on one axis.
        stream = inputs[0] + self.change.reshape(inputs[0].shape)
        # Digits lost by rounding next to a large old stream do not come back when that is removed. Half precision
        # promises less.
        rounding, least = torch.finfo(stream.dtype).eps * self._largest, float(stream.detach().abs().max())
        if rounding > PROMISED.get(stream.dtype, torch.inf) * least:
            raise CircuitsError(
                f"resid_mid: of a residual stream with entries to {self._largest:.1e} a write that leaves {least:.1e} "
                "has too few digits on a TransformerBridge; run the model in float64, or edit attn_out and resid_pre"
            )
        return (stream, *inputs[1:])


# Active writes by hook point, in the order in which they act.
_writes: WeakKeyDictionary[nn.Module, list[StreamWrite]] = WeakKeyDictionary()


class _WriteHandle:
    def __init__(self, writes: list[StreamWrite], write: StreamWrite) -> None:
        self._writes, self._write = writes, write

    def remove(self) -> None:
        if self._write in self._writes:
            self._writes.remove(self._write)


def refuse_other_writes(
    block_input: Tensor, module: nn.Module, output: Tensor, layer: int, before: StreamWrite | None = None
) -> None:
    """Refuses hooks of the user's at resid_mid: the MLP reads their output, but the residual stream does not carry it
    on.

    Args:
        module: the hook point, whose own writes are known.
        before: of these, only those that act before this one have acted.
    """
    writes = _writes.get(module, [])
    writes = writes if before is None else writes[: writes.index(before)]
    with torch.no_grad():
        expected = sum((write.change for write in writes if write.change is not None), block_input)
        difference = (expected - output).abs().masked_fill(expected == output, 0).max()
        # The comparison is negated so that NaN counts as a difference.
        if not bool(difference <= RECOMPUTED.get(block_input.dtype, COARSEST) * output.abs().max()):
            raise CircuitsError(
                f"resid_mid.{layer}: a hook of yours changes it, which on a TransformerBridge reaches the MLP and not "
                "the residual stream, so the two differ; make that change with edit"
            )
