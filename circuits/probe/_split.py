"""Splits examples into those a probe is fitted on and those held out, and reads the entries to use and their splits."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.model.prompts import Prompts
from circuits.tensors import (
    Snapshot,
    as_dense_tensor,
    is_bool,
    parse_positions,
    refuse_numbers_as_mask,
    select_positions,
)
from circuits.validate import by_text

#: The split that every probe has.
ALL = "all"


@dataclass(frozen=True)
class Entries:
    """The entries (example, position) of a batch that a probe uses, each example's own tokens first.

    Attributes:
        used: boolean [batch pos], true where an entry is fitted or scored.
        fit: indices of the examples to fit, ascending.
        held_out: indices of the examples to score; none is in `fit`.
        fold: [batch], the cross-validation fold of each example of `fit`; −1 for the others.
        splits: name -> boolean [batch pos], "all" first; each split has scores of its own.
    """

    used: Tensor
    fit: Tensor
    held_out: Tensor
    fold: Tensor
    splits: Mapping[str, Tensor]

    @property
    def positions(self) -> list[int]:
        """Returns the positions that some example uses."""
        return [int(position) for position in self.used.any(0).nonzero().flatten()]


def read_entries(
    prompts: Prompts, positions: Any, splits: Any, test: Any, folds: int, seed: int, per_position: bool
) -> Entries:
    """Reads the entries of a probe; `folds` is 0 without cross-validation.

    Held-out examples and folds depend only on the seed and the number of examples.
    """
    batch, pos = prompts.shape[:2]
    generator = torch.Generator().manual_seed(seed)
    held_out = _read_test(test, batch, generator)
    is_held_out = torch.zeros(batch, dtype=torch.bool)
    is_held_out[held_out] = True
    fit = (~is_held_out).nonzero().flatten()
    if len(held_out) < 2 or len(fit) < max(2, folds):
        raise CircuitsError(
            f"probe: {len(fit)} examples to fit and {len(held_out)} held out; it takes 2 to score, and "
            f"{max(2, folds)} to fit" + (f" in {folds} folds" if folds else "")
        )
    fold = torch.full((batch,), -1)
    fold[fit] = 0 if not folds else (torch.randperm(len(fit), generator=generator) % folds)
    used = prompts.in_order(_read_used(positions, prompts) & prompts.real) & prompts.reached
    all_splits = {ALL: torch.ones(batch, pos, dtype=torch.bool), **_read_splits(splits, batch, pos)}
    all_splits = {name: prompts.in_order(split) for name, split in all_splits.items()}
    for part, examples in (("fitted", fit), ("held-out", held_out)):
        positions_used = used[examples].any(0)
        unused = (used.any(0) & ~positions_used).nonzero().flatten().tolist() if per_position else []
        if unused or not bool(positions_used.any()):
            where = f" at position {unused[0]}" if unused else ""
            raise CircuitsError(f"probe: positions= selects nothing{where} in the {part} examples")
    return Entries(used, fit, held_out, fold, all_splits)


def _read_test(test: Any, batch: int, generator: torch.Generator) -> Tensor:
    """Reads the held-out examples: a fraction or number, drawn at random; a mask [batch], indices or a slice."""
    if isinstance(test, float) and 0 < test < 1:
        test = max(1, round(test * batch))
    test = as_dense_tensor(test, "probe: test")
    try:
        if isinstance(test, slice):
            # Torch takes no slice that goes backwards.
            return torch.tensor(sorted(range(batch)[test]), dtype=torch.long)
        if isinstance(test, Tensor) and test.dtype == torch.bool:
            if test.shape != (batch,):
                raise TypeError
            return test.cpu().nonzero().flatten()
        if isinstance(test, bool | str | float):
            raise TypeError
        if isinstance(test, int | np.integer):
            if not 0 < test < batch:
                raise TypeError
            return torch.randperm(batch, generator=generator)[: int(test)].sort().values
        refuse_numbers_as_mask(test, "probe: test", f"[{batch}] of examples")
        test = tuple(test)
        if any(map(is_bool, test)):
            raise TypeError
        chosen = sorted({operator.index(example) for example in test})
    except (TypeError, ValueError) as error:
        raise CircuitsError(
            f"probe: test={test!r}; hold out a fraction below 1, a number below {batch}, a slice, indices, or a "
            f"boolean mask [{batch}] of examples"
        ) from error
    if any(not 0 <= example < batch for example in chosen):
        raise CircuitsError(f"probe: test names example {max(chosen, key=abs)}, there are 0-{batch - 1}")
    return torch.tensor(chosen, dtype=torch.long)


def _read_used(positions: Any, prompts: Prompts) -> Tensor:
    batch, pos = prompts.shape[:2]
    parsed = parse_positions(positions, "probe, positions")
    if parsed is None:
        return torch.ones(batch, pos, dtype=torch.bool)
    if isinstance(parsed, Snapshot):
        return _mask("positions", parsed.tensor, batch, pos)
    return select_positions(parsed, pos, "probe", prompts.real if prompts.padded else None).expand(batch, pos)


def _read_splits(splits: Any, batch: int, pos: int) -> dict[str, Tensor]:
    if splits is None:
        return {}
    if not isinstance(splits, Mapping) or ALL in splits:
        got = "all" if isinstance(splits, Mapping) else type(splits).__name__
        raise CircuitsError(f"probe: splits are a dict of names (other than 'all') and masks, got {got}")
    return {
        name: _mask(f"split {name!r}", mask, batch, pos)
        for name, mask in by_text(splits, "probe", "splits").items()
    }


def _mask(label: str, mask: Any, batch: int, pos: int) -> Tensor:
    mask = as_dense_tensor(mask, f"probe, {label}")
    shape = tuple(mask.shape) if isinstance(mask, Tensor) else None
    if (
        not isinstance(mask, Tensor)
        or mask.dtype != torch.bool
        or shape not in ((batch, pos), (batch, 1), (pos,))
    ):
        got = type(mask).__name__ if shape is None else f"{str(mask.dtype)[6:]} {list(shape)}"
        raise CircuitsError(
            f"probe, {label}: a mask is boolean, [batch pos] = [{batch}, {pos}], [batch 1] or [pos]; got {got}"
        )
    return mask.detach().cpu().expand(batch, pos)
