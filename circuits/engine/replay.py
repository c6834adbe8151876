"""Replays the forward pass of a transformer from its weights, beginning at any site of any layer.

`Replay.of` refuses models that it cannot describe; callers compare the replay with the model's own forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from circuits.engine.parts import Block, Linear, Mix, Norm, Places, Tap, capped, tensors, widened
from circuits.engine.parts import NotReplayed as NotReplayed
from circuits.engine.weights import described
from circuits.model.surface import Surface


@dataclass(frozen=True)
class Replay:
    """All weights of a model, and the forward pass through them. `x` is a residual stream [row pos d_model]."""

    embed: Tensor
    embed_scale: Tensor | None  # the embeddings are multiplied by it
    positions: Tensor | None  # a table of position embeddings
    blocks: tuple[Block, ...]
    parallel: bool  # whether the MLP of a layer reads what its attention reads
    #: On the residual stream before each layer (post-norm), and before the unembedding.
    entries: tuple[Norm, ...]
    unembed: Linear
    cap: float | None  # of the output

    @classmethod
    def of(
        cls, surface: Surface, weights: Mapping[str, Tensor] | None = None, length: int | None = None
    ) -> Replay:
        """Returns the replay of a model; raises `NotReplayed`, with the reason, for a model that cannot be described.

        Args:
            weights: a state_dict, or several stacked. Default: the model's own.
            length: the number of positions to replay. Default: as many as the model has room for.
        """
        try:
            # Buffers too: the bridge of 4.x keeps the bias of the unembedding in one.
            return cls(
                **described(surface, surface.model.state_dict() if weights is None else weights, length)
            )
        except KeyError as missing:
            raise NotReplayed(f"the model has no weight {missing.args[0]}") from missing
        except RuntimeError as error:
            raise NotReplayed("its weights have other shapes than its settings say") from error

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def n_layers(self) -> int:
        return len(self.blocks)

    @property
    def copies(self) -> int:
        """Number of checkpoints whose weights are stacked."""
        return self.embed.shape[0] if self.embed.ndim > 2 else 1

    @property
    def nbytes(self) -> int:
        return sum(weight.numel() * weight.element_size() for weight in tensors(self))

    def wide(self, layer: int | None = None) -> Replay:
        """Returns the replay with the weights of one layer, or (None) of the unembedding and the norm before it, in
        single precision.
        """
        if layer is None:
            last = widened(self.entries[-1])
            return replace(self, entries=(*self.entries[:-1], last), unembed=widened(self.unembed))
        blocks, entries = list(self.blocks), list(self.entries)
        blocks[layer], entries[layer] = widened(blocks[layer]), widened(entries[layer])
        return replace(self, blocks=tuple(blocks), entries=tuple(entries))

    def embedded(self, tokens: Tensor, tap: Tap, places: Places | None = None) -> Tensor:
        """Returns the sum of the embeddings of tokens [row pos]."""
        length = tokens.shape[1]
        order = torch.arange(length, device=tokens.device) if places is None else places.order
        x = self._looked_up(self.embed, tokens)
        x = tap("embed", None, x if self.embed_scale is None else x * self.embed_scale)
        if self.positions is None:
            return x
        return x + tap("pos_embed", None, self._looked_up(self.positions, order.expand(tokens.shape)))

    def _looked_up(self, table: Tensor, ids: Tensor) -> Tensor:
        if table.ndim == 2:
            return table[ids]
        which = torch.arange(self.copies, device=ids.device).repeat_interleave(len(ids) // self.copies)
        return table[which[:, None], ids]

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
        places: Places | None = None,
    ) -> Tensor:
        """Returns the sum of a layer's resid_pre and its attention's output, given its resid_pre after `tap`.

        Args:
            explicit: show scores and pattern to `tap`.
            mix: called with z and v where scores are not shown, for heads whose attention does not depend on scores.
            read: compute these positions only.
            places: where the tokens of padded examples are.
        """
        block = self.blocks[layer]
        z = block.attention.z(layer, block.ln1(x), tap, explicit, mix, read, places)
        x = x if read is None else x[:, read]
        return x + tap("attn_out", layer, self.attn_out(layer, z))

    def attn_out(self, layer: int, z: Tensor) -> Tensor:
        """Returns what a layer's attention adds, given z [row pos head d_head]."""
        block = self.blocks[layer]
        return block.after_attention(block.attention.out(z.flatten(-2)))

    def mlp(self, layer: int, x: Tensor, tap: Tap, beside: Tensor | None = None) -> Tensor:
        """Returns resid_post of a layer, given its resid_mid after `tap`.

        Args:
            beside: resid_pre, which the MLP of a parallel layer reads.
        """
        block = self.blocks[layer]
        if block.mlp is None:
            return x
        x = block.between(x)
        return x + self.mlp_out(layer, x if beside is None else beside, tap)

    def mlp_out(self, layer: int, x: Tensor, tap: Tap) -> Tensor:
        """Returns what a layer's MLP adds, given the residual stream that it reads."""
        block = self.blocks[layer]
        assert block.mlp is not None
        return tap("mlp_out", layer, block.after_mlp(block.mlp(layer, block.ln2(x), tap)))

    def output(self, x: Tensor) -> Tensor:
        """Returns the logits [row pos out] of the last residual stream."""
        return capped(self.unembed(self.entering(self.n_layers, x)), self.cap)
