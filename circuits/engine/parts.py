"""The parts of a replayed transformer: what each computes, said by its weights and a few settings.

The weights of several checkpoints of one model may be stacked: then every weight has an extra first axis, and the rows
of an activation are those of the first checkpoint, then those of the second, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

#: Hook function: gets a site's name, its layer and its activation, and returns the activation to go on with.
Tap = Callable[[str, int | None, Tensor], Tensor]
#: Called with a layer, its z and its v; returns z.
Mix = Callable[[int, Tensor, Tensor], Tensor]

#: Types in which what a step computes is rounded to fewer digits than it is computed with.
HALF = (torch.bfloat16, torch.float16)

_Part = TypeVar("_Part")


class NotReplayed(Exception):
    """The reason for which a model's forward is not replayed."""


@dataclass(frozen=True)
class Places:
    """Where the tokens of padded examples are. An activation has their rows once, or several times one after the
    other.
    """

    mask: Tensor  # bool [row pos], true at tokens

    @cached_property
    def order(self) -> Tensor:
        """The position of each token among its row's own, [row pos]; of padding, some position."""
        return (self.mask.long().cumsum(1) - 1).clamp(min=0)

    def times(self, rows: int) -> Places:
        """Returns the places of an activation with this number of rows."""
        count = rows // len(self.mask)
        return self if count == 1 else Places(self.mask.repeat(count, 1))


@dataclass(frozen=True)
class Linear:
    """A linear map; the first axis of the matrix is the input's."""

    weight: Float[Tensor, "*stack in out"]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if weight.ndim > 2:
            rows = x.reshape(len(weight), -1, x.shape[-1])
            product = rows @ weight if bias is None else torch.baddbmm(bias[:, None], rows, weight)
        else:
            rows = x.reshape(-1, x.shape[-1])
            product = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
        return product.reshape(*x.shape[:-1], weight.shape[-1])

    def outputs(self, which: slice) -> Linear:
        """Returns the map to some of the outputs."""
        return Linear(self.weight[..., which], None if self.bias is None else self.bias[..., which])


