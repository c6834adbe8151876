"""Keeps the functions hooked at the scores and pattern of a layer, where these have no hook point in line."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from circuits.model.hooks import Function, Handle, Handles


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
