"""Replays the forward pass of a plain transformer from its weights, beginning at any site of any layer.

`Replay.of` refuses models that it does not cover; callers compare the replay with the model's own forward. The weights
of several checkpoints of one model may be stacked: then every weight has an extra first axis, and the rows of an
activation are those of the first checkpoint, then those of the second, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from circuits.model.surface import Surface

#: Hook function: gets a site's name, its layer and its activation, and returns the activation to go on with.
Tap = Callable[[str, int | None, Tensor], Tensor]
#: Called with a layer, its z and its v; returns z.
Mix = Callable[[int, Tensor, Tensor], Tensor]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,  # in place, as its input is not kept and memory is slow
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
# Settings of the model, with the values that are replayed.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "positional_embedding_type": ("standard",),
    "attn_scores_soft_cap": (-1.0, 0.0, None),
    "output_logits_soft_cap": (-1.0, 0.0, None),
    "gated_mlp": (False,),
    "use_local_attn": (False,),
    "use_qk_norm": (False,),
    "parallel_attn_mlp": (False,),
    "use_normalization_before_and_after": (False,),
    "dtype": (torch.float32, torch.float64),
}


class NotReplayed(Exception):
    """The reason for which a model's forward is not replayed."""


@dataclass(frozen=True)
class Norm:
    """A LayerNorm, an RMS norm or (kind None) the identity, with weight and bias where it has them."""

    kind: str | None
    eps: float
    weight: Tensor | None
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        if self.kind is None:
            return x
        stacked = self.weight is not None and self.weight.ndim > 1
        if self.kind == "LN":
            weight, bias = (None, None) if stacked else (self.weight, self.bias)
            x = F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)
            return _scaled(x, self.weight, self.bias) if stacked else x
        x = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return _scaled(x, self.weight, None) if stacked else x if self.weight is None else x * self.weight


@dataclass(frozen=True)
class Block:
    """The weights of one layer; the first axis of a matrix is the input's."""

    ln1: Norm  # before attention
    qkv: Float[Tensor, "*stack d_model qkv"]  # all heads of q, then of k, then of v
    qkv_bias: Tensor
    out: Float[Tensor, "*stack head d_head d_model"]
    out_bias: Tensor
    scale: float
    ln2: Norm | None  # before the MLP; None: attention only
    between: Norm  # on the residual stream between attention and MLP, in a post-norm model
    mlp_in: Tensor | None = None
    mlp_in_bias: Tensor | None = None
    mlp_out: Tensor | None = None
    mlp_out_bias: Tensor | None = None