@dataclass(frozen=True)
class Norm:
    """A LayerNorm ("LN"), an RMS norm ("RMS") or (kind None) the identity, with weight and bias where it has them."""

    kind: str | None = None
    eps: float = 0.0
    weight: Tensor | None = None
    bias: Tensor | None = None
    #: Computed in this type. Default: the input's own, half precision in single.
    wide: torch.dtype | None = None
    #: Whether the result is rounded to the input's type once, and not before weight and bias already.
    rounded_last: bool = True

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the normalised stream, rounded where the model rounds; weights may be stacked by checkpoint."""
        if self.kind is None:
            return x
        own, weight = x.dtype, self.weight
        wide = self.wide or (torch.float32 if own in HALF else own)
        stacked = weight is not None and weight.ndim > 1
        if self.kind == "LN" and wide == own and not stacked:
            return F.layer_norm(x, x.shape[-1:], weight, self.bias, self.eps)
        x = x.to(wide)
        if self.kind == "LN":
            x = F.layer_norm(x, x.shape[-1:], None, None, self.eps)
        else:
            x = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        if not self.rounded_last:
            x = x.to(own)
        if weight is not None:
            shape = x.shape
            rows = x.reshape(len(weight), -1, shape[-1]) if stacked else x
            rows = rows * (weight[:, None] if stacked else weight)
            if self.bias is not None:
                rows = rows + (self.bias[:, None] if stacked else self.bias)
            x = rows.reshape(shape)
        return x.to(own)


@dataclass(frozen=True)
class Rotary:
    """Rotates pairs of a head's first entries by angles that grow with the position."""

    cos: Float[Tensor, "pos turned"]
    sin: Float[Tensor, "pos turned"]
    #: Whether the entries of a pair are neighbours, and not half of `turned` apart.
    adjacent: bool

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Returns x [row pos head d_head] at these positions, [pos] or [row pos], rotated."""
        size = self.cos.shape[-1]
        turning = x[..., :size]
        if self.adjacent:
            turned = torch.stack((-turning[..., 1::2], turning[..., ::2]), -1).flatten(-2)
        else:
            first, second = turning.chunk(2, -1)
            turned = torch.cat((-second, first), -1)
        cos, sin = self.cos[positions][..., None, :], self.sin[positions][..., None, :]
        turned = turning * cos + turned * sin
        return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), -1)


@dataclass(frozen=True)
class Attention:
    """One layer's attention, from the normalised stream to z, and from z to what it adds."""

    qkv: Linear  # all query heads, then the key heads, then the value heads
    heads: int
    groups: int  # of key and value heads, each of which several query heads in a row share
    out: Linear  # of all heads, one after the other
    scale: float  # scores are divided by it
    causal: bool
    mask_value: float = -torch.inf  # the value of masked scores
    window: int | None = None  # the number of keys, its own included, that a query sees
    cap: float | None = None  # scores are bent so as to stay below
    softmax: torch.dtype | None = None  # the type in which it is computed. Default: that of the scores
    #: What becomes of NaN in a pattern: "zeros", "zeros where all is masked", or "kept".
    blind: str = "kept"
    rotary: Rotary | None = None
    q_norm: Norm = Norm()
    k_norm: Norm = Norm()
    norms_join_heads: bool = False  # q_norm and k_norm are of all heads together

    @property
    def d_head(self) -> int:
        return self.out.weight.shape[-2] // self.heads

    def z(
        self,
        layer: int,
        x: Tensor,
        tap: Tap,
        explicit: bool = False,
        mix: Mix | None = None,
        read: Tensor | None = None,
        places: Places | None = None,
    ) -> Tensor:
        """Returns z [row pos head d_head] after `tap`; the arguments are those of `Replay.block`."""
        split = self.heads * self.d_head
        if read is None:
            joint = self.qkv(x).unflatten(-1, (self.heads + 2 * self.groups, self.d_head))
            q, k, v = joint.split((self.heads, self.groups, self.groups), -2)
        else:
            q = self.qkv.outputs(slice(split))(x[:, read]).unflatten(-1, (self.heads, self.d_head))
            joint = self.qkv.outputs(slice(split, None))(x)
            k, v = joint.unflatten(-1, (2 * self.groups, self.d_head)).split(self.groups, -2)
        q, k, v = tap("q", layer, q), tap("k", layer, k), tap("v", layer, v)
        values = v
        q, k = self._normed(self.q_norm, q), self._normed(self.k_norm, k)
        if self.rotary is not None:
            order = torch.arange(x.shape[1], device=x.device) if places is None else places.order
            k = self.rotary(k, order)
            q = self.rotary(q, order if read is None else order[..., read])
        seen = self.visible(x.shape[1], x.device, places)
        if seen is not None and read is not None:
            seen = seen[..., read, :]
        # [row head pos d_head]
        q, k, v = q.transpose(1, 2), self._shared(k.transpose(1, 2)), self._shared(v.transpose(1, 2))
        exact = self.softmax in (None, q.dtype) and q.dtype not in HALF and self.cap is None
        if explicit or not exact:
            z = self._by_scores(layer, q, k, v, seen, tap if explicit else None)
        else:
            plain = self.causal and read is None and places is None and self._sees_all_before(x.shape[1])
            z = F.scaled_dot_product_attention(
                q, k, v, attn_mask=None if plain else seen, is_causal=plain, scale=1 / self.scale
            )
        z = z.transpose(1, 2)
        return tap("z", layer, z if mix is None else mix(layer, z, values))

    def _normed(self, norm: Norm, x: Tensor) -> Tensor:
        return norm(x.flatten(-2)).reshape(x.shape) if self.norms_join_heads else norm(x)

    def _shared(self, x: Tensor) -> Tensor:
        """Returns keys or values [row group pos d_head] for each query head."""
        return x if self.groups == self.heads else x.repeat_interleave(self.heads // self.groups, 1)

    def _by_scores(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, tap: Tap | None
    ) -> Tensor:
        """Returns attention's mix of v by explicit scores and patterns, which `tap` sees and may change."""
        scores = capped(q @ k.transpose(-2, -1) / self.scale, self.cap)
        if seen is not None:
            scores = scores.masked_fill(~seen, self.mask_value)
        if tap is not None:
            scores = tap("scores", layer, scores)
        pattern = scores.softmax(-1, dtype=self.softmax).to(scores.dtype)
        if tap is not None:
            # A query that sees no key may have a pattern of zeros.
            if self.blind == "zeros":
                pattern = pattern.masked_fill(pattern.isnan(), 0.0)
            elif self.blind == "zeros where all is masked":
                pattern = pattern.masked_fill(scores.isneginf().all(-1, keepdim=True), 0.0)
            pattern = tap("pattern", layer, pattern)
        return pattern @ v

    def _sees_all_before(self, length: int) -> bool:
        return self.window is None or self.window >= length

    def visible(self, length: int, device: torch.device, places: Places | None = None) -> Tensor | None:
        """Returns the mask of the keys that a query may see, [query key] or [row 1 query key]; None: it sees all.

        A query of padding that may see none sees itself, so that what it computes is finite; nobody reads it.
        """
        seen = None
        if self.causal:
            seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
            if self.window is not None and self.window < length:
                seen = seen.triu(1 - self.window)
        if places is None:
            return seen
        keys = places.mask[:, None, None, :]
        seen = keys if seen is None else seen & keys
        return seen | torch.eye(length, dtype=torch.bool, device=device) & ~places.mask[:, None, :, None]


@dataclass(frozen=True)
class Mlp:
    """One layer's MLP, on the normalised stream; gated where it has a second map of it."""

    inner: Linear  # to what the activation function is applied to
    outer: Linear
    activation: Callable[[Tensor], Tensor]
    linear: Linear | None = None  # multiplied by what the activation function gives
    bias: Tensor | None = None  # added to the product of a gated one
    norm: Norm = Norm()  # of what the activation function gives

    def __call__(self, layer: int, x: Tensor, tap: Tap) -> Tensor:
        post = self.norm(self.activation(tap("mlp_pre", layer, self.inner(x))))
        if self.linear is not None:
            post = post * self.linear(x)
        if self.bias is not None:
            post = added(post, self.bias)
        return self.outer(tap("mlp_post", layer, post))


@dataclass(frozen=True)
class Block:
    """One layer: attention and an MLP, with norms before or after each."""

    ln1: Norm  # before attention
    attention: Attention
    after_attention: Norm  # of what attention adds
    between: Norm  # on the residual stream between attention and MLP, in a post-norm model
    ln2: Norm
    mlp: Mlp | None
    after_mlp: Norm


def capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def added(x: Tensor, bias: Tensor) -> Tensor:
    """Adds a bias, or that of each checkpoint."""
    if bias.ndim == 1:
        return x + bias
    return (x.reshape(len(bias), -1, x.shape[-1]) + bias[:, None]).reshape(x.shape)


def tensors(part: Any) -> Iterator[Tensor]:
    """Yields all tensors of a part and its parts."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for one in part:
            yield from tensors(one)
    elif is_dataclass(part):
        for one in fields(part):
            yield from tensors(getattr(part, one.name))


def widened(part: _Part) -> _Part:
    """Returns a part with its weights in single precision."""
    changes: dict[str, Any] = {}
    for one in fields(part):  # type: ignore[arg-type]
        value = getattr(part, one.name)
        if isinstance(value, Tensor):
            changes[one.name] = value.float()
        elif is_dataclass(value):
            changes[one.name] = widened(value)
    return replace(part, **changes)  # type: ignore[type-var]
