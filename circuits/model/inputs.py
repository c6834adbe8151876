"""Makes inputs of a model from texts, lists of unequal length, mappings or tensors, with the mask of their padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.model.hooked_model import HookedModel
from circuits.model.prompts import Prompts, Words, check_mask
from circuits.tensors import as_dense_tensor
from circuits.validate import read_choice, read_inputs

SIDES = ("left", "right")


@dataclass(frozen=True)
class Texts:
    """Texts that wait for a model, whose tokenizer makes tokens of them."""

    texts: tuple[str, ...]

    def describe(self) -> dict[str, Any]:
        return {"texts": list(self.texts)}


#: What an intervention keeps of the inputs it was given.
Given = Prompts | Texts


def prompts(model: Any, given: Any, side: str | None = None) -> Prompts:
    """Makes inputs for a model, in one batch, with a mask where lengths differ.

        prompts(model, ["The cat sat", "A dog"])
        prompts(model, [[5, 3, 8], [2, 1]], side="left")
        prompts(model, tokenizer(texts, padding=True, return_tensors="pt"))

    Args:
        given: a text or texts, which the model tokenises as in `model(text)`, with the first token (BOS) that it puts
            first by default, and never cut off (a text that begins with it, such as a chat template's, gets no
            second one); lists or tensors of token ids, of any lengths; a mapping such as a tokenizer returns, with
            `input_ids`, `attention_mask` and what else the model's own forward takes for each token
            (`token_type_ids`, `position_ids`); or a tensor [batch pos], in which what the model's tokenizer
            calls padding, at `side`, is padding (a first token that has the same id is not).
        side: "left" or "right", where padding goes; by default the `padding_side` of the model's tokenizer, else right.
    """
    surface = HookedModel.of(model)
    if side is not None:
        read_choice(side, SIDES, "prompts", "side")
    found = with_model(read_given(given, "prompts", "given", side), surface, "prompts", side)
    mask = found.mask
    if mask is None:
        mask = mask_of_tokenizer(surface, found.tokens, side)
    words = found.words or _words(surface, found.tokens, mask)
    made = Prompts(found.tokens, mask, words, found.texts, found.extra)
    surface.check_prompts(made, "prompts: tokens")
    return made


def read_prompts(surface: HookedModel, given: Any, caller: str, name: str = "tokens") -> Prompts:
    """Reads the inputs of a run: whatever `prompts` takes, and tensors as they are, without looking for padding."""
    return with_model(read_given(given, caller, name), surface, caller)


def read_given(given: Any, caller: str, name: str, side: str | None = None) -> Given:
    """Reads inputs without a model: texts are kept, and lists of unequal length padded."""
    what = f"{caller}: {name}"
    if isinstance(given, Prompts | Texts):
        return given
    if isinstance(given, str):
        return Texts((given,))
    if is_encoding(given):
        return _encoded(given, what, side or "right")
    given = as_dense_tensor(given, what)
    if _is_list(given):
        if given and all(isinstance(text, str) for text in given):
            return Texts(tuple(given))
        return _padded(given, what, 0, side or "right")
    return Prompts(read_inputs(given, what))


def _encoded(given: Mapping[str, Any], what: str, side: str) -> Prompts:
    """Reads what a tokenizer returns, with further keys as they are; whether the model takes them, it tells later."""
    ids, mask = (as_dense_tensor(given.get(name), what) for name in ("input_ids", "attention_mask"))
    if not _is_list(ids):
        found = _masked(read_inputs(ids, what), mask, what)
    else:
        found = _padded(ids, what, 0, side)
        # A tokenizer that did not pad returns lists of ones beside it.
        found = found if mask is None or _all_ones(mask) else _masked(found.tokens, mask, what)
    extra = {
        name: _extra(given[name], found, f"{what}, {name}", side)
        for name in given.keys()  # noqa: SIM118 (a BatchEncoding iterates over rows)
        if name not in ("input_ids", "attention_mask") and given[name] is not None
    }
    return Prompts(found.tokens, found.mask, extra=extra)


def _extra(values: Any, prompts: Prompts, what: str, side: str) -> Tensor:
    """Reads what a mapping says of each token, in the layout of its prompts; a single row serves all of them."""
    with suppress(CircuitsError, RuntimeError, TypeError, ValueError):
        read = as_dense_tensor(values, what)
        read = _padded(read, what, 0, side).tokens if _is_list(read) else read
        if torch.as_tensor(read).ndim == 2:
            return torch.as_tensor(read).expand(prompts.shape[:2])
    raise CircuitsError(f"{what}: no number for each token [batch pos]; leave it out")


def is_encoding(given: Any) -> bool:
    """Tells whether this is what a tokenizer returns."""
    return hasattr(given, "keys") and "input_ids" in list(given.keys())


def with_model(given: Given, surface: HookedModel, caller: str, side: str | None = None) -> Prompts:
    """Returns inputs as a model takes them: texts as its tokens, and the mask where the model masks by itself."""
    if isinstance(given, Prompts):
        mask = mask_of_model(surface, given.tokens) if given.mask is None else None
        return given if mask is None else given.with_mask(mask)
    model: Any = surface.model
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None or not (callable(tokenizer) or hasattr(model, "to_tokens")):
        raise CircuitsError(f"{caller}: the model has no tokenizer, which texts need; give token ids")
    rows = [_tokens_of(model, tokenizer, text) for text in given.texts]
    pad = getattr(tokenizer, "pad_token_id", None)
    side = side or getattr(tokenizer, "padding_side", None) or "right"
    found = _padded(rows, f"{caller}: texts", 0 if pad is None else int(pad), side)
    words = _words(surface, found.tokens, found.mask)
    return Prompts(found.tokens, found.mask, words, given.texts)


def continuation(
    surface: HookedModel, prompts: Prompts, row: int, length: int, text: str
) -> list[int] | None:
    """Returns the ids of a text that follows the first tokens of a prompt: of both together, what comes after these.

    None where prompt and text together do not begin with these tokens.

    Args:
        length: how many of the prompt's own tokens; after none, the text stands alone.
    """
    model: Any = surface.model
    own = prompts.tokens[row][prompts.real[row].to(prompts.tokens.device)].tolist()
    before = _without_bos(model.tokenizer, own[:length])
    if prompts.texts is not None and length == len(own):
        start = prompts.texts[row]
    else:
        start = model.tokenizer.decode(before, clean_up_tokenization_spaces=False)
    both = _without_bos(model.tokenizer, _tokens_of(model, model.tokenizer, start + text, special=False))
    return both[len(before) :] if both[: len(before)] == before else None


def _without_bos(tokenizer: Any, ids: Any) -> list[int]:
    ids = list(ids)
    return ids[1:] if ids and ids[0] == getattr(tokenizer, "bos_token_id", None) else ids


def _tokens_of(model: Any, tokenizer: Any, text: str, special: bool = True) -> Any:
    """Returns the ids of a text, with the tokens that model or tokenizer put around it, unless it begins with them."""
    first = [getattr(tokenizer, name, None) for name in ("bos_token", "cls_token")]
    if not special or text.startswith(tuple(one for one in first if one)):
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    if hasattr(model, "to_tokens"):
        # Too long a text is refused later, and not cut off.
        return model.to_tokens(text, truncate=False)[0].cpu()
    return tokenizer(text)["input_ids"]


def _padded(given: Sequence[Any], what: str, pad: int, side: str) -> Prompts:
    rows = [_row(row, index, what) for index, row in enumerate(given)]
    if not rows:
        raise CircuitsError(f"{what}: no prompts given")
    longest = max(map(len, rows))
    tokens = torch.full((len(rows), longest), pad)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for row, line, kept in zip(rows, tokens, mask, strict=True):
        place = slice(longest - len(row), longest) if side == "left" else slice(0, len(row))
        line[place], kept[place] = row, True
    return Prompts(tokens, mask)


def _row(given: Any, index: int, what: str) -> Tensor:
    dense = as_dense_tensor(given, what)
    try:
        row = dense if isinstance(dense, Tensor) else torch.as_tensor(dense)
    except (TypeError, ValueError, RuntimeError):
        row = torch.zeros(0, 0)
    row = row[0] if row.ndim == 2 and len(row) == 1 else row
    if row.ndim == 1 and not len(row):
        raise CircuitsError(f"{what}: prompt {index} is empty")
    if row.ndim != 1 or row.dtype == torch.bool or row.is_floating_point() or row.is_complex():
        got = f"{list(row.shape)}" if isinstance(dense, Tensor) else repr(given)
        raise CircuitsError(f"{what}: a prompt is a text or a list of token ids; prompt {index} is {got}")
    return row.detach().cpu().long()


def _masked(tokens: Tensor, mask: Any, what: str) -> Prompts:
    if mask is None:
        return Prompts(tokens)
    try:
        read = as_dense_tensor(mask, f"{what}, attention_mask")
        read = read if isinstance(read, Tensor) else torch.as_tensor(read)
    except (TypeError, ValueError) as error:
        raise CircuitsError(f"{what}: attention_mask is 0 and 1 for each token, got {mask!r}") from error
    check_mask(read, tokens)
    return Prompts(tokens, read.bool())


def _words(surface: HookedModel, tokens: Tensor, mask: Tensor | None) -> Words | None:
    decode = getattr(getattr(surface.model, "tokenizer", None), "decode", None)
    if decode is None or tokens.is_floating_point() or tokens.ndim != 2:
        return None
    rows = (
        tokens.tolist()
        if mask is None
        else [row[kept].tolist() for row, kept in zip(tokens.cpu(), mask, strict=True)]
    )
    texts = {number: str(decode([number])) for number in {one for row in rows for one in row}}
    return tuple(tuple(texts[one] for one in row) for row in rows)


def _is_list(given: Any) -> bool:
    return isinstance(given, list | tuple)


def _all_ones(mask: Any) -> bool:
    return _is_list(mask) and all(bool(np.all(np.asarray(row) == 1)) for row in mask)


ADVICE = "circuits.prompts(model, texts or tokens) makes inputs that carry a mask"


def padding(surface: HookedModel, tokens: Tensor) -> Tensor | None:
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


def mask_of_tokenizer(surface: HookedModel, tokens: Tensor, side: str | None = None) -> Tensor | None:
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


def mask_of_model(surface: HookedModel, tokens: Tensor) -> Tensor | None:
    """Returns the mask [batch pos] that the model makes itself where it is given none; None where it masks nothing.

    A HookedTransformer does so where its tokenizer pads on the left.
    """
    side = getattr(getattr(surface.model, "tokenizer", None), "padding_side", None)
    if side != "left" or surface.bridged:
        return None
    mask = mask_of_tokenizer(surface, tokens, "left")
    return None if mask is None or bool(mask.all()) else mask


def refuse_padding(surface: HookedModel, prompts: Prompts, used: Tensor | None, what: str) -> None:
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
