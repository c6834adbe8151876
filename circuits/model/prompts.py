"""Inputs of a model, made from texts, lists, mappings or tensors: a row for each prompt, with a mask of padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.model.hooked_model import HookedModel
from circuits.tensors import Snapshot, as_dense_tensor
from circuits.validate import read_choice, read_inputs

Words = tuple[tuple[str, ...], ...]


class Prompts:
    """Inputs of a model, a row each, with the mask of their padding. Never changes; compared by content.

    Attributes:
        tokens: ids [batch pos], or vectors [batch pos d] for models that take them.
        mask: bool [batch pos], true at tokens and false at padding, which stands before or after a row's tokens; None
            where nothing is known of padding, and all are taken for tokens.
        words: by row, the text of each of its tokens, padding left out; None without a tokenizer.
        texts: by row, the text that its tokens were made of; None where tokens were given.
        extra: by name, what else the model's forward takes for each token, [batch pos], such as token_type_ids.
    """

    def __init__(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        words: Words | None = None,
        texts: tuple[str, ...] | None = None,
        extra: Mapping[str, Tensor] | None = None,
    ) -> None:
        if mask is not None:
            check_mask(mask, tokens)
        self._tokens = Snapshot(tokens)
        self._mask = None if mask is None else Snapshot(mask.bool().cpu())
        self._words = words
        self.texts = texts
        self._extra = {name: Snapshot(x) for name, x in sorted((extra or {}).items())}

    @property
    def tokens(self) -> Tensor:
        return self._tokens.tensor

    @property
    def mask(self) -> Tensor | None:
        return None if self._mask is None else self._mask.tensor

    @property
    def words(self) -> Words | None:
        return self._words

    @property
    def extra(self) -> dict[str, Tensor]:
        return {name: x.tensor for name, x in self._extra.items()}

    @property
    def shape(self) -> tuple[int, ...]:
        return self._tokens.shape

    @cached_property
    def padded(self) -> bool:
        """Tells whether some row has padding."""
        return self.mask is not None and not bool(self.mask.all())

    @property
    def real(self) -> Tensor:
        """The mask, bool [batch pos], all true where there is none."""
        return torch.ones(self.shape[:2], dtype=torch.bool) if self.mask is None else self.mask

    @cached_property
    def lengths(self) -> Tensor:
        """The number of tokens of each row, [batch]."""
        return self.real.sum(1)

    def last(self, x: Tensor) -> Tensor:
        """Returns what stands at each prompt's last own token, [batch ...], in an output or activation [batch pos ...]
        of these prompts.
        """
        if tuple(x.shape[:2]) != tuple(self.shape[:2]):
            raise CircuitsError(
                f"prompts.last: got {list(x.shape)}; the prompts are {list(self.shape[:2])} [batch pos]"
            )
        columns = self.shape[1] - 1 - self.real.int().flip(1).argmax(1)
        return x[torch.arange(len(self), device=x.device), columns.to(x.device)]

    def nan_at_padding(self, x: Any, axis: int = 1) -> Any:
        """Returns activations [batch ...] with NaN at padding along an axis of positions; all else as it is."""
        if not self.padded or not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim <= axis:
            return x
        if (len(x), x.shape[axis]) != tuple(self.shape[:2]):
            return x
        return x.masked_fill(broadcast_mask(~self.real.to(x.device), axis, x.ndim), torch.nan)

    def in_order(self, x: Tensor, axes: Sequence[int] = (1,), lowest: bool = False) -> Tensor:
        """Returns [batch ...] values with each row's own tokens first along one or two axes, which hold positions.

        What stands behind a shorter row's tokens has no meaning on the first axis. On a second, of keys, it is 0 or
        (`lowest`) the lowest value of the query, which is that of the keys it does not see.
        """
        if not self.padded:
            return x
        start = self.real.int().argmax(1)[:, None]
        columns = (start + torch.arange(self.shape[1])).clamp(max=self.shape[1] - 1)
        x = taken(x, columns, axes[0])
        for axis in axes[1:]:
            rest = x.amin(axis, keepdim=True) if lowest else x.new_zeros(())
            reached = broadcast_mask(self.reached.to(x.device), axis, x.ndim)
            x = torch.where(reached, taken(x, columns, axis), rest)
        return x

    @property
    def reached(self) -> Tensor:
        """Tells which of its own positions each row has, bool [batch pos]: the mask, with tokens first."""
        return torch.arange(self.shape[1]) < self.lengths[:, None]

    def labels(self) -> list[str] | None:
        """Returns a name for each position, counted in each row's own tokens: its number and, where all rows that reach
        it agree, its word; None without words.
        """
        if self.words is None:
            return None
        names = []
        for position in range(int(self.lengths.max())):
            found = {row[position] for row in self.words if len(row) > position}
            names.append(f"{position} {found.pop()}" if len(found) == 1 else str(position))
        return names

    def like(self, other: Prompts) -> Prompts:
        """Returns these prompts in the layout of others, whose rows have as many tokens each; a single one serves all
        of them.
        """
        if torch.equal(self.real.expand_as(other.real) if len(self) == 1 else self.real, other.real):
            return self
        rows = self[torch.zeros(len(other), dtype=torch.long)] if len(self) == 1 else self
        tokens = other.tokens.to(self.tokens).clone()
        tokens[other.real] = rows.tokens[rows.real]
        extra = {name: x.new_zeros(other.real.shape) for name, x in rows.extra.items()}
        for name, x in extra.items():
            x[other.real] = rows.extra[name][rows.real]
        return Prompts(tokens, other.real, rows.words, rows.texts, extra)

    def describe(self) -> dict[str, Any]:
        described = self._tokens.describe() | {name: x.sha256 for name, x in self._extra.items()}
        return described if not self.padded or self._mask is None else described | {"mask": self._mask.sha256}

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Prompts:
        """Returns some of the rows: of a slice, indices, or one."""
        rows = slice(rows, rows + 1 or None) if isinstance(rows, int) else rows
        if isinstance(rows, slice) and rows.indices(len(self)) == (0, len(self), 1):
            return self

        def chosen(given: tuple[Any, ...] | None) -> Any:
            return (
                None
                if given is None
                else tuple(given[row] for row in torch.arange(len(given))[rows].tolist())
            )

        return self._at(rows, chosen(self.words), chosen(self.texts))

    def _at(self, rows: Any, words: Words | None, texts: tuple[str, ...] | None) -> Prompts:
        mask = None if self.mask is None else self.mask[rows]
        extra = {name: x[rows] for name, x in self.extra.items()}
        return Prompts(self.tokens[rows], mask, words, texts, extra)

    def with_mask(self, mask: Tensor | None) -> Prompts:
        """Returns the same prompts with this mask of padding."""
        return Prompts(self.tokens, mask, self.words, self.texts, self.extra)

    def repeated(self, copies: int) -> Prompts:
        """Returns the prompts so many times over, one copy after the other, without their words."""
        return self if copies == 1 else self._at(torch.arange(len(self)).repeat(copies), None, None)

    def _key(self) -> tuple[Any, ...]:
        return self._tokens, self._mask, tuple(self._extra.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prompts) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        lengths = self.lengths.tolist()
        shown = f"{min(lengths)}-{max(lengths)}" if min(lengths) < max(lengths) else f"{lengths[0]}"
        return f"Prompts({len(self)} of {shown} tokens, {self._tokens!r})"


def check_mask(mask: Tensor, tokens: Tensor) -> None:
    if tuple(mask.shape) != tuple(tokens.shape[:2]) or not bool(((mask == 0) | (mask == 1)).all()):
        raise CircuitsError(
            f"prompts: a mask is 0 or 1 for each of the tokens {list(tokens.shape[:2])}; got {list(mask.shape)}"
        )
    kept = mask.bool()
    edges = (kept[:, 1:] != kept[:, :-1]).sum(1) - (kept[:, 0].int() - kept[:, -1].int()).abs()
    wrong = ~kept.any(1) | ((edges > 0) & kept[:, 0]) | (edges > 2)
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        problem = "padding between its tokens" if bool(kept[index].any()) else "no token"
        raise CircuitsError(
            f"prompts: prompt {index} has {problem}; padding stands before or after the tokens"
        )


def check_pair(base: Prompts, source: Prompts, caller: str) -> None:
    """Refuses a source that is neither a single prompt nor one for each of base, of the same lengths."""
    padded = base.padded or source.padded
    if source.shape[1 + padded :] != base.shape[1 + padded :] or len(source) not in (1, len(base)):
        raise CircuitsError(
            f"{caller}: source is {list(source.shape)}, base {list(base.shape)}; the source must have base's "
            "shape, or a batch of 1"
        )
    differs = base.lengths != source.lengths
    if bool(differs.any()):
        row = int(differs.nonzero()[0])
        there = int(source.lengths[0 if len(source) == 1 else row])
        raise CircuitsError(
            f"{caller}: example {row} has {int(base.lengths[row])} tokens, its source {there}; give pairs of one length"
        )


def taken(x: Tensor, columns: Tensor, axis: int) -> Tensor:
    """Returns the entries of each row [batch ...] at its `columns` [batch or 1, n] along an axis."""
    columns = columns.to(x.device)
    batch = max(len(x), len(columns))
    shape = [batch, *x.shape[1:]]
    index_shape = [1] * x.ndim
    index_shape[0], index_shape[axis] = columns.shape
    shape[axis] = columns.shape[1]
    return x.expand(batch, *x.shape[1:]).gather(axis, columns.reshape(index_shape).expand(shape))


def broadcast_mask(chosen: Tensor, axis: int, ndim: int) -> Tensor:
    """Returns values of rows and positions, [batch pos], in a shape that broadcasts to an activation's."""
    shape = [1] * ndim
    shape[0], shape[axis] = chosen.shape
    return chosen.reshape(shape)


def own_positions(mask: Tensor) -> Tensor:
    """Returns the position of each column in its row's own tokens, [batch pos]; −1 before the first token."""
    return mask.long().cumsum(1) - 1


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
