"""Passes attention patterns to a function as they are computed, layer by layer and chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.engine.batch_size import batch_size as rows_in_a_forward
from circuits.errors import CircuitsError
from circuits.interventions.edits import parse_query_positions
from circuits.interventions.replacements import derangement, visible
from circuits.model.generation import WHOLE
from circuits.model.heads import Head
from circuits.model.hooked_model import HookedModel
from circuits.model.hooks import Function
from circuits.model.prompts import Prompts, read_prompts, refuse_padding
from circuits.model.record import evaluating, keep_in, listening
from circuits.model.sites import KINDS
from circuits.model.state import running_rows
from circuits.statistics import bootstrap, ratio
from circuits.tensors import Snapshot
from circuits.validate import answers_former_names, is_whole, read_indices, read_seed

# Numbers for each entry of a pattern: with what is computed of it in double precision it then stays in the cache.
_PER_ENTRY = 32

# Called with a layer, its pattern, and the mask of the keys that each query may see, both [batch head query key].
Visitor = Callable[[int, Tensor, Tensor], None]


@dataclass(frozen=True)
class Recorded:
    """Attention patterns of some inputs, which the other functions of this module take in the place of the tokens.

    Attributes:
        layers: those recorded, ascending.
    """

    layers: tuple[int, ...]
    prompts: Prompts = field(repr=False)
    model: Any = field(repr=False)
    patterns: Mapping[int, Tensor] = field(repr=False)
    seen: Mapping[int, Tensor] = field(repr=False)

    def check(self, surface: HookedModel, caller: str) -> None:
        """Refuses another model than the recorded one."""
        if self.model is not surface.model:
            raise CircuitsError(
                f"{caller}: these patterns were recorded of another model; give the tokens, or record them of this one"
            )

    def check_layers(self, layers: tuple[int, ...], caller: str) -> None:
        """Refuses layers that were not recorded."""
        missing = sorted(set(layers) - set(self.layers))
        if missing:
            raise CircuitsError(
                f"{caller}: layer {missing[0]} was not recorded; there are layers "
                f"{', '.join(map(str, self.layers))}"
            )

    def show(self, rows: slice | Tensor, layers: tuple[int, ...], visitor: Visitor) -> None:
        """Passes the recorded patterns of these rows to `visitor`."""
        for layer in layers:
            visitor(layer, self.patterns[layer][rows], self.seen[layer][rows])


@answers_former_names
def record(model: Any, tokens: Any, layers: Any = None, *, batch_size: int | None = None) -> Recorded:
    """Runs a model once and keeps its attention patterns, for several functions of this module.

    What comes out is what the tokens give, without another forward pass. A recorded pattern takes one number of the
    model's precision, and one byte, for each example, head, query and key.

    Args:
        tokens: ids [batch pos], or anything that `circuits.prompts` takes.
        layers: only these.
        batch_size: examples in a forward, by default as in `sweep`.

    Inside `intervene` the edits are in force, and stay so in what was recorded.
    """
    reading = PatternPass.read("patterns.record", model, tokens, layers, None)
    surface, prompts = reading.surface, reading.prompts
    patterns: dict[int, list[Tensor]] = {layer: [] for layer in reading.layers}
    seen: dict[int, list[Tensor]] = {layer: [] for layer in reading.layers}

    def store(layer: int, pattern: Tensor, visible_keys: Tensor) -> None:
        patterns[layer].append(pattern)
        seen[layer].append(visible_keys)

    for rows, _ in reading.chunks(batch_size):
        visit_patterns(surface, prompts, rows, reading.layers, store)
    joined = ({layer: torch.cat(parts) for layer, parts in kept.items()} for kept in (patterns, seen))
    return Recorded(reading.layers, prompts, surface.model, *joined)


@dataclass(frozen=True)
class PatternPass:
    """The inputs of a pass over a model's patterns: prompts, the layers to read, and the queries that count.

    Attributes:
        layers: ascending.
        selected: bool [batch pos], the queries that count.
        recorded: the patterns of the prompts, where they need no run.
    """

    caller: str
    surface: HookedModel
    prompts: Prompts
    layers: tuple[int, ...]
    selected: Tensor
    recorded: Recorded | None

    @classmethod
    def read(cls, caller: str, model: Any, tokens: Any, layers: Any, positions: Any) -> PatternPass:
        """Reads the arguments that all passes share."""
        surface = HookedModel.of(model)
        prompts, recorded = read_run(surface, tokens, caller)
        every = recorded.layers if recorded is not None and layers is None else layers
        chosen = parse_layers(every, surface, caller)
        check_recorded(recorded, chosen, caller)
        selected = selected_queries(surface, positions, prompts, caller)
        return cls(caller, surface, prompts, chosen, selected, recorded)

    @property
    def heads(self) -> tuple[Head, ...]:
        """All heads of the layers, layer by layer."""
        return tuple(Head(layer, head) for layer in self.layers for head in range(self.surface.n_heads))

    def chunks(self, batch_size: int | None) -> Iterator[tuple[slice, Tensor]]:
        """Yields the rows of each forward pass and their mask of queries that count, bool [batch 1 query]."""
        for rows in chunks(self.surface, self.prompts, self.layers, batch_size, self.caller):
            yield rows, self.selected[rows, None].to(self.surface.device)

    def visit(self, rows: slice | Tensor, visitor: Visitor) -> None:
        """Passes the patterns of these rows to `visitor`, in double precision."""
        self._visit(self.prompts, self.recorded, rows, visitor)

    def _visit(
        self, prompts: Prompts, recorded: Recorded | None, rows: slice | Tensor, visitor: Visitor
    ) -> None:
        def in_double(layer: int, pattern: Tensor, seen: Tensor) -> None:
            visitor(layer, pattern.double(), seen)

        if recorded is None:
            visit_patterns(self.surface, prompts, rows, self.layers, in_double)
        else:
            recorded.show(rows, self.layers, in_double)


@dataclass(frozen=True)
class PairedPass(PatternPass):
    """The inputs of passes over two inputs that are compared row by row, with a control that pairs other rows.

    Attributes:
        other: the second input, in the layout of `prompts`.
        other_recorded: its patterns, where they need no run.
        order: [batch], the row of the control's pair: a derangement drawn from `seed`.
        seed: also of the bootstrap, of `draws` resamples.
    """

    other: Prompts
    other_recorded: Recorded | None
    order: Tensor
    seed: int
    draws: int

    @classmethod
    def read_pair(
        cls,
        caller: str,
        model: Any,
        tokens: Any,
        other: Any,
        layers: Any,
        positions: Any,
        seed: Any,
        draws: Any,
    ) -> PairedPass:
        """Reads the arguments; raises `CircuitsError` unless both inputs have as many tokens row by row, in at least 2
        rows.
        """
        seed, draws = read_seed(seed, caller), parse_draws(draws, caller)
        first = PatternPass.read(caller, model, tokens, layers, positions)
        second, recorded = read_run(first.surface, other, caller)
        _check_pairs(first.prompts, second, caller)
        check_recorded(recorded, first.layers, caller)
        laid_out = second.like(first.prompts)
        return cls(
            **vars(first),
            other=laid_out,
            # A record of another layout is of no use.
            other_recorded=recorded if laid_out is second else None,
            order=derangement(len(second), seed),
            seed=seed,
            draws=draws,
        )

    def visit_other(self, rows: slice | Tensor, visitor: Visitor) -> None:
        """Passes the patterns of these rows of the second input to `visitor`, in double precision."""
        self._visit(self.other, self.other_recorded, rows, visitor)

    def zeros(self) -> np.ndarray:
        """Returns zeros [pairing layer head example], to add to; the pairings are the pairs and the control."""
        return np.zeros((2, len(self.layers), self.surface.n_heads, len(self.prompts)))

    @property
    def compared(self) -> Tensor:
        """The queries that count which a row and the other row of its control both have, bool [batch pos]."""
        return self.selected & self.other.reached[self.order]

    def means(
        self, sums: np.ndarray, control: Tensor | None = None
    ) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """Returns means over queries and examples [pairing head], and their resamples [draw head] for each pairing.

        Args:
            sums: over queries, [pairing layer head example].
            control: the queries of the control, bool [batch pos]; None: those of the pairs.
        """
        series = sums.reshape(-1, len(self.prompts))
        queries = torch.stack([self.selected, self.selected if control is None else control]).sum(2).double()
        entries = np.broadcast_to(queries[:, None, None].numpy(), sums.shape).reshape(series.shape)
        resampled = bootstrap(series, entries, self.seed, self.draws)
        paired, unpaired = np.split(resampled, 2, axis=1)
        return ratio(series.sum(1), entries.sum(1)).reshape(2, -1), (paired, unpaired)


def visit_patterns(
    surface: HookedModel, prompts: Prompts, rows: slice | Tensor, layers: tuple[int, ...], visitor: Visitor
) -> None:
    """Runs `rows` (a slice or indices) of the prompts in eval mode, without gradients; passes each pattern to
    `visitor`, each prompt's own tokens first.

    Edits of open blocks are in force; where one has a mask per example, its entries for these rows are used.
    """
    scores: dict[str, Tensor] = {}
    seen_layers: list[int] = []
    functions: list[tuple[str, Function]] = []
    for layer in layers:
        hook = KINDS["scores"].hook.format(layer)
        functions.append((hook, keep_in(scores, hook)))
        pass_on = partial(_show, surface, prompts[rows], layer, visitor, scores, seen_layers)
        functions.append((KINDS["pattern"].hook.format(layer), pass_on))
    model = surface.model
    with (
        evaluating(model),
        torch.no_grad(),
        running_rows(model, rows, len(prompts)),
        listening(surface, functions),
    ):
        surface.call(prompts[rows])
    for layer in layers:
        if layer not in seen_layers:
            raise CircuitsError(f"patterns: {KINDS['pattern'].hook.format(layer)} never fired in this model")


def _show(
    surface: HookedModel,
    prompts: Prompts,
    layer: int,
    visitor: Visitor,
    scores: dict[str, Tensor],
    seen_layers: list[int],
    pattern: Tensor,
) -> None:
    """Passes a pattern to `visitor`, with the visible keys that the layer's scores show, which precede it."""
    seen = visible(scores.pop(KINDS["scores"].hook.format(layer)))
    seen_layers.append(layer)
    pattern, seen = pattern.detach(), seen.expand_as(pattern)
    if prompts.padded:
        axes = KINDS["pattern"].position_axes
        pattern, seen = prompts.in_order(pattern, axes), prompts.in_order(seen.to(torch.uint8), axes).bool()
    visitor(layer, pattern, seen)


