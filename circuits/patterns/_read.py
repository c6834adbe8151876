"""Passes attention patterns to a function as they are computed, layer by layer and chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.arguments import read_queries
from circuits.interventions.replacements import visible
from circuits.model.generation import WHOLE
from circuits.model.hooks import Function
from circuits.model.padding import refuse_padding
from circuits.model.record import evaluating, keep_in, listening
from circuits.model.sites import KINDS
from circuits.model.state import running_rows
from circuits.model.surface import Surface
from circuits.tensors import Snapshot
from circuits.validate import is_whole, read_indices

# The most tokens per forward pass, and entries of the patterns of all its layers, under chunk="auto".
AUTO_CHUNK, AUTO_ENTRIES = 16384, 2**24

# Called with a layer, its pattern, and the mask of the keys that each query may see, both [batch head query key].
Look = Callable[[int, Tensor, Tensor], None]


def look_at(
    surface: Surface, tokens: Tensor, rows: slice | Tensor, layers: tuple[int, ...], look: Look
) -> None:
    """Runs `rows` (a slice or indices) of the tokens in eval mode, without gradients; passes each pattern to `look`.

    Edits of open blocks are in force; where one has a mask per example, its entries for these rows are used.
    """
    scores: dict[str, Tensor] = {}
    seen_layers: list[int] = []
    functions: list[tuple[str, Function]] = []
    for layer in layers:
        hook = KINDS["scores"].hook.format(layer)
        functions.append((hook, keep_in(scores, hook)))
        pass_on = partial(_show, surface, layer, look, scores, seen_layers)
        functions.append((KINDS["pattern"].hook.format(layer), pass_on))
    model = surface.model
    with (
        evaluating(model),
        torch.no_grad(),
        running_rows(model, rows, len(tokens)),
        listening(surface, functions),
    ):
        model(tokens[rows].to(surface.device, copy=True))
    for layer in layers:
        if layer not in seen_layers:
            raise CircuitsError(f"patterns: {KINDS['pattern'].hook.format(layer)} never fired in this model")


def _show(
    surface: Surface,
    layer: int,
    look: Look,
    scores: dict[str, Tensor],
    seen_layers: list[int],
    pattern: Tensor,
) -> None:
    """Passes a pattern to `look`, with the visible keys as read from the layer's scores, which precede the pattern."""
    visible_keys = visible(scores.pop(KINDS["scores"].hook.format(layer)), surface.masked_score(layer))
    seen_layers.append(layer)
    look(layer, pattern.detach().double(), visible_keys.expand_as(pattern))


def read_layers(layers: Any, surface: Surface, caller: str) -> tuple[int, ...]:
    """Returns the chosen layers, ascending; None chooses all."""
    chosen = read_indices(layers, caller, "layers")
    if chosen is None:
        return tuple(range(surface.n_layers))
    unknown = [layer for layer in chosen if layer >= surface.n_layers]
    if unknown:
        raise CircuitsError(f"{caller}: no layer {unknown[0]}: the model has layers 0-{surface.n_layers - 1}")
    return tuple(sorted(chosen))


def chunks(
    surface: Surface, tokens: Tensor, layers: tuple[int, ...], chunk: int | str, caller: str
) -> Iterator[slice]:
    """Yields the rows of each forward pass: `chunk` tokens, at least one example."""
    if chunk == "auto":
        entries = len(layers) * surface.n_heads * tokens.shape[1] ** 2
        step = min(AUTO_CHUNK // tokens[0].numel(), AUTO_ENTRIES // entries)
    elif not is_whole(chunk, 1):
        raise CircuitsError(
            f'{caller}: chunk={chunk!r}; give "auto" or a number of tokens per forward, at least 1'
        )
    else:
        step = int(chunk) // tokens[0].numel()
    step = max(1, step)
    for start in range(0, len(tokens), step):
        yield slice(start, min(start + step, len(tokens)))


def selected_queries(surface: Surface, queries: Any, positions: Any, tokens: Tensor, caller: str) -> Tensor:
    """Returns a mask, bool [batch pos], of the queries that count."""
    selected = _selected(queries, positions, tokens, caller)
    refuse_padding(surface, tokens, selected, caller, "leave it out with queries=, a mask [batch pos]")
    return selected


def _selected(queries: Any, positions: Any, tokens: Tensor, caller: str) -> Tensor:
    chosen = read_queries(queries, positions, caller)
    batch, length = tokens.shape[:2]
    if chosen is None:
        return torch.ones(1, length, dtype=torch.bool).expand(batch, -1)
    if not isinstance(chosen, Snapshot):
        return WHOLE.selected(chosen, length, caller).expand(batch, -1)
    mask = chosen.tensor.cpu()
    if tuple(mask.shape) not in ((length,), (batch, length)):
        raise CircuitsError(
            f"{caller}: a mask of queries is [pos] or [batch pos], here {[length]} or {[batch, length]}; "
            f"got {list(mask.shape)}"
        )
    return mask.expand(batch, -1)


def read_draws(draws: Any, caller: str) -> int:
    if not is_whole(draws, 1):
        raise CircuitsError(f"{caller}: draws={draws!r}; give the number of bootstrap resamples, at least 1")
    return int(draws)
