"""Reads and writes the activations of a `TransformerBridge` (transformer-lens 3.9 to 4.3).

There a hook point is not always in line. Heads are hooked flat, and split here. A write at `resid_mid` (the input of
ln2) would not reach the skip connection, so it is made in place. Scores and pattern are met at the softmax where the
module computes attention itself.

Hooks here and beside are lambdas: a deep copy of a model shares them, and does not copy the objects that they refer to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from circuits.errors import CircuitsError
from circuits.model.hooks import Function, Handle, Handles, before_module, bound, on_hook_point, passed
from circuits.model.sites import KINDS

BRIDGE = "TransformerBridge"

# Sites at which the model has all heads on one flat axis.
_BY_HEAD = ("q", "k", "v", "z")


@runtime_checkable
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

    def _at_softmax(self, site: str, layer: int, function: Function) -> Handle | None:
        """Hooks a site that is met at the softmax; returns None where its hook point is in line."""
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
            return _on_stream(module, given, layer)
        return self._at_softmax(site, layer, given) or on_hook_point(module, given)

    def before(self, hook: str, function: Function) -> Handle:
        site, layer = self._sites.get(hook, (hook, None))
        given = self._when_used(layer, function)
        if layer is not None and site in _BY_HEAD:
            given = _by_head(given, self._d_head(layer))
        return before_module(self._hooks[hook], given)

    def through(self, hook: str, activation: Tensor) -> Tensor:
        site, layer = self._sites.get(hook, (hook, None))
        if layer is not None and site == "resid_mid" and self.on_branch(site):
            output: Tensor = self._hooks[hook](copy := activation.clone())
            _check_stream(output, copy, layer)
            written = output.is_inference() or output._version > 0
            return output if written or not torch.equal(output, activation) else activation
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


class SoftmaxHooks:
    """Hooks scores and pattern of a module that computes attention itself, for as long as any function is hooked.

    The softmax that the module calls is met while it runs: scores are what that is given, and what it returns is the
    pattern. A call of torch's fused attention, which has none to meet, is computed in its steps.
    """

    def __init__(self, attention: Any, layer: int, masks_after: bool) -> None:
        """
        Args:
            masks_after: whether the module masks the pattern once more, which would undo a write at a masked key.
        """
        self._attention, self._layer, self.masks_after = attention, layer, masks_after
        self._listeners: dict[str, dict[object, Function]] = {"scores": {}, "pattern": {}}
        self._hooks: Handles | None = None
        self._mode: _Softmax | None = None

    @classmethod
    def of(cls, attention: nn.Module, layer: int, masks_after: bool = False) -> SoftmaxHooks:
        if attention not in _softmax_hooks:
            _softmax_hooks[attention] = cls(attention, layer, masks_after)
        return _softmax_hooks[attention]

    def listen(self, site: str, function: Function) -> Handle:
        if self._hooks is None:
            self._hooks = Handles(
                self._attention.register_forward_pre_hook(lambda module, inputs: self._enter(), prepend=True),
                self._attention.register_forward_hook(
                    lambda module, inputs, output: self._leave(output), always_call=True
                ),
            )
        key = object()
        self._listeners[site][key] = function
        return _ListenerHandle(self, site, key)

    def stop(self, site: str, key: object) -> None:
        self._listeners[site].pop(key, None)
        if self._hooks is not None and not any(self._listeners.values()):
            self._hooks.remove()
            self._hooks = None
            self._end()
            _softmax_hooks.pop(self._attention, None)

    def _end(self) -> int:
        """Stops looking at softmaxes; returns how many there were, or 1 where that had been stopped."""
        mode, self._mode = self._mode, None
        if mode is None:
            return 1
        mode.__exit__(None, None, None)
        return mode.count

    def _enter(self) -> None:
        # A copy of the model made while hooks are on shares them.
        if any(self._listeners.values()):
            self._mode = _Softmax(self)
            self._mode.__enter__()

    def _leave(self, output: Any) -> None:
        count = self._end()
        # After an exception of the module there is no output. (After an interrupt nothing is called but `_end`.)
        if output is not None and count != 1:
            raise CircuitsError(
                f"blocks.{self._layer}.attn: {count} softmaxes over keys where one is supported, which hides scores "
                'and pattern; call model.original_model.set_attn_implementation("eager"), and no softmax in a hook '
                "there"
            )

    @property
    def grouped(self) -> bool:
        """Whether heads share keys, which may then come with another axis than that of heads."""
        return bool(getattr(self._attention, "num_key_value_groups", 1) > 1)

    def given(self, scores: Tensor) -> Tensor:
        new = apply_in_order(self._listeners["scores"], scores)
        return scores if new is None else new

    def returned(self, pattern: Tensor) -> Tensor:
        # The module brings the pattern into the dtype of its weights; one that is put there has it, unrounded.
        new = apply_in_order(self._listeners["pattern"], pattern.to(next(self._attention.parameters()).dtype))
        return pattern if new is None else new


class _ListenerHandle:
    def __init__(self, hooks: SoftmaxHooks, site: str, key: object) -> None:
        self._hooks, self._site, self._key = hooks, site, key

    def remove(self) -> None:
        self._hooks.stop(self._site, self._key)


# The attention modules whose scores or pattern have a hook now.
_softmax_hooks: WeakKeyDictionary[nn.Module, SoftmaxHooks] = WeakKeyDictionary()


class _Softmax(TorchFunctionMode):
    """Meets the softmax of an activation [batch head query key]."""

    def __init__(self, hooks: SoftmaxHooks) -> None:
        super().__init__()
        self._hooks = hooks
        self.count = 0
        self._pattern: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.masked_fill and args[0] is self._pattern:
            return args[0]
        # Inside this method the mode is off, so that a softmax which calls another is seen once.
        if func not in _MET or not args or args[0].ndim != 4:
            return func(*args, **kwargs)
        if func is scaled_dot_product_attention:
            return func(*args, **kwargs) if self._hooks.grouped else self._attention(*args, **kwargs)
        self.count += 1
        scores = self._hooks.given(args[0])
        if not self._hooks.masks_after:
            return self._hooks.returned(func(scores, *args[1:], **kwargs))
        self._pattern = self._hooks.returned(pattern_of(scores))
        return self._pattern

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ) -> Tensor:
        """Returns what torch's scaled_dot_product_attention does, [batch head query d_head], by its definition."""
        self.count += 1
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            hidden = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if hidden else scores + attn_mask
        pattern = self._hooks.returned(pattern_of(self._hooks.given(scores)))
        return dropout(pattern, dropout_p) @ value


_MET = (torch.softmax, torch.nn.functional.softmax, Tensor.softmax, scaled_dot_product_attention)


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


def _on_stream(module: nn.Module, function: Function, layer: int) -> Handle:
    """Hooks a hook point of the residual stream that feeds the MLP alone: what is written there is written to the
    stream's own memory, which the skip connection reads next.
    """
    streams: list[Tensor] = []

    def write(output: Tensor) -> Tensor | None:
        stream = streams.pop()
        # A copy, as gradients may need what the function was given.
        new = function(output.clone())
        if new is None:
            return None
        _check_stream(output, stream, layer)
        return output.copy_(new)

    return Handles(
        module.register_forward_pre_hook(lambda module, inputs: streams.append(inputs[0]), prepend=True),
        module.register_forward_hook(lambda module, inputs, output: write(output)),
    )


def _check_stream(output: Tensor, stream: Tensor, layer: int) -> None:
    """Refuses hooks of the user's at resid_mid: the MLP reads their output, but the stream does not carry it on."""
    if output is not stream:
        raise CircuitsError(
            f"resid_mid.{layer}: a hook of yours changes it, which on a TransformerBridge reaches the MLP and not the "
            "residual stream, so the two differ; make that change with edit"
        )
