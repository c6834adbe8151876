"""Prompts as a value: a row of tokens for each, with the mask of padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.errors import CircuitsError, format_value
from circuits.frozen_tensors_and_positions import Snapshot

Words = tuple[tuple[str, ...], ...]


class Prompts:
    """Inputs of a model, a row each, with the mask of their padding. Never changes; compared by content.

    Attributes:
        tokens: ids [batch pos].
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
        self._extra = {name: Snapshot(x) for name, x in sorted((extra or {}).items())}
        self.tokens, self.shape = self._tokens.tensor, self._tokens.shape
        self.mask = None if self._mask is None else self._mask.tensor
        self.words, self.texts = words, texts
        self.extra = {name: x.tensor for name, x in self._extra.items()}

    @cached_property
    def padded(self) -> bool:
        """Tells whether some row has padding."""
        return self.mask is not None and not bool(self.mask.all())

    @property
    def device(self) -> torch.device:
        return self.tokens.device

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

    def nan_at_padding(self, x: Tensor, axis: int = 1) -> Tensor:
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
        x = gather_columns(x, columns, axes[0])
        for axis in axes[1:]:
            rest = x.amin(axis, keepdim=True) if lowest else x.new_zeros(())
            reached = broadcast_mask(self.reached.to(x.device), axis, x.ndim)
            x = torch.where(reached, gather_columns(x, columns, axis), rest)
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
        """Returns some of the rows: of a slice, of one number or several, or of a mask of bools."""
        if isinstance(rows, slice) and rows.indices(len(self)) == (0, len(self), 1):
            return self
        numbers, words, texts = row_numbers(rows, len(self)), self.words, self.texts
        return self._select_rows(
            rows if isinstance(rows, slice) and (rows.step or 1) > 0 else numbers,
            None if words is None else tuple(words[number] for number in numbers),
            None if texts is None else tuple(texts[number] for number in numbers),
        )

    def _select_rows(self, rows: Any, words: Words | None, texts: tuple[str, ...] | None) -> Prompts:
        mask = None if self.mask is None else self.mask[rows]
        extra = {name: x[rows] for name, x in self.extra.items()}
        return Prompts(self.tokens[rows], mask, words, texts, extra)

    def with_mask(self, mask: Tensor | None) -> Prompts:
        """Returns the same prompts with this mask of padding."""
        return Prompts(self.tokens, mask, self.words, self.texts, self.extra)

    def repeated(self, copies: int) -> Prompts:
        """Returns the prompts so many times over, one copy after the other, without their words."""
        return self if copies == 1 else self._select_rows(torch.arange(len(self)).repeat(copies), None, None)

    def _key(self) -> tuple[Any, ...]:
        return self._tokens, self._mask, tuple(self._extra.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prompts) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        lengths = sorted({*self.lengths.tolist()}) or [0]
        shown = f"{lengths[0]}-{lengths[-1]}" if len(lengths) > 1 else f"{lengths[0]}"
        return f"Prompts({len(self)} of {shown} tokens, {self._tokens!r})"


def row_numbers(rows: Any, count: int) -> list[int]:
    """Returns the numbers of the rows, of so many, that a slice, one number, several or a mask of bools choose."""
    if isinstance(rows, slice):
        return list(range(count)[rows])
    # numpy takes a bool among numbers for 0 or 1, and fails on lists of unequal lengths.
    listed = rows if isinstance(rows, list | tuple) else []
    mixed = any(isinstance(row, list) for row in listed) or len({type(row) is bool for row in listed}) > 1
    given = (
        rows.numpy(force=True) if isinstance(rows, Tensor) else np.asarray(rows, object if mixed else None)
    )
    given = given if given.size else given.astype(int)
    is_mask = given.dtype == bool and given.shape == (count,)
    # Bytes may be meant as a mask or as numbers.
    if not is_mask and (given.dtype.kind not in "iu" or given.ndim > 1 or given.ndim == 1 == given.itemsize):
        raise CircuitsError(
            f"prompts: rows are a slice, whole numbers, or a mask of {count} bools; got {format_value(rows)}"
        )
    chosen: list[int] = (
        np.arange(count)[given].reshape(-1).tolist()
    )  # an IndexError beyond the last ends a loop
    return chosen


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
        raise CircuitsError(f"prompts: prompt {index} has {problem}; padding is before or after the tokens")


def check_source_fits_base(base: Prompts, source: Prompts, caller: str) -> None:
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


def gather_columns(x: Tensor, columns: Tensor, axis: int) -> Tensor:
    """Returns the entries of each row [batch ...] at its `columns` [batch or 1, n] along an axis."""
    columns = columns.to(x.device)
    batch = max(len(x), len(columns))
    shape = [batch, *x.shape[1:]]
    index_shape = [1] * x.ndim
    index_shape[0], index_shape[axis] = columns.shape
    shape[axis] = columns.shape[1]
    return x.expand(batch, *x.shape[1:]).gather(axis, columns.reshape(index_shape).expand(shape))


def broadcast_mask(chosen: Tensor, axis: int, ndim: int) -> Tensor:
    """Returns values along an axis, [size] or [batch size], in a shape that broadcasts to an activation's."""
    shape = [len(chosen) if chosen.ndim == 2 else 1, *[1] * (ndim - 1)]
    shape[axis] = chosen.shape[-1]
    return chosen.reshape(shape)


def positions_from_mask(mask: Tensor) -> Tensor:
    """Returns the position of each column in its row's own tokens, [batch pos]; −1 before the first token."""
    return mask.long().cumsum(1) - 1


@dataclass(frozen=True)
class UntokenisedTexts:
    """Texts that wait for a model, whose tokenizer makes tokens of them."""

    texts: tuple[str, ...]

    def describe(self) -> dict[str, Any]:
        return {"texts": list(self.texts)}


#: What an intervention keeps of the inputs it was given.
Given = Prompts | UntokenisedTexts
