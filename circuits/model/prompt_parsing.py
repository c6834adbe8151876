"""Makes prompts of what a user gives: texts, lists, mappings or tensors; and tells what of them is padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from circuits.arguments import parse_choice, parse_token_tensor
from circuits.errors import CircuitsError
from circuits.frozen_tensors_and_positions import to_tensor_if_array
from circuits.model.hooked_model import HookedModel
from circuits.model.prompts_with_mask import Given, Prompts, UntokenisedTexts, Words
from circuits.model.types import TokensLike


def prompts(model: nn.Module, given: TokensLike, side: str | None = None) -> Prompts:
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
    hooked = HookedModel(model)
    if side is not None:
        parse_choice(side, ("left", "right"), "prompts", "side")
    parsed = parse_tokens_or_texts(given, "prompts", "given", side)
    found = prompts_for_model(parsed, hooked, "prompts", side)
    mask = mask_of_tokenizer(hooked, found.tokens, side) if found.mask is None else found.mask
    words = found.words or _token_strings(hooked, found.tokens, mask)
    made = Prompts(found.tokens, mask, words, found.texts, found.extra)
    hooked.check_prompts(made, "prompts: tokens")
    return made


def parse_prompts(hooked: HookedModel, given: Any, caller: str, name: str = "tokens") -> Prompts:
    """Reads the inputs of a run: whatever `prompts` takes, and tensors as they are, without looking for padding;
    refuses what the model does not take.
    """
    found = prompts_for_model(parse_tokens_or_texts(given, caller, name), hooked, caller)
    hooked.check_prompts(found, f"{caller}: {name}" + " tokens" * (name != "tokens"))
    if hooked.device.type == "meta":
        raise CircuitsError(f"{caller}: the model is on meta, without values; load its weights first")
    return found


def parse_tokens_or_texts(given: Any, caller: str, name: str, side: str | None = None) -> Given:
    """Reads inputs without a model: texts are kept, and lists of unequal length padded."""
    what = f"{caller}: {name}"
    if isinstance(given, Prompts | UntokenisedTexts):
        return given
    if isinstance(given, str):
        return UntokenisedTexts((given,))
    if is_tokenizer_output(given):
        return _parse_tokenizer_output(given, what, side or "right")
    given = to_tensor_if_array(given, what)
    if not isinstance(given, list | tuple):
        return Prompts(parse_token_tensor(given, what))
    if given and all(isinstance(text, str) for text in given):
        return UntokenisedTexts(tuple(given))
    return _pad_rows(given, what, 0, side or "right")


def is_tokenizer_output(given: Any) -> bool:
    """Tells whether this is what a tokenizer returns."""
    return hasattr(given, "keys") and "input_ids" in list(given.keys())


def _parse_tokenizer_output(given: Mapping[str, Any], what: str, side: str) -> Prompts:
    """Reads what a tokenizer returns, with further keys as they are; whether the model takes them, it tells later."""
    ids = to_tensor_if_array(given["input_ids"], what)
    found = (
        _pad_rows(ids, what, 0, side)
        if isinstance(ids, list | tuple)
        else Prompts(parse_token_tensor(ids, what))
    )
    extra: dict[str, Tensor] = {}
    for name in given.keys():  # noqa: SIM118 (a BatchEncoding iterates over rows)
        if name == "input_ids" or given[name] is None:
            continue
        # Lists that a tokenizer did not pad are padded as the ids are; a single row serves all of them.
        with suppress(CircuitsError, RuntimeError, TypeError, ValueError):
            read = to_tensor_if_array(given[name], what)
            read = _pad_rows(read, what, 0, side).tokens if isinstance(read, list | tuple) else read
            if torch.as_tensor(read).ndim == 2:
                extra[name] = torch.as_tensor(read).expand(found.shape[:2])
        if name not in extra:
            raise CircuitsError(f"{what}, {name}: no number for each token [batch pos]; leave it out")
    return Prompts(found.tokens, extra.pop("attention_mask", found.mask), extra=extra)


def prompts_for_model(given: Given, hooked: HookedModel, caller: str, side: str | None = None) -> Prompts:
    """Returns inputs as a model takes them: texts as its tokens, and the mask where the model masks by itself."""
    if isinstance(given, Prompts):
        mask = mask_of_model(hooked, given.tokens) if given.mask is None else None
        return given if mask is None else given.with_mask(mask)
    model: Any = hooked.model
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise CircuitsError(f"{caller}: the model has no tokenizer, which texts need; give token ids")
    rows = [_tokenise_text(model, text) for text in given.texts]
    pad = getattr(tokenizer, "pad_token_id", None)
    side = side or getattr(tokenizer, "padding_side", None) or "right"
    found = _pad_rows(rows, f"{caller}: texts", 0 if pad is None else int(pad), side)
    return Prompts(found.tokens, found.mask, _token_strings(hooked, found.tokens, found.mask), given.texts)


def continuation_ids(
    hooked: HookedModel, prompts: Prompts, row: int, length: int, text: str
) -> list[int] | None:
    """Returns the ids of a text that follows the first `length` of a prompt's own tokens (0: it stands alone): of both
    together, what comes after these; None where both together do not begin with them.
    """
    model: Any = hooked.model
    own = prompts.tokens[row][prompts.real[row].to(prompts.tokens.device)].tolist()
    before = _without_bos(model.tokenizer, own[:length])
    if prompts.texts is not None and length == len(own):
        start = prompts.texts[row]
    else:
        start = model.tokenizer.decode(before, clean_up_tokenization_spaces=False)
    both = _without_bos(model.tokenizer, _tokenise_text(model, start + text, special=False))
    return both[len(before) :] if both[: len(before)] == before else None


def _without_bos(tokenizer: Any, ids: Any) -> list[int]:
    ids = list(ids)
    return ids[1:] if ids and ids[0] == getattr(tokenizer, "bos_token_id", None) else ids


def _tokenise_text(model: Any, text: str, special: bool = True) -> Any:
    """Returns the ids of a text, with the tokens that model or tokenizer put around it, unless it begins with them."""
    tokenizer = model.tokenizer
    first = [getattr(tokenizer, name, None) for name in ("bos_token", "cls_token")]
    if not special or text.startswith(tuple(one for one in first if one)):
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    # Too long a text is refused later, and not cut off.
    return model.to_tokens(text, truncate=False)[0].cpu()


def _pad_rows(given: Sequence[Any], what: str, pad: int, side: str) -> Prompts:
    """Returns rows of unequal length in one batch, with their mask."""
    rows = [_parse_token_row(row, index, what) for index, row in enumerate(given)]
    if not rows:
        raise CircuitsError(f"{what}: no prompts given")
    longest = max(map(len, rows))
    tokens = torch.full((len(rows), longest), pad)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for row, line, kept in zip(rows, tokens, mask, strict=True):
        place = slice(longest - len(row), longest) if side == "left" else slice(0, len(row))
        line[place], kept[place] = row, True
    return Prompts(tokens, mask)


def _parse_token_row(given: Any, index: int, what: str) -> Tensor:
    dense = to_tensor_if_array(given, what)
    row = torch.zeros(0, 0)
    with suppress(TypeError, ValueError, RuntimeError):
        row = torch.as_tensor(dense)
    row = row[0] if row.ndim == 2 and len(row) == 1 else row
    if row.ndim == 1 and not len(row):
        raise CircuitsError(f"{what}: prompt {index} is empty")
    if row.ndim != 1 or row.dtype == torch.bool or row.is_floating_point() or row.is_complex():
        got = f"{list(row.shape)}" if isinstance(dense, Tensor) else repr(given)
        raise CircuitsError(f"{what}: a prompt is a text or a list of token ids; prompt {index} is {got}")
    return row.detach().cpu().long()


def _token_strings(hooked: HookedModel, tokens: Tensor, mask: Tensor | None) -> Words | None:
    decode = getattr(getattr(hooked.model, "tokenizer", None), "decode", None)
    if decode is None:
        return None
    kept = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.to(tokens.device).bool()
    rows = [row[own].tolist() for row, own in zip(tokens, kept, strict=True)]
    texts = {number: str(decode([number])) for number in {one for row in rows for one in row}}
    return tuple(tuple(texts[one] for one in row) for row in rows)


def _padding_at_side(hooked: HookedModel, tokens: Tensor, side: str, spare: str | None) -> Tensor | None:
    """Returns bool [batch pos], true at padding ids at one side of each row, but for the one next to the text where
    that is the id of the `spare` token, "bos" or "eos"; None where no tokenizer names any.
    """
    tokenizer: Any = getattr(hooked.model, "tokenizer", None)
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        return None
    at = tokens == int(pad)
    at = (at if side == "left" else at.flip(1)).int().cumprod(1).bool()
    if spare is not None and pad == getattr(tokenizer, f"{spare}_token_id", None):
        at = at & torch.cat([at[:, 1:], torch.zeros_like(at[:, :1])], 1)
    return at if side == "left" else at.flip(1)


def find_padding(hooked: HookedModel, tokens: Tensor) -> Tensor | None:
    """Returns bool [batch pos], true at padding before or after an example; None where there is none, or no tokenizer.

    Where padding has the id of the first (BOS) or last (EOS) token too, the one next to the text counts as that token.
    """
    before, after = (_padding_at_side(hooked, tokens, *end) for end in (("left", "bos"), ("right", "eos")))
    if before is None or after is None or not bool((before | after).any()):
        return None
    return before | after


def mask_of_tokenizer(hooked: HookedModel, tokens: Tensor, side: str | None = None) -> Tensor | None:
    """Returns the mask [batch pos], true at tokens, of padding at one side; None where no tokenizer names any.

    All of a row's padding ids at that side count, but the last of those before the text where the model begins its
    prompts with a token of that id: transformer-lens reads its own batches so.
    """
    tokenizer: Any = getattr(hooked.model, "tokenizer", None)
    side = side or getattr(tokenizer, "padding_side", None) or "right"
    begins = side == "left" and getattr(hooked.model.cfg, "default_prepend_bos", True)
    found = _padding_at_side(hooked, tokens, side, "bos" if begins else None)
    return None if found is None else ~found


def mask_of_model(hooked: HookedModel, tokens: Tensor) -> Tensor | None:
    """Returns the mask [batch pos] that the model makes itself where it is given none; None where it masks nothing.

    A HookedTransformer does so where its tokenizer pads on the left.
    """
    side = getattr(getattr(hooked.model, "tokenizer", None), "padding_side", None)
    if side != "left" or hooked.bridged:
        return None
    mask = mask_of_tokenizer(hooked, tokens, "left")
    return None if mask is None or bool(mask.all()) else mask


def check_no_unmasked_padding(hooked: HookedModel, prompts: Prompts, read: Tensor | None, what: str) -> None:
    """Refuses inputs without a mask in which padding would be taken for tokens, at the positions `read`, bool [batch
    pos]; None: examples are compared by position, and padding that they all have in the same places does no harm.
    """
    mask = find_padding(hooked, prompts.tokens) if prompts.mask is None else None
    if mask is None:
        return
    mask = mask & (~mask.all(0) if read is None else read.to(mask.device))
    if bool(mask.any()):
        raise CircuitsError(
            f"{what}: {int(mask.any(1).sum())} of {len(prompts)} examples have padding that would be taken for tokens; "
            "circuits.prompts(model, texts or tokens) makes inputs that carry a mask"
        )
