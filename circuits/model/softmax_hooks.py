"""Meets the softmax inside a module that computes attention itself, for the sites scores and pattern of a bridge.

Hooks here are lambdas: a deep copy of a model shares them, and does not copy the objects that they refer to.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from circuits.errors import CircuitsError
from circuits.model.hooks import Function, Handle, Handles


class SoftmaxHooks:
    """Hooks scores and pattern of a module that computes attention itself, for as long as any function is hooked.

    The softmax that the module calls is met while it runs: scores are what that is given, and what it returns is the
    pattern. `masks_after` says that the module masks the pattern once more, which would undo a write at a masked key.
    """

    def __init__(self, attention: Any, layer: int, masks_after: bool) -> None:
        self._attention, self._layer, self.masks_after = attention, layer, masks_after
        self._listeners: dict[str, dict[object, Function]] = {"scores": {}, "pattern": {}}
        self._hooks: Handles | None = None
        self._mode: _SoftmaxInterceptor | None = None

    @classmethod
    def of(cls, attention: nn.Module, layer: int, masks_after: bool = False) -> SoftmaxHooks:
        if attention not in _softmax_hooks:
            _softmax_hooks[attention] = cls(attention, layer, masks_after)
        return _softmax_hooks[attention]

    def listen(self, site: str, function: Function) -> Handle:
        if self._hooks is None:
            self._hooks = Handles(
                self._attention.register_forward_pre_hook(
                    lambda module, inputs: self._start_intercepting(), prepend=True
                ),
                self._attention.register_forward_hook(
                    lambda module, inputs, output: self._stop_and_check(output), always_call=True
                ),
            )
        listener = object()
        self._listeners[site][listener] = function
        return SimpleNamespace(remove=partial(self.stop, site, listener))

    def stop(self, site: str, listener: object) -> None:
        self._listeners[site].pop(listener, None)
        if self._hooks is not None and not any(self._listeners.values()):
            self._hooks.remove()
            self._hooks = None
            self._stop_and_count_softmaxes()
            _softmax_hooks.pop(self._attention, None)

    def _stop_and_count_softmaxes(self) -> int:
        """Stops looking at softmaxes; returns how many there were, or 1 where that had been stopped."""
        mode, self._mode = self._mode, None
        if mode is None:
            return 1
        mode.__exit__(None, None, None)
        return mode.count

    def _start_intercepting(self) -> None:
        # A copy of the model made while hooks are on shares them.
        if any(self._listeners.values()):
            self._mode = _SoftmaxInterceptor(self)
            self._mode.__enter__()

    def _stop_and_check(self, output: Any) -> None:
        count = self._stop_and_count_softmaxes()
        # After an exception of the module there is no output; after an interrupt only the stop itself is called.
        if output is not None and count != 1:
            raise CircuitsError(
                f"blocks.{self._layer}.attn: {count} softmaxes over keys where one is supported, which hides scores "
                'and pattern; call model.original_model.set_attn_implementation("eager"), and no softmax in a hook '
                "there"
            )

    def edit_scores(self, scores: Tensor) -> Tensor:
        new = _apply_in_order(self._listeners["scores"], scores)
        return scores if new is None else new

    def edit_pattern(self, pattern: Tensor) -> Tensor:
        # The module brings the pattern into the dtype of its weights; one that is put there has it, unrounded.
        dtype = next(self._attention.parameters()).dtype
        new = _apply_in_order(self._listeners["pattern"], pattern.to(dtype))
        return pattern if new is None else new


# The attention modules whose scores or pattern have a hook now.
_softmax_hooks: WeakKeyDictionary[nn.Module, SoftmaxHooks] = WeakKeyDictionary()


class _SoftmaxInterceptor(TorchFunctionMode):
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
        self.count += 1
        scores = self._hooks.edit_scores(args[0])
        if not self._hooks.masks_after:
            return self._hooks.edit_pattern(func(scores, *args[1:], **kwargs))
        self._pattern = self._hooks.edit_pattern(softmax_over_keys(scores))
        return self._pattern


_MET = (torch.softmax, torch.nn.functional.softmax, Tensor.softmax)


def _apply_in_order(listeners: Mapping[object, Function], value: Tensor) -> Tensor | None:
    """Applies the functions to a value one after the other; returns None where all of them only read."""
    changed = None
    for function in list(listeners.values()):
        new = function(value if changed is None else changed)
        changed = changed if new is None else new
    return changed


def softmax_over_keys(scores: Tensor) -> Tensor:
    """Returns the softmax over keys; a query that sees no key gets zeros, and no NaN gradient."""
    fully_masked = torch.isneginf(scores).all(-1, keepdim=True)
    return scores.masked_fill(fully_masked, 0.0).softmax(-1).masked_fill(fully_masked, 0.0)
