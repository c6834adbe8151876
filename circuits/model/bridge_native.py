"""Reads and writes the activations of a native `TransformerBridge` (boot_native).

There the hook of `scores` fires after the fact, with the pattern, and on 3.9 so does that of `pattern`. These two are
recomputed (`_Recomputed`) from the outputs of the layer's q, k and v projections, and the edited values are put in
where the model takes them, as the pattern or, on 3.9, as z = pattern @ v. Every such forward first checks that the
recomputed values are the model's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.model.bridge import COARSEST, RECOMPUTED, AttentionHooks, Bridge, apply_in_order, pattern_of
from circuits.model.hooks import Function, Handle, Handles

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


class _Recomputed(AttentionHooks):
    """Recomputes scores and pattern of a native bridge from q, k and v."""

    def __init__(self, attention: Any, layer: int) -> None:
        super().__init__(attention, layer)
        self._signature = inspect.signature(type(attention).forward)
        # Values of the current forward pass: its arguments, the outputs of q, k and v, and then the edited pattern.
        self._seen: dict[str, Any] = {}

    def _forget(self) -> None:
        self._seen.clear()

    def _register(self) -> Handles:
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


def _check(recomputed: Tensor, expected: Tensor, layer: int) -> None:
    with torch.no_grad():
        if recomputed.shape != expected.shape:
            raise CircuitsError(_not_its_own(layer, f"{list(recomputed.shape)}, not {list(expected.shape)}"))
        largest = expected.abs().nan_to_num().max()
        if not torch.allclose(
            recomputed,
            expected,
            rtol=0,
            atol=RECOMPUTED.get(expected.dtype, COARSEST) * float(largest),
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


def _pattern_in_line(attention: Any) -> bool:
    return bool(getattr(attention, "accepts_pattern_fn", False))


def _inner(component: Any) -> Any:
    """Returns the wrapped module of a bridge component."""
    return component.get_submodule("_original_component")


def _refuse_foreign(block: nn.Module, layer: int) -> None:
    inner = _inner(block)
    attention = _inner(inner.attn)
    for module, wanted in ((inner, "NativeBlock"), (attention, "NativeAttention")):
        if type(module).__name__ != wanted:
            raise CircuitsError(
                f"block {layer} of this TransformerBridge has a {type(module).__name__} where {wanted} is supported"
            )
    lacking = [name for name in _NEEDED if not hasattr(attention, name)]
    if lacking:
        raise CircuitsError(
            f"block {layer}: {type(attention).__name__} has no {lacking[0]}; it is not supported"
        )
