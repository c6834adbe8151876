"""Which examples a probe is fitted on and which it is scored on; which entries of them, and how those are split."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.tensors import Snapshot, is_bool, parse_positions, refuse_numbers_as_mask, select_positions

#: The split that every probe has.
ALL = "all"


@dataclass(frozen=True)
class Entries:
    """Of a batch [batch pos].

    Attributes:
        used: boolean [batch pos], which entries are fitted or scored.
        fit: indices of examples, ascending; no example is in both.
        held_out: see `fit`.
        fold: [batch], the cross-validation fold of each example of `fit`; −1 of the others.
        splits: name -> boolean [batch pos], "all" first; what scores are told apart by.
    """

    used: Tensor
    fit: Tensor
    held_out: Tensor
    fold: Tensor
    splits: Mapping[str, Tensor]

    @property
    def positions(self) -> list[int]:
        """Positions that some example uses."""
        return [int(position) for position in self.used.any(0).nonzero().flatten()]


def read_entries(
    tokens: Tensor, positions: Any, splits: Any, test: Any, folds: int, seed: int, per_position: bool
) -> Entries:
    """`folds` of 0: none. Both draws are a function of the seed and the number of examples alone."""
    batch, pos = tokens.shape[:2]
    generator = torch.Generator().manual_seed(seed)
    held_out = _read_test(test, batch, generator)
    inside = torch.zeros(batch, dtype=torch.bool)
    inside[held_out] = True
    fit = (~inside).nonzero().flatten()
    if len(held_out) < 2 or len(fit) < max(2, folds):
        raise CircuitsError(
            f"probe: {len(fit)} examples to fit and {len(held_out)} held out; it takes 2 to score, and "
            f"{max(2, folds)} to fit" + (f" in {folds} folds" if folds else "")
        )
    fold = torch.full((batch,), -1)
    fold[fit] = 0 if not folds else (torch.randperm(len(fit), generator=generator) % folds)
    used = _read_used(positions, batch, pos)
    everything = {ALL: torch.ones(batch, pos, dtype=torch.bool), **_read_splits(splits, batch, pos)}
    for which, examples in (("fitted", fit), ("held-out", held_out)):
        found = used[examples].any(0)
        lacking = (used.any(0) & ~found).nonzero().flatten().tolist() if per_position else []
        if lacking or not bool(found.any()):
            at = f" at position {lacking[0]}" if lacking else ""
            raise CircuitsError(f"probe: positions= selects nothing{at} in the {which} examples")
    return Entries(used, fit, held_out, fold, everything)


def _read_test(test: Any, batch: int, generator: torch.Generator) -> Tensor:
    """A fraction or a number of examples, drawn at random; a boolean mask [batch], indices or a slice."""
    if isinstance(test, float) and 0 < test < 1:
        test = max(1, round(test * batch))
    if isinstance(test, np.ndarray):
        test = torch.from_numpy(test)
    try:
        if isinstance(test, slice):
            return torch.arange(batch)[test]
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
    except TypeError as error:
        raise CircuitsError(
            f"probe: test={test!r}; hold out a fraction below 1, a number below {batch}, a slice, indices, or a "
            f"boolean mask [{batch}] of examples"
        ) from error
    if any(not 0 <= example < batch for example in chosen):
        raise CircuitsError(f"probe: test names example {max(chosen, key=abs)}, there are 0-{batch - 1}")
    return torch.tensor(chosen, dtype=torch.long)


def _read_used(positions: Any, batch: int, pos: int) -> Tensor:
    read = parse_positions(positions, "probe, positions")
    if read is None:
        return torch.ones(batch, pos, dtype=torch.bool)
    if isinstance(read, Snapshot):
        return _mask("positions", read.tensor, batch, pos)
    return select_positions(read, pos, "probe").expand(batch, pos)


def _read_splits(splits: Any, batch: int, pos: int) -> dict[str, Tensor]:
    if splits is None:
        return {}
    if not isinstance(splits, Mapping) or ALL in splits:
        got = "all" if isinstance(splits, Mapping) else type(splits).__name__
        raise CircuitsError(f"probe: splits are a dict of names (other than 'all') and masks, got {got}")
    return {str(name): _mask(f"split {name!r}", mask, batch, pos) for name, mask in splits.items()}


def _mask(what: str, mask: Any, batch: int, pos: int) -> Tensor:
    if isinstance(mask, np.ndarray):
        mask = torch.from_numpy(mask)
    shape = tuple(mask.shape) if isinstance(mask, Tensor) else None
    if (
        not isinstance(mask, Tensor)
        or mask.dtype != torch.bool
        or shape not in ((batch, pos), (batch, 1), (pos,))
    ):
        got = type(mask).__name__ if shape is None else f"{str(mask.dtype)[6:]} {list(shape)}"
        raise CircuitsError(
            f"probe, {what}: a mask is boolean, [batch pos] = [{batch}, {pos}], [batch 1] or [pos]; got {got}"
        )
    return mask.detach().cpu().expand(batch, pos)
