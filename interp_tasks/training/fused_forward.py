"""The trainer's forward pass: fused where the architecture allows, the model's own elsewhere.

Both share the model's parameters and return the output at the positions the task reads. They are interchangeable:
the tests hold outputs and gradients equal, and :func:`fastest_forward` checks the first batch of every run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp_tasks.devices import float32_matmul_precision
from tasks.model_building import is_post_norm
from tasks.seeds_and_device_tensors import constant, generator

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer

Place = Literal["resid_mid", "resid_post"]


@dataclass(frozen=True)
class DropoutMasks:
    """The masks of one step (Syrkis & Søgaard 2024, code: z = drop(z + attn(z)); z = drop(z + mlp(z))).

    Attributes:
        rate: share of entries set to zero; the rest is scaled by 1 / (1 − rate).
        masks: one for each sample, or one shared by the batch, as published.
        positions: length of the full sequence; a mask covers it whatever part is computed.
        drawn: masks that are drawn already, by ``layer.place``: a captured function cannot draw.
    """

    rate: float
    masks: Literal["per-sample", "shared"]
    positions: int
    seed: int
    step: int
    drawn: Mapping[str, Tensor] = field(default_factory=dict)

    def __call__(
        self,
        resid: Float[Tensor, "batch pos d_model"],
        layer: int,
        place: Place,
        positions: Sequence[int] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """Applies this step's mask to ``resid`` (at ``positions``, if only some are computed)."""
        kept = self.kept_entries(len(resid), resid.shape[-1], layer, place).to(resid.device, resid.dtype)
        if positions is not None:
            kept = kept[:, constant(tuple(positions), torch.long, resid.device)]
        return resid * kept / (1 - self.rate)

    def masks_of(
        self, model: HookedTransformer, examples: int
    ) -> dict[str, Bool[Tensor, "rows pos d_model"]]:
        """Returns the entries that stay at every place of a model, by ``layer.place``."""
        places: tuple[Place, ...] = ("resid_post",) if model.cfg.attn_only else ("resid_mid", "resid_post")
        return {
            f"{layer}.{place}": self.kept_entries(examples, model.cfg.d_model, layer, place)
            for layer in range(model.cfg.n_layers)
            for place in places
        }

    def kept_entries(
        self, examples: int, d_model: int, layer: int, place: Place
    ) -> Bool[Tensor, "rows pos d_model"]:
        """Returns the entries that stay, on the CPU where they are drawn here; of a shared mask one row."""
        if self.drawn:
            return self.drawn[f"{layer}.{place}"]
        random_stream = generator(self.seed, "dropout", self.step, layer, place)
        rows = 1 if self.masks == "shared" else examples
        return torch.rand(rows, self.positions, d_model, generator=random_stream) >= self.rate


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class HookedForward:
    """The ``HookedTransformer``'s own forward pass, dropout added by raw forward hooks.

    Called on tokens ``[batch pos]``, it returns the output at the read positions ``[batch read d_out]``.
    """

    kind = "hooked"

    def __init__(self, model: HookedTransformer, read_positions: Sequence[int]) -> None:
        self.model = model
        self.read_positions = list(read_positions)

    def __call__(
        self, tokens: Int[Tensor, "batch pos"], dropout: DropoutMasks | None = None
    ) -> Float[Tensor, "batch read d_out"]:
        """Returns the output at the positions that are read, by the model's own forward."""
        handles = []
        if dropout is not None:
            for layer, block in enumerate(self.model.blocks):
                for place in ("resid_mid", "resid_post"):
                    point = getattr(block, f"hook_{place}", None)
                    if point is not None:
                        handles.append(point.register_forward_hook(_dropout_hook(dropout, layer, place)))
        try:
            output: Tensor = self.model(tokens)
        finally:
            for handle in handles:
                handle.remove()
        return output[:, [position for position in self.read_positions if position < tokens.shape[1]]]


def _dropout_hook(dropout: DropoutMasks, layer: int, place: Any) -> Callable[[Any, Any, Tensor], Tensor]:
    return lambda module, args, resid: dropout(resid, layer, place)