def parse_layers(layers: Any, surface: HookedModel, caller: str) -> tuple[int, ...]:
    """Returns the chosen layers, ascending; None chooses all."""
    chosen = read_indices(layers, caller, "layers")
    if chosen is None:
        return tuple(range(surface.n_layers))
    unknown = [layer for layer in chosen if layer >= surface.n_layers]
    if unknown:
        raise CircuitsError(f"{caller}: no layer {unknown[0]}: the model has layers 0-{surface.n_layers - 1}")
    return tuple(sorted(chosen))


def chunks(
    surface: HookedModel, prompts: Prompts, layers: tuple[int, ...], batch_size: int | None, caller: str
) -> Iterator[slice]:
    """Yields the rows of each forward pass."""
    total, length = prompts.shape[:2]
    kept = _PER_ENTRY * len(layers) * surface.n_heads * length
    step = rows_in_a_forward(surface, length, batch_size, caller, kept=kept)
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def read_run(surface: HookedModel, tokens: Any, caller: str) -> tuple[Prompts, Recorded | None]:
    """Returns the prompts, and their patterns where these were recorded."""
    if isinstance(tokens, Recorded):
        tokens.check(surface, caller)
        return tokens.prompts, tokens
    prompts = read_prompts(surface, tokens, caller)
    surface.check_prompts(prompts, f"{caller}: tokens")
    return prompts, None