@dataclass(frozen=True)
class Replay:
    """All weights of a model, and the forward pass through them. `x` is a residual stream [row pos d_model]."""

    embed: Tensor
    positions: Tensor
    blocks: tuple[Block, ...]
    entries: tuple[
        Norm, ...
    ]  # on the residual stream before each layer (post-norm), and before the unembedding
    unembed: Tensor
    unembed_bias: Tensor
    causal: bool
    activation: Callable[[Tensor], Tensor]
    mask_value: float  # the value of masked scores
    nan_pattern_to_zero: bool  # whether the model replaces every NaN in a pattern by 0

    @classmethod
    def of(cls, surface: Surface, weights: Mapping[str, Tensor] | None = None) -> Replay:
        """Returns the replay of a model; raises `NotReplayed`, with the reason, for a model that is not plain.

        Args:
            weights: a state_dict, or several stacked. Default: the model's own.
        """
        cfg: Any = surface.model.cfg
        if surface.huggingface is not None:
            raise NotReplayed(f"the bridge of a {surface.huggingface.family.wrapped} is not replayed")
        for setting, values in _PLAIN.items():
            value = getattr(cfg, setting, values[0])
            if value not in values:
                raise NotReplayed(f"{setting}={value} is not replayed")
        dtypes = {weight.dtype for weight in surface.model.parameters()}
        if len(dtypes) > 1 or not dtypes <= set(_PLAIN["dtype"]):
            raise NotReplayed("half or mixed precision is not replayed")
        if surface.norms_after_only:
            raise NotReplayed("norms after attention and MLP alone are not replayed")
        if surface.heads_at["k"] != surface.n_heads:
            raise NotReplayed("grouped key-value heads are not replayed")
        if getattr(cfg, "act_fn", None) not in _ACTIVATIONS and not getattr(cfg, "attn_only", False):
            raise NotReplayed(f"act_fn={cfg.act_fn} is not replayed")
        try:
            # Buffers too: the bridge of 4.x keeps the bias of the unembedding in one.
            return _read(surface, surface.model.state_dict() if weights is None else weights)
        except KeyError as missing:
            raise NotReplayed(f"the model has no weight {missing.args[0]}") from missing
        except RuntimeError as error:
            raise NotReplayed("its weights have other shapes than its settings say") from error

    @property
    def n_layers(self) -> int:
        return len(self.blocks)

    @property
    def copies(self) -> int:
        """Number of checkpoints whose weights are stacked."""
        return self.embed.shape[0] if self.embed.ndim > 2 else 1

    @property
    def nbytes(self) -> int:
        return sum(weight.numel() * weight.element_size() for weight in _weights(self))

    def embedded(self, tokens: Tensor, tap: Tap) -> Tensor:
        """Returns the sum of the embeddings of tokens [row pos]."""
        length, width = tokens.shape[1], self.embed.shape[-1]
        if self.embed.ndim > 2:
            copies, rows = self.copies, len(tokens) // self.copies
            which = torch.arange(copies, device=tokens.device).repeat_interleave(rows)
            embedded = self.embed[which[:, None], tokens]
            table = self.positions[:, None, :length].expand(copies, rows, length, width).flatten(0, 1)
        else:
            embedded = self.embed[tokens]
            table = self.positions[:length].expand(*tokens.shape, -1)
        return tap("embed", None, embedded) + tap("pos_embed", None, table)

    def entering(self, layer: int, x: Tensor) -> Tensor:
        """Returns resid_pre of a layer, given the output of the layer before (or the embeddings' sum); at n_layers, the
        input of the unembedding.
        """
        return self.entries[layer](x)

    def block(
        self,
        layer: int,
        x: Tensor,
        tap: Tap,
        explicit: bool = False,
        mix: Mix | None = None,
        read: Tensor | None = None,
    ) -> Tensor:
        """Returns resid_mid of a layer, or resid_post where it has no MLP, given its resid_pre after `tap`.

        Args:
            explicit: compute scores and pattern, and show them to `tap`.
            mix: called with z and v where scores are not computed, for heads whose attention does not depend on scores.
            read: compute these positions only.
        """
        block = self.blocks[layer]
        heads, d_head, _ = block.out.shape[-3:]
        width = heads * d_head
        normed = block.ln1(x)
        if read is None:
            joint = _affine(normed, block.qkv, block.qkv_bias).unflatten(-1, (3, heads, d_head))
            q, k, v = joint.unbind(-3)
        else:
            q = _affine(normed[:, read], block.qkv[..., :width], block.qkv_bias[..., :width])
            joint = _affine(normed, block.qkv[..., width:], block.qkv_bias[..., width:])
            q = q.unflatten(-1, (heads, d_head))
            k, v = joint.unflatten(-1, (2, heads, d_head)).unbind(-3)
            x = x[:, read]
        q, k, v = tap("q", layer, q), tap("k", layer, k), tap("v", layer, v)
        if explicit:
            scores = q.transpose(-3, -2) @ k.permute(0, 2, 3, 1) / block.scale
            if self.causal:
                scores = scores.masked_fill(~self.visible(x.shape[1], x.device), self.mask_value)
            scores = tap("scores", layer, scores)
            pattern = scores.softmax(-1)
            # A query that sees no key has a pattern of zeros.
            fully_masked = (
                pattern.isnan() if self.nan_pattern_to_zero else scores.isneginf().all(-1, keepdim=True)
            )
            pattern = tap("pattern", layer, pattern.masked_fill(fully_masked, 0.0))
            z = pattern @ v.transpose(-3, -2)
        else:
            mask = None if read is None or not self.causal else self.visible(k.shape[1], x.device)[read]
            z = F.scaled_dot_product_attention(
                q.transpose(-3, -2),
                k.transpose(-3, -2),
                v.transpose(-3, -2),
                attn_mask=mask,
                is_causal=self.causal and read is None,
                scale=1 / block.scale,
            )
        z = z.transpose(-3, -2)
        z = tap("z", layer, z if mix is None else mix(layer, z, v))
        return x + tap("attn_out", layer, self.attn_out(layer, z))

    def attn_out(self, layer: int, z: Tensor) -> Tensor:
        """Returns the output of a layer's attention, given z [row pos head d_head]."""
        block = self.blocks[layer]
        return _affine(z.flatten(-2), block.out.flatten(-3, -2), block.out_bias)

    def mlp(self, layer: int, x: Tensor, tap: Tap) -> Tensor:
        """Returns resid_post of a layer, given its resid_mid after `tap`."""
        block = self.blocks[layer]
        if block.ln2 is None or block.mlp_in is None or block.mlp_out is None:
            return x
        x = block.between(x)
        pre = tap("mlp_pre", layer, _affine(block.ln2(x), block.mlp_in, block.mlp_in_bias))
        post = tap("mlp_post", layer, self.activation(pre))
        return x + tap("mlp_out", layer, _affine(post, block.mlp_out, block.mlp_out_bias))

    def output(self, x: Tensor) -> Tensor:
        """Returns the logits [row pos out] of the last residual stream."""
        return _affine(self.entering(self.n_layers, x), self.unembed, self.unembed_bias)

    def visible(self, length: int, device: torch.device) -> Tensor:
        """Returns the mask of the keys that a query may see, [query key]."""
        everything = torch.ones(length, length, dtype=torch.bool, device=device)
        return everything.tril() if self.causal else everything


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert bias is not None
    if weight.ndim > 2:
        product = torch.baddbmm(bias[:, None], x.reshape(len(weight), -1, x.shape[-1]), weight)
    else:
        product = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight)
    return product.reshape(*x.shape[:-1], weight.shape[-1])


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Multiplies by the weight and adds the bias of each checkpoint."""
    assert weight is not None
    product = x.reshape(len(weight), -1, x.shape[-1]) * weight[:, None]
    return (product if bias is None else product.add_(bias[:, None])).reshape(x.shape)


def _weights(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for one in part:
            yield from _weights(one)
    elif isinstance(part, Replay | Block | Norm):
        for one in fields(part):
            yield from _weights(getattr(part, one.name))


def _read(surface: Surface, parameters: Mapping[str, Tensor]) -> Replay:
    cfg: Any = surface.model.cfg
    linear = "unembed.W_U" not in parameters
    heads, d_head = surface.n_heads, int(cfg.d_head)
    kind = getattr(cfg, "normalization_type", None)
    norm_kind = None if kind is None else str(kind).upper().removesuffix("PRE")

    def norm(path: str | None, kind: str | None) -> Norm:
        if path is None:
            return Norm(None, 0.0, None, None)
        weight = parameters.get(f"{path}.weight" if linear else f"{path}.w")
        bias = parameters.get(f"{path}.bias" if linear else f"{path}.b")
        return Norm(kind, float(cfg.eps), weight, bias)

    def projected(path: str, name: str) -> tuple[Tensor, Tensor]:
        """Returns the weights [d_model, head * d_head] of q, k or v, and the bias."""
        if linear:
            return parameters[f"{path}.{name}.weight"].mT, parameters[f"{path}.{name}.bias"]
        big = name.upper()
        return parameters[f"{path}.W_{big}"].transpose(-3, -2).flatten(-2), parameters[
            f"{path}.b_{big}"
        ].flatten(-2)

    blocks, entries = [], [norm(surface.stream_norm("embed", None), norm_kind)]
    # Norms are on the inputs of attention and MLP, or (post-norm) on the stream.
    branch = None if surface.post_norm else norm_kind
    for layer in range(surface.n_layers):
        path = f"blocks.{layer}"
        attention: Any = surface.model.get_submodule(f"{path}.attn")
        scale = getattr(attention, "attn_scale", None)
        if linear or scale is None:
            given = float(getattr(cfg, "attn_scale", -1.0))
            scale = given if given > 0 else d_head**0.5
        parts = [projected(f"{path}.attn", name) for name in "qkv"]
        out = (
            parameters[f"{path}.attn.o.weight"].mT.unflatten(-2, (heads, d_head))
            if linear
            else parameters[f"{path}.attn.W_O"]
        )
        plain: dict[str, Any] = {
            "ln1": norm(f"{path}.ln1", branch),
            "qkv": torch.cat([weight for weight, _ in parts], -1),
            "qkv_bias": torch.cat([bias for _, bias in parts], -1),
            "out": out.contiguous(),
            "out_bias": parameters[f"{path}.attn.o.bias" if linear else f"{path}.attn.b_O"],
            "scale": float(scale),
            "ln2": None,
            "between": norm(surface.stream_norm("resid_mid", layer), norm_kind),
        }
        if hasattr(surface.model.get_submodule(path), "mlp"):
            plain["ln2"] = norm(f"{path}.ln2", branch)
            inner = parameters[f"{path}.mlp.in.weight" if linear else f"{path}.mlp.W_in"]
            outer = parameters[f"{path}.mlp.out.weight" if linear else f"{path}.mlp.W_out"]
            plain["mlp_in"], plain["mlp_out"] = (inner.mT, outer.mT) if linear else (inner, outer)
            plain["mlp_in_bias"] = parameters[f"{path}.mlp.in.bias" if linear else f"{path}.mlp.b_in"]
            plain["mlp_out_bias"] = parameters[f"{path}.mlp.out.bias" if linear else f"{path}.mlp.b_out"]
        blocks.append(Block(**plain))
        entries.append(norm(surface.stream_norm("resid_post", layer), norm_kind))
    if not surface.post_norm:
        last_kind = "RMS" if norm_kind is not None and getattr(cfg, "final_rms", False) else norm_kind
        entries[-1] = norm("ln_final", last_kind)
    mask_value = surface.masked_score(0)
    return Replay(
        embed=parameters["embed.weight" if linear else "embed.W_E"],
        positions=parameters["pos_embed.weight" if linear else "pos_embed.W_pos"],
        blocks=tuple(blocks),
        entries=tuple(entries),
        unembed=parameters["unembed.weight"].mT if linear else parameters["unembed.W_U"],
        unembed_bias=parameters["unembed.bias" if linear else "unembed.b_U"],
        causal=cfg.attention_dir == "causal",
        activation=_ACTIVATIONS.get(str(cfg.act_fn), torch.relu_),
        mask_value=-torch.inf if mask_value is None else mask_value,
        nan_pattern_to_zero=not linear,
    )
