"""Describes a model to be replayed, from its weights and settings.

What is read wrongly, or is not a setting, shows when the replay is compared with the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from circuits.engine.parts import HALF, Attention, Block, Linear, Mlp, Norm, NotReplayed, Rotary
from circuits.model.state import parameters_of
from circuits.model.surface import Surface

# What these compute is what the model computes, in one pass through memory. Half precision has other roundings.
_AT_ONCE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,  # in place, as its input is not kept and memory is slow
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
# Names of the activation function in the MLPs of the libraries.
_ACTIVATIONS = ("act_fn", "act", "activation_fn")
# The attention of bridges around Hugging Face models, or what it wraps, with the type in which it computes its softmax.
_SOFTMAX: dict[str, torch.dtype | None] = {
    "JointQKVAttentionBridge": None,
    "JointQKVPositionEmbeddingsAttentionBridge": None,
    "PositionEmbeddingsAttentionBridge": torch.float32,
    "OPTAttention": torch.float32,
}
_POSITIONS = ("standard", "rotary")
_DTYPES = (torch.float32, torch.float64, *HALF)


def described(surface: Surface, parameters: Mapping[str, Tensor], length: int | None) -> dict[str, Any]:
    """Returns the fields of a `Replay`.

    Raises `NotReplayed` for a model that cannot be described, KeyError for a weight that is not there, and
    RuntimeError for one that has another shape.
    """
    cfg: Any = surface.model.cfg
    kind = getattr(cfg, "positional_embedding_type", "standard")
    if kind not in _POSITIONS:
        raise NotReplayed(f"positional_embedding_type={kind} is not replayed")
    dtypes = {weight.dtype for weight in parameters_of(surface.model)}
    if len(dtypes) > 1 or not dtypes <= set(_DTYPES):
        raise NotReplayed("mixed precision is not replayed")
    reader = _Reader(surface, parameters, cfg, length)
    linear = reader.linear
    embedding: Any = _inner(surface.model.get_submodule("embed"))
    scale = getattr(embedding, "embed_scale", None)
    embed = parameters["embed.weight" if linear else "embed.W_E"]
    entries = [reader.norm(surface.stream_norm("embed", None))]
    entries += [reader.norm(surface.stream_norm("resid_post", layer)) for layer in range(surface.n_layers)]
    if not surface.post_norm:
        final = getattr(cfg, "final_rms", False) and reader.kind is not None
        entries[-1] = reader.norm("ln_final", "RMS" if final else reader.kind)
    positions = None
    if kind == "standard":
        positions = parameters["pos_embed.weight" if linear else "pos_embed.W_pos"]
        # Some tables begin with rows for something else.
        positions = positions[
            ..., getattr(_inner(surface.model.get_submodule("pos_embed")), "offset", 0) :, :
        ]
    return {
        "embed": embed,
        "embed_scale": None if scale is None else torch.as_tensor(scale).to(embed),
        "positions": positions,
        "blocks": tuple(reader.block(layer) for layer in range(surface.n_layers)),
        "parallel": surface.parallel,
        "entries": tuple(entries),
        "unembed": reader.map("unembed")
        if linear
        else Linear(parameters["unembed.W_U"], parameters["unembed.b_U"]),
        "cap": _limit(getattr(cfg, "output_logits_soft_cap", None)),
    }


@dataclass(frozen=True)
class _Reader:
    """Reads the parts of one model. Those of a bridge are linear maps; HookedTransformer's are by head."""

    surface: Surface
    parameters: Mapping[str, Tensor]
    cfg: Any
    length: int | None

    @property
    def linear(self) -> bool:
        return "unembed.W_U" not in self.parameters

    @property
    def kind(self) -> str | None:
        kind = getattr(self.cfg, "normalization_type", None)
        return None if kind is None else str(kind).upper().removesuffix("PRE")

    def norm(self, path: str | None, kind: str | None = "") -> Norm:
        """Reads a norm.

        Args:
            kind: of which kind it is. Default: that of the model's norms.
        """
        kind = self.kind if kind == "" else kind
        if path is None or kind is None:
            return Norm()
        weight = self.parameters.get(f"{path}.weight" if self.linear else f"{path}.w")
        bias = self.parameters.get(f"{path}.bias" if self.linear else f"{path}.b")
        eps = float(self.cfg.eps)
        if not self.linear:
            return Norm(kind, eps, weight, bias, rounded_last=False)
        if type(self.surface.model.get_submodule(path)).__name__ != "RMSNormalizationBridge":
            return Norm(kind, eps, weight, bias)
        # What it wraps computes in single precision, whatever the model's.
        if not getattr(self.cfg, "rmsnorm_uses_offset", False) or weight is None:
            return Norm(kind, eps, weight, None, torch.float32, rounded_last=False)
        return Norm(kind, eps, 1.0 + weight.float(), None, torch.float32)

    def map(self, path: str) -> Linear:
        """Reads a linear map of a bridge."""
        weight = self.parameters[f"{path}.weight"]
        weight = weight if self.surface.is_input_first(path) else weight.mT
        return Linear(weight, self.parameters.get(f"{path}.bias"))

    def block(self, layer: int) -> Block:
        """Reads a block: its norms where this form of model has them, its attention and its MLP."""
        surface, path = self.surface, f"blocks.{layer}"
        module = surface.model.get_submodule(path)
        # The norms before attention and MLP; in other models these stand on the stream, or after both.
        before = not surface.post_norm and not surface.norms_after_only
        ln1 = self.norm(f"{path}.ln1") if before else Norm()
        # In some parallel models both read the same norm.
        ln2 = self.norm(f"{path}.ln2") if before and hasattr(module, "ln2") else ln1
        return Block(
            ln1=ln1,
            attention=self.attention(layer),
            after_attention=self.norm(surface.sublayer_norm("attn_out", layer)),
            between=self.norm(surface.stream_norm("resid_mid", layer)),
            ln2=ln2,
            mlp=self.mlp(layer) if hasattr(module, "mlp") else None,
            after_mlp=self.norm(surface.sublayer_norm("mlp_out", layer))
            if hasattr(module, "mlp")
            else Norm(),
        )

    def attention(self, layer: int) -> Attention:
        """Reads the attention of a layer: projections, mask, scale, rotary table; raises `NotReplayed` for others."""
        surface, cfg, path = self.surface, self.cfg, f"blocks.{layer}.attn"
        module: Any = surface.model.get_submodule(path)
        settings: dict[str, Any] = {
            "blind": "zeros",
            "cap": _limit(getattr(cfg, "attn_scores_soft_cap", None)),
        }
        if surface.huggingface is not None:
            settings |= self._huggingface(module)
        elif self.linear:
            given = float(getattr(cfg, "attn_scale", -1.0))
            settings["scale"] = given if given > 0 else int(cfg.d_head) ** 0.5
            settings["blind"] = "zeros where all is masked"
        else:
            settings["scale"] = float(module.attn_scale)
            masked = surface.masked_score(layer)
            settings["mask_value"] = -torch.inf if masked is None else masked
            settings["window"] = cfg.window_size if module.attn_type == "local" else None
        qkv = [self._projection(path, name) for name in "qkv"]
        biases = [one.bias for one in qkv if one.bias is not None]
        if len(biases) not in (0, len(qkv)):
            biases = [
                torch.zeros_like(one.weight[..., 0, :]) if one.bias is None else one.bias for one in qkv
            ]
        out = (
            self.map(f"{path}.o")
            if self.linear
            else Linear(
                self.parameters[f"{path}.W_O"].flatten(-3, -2).contiguous(), self.parameters[f"{path}.b_O"]
            )
        )
        d_head, groups = int(cfg.d_head), surface.key_value_heads
        widths = [one.weight.shape[-1] for one in qkv]
        if widths != [surface.n_heads * d_head, *[groups * d_head] * 2] or out.weight.shape[-2] != widths[0]:
            raise NotReplayed("its weights have other shapes than its settings say")
        normed: dict[str, Any] = {
            name: self.norm(f"{path}.{name}", "RMS") for name in ("q_norm", "k_norm") if _has(module, name)
        }
        weight = normed["q_norm"].weight if normed else None
        return Attention(
            qkv=Linear(torch.cat([one.weight for one in qkv], -1), torch.cat(biases, -1) if biases else None),
            heads=surface.n_heads,
            groups=groups,
            out=out,
            causal=getattr(cfg, "attention_dir", "causal") == "causal",
            rotary=self._rotary(module),
            norms_join_heads=weight is not None and weight.shape[-1] != d_head,
            **(normed | settings),
        )

    def _huggingface(self, module: Any) -> dict[str, Any]:
        """Returns the settings of the attention of a bridge around a Hugging Face model."""
        inner, model = _inner(module), self.surface.model
        known = [name for name in (type(module).__name__, type(inner).__name__) if name in _SOFTMAX]
        if not known:
            raise NotReplayed(f"attention of the class {type(inner).__name__} is not replayed")
        # Some models hide the keys beyond a window in one mask for all layers.
        window = getattr(model.__dict__["original_model"].config, "sliding_window", None)
        compatible = bool(getattr(model, "compatibility_mode", False))
        dtype = next(model.parameters()).dtype
        return {
            "scale": 1 / float(getattr(inner, "scaling", None) or int(self.cfg.d_head) ** -0.5),
            "softmax": _SOFTMAX[known[0]],
            "window": getattr(inner, "sliding_window", window),
            "mask_value": -torch.inf if compatible else torch.finfo(dtype).min,
            "blind": "zeros" if compatible else "kept",
        }

    def _projection(self, path: str, name: str) -> Linear:
        """Reads the map [d_model, head * d_head] of q, k or v."""
        if self.linear:
            return self.map(f"{path}.{name}")
        big = name.upper()
        # Grouped key-value heads stand under another name.
        stored = f"{path}.W_{big}" in self.parameters
        weight = self.parameters[f"{path}.W_{big}" if stored else f"{path}._W_{big}"]
        bias = self.parameters[f"{path}.b_{big}" if stored else f"{path}._b_{big}"]
        heads = self.surface.heads_at.get(name, self.surface.n_heads)
        if weight.shape[-3] < heads:
            weight, bias = (
                one.repeat_interleave(heads // one.shape[axis], axis)
                for one, axis in ((weight, -3), (bias, -2))
            )
        return Linear(weight.transpose(-3, -2).flatten(-2), bias.flatten(-2))

    def _rotary(self, attention: Any) -> Rotary | None:
        """Returns the table of rotary embedding, `None` where there is none; raises `NotReplayed` for one per layer."""
        model: Any = self.surface.model
        if getattr(self.cfg, "positional_embedding_type", None) != "rotary":
            return None
        if not self.linear:
            cos, sin, adjacent = (
                attention.rotary_cos,
                attention.rotary_sin,
                bool(self.cfg.rotary_adjacent_pairs),
            )
        elif self.surface.huggingface is None:
            table, adjacent = model.__dict__["original_model"].rotary, True
            cos, sin = (
                one.to(next(model.parameters()).dtype) for one in (table.cos_cached, table.sin_cached)
            )
        else:
            adjacent = False
            positions = torch.arange(self.length or int(self.cfg.n_ctx), device=self.surface.device)
            dummy = torch.zeros((), dtype=next(model.parameters()).dtype, device=self.surface.device)
            try:
                cos, sin = (one[0] for one in _inner(model.rotary_emb)(dummy, positions[None]))
            except (AttributeError, TypeError, ValueError) as error:
                raise NotReplayed("its rotary table is not one that all layers share") from error
            if getattr(self.cfg, "rotary_adjacent_pairs", False):
                raise NotReplayed("its rotary table is of pairs of neighbours")
        if self.length is not None and len(cos) < self.length:
            raise NotReplayed(f"its rotary table has {len(cos)} positions yet")
        return Rotary(cos[: self.length], sin[: self.length], adjacent)

    def mlp(self, layer: int) -> Mlp:
        """Reads the MLP of a layer: its maps, its gate and its activation function."""
        path = f"blocks.{layer}.mlp"
        activation = self._activation(layer)
        if self.linear:
            inner, outer = self.map(f"{path}.in"), self.map(f"{path}.out")
            gated = f"{path}.gate.weight" in self.parameters
            return Mlp(
                self.map(f"{path}.gate") if gated else inner, outer, activation, inner if gated else None
            )
        inner = Linear(self.parameters[f"{path}.W_in"], self.parameters[f"{path}.b_in"])
        outer = Linear(self.parameters[f"{path}.W_out"], self.parameters[f"{path}.b_out"])
        norm = Norm()
        if str(self.cfg.act_fn).endswith("_ln"):
            norm = self.norm(f"{path}.ln", "LN")
        if f"{path}.W_gate" not in self.parameters:
            return Mlp(inner, outer, activation, norm=norm)
        gate = Linear(self.parameters[f"{path}.W_gate"])
        return Mlp(gate, outer, activation, Linear(inner.weight), inner.bias, norm)

    def _activation(self, layer: int) -> Callable[[Tensor], Tensor]:
        name = str(getattr(self.cfg, "act_fn", None))
        if name in _AT_ONCE and next(self.surface.model.parameters()).dtype not in HALF:
            return _AT_ONCE[name]
        module = _inner(self.surface.block(layer).mlp)
        own = [getattr(module, one) for one in _ACTIVATIONS if callable(getattr(module, one, None))]
        if not own:
            raise NotReplayed(f"act_fn={name} is not replayed")
        function: Callable[[Tensor], Tensor] = own[0]
        return function


def _inner(component: Any) -> Any:
    """Returns what a component of a bridge wraps; other modules as they are."""
    while isinstance(inner := getattr(component, "original_component", None), nn.Module):
        component = inner
    return component


def _has(module: nn.Module, name: str) -> bool:
    return isinstance(getattr(module, name, None), nn.Module)


def _limit(cap: Any) -> float | None:
    """Returns a soft cap; None where it is off."""
    return float(cap) if cap is not None and cap > 0 else None
