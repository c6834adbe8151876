"""Defines attention templates: boolean tensors that mark the keys that count for each query.

A template is bool [query key], or [batch query key] where it depends on the example. Templates are combined with `&`,
`|` and `~`: `row(7, 7, itself=False) & marked(observed)` marks the observed entries of the query's row. Queries without
a key in a template are not scored against it. `induction`, `duplicate`, `previous` and `identity` take tokens, and so
are templates themselves: `{"induction": patterns.induction}`. All are on the CPU, so that they combine whatever they
are made from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from circuits.arguments import is_whole, parse_token_tensor, stringify_keys
from circuits.errors import CircuitsError
from circuits.frozen_tensors_and_positions import positions_to_mask, to_tensor_if_array
from circuits.interventions.places_and_edits import parse_positions_without_mask
from circuits.model.prompts_with_mask import Prompts
from circuits.model.types import ArrayLike, PositionsLike


def identity(length: int | ArrayLike) -> Bool[Tensor, "query key"]:
    """Marks the query's own position; of a length, or of tokens [batch pos]."""
    return previous(length, 0)


def previous(length: int | ArrayLike, by: int = 1) -> Bool[Tensor, "query key"]:
    """Marks the position `by` before the query's, none for the first `by` queries; of a length, or of tokens [batch
    pos].
    """
    length = length.shape[1] if isinstance(length, Tensor) and length.ndim > 1 else _parse_size(length, 1)
    positions = torch.arange(length)
    return positions[:, None] - positions == _parse_size(by, 0)


def constant(length: int, positions: PositionsLike) -> Bool[Tensor, "query key"]:
    """Marks the same positions for every query; negative ones count from the end."""
    chosen = parse_positions_without_mask(positions, "patterns.constant", "positions")
    if chosen is None:
        raise CircuitsError("patterns.constant: no position given")
    return positions_to_mask(chosen, _parse_size(length, 1), "patterns.constant").expand(length, -1)


def row(rows: int, columns: int, itself: bool = True) -> Bool[Tensor, "query key"]:
    """Marks the query's row in a matrix laid out row by row, without the query's own entry if not `itself`."""
    return _same_line(torch.arange(_parse_size(rows, 1)).repeat_interleave(_parse_size(columns, 1)), itself)


def column(rows: int, columns: int, itself: bool = True) -> Bool[Tensor, "query key"]:
    """Marks the query's column in a matrix laid out row by row, without the query's own entry if not `itself`."""
    return _same_line(torch.arange(_parse_size(columns, 1)).repeat(_parse_size(rows, 1)), itself)


def _same_line(line: Tensor, itself: bool) -> Tensor:
    """Marks the keys on the query's line, [pos]."""
    same = line[:, None] == line
    return same if itself else same & ~identity(len(line))


def marked(mask: ArrayLike) -> Bool[Tensor, "batch query key"]:
    """Marks for every query the positions that `mask` [batch pos] marks in its example, such as the masked entries."""
    mask = to_tensor_if_array(mask, "patterns.marked")
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 2:
        raise CircuitsError(f"patterns.marked: expected a bool mask [batch pos], got {_describe_given(mask)}")
    return mask.cpu()[:, None, :].expand(-1, mask.shape[1], -1)


def duplicate(tokens: ArrayLike) -> Bool[Tensor, "batch query key"]:
    """Marks the earlier positions with the query's token, where a duplicate token head looks."""
    ids = parse_token_tensor(tokens, "patterns: tokens").cpu()
    return (ids[:, :, None] == ids[:, None, :]).tril(-1)


def induction(tokens: ArrayLike) -> Bool[Tensor, "batch query key"]:
    """Marks the positions right after an earlier one with the query's token, where an induction head looks."""
    return torch.nn.functional.pad(duplicate(tokens)[:, :, :-1], (1, 0))


def parse_templates(given: Any, tokens: Tensor, functions_take_batch: bool) -> dict[str, Any]:
    """Reads templates by name and checks tensors; functions may be called with the user's batch."""
    if not isinstance(given, Mapping) or not given:
        raise CircuitsError("patterns.scores: no templates; give a dict of names and templates [query key]")
    templates: dict[str, Any] = {}
    for name, template in stringify_keys(given, "patterns.scores", "templates").items():
        template = to_tensor_if_array(template, f"template {name!r}")
        if isinstance(template, Tensor):
            _check_template(name, template, len(tokens), tokens.shape[1])
        elif not callable(template):
            raise CircuitsError(
                f"template {name!r}: expected bool [query key], [batch query key] or a function of "
                f"{'the batch' if functions_take_batch else 'the tokens'}, got {type(template).__name__}"
            )
        templates[name] = template
    return templates


def template_for_rows(name: str, template: Any, examples: Any, rows: slice, prompts: Prompts) -> Tensor:
    """Returns a template for some rows, [batch or 1, query, key]; a function is called with `examples`, those rows.

    Args:
        prompts: those rows, of whose own tokens the first comes first.
    """
    if isinstance(template, Tensor):
        keys = template if template.ndim == 2 else template[rows]
    else:
        keys = to_tensor_if_array(template(examples), f"template {name!r}")
        _check_template(name, keys, len(prompts), prompts.shape[1])
    keys = keys.cpu()
    return keys[None] if keys.ndim == 2 else prompts.in_order(keys.to(torch.uint8), (1, 2)).bool()


def _check_template(name: str, template: Any, batch: int, length: int) -> None:
    is_mask = isinstance(template, Tensor) and template.dtype == torch.bool
    if not is_mask or tuple(template.shape) not in ((length, length), (batch, length, length)):
        raise CircuitsError(
            f"template {name!r}: expected bool {[length, length]} or {[batch, length, length]}, got "
            f"{_describe_given(template)}"
        )


def _parse_size(number: Any, least: int) -> int:
    if not is_whole(number, least):
        raise CircuitsError(f"patterns: a template's size is a whole number from {least}; got {number!r}")
    return int(number)


def _describe_given(given: Any) -> str:
    if not isinstance(given, Tensor):
        return type(given).__name__
    return f"{str(given.dtype).removeprefix('torch.')} {list(given.shape)}"