class FusedForward:
    """Computes the same function as the model, without hooks.

    There is one packed QKV product, scaled_dot_product_attention, and no unread position: in the last layer queries,
    MLP and read-out run at the read positions alone. The first layer's keys, values and queries depend on
    (position, token) only; where there are fewer such pairs than inputs in the batch they are computed once per pair
    and looked up.

    Raises:
        ValueError: if the architecture is not one this forward computes; the message says why.
    """

    kind = "fused"

    def __init__(self, model: HookedTransformer, read_positions: Sequence[int]) -> None:
        reason = why_not_fused(model)
        if reason:
            raise ValueError(f"no fused forward: {reason}")
        self.model = model
        self.read_positions = tuple(read_positions)
        self.cfg = model.cfg
        self.post_norm = is_post_norm(model)
        # A bias that is frozen at zero adds nothing; do not pay for it.
        self.zero_biases = {
            name for name, p in model.named_parameters() if not p.requires_grad and not p.any().item()
        }
        self.parameters = dict(model.named_parameters())

    def __call__(
        self, tokens: Int[Tensor, "batch pos"], dropout: DropoutMasks | None = None
    ) -> Float[Tensor, "batch read d_out"]:
        """Returns the output at the positions that are read; in the last layer only those are computed."""
        n_pos = tokens.shape[1]
        positions = tuple(position for position in self.read_positions if position < n_pos)
        read = None if positions == tuple(range(n_pos)) else positions
        last = self.cfg.n_layers - 1
        look_up = 2 * self.cfg.d_vocab < len(tokens)
        by_token = F.embedding(tokens, self.parameters["embed.W_E"])
        resid = self._norm_if_post_norm("ln_embed", by_token + self.parameters["pos_embed.W_pos"][:n_pos])
        for layer in range(self.cfg.n_layers):
            rows = read if layer == last else None
            if layer == 0 and look_up:
                q, k, v = self._qkv_by_lookup(tokens, rows)
            else:
                q, k, v = self._qkv(layer, resid, rows)
            if rows is not None:
                resid = resid[:, _positions_as_index(rows, resid.device)]
            mixed, prefix = self._attention(layer, q, k, v, rows), f"blocks.{layer}.attn."
            resid = resid + self._affine(mixed, f"{prefix}W_O", f"{prefix}b_O")
            if self.cfg.attn_only:
                resid = resid if dropout is None else dropout(resid, layer, "resid_post", rows)
                resid = self._norm_if_post_norm(f"blocks.{layer}.ln1", resid)
                continue
            resid = resid if dropout is None else dropout(resid, layer, "resid_mid", rows)
            resid = self._norm_if_post_norm(f"blocks.{layer}.ln1", resid)
            resid = resid + self._mlp(layer, resid)
            resid = resid if dropout is None else dropout(resid, layer, "resid_post", rows)
            resid = self._norm_if_post_norm(f"blocks.{layer}.ln2", resid)
        return self._affine(self._norm_if_pre_norm("ln_final", resid), "unembed.W_U", "unembed.b_U")

    def _norm_if_pre_norm(self, name: str, x: Tensor) -> Tensor:
        """Returns the input of a sublayer, from the residual stream: normalised where the model is pre-norm."""
        return x if self.post_norm else self._norm(name, x)

    def _norm_if_post_norm(self, name: str, x: Tensor) -> Tensor:
        """Returns a sum in the residual stream, normalised where the model is post-norm."""
        return self._norm(name, x) if self.post_norm else x

    def _norm(self, name: str, x: Tensor) -> Tensor:
        if self.cfg.normalization_type is None:
            return x
        weight, bias = self.parameters.get(f"{name}.w"), self.parameters.get(f"{name}.b")
        return F.layer_norm(x, (self.cfg.d_model,), weight, bias, self.cfg.eps)

    def _affine(self, x: Tensor, weight_name: str, bias_name: str) -> Tensor:
        """Returns ``x @ weight + bias``; a weight with an axis of heads has them side by side in its rows."""
        b = None if bias_name in self.zero_biases else self.parameters[bias_name]
        w = self.parameters[weight_name]
        return F.linear(x, (w.flatten(0, 1) if w.ndim == 3 else w).T, b)

    def _project_qkv(self, layer: int, kinds: str, x: Tensor) -> Tensor:
        """Returns several of Q, K, V in one product, side by side, ``[... kinds·head·d_head]``."""
        prefix = f"blocks.{layer}.attn."
        weight = torch.cat([self.parameters[f"{prefix}W_{kind}"] for kind in kinds])
        packed = rearrange(weight, "heads d_model d_head -> d_model (heads d_head)")
        biases = [f"{prefix}b_{kind}" for kind in kinds]
        zero = self.zero_biases.issuperset(biases)
        bias = None if zero else torch.cat([self.parameters[name] for name in biases]).flatten()
        return F.linear(x, packed.T, bias)

    def _qkv(self, layer: int, resid: Tensor, rows: tuple[int, ...] | None) -> list[Tensor]:
        x = self._norm_if_pre_norm(f"blocks.{layer}.ln1", resid)
        if rows is None:
            return list(self._project_qkv(layer, "QKV", x).chunk(3, dim=-1))
        q = self._project_qkv(layer, "Q", x[:, _positions_as_index(rows, x.device)])
        return [q, *self._project_qkv(layer, "KV", x).chunk(2, dim=-1)]

    def _qkv_by_lookup(self, tokens: Int[Tensor, "batch pos"], rows: tuple[int, ...] | None) -> list[Tensor]:
        """Returns q, k and v of the first layer, looked up in a table of every token at every position."""
        n_pos = tokens.shape[1]
        table = self.parameters["pos_embed.W_pos"][:n_pos, None] + self.parameters["embed.W_E"]
        table = self._norm_if_pre_norm(
            "blocks.0.ln1", self._norm_if_post_norm("ln_embed", table)
        )  # [pos vocab d_model]
        index = tokens + self.cfg.d_vocab * torch.arange(n_pos, device=tokens.device)
        if rows is None:
            packed = F.embedding(index, self._project_qkv(0, "QKV", table).flatten(0, 1))
            return list(packed.chunk(3, dim=-1))
        packed = F.embedding(index, self._project_qkv(0, "KV", table).flatten(0, 1))
        read = _positions_as_index(rows, tokens.device)
        q_table = self._project_qkv(0, "Q", table[read])
        offsets = self.cfg.d_vocab * torch.arange(len(rows), device=tokens.device)
        q = F.embedding(tokens[:, read] + offsets, q_table.flatten(0, 1))
        return [q, *packed.chunk(2, dim=-1)]

    def _attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: tuple[int, ...] | None
    ) -> Float[Tensor, "batch pos d_heads"]:
        """Returns the heads' outputs, before W_O, at the positions that have a query."""
        scale = 1 / float(self.cfg.attn_scale)
        q, k, v = (rearrange(x, "b p (head d) -> b head p d", head=self.cfg.n_heads) for x in (q, k, v))
        visible = self._visible_keys(k.shape[2], rows, k.device)
        if q.shape[2] == 1 and visible is None:
            # A fused kernel does not pay for a single query that sees every key.
            pattern = (q * scale * k).sum(-1, keepdim=True).softmax(2)
            z = (pattern * v).sum(2, keepdim=True)
        else:
            z = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
        return rearrange(z, "b head p d -> b p (head d)")

    def _visible_keys(
        self, n_pos: int, rows: tuple[int, ...] | None, device: torch.device
    ) -> Bool[Tensor, "query key"] | None:
        """Returns the mask of the keys that each computed query sees; ``None`` if all see all."""
        if self.cfg.attention_dir == "bidirectional" or (rows is not None and min(rows) == n_pos - 1):
            return None
        positions = torch.arange(n_pos, device=device)
        queries = positions if rows is None else positions[_positions_as_index(rows, device)]
        return positions <= queries[:, None]

    def _mlp(self, layer: int, resid: Tensor) -> Tensor:
        prefix = f"blocks.{layer}.mlp."
        x = self._norm_if_pre_norm(f"blocks.{layer}.ln2", resid)
        hidden = ACTIVATIONS[self.cfg.act_fn](self._affine(x, f"{prefix}W_in", f"{prefix}b_in"))
        return self._affine(hidden, f"{prefix}W_out", f"{prefix}b_out")


