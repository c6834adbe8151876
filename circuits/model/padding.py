"""Tells which tokens are padding where nobody gave a mask, as far as the model's own tokenizer does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.model.prompts import Prompts
from circuits.model.surface import Surface

ADVICE = "circuits.prompts(model, texts or tokens) makes inputs that carry a mask"


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


def mask_of_tokenizer(surface: Surface, tokens: Tensor, side: str | None = None) -> Tensor | None:
    """Returns the mask [batch pos], true at tokens, of padding at one side; None where no tokenizer names any.

    All of a row's padding ids at that side count, but the last of those before the text where the model begins its
    prompts with a token of that id: transformer-lens reads its own batches so.
    """
    tokenizer: Any = getattr(surface.model, "tokenizer", None)
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None or tokens.ndim != 2 or tokens.is_floating_point():
        return None
    is_pad = tokens == int(pad)
    if (side or getattr(tokenizer, "padding_side", None) or "right") == "right":
        return ~is_pad.flip(1).int().cumprod(1).flip(1).bool()
    before = is_pad.int().cumprod(1).bool()
    begins = getattr(surface.model.cfg, "default_prepend_bos", True)
    if begins and pad == getattr(tokenizer, "bos_token_id", None):
        before = before & torch.cat([before[:, 1:], torch.zeros_like(before[:, :1])], 1)
    return ~before


def mask_of_model(surface: Surface, tokens: Tensor) -> Tensor | None:
    """Returns the mask [batch pos] that the model makes itself where it is given none; None where it masks nothing.

    A HookedTransformer does so where its tokenizer pads on the left.
    """
    side = getattr(getattr(surface.model, "tokenizer", None), "padding_side", None)
    if side != "left" or surface.bridged:
        return None
    mask = mask_of_tokenizer(surface, tokens, "left")
    return None if mask is None or bool(mask.all()) else mask


def refuse_padding(surface: Surface, prompts: Prompts, used: Tensor | None, what: str) -> None:
    """Refuses inputs without a mask in which padding would be taken for tokens.

    Args:
        used: bool [batch pos], the positions used; None: examples are compared position by position, so that padding
            that they all have in the same places does no harm.
    """
    if prompts.mask is not None:
        return
    mask = padding(surface, prompts.tokens)
    if mask is None:
        return
    if used is None:
        differing = mask.any(0) & ~mask.all(0)
        mask = mask & differing
    else:
        mask = mask & used.to(mask.device)
    if bool(mask.any()):
        raise CircuitsError(
            f"{what}: {int(mask.any(1).sum())} of {len(prompts)} examples have padding that would be taken for tokens; "
            f"{ADVICE}"
        )
