"""Reads and writes the activations of a `TransformerBridge` (transformer-lens 3.9 to 4.3).

There a hook point is not always in line. Heads are hooked flat, and split here. A write at `resid_mid` (the input
of ln2) does not reach the skip connection, so the difference is put in at the end of the block (`stream_writes`).

Hooks here and beside are lambdas: a deep copy of a model shares them, and does not copy the objects that they refer to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.model.bridges.stream_writes import StreamWrite, refuse_other_writes
from circuits.model.hooks import Function, Handle, Handles, before_module, bound, on_hook_point, passed
from circuits.model.sites import KINDS

BRIDGE = "TransformerBridge"

# Sites at which the model has all heads on one flat axis.
_BY_HEAD = ("q", "k", "v", "z")


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
            return StreamWrite(given, module, layer).put_on(
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