def check_recorded(recorded: Recorded | None, layers: tuple[int, ...], caller: str) -> None:
    if recorded is not None:
        recorded.check_layers(layers, caller)


def _check_pairs(one: Prompts, two: Prompts, caller: str) -> None:
    """Refuses two inputs that cannot be compared row by row."""
    if len(one) != len(two) or len(one) < 2 or (one.shape != two.shape and not (one.padded or two.padded)):
        raise CircuitsError(
            f"{caller}: two inputs of one shape are compared row by row, at least 2 rows; got {list(one.shape)} and "
            f"{list(two.shape)}"
        )
    differs = one.lengths != two.lengths
    if bool(differs.any()):
        row = int(differs.nonzero()[0])
        raise CircuitsError(
            f"{caller}: example {row} has {int(one.lengths[row])} tokens, the one it is compared with "
            f"{int(two.lengths[row])}; give pairs of one length"
        )


def selected_queries(surface: HookedModel, positions: Any, prompts: Prompts, caller: str) -> Tensor:
    """Returns a mask, bool [batch pos], of the queries that count, each prompt's own tokens first."""
    selected = _selected(positions, prompts, caller)
    refuse_padding(surface, prompts, selected, caller)
    return prompts.in_order(selected & prompts.real) & prompts.reached


def _selected(positions: Any, prompts: Prompts, caller: str) -> Tensor:
    """Returns a boolean mask [batch pos] of the queries to score."""
    chosen = parse_query_positions(positions, caller)
    batch, length = prompts.shape[:2]
    if chosen is None:
        return torch.ones(1, length, dtype=torch.bool).expand(batch, -1)
    if not isinstance(chosen, Snapshot):
        real = prompts.real if prompts.padded else None
        return replace(WHOLE, real=real).selected(chosen, length, caller).expand(batch, -1)
    mask = chosen.tensor.cpu()
    if tuple(mask.shape) not in ((length,), (batch, length)):
        raise CircuitsError(
            f"{caller}: a mask of positions is [pos] or [batch pos], here {[length]} or {[batch, length]}; "
            f"got {list(mask.shape)}"
        )
    return mask.expand(batch, -1)


def parse_draws(draws: Any, caller: str) -> int:
    if not is_whole(draws, 1):
        raise CircuitsError(f"{caller}: draws={draws!r}; give the number of bootstrap resamples, at least 1")
    return int(draws)
