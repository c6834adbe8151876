"""Tells which tokens are padding, as far as the model's own tokenizer does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.model.surface import Surface
from circuits.tensors import Positions, select_positions


def padding(surface: Surface, tokens: Tensor) -> Tensor | None:
    """Returns bool [batch pos], true at padding before or after an example; None where there is none, or no tokenizer.

    Where padding has the id of the first (BOS) or last (EOS) token too, the one next to the text counts as that token.
    """
    tokenizer: Any = getattr(surface.model, "tokenizer", None)
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None or tokens.ndim != 2 or tokens.is_floating_point():
        return None
    is_pad = tokens == int(pad)
    before = is_pad.int().cumprod(1).bool()
    after = is_pad.flip(1).int().cumprod(1).flip(1).bool()
    edge = torch.zeros_like(is_pad[:, :1])
    if pad == getattr(tokenizer, "bos_token_id", None):
        before = before & torch.cat([before[:, 1:], edge], 1)
    if pad == getattr(tokenizer, "eos_token_id", None):
        after = after & torch.cat([edge, after[:, :-1]], 1)
    mask = before | after
    return mask if bool(mask.any()) else None


def masks_itself(surface: Surface, tokens: Tensor) -> bool:
    """Tells whether the model masks padding in these tokens without being given a mask."""
    side = getattr(getattr(surface.model, "tokenizer", None), "padding_side", None)
    return side == "left" and padding(surface, tokens) is not None


def refuse_padding(surface: Surface, tokens: Tensor, used: Tensor | None, what: str, instead: str) -> None:
    """Refuses inputs in which padding would be taken for tokens.

    Args:
        used: bool [batch pos], the positions used; None: examples are compared position by position, so that padding
            that they all have in the same places does no harm.
        instead: advice for the error message.
    """
    mask = padding(surface, tokens)
    if mask is None:
        return
    if used is None:
        differing = mask.any(0) & ~mask.all(0)
        mask = mask & differing
    else:
        mask = mask & used.to(mask.device)
    if bool(mask.any()):
        raise CircuitsError(
            f"{what}: {int(mask.any(1).sum())} of {len(tokens)} examples have padding that would be taken for tokens; "
            f"{instead}"
        )


def refuse_default_metrics_over_padding(
    surface: Surface, tokens: Tensor, read: Positions | None, what: str, instead: str
) -> None:
    """Refuses padding among the positions over which the default metrics would be averaged."""
    used = torch.ones(tokens.shape[1], dtype=torch.bool)
    if read is not None:
        used = select_positions(read, tokens.shape[1], f"{what}, positions")
    refuse_padding(surface, tokens, used.expand(tokens.shape[:2]), f"{what}, without metric=", instead)