def _positions_as_index(positions: tuple[int, ...], device: torch.device) -> Int[Tensor, " row"]:
    return constant(positions, torch.long, device)


def why_not_fused(model: HookedTransformer) -> str | None:
    """Returns the reason that keeps a model from the fused forward, or ``None``."""
    cfg = model.cfg
    checks = {
        "positions are not a learned table": cfg.positional_embedding_type != "standard",
        f"normalisation {cfg.normalization_type!r}": cfg.normalization_type not in (None, "LN", "LNPre"),
        f"activation {cfg.act_fn!r}": not cfg.attn_only and cfg.act_fn not in ACTIVATIONS,
        "gated MLP": cfg.gated_mlp,
        "grouped queries": cfg.n_key_value_heads not in (None, cfg.n_heads),
        "experts": cfg.num_experts is not None,
        "parallel attention and MLP": cfg.parallel_attn_mlp,
        "local attention": cfg.use_local_attn,
        "unscaled or soft-capped attention": not cfg.use_attn_scale or cfg.attn_scores_soft_cap > 0,
        "scores scaled by layer": cfg.scale_attn_by_inverse_layer_idx,
        "capped logits": cfg.output_logits_soft_cap > 0,
        "norms after the sublayers": cfg.use_normalization_before_and_after,
        "a LayerNorm after the embedding": cfg.post_embedding_ln,
    }
    return next((reason for reason, present in checks.items() if present), None)


def fastest_forward(
    model: HookedTransformer, read_positions: Sequence[int], tokens: Int[Tensor, "batch pos"]
) -> tuple[FusedForward | HookedForward, str | None]:
    """Returns the fused forward if it reproduces the model's own on ``tokens``, else the model's own and the reason."""
    hooked = HookedForward(model, read_positions)
    try:
        fused = FusedForward(model, read_positions)
    except ValueError as error:
        return hooked, str(error)
    # Rounded to tf32, two right forwards differ by more than a right and a wrong one.
    with torch.no_grad(), float32_matmul_precision(rounded=False):
        expected, got = hooked(tokens), fused(tokens)
    scale = expected.std().item() or 1.0
    difference = (got - expected).abs().max().item() / scale
    if not difference < 1e-3:
        return hooked, f"the fused forward differs from the model's own by {difference:.1e} s.d."
    return fused, None
