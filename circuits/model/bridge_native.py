"""Reads and writes the activations of a native `TransformerBridge` (boot_native).

There the hook of `scores` fires after the fact, with the pattern, and on 3.9 so does that of `pattern`: these two are
met at the softmax.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from circuits.errors import CircuitsError
from circuits.model.bridge import Bridge, SoftmaxHooks
from circuits.model.hooks import Function, Handle


class NativeBridge(Bridge):
    """Hooks one native bridge (boot_native)."""

    def __init__(self, model: nn.Module, hooks: Mapping[str, nn.Module], wrapped: nn.Module) -> None:
        super().__init__(model, hooks, wrapped)
        for layer, block in enumerate(self._blocks):
            for module, wanted in (
                (_inner(block), "NativeBlock"),
                (self._attention(layer), "NativeAttention"),
            ):
                if type(module).__name__ != wanted:
                    raise CircuitsError(
                        f"block {layer} of this TransformerBridge has a {type(module).__name__} where {wanted} is "
                        "supported"
                    )

    @property
    def key_heads(self) -> int:
        return int(self._attention(0).n_kv_heads)

    def block(self, layer: int) -> Any:
        return _inner(self._blocks[layer])

    def _d_head(self, layer: int) -> int:
        return int(self._attention(layer).d_head)

    def _at_softmax(self, site: str, layer: int, function: Function) -> Handle | None:
        attention = self._attention(layer)
        in_line = bool(getattr(attention, "accepts_pattern_fn", False))
        if site == "scores" or (site == "pattern" and not in_line):
            return SoftmaxHooks.of(attention, layer, masks_after=True).listen(site, function)
        return None

    def _attention(self, layer: int) -> Any:
        return _inner(_inner(self._blocks[layer]).attn)


def _inner(component: Any) -> Any:
    """Returns the wrapped module of a bridge component."""
    return component.get_submodule("_original_component")
