"""Reads attention patterns of some inputs, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.engine.batch_size import batch_size as rows_in_a_forward
from circuits.errors import CircuitsError
from circuits.interventions.edits import parse_query_positions
from circuits.interventions.replacements import derangement, visible
from circuits.model.edit_state import running_rows
from circuits.model.generation import WHOLE
from circuits.model.heads import Head
from circuits.model.hooked_model import HookedModel
from circuits.model.hooks import Function
from circuits.model.inputs import check_no_padding, parse_prompts
from circuits.model.prompts import Prompts
from circuits.model.record import evaluating, keep_in, listening
from circuits.model.sites import KINDS
from circuits.statistics import bootstrap, ratio
from circuits.tensors import Snapshot
from circuits.validate import answers_former_names, is_whole, parse_indices, parse_seed

# Numbers for each entry of a pattern: with what is computed of it in double precision it then stays in the cache.
_PER_ENTRY = 32

#: By layer, its pattern and the mask of the keys that each query may see, both [batch head query key].
Patterns = dict[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Recorded:
    """Attention patterns of some inputs, which the other functions of this module take in the place of the tokens.

    Attributes:
        layers: those recorded, ascending.
    """

    layers: tuple[int, ...]
    prompts: Prompts = field(repr=False)
    model: Any = field(repr=False)
    patterns: Patterns = field(repr=False)


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
    chunks = [run_patterns(surface, prompts, rows, reading.layers) for rows, _ in reading.chunks(batch_size)]
    patterns: Patterns = {}
    for layer in reading.layers:
        parts, seen = zip(*(one.pop(layer) for one in chunks), strict=True)
        patterns[layer] = torch.cat(parts), torch.cat(seen)
    return Recorded(reading.layers, prompts, surface.model, patterns)


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
        prompts, recorded = parse_run(surface, tokens, caller)
        chosen = parse_layers(layers, surface, recorded, caller)
        selected = selected_queries(surface, positions, prompts, caller)
        return cls(caller, surface, prompts, chosen, selected, recorded)

    @property
    def heads(self) -> tuple[Head, ...]:
        """All heads of the layers, layer by layer."""
        return tuple(Head(layer, head) for layer in self.layers for head in range(self.surface.n_heads))

    def chunks(self, batch_size: int | None) -> Iterator[tuple[slice, Tensor]]:
        """Yields the rows of each forward pass and their mask of queries that count, bool [batch 1 query]."""
        total, length = self.prompts.shape[:2]
        kept = _PER_ENTRY * len(self.layers) * self.surface.n_heads * length
        step = rows_in_a_forward(self.surface, length, batch_size, self.caller, kept=kept)
        for start in range(0, total, step):
            rows = slice(start, min(start + step, total))
            yield rows, self.selected[rows, None].to(self.surface.device)

    def patterns(self, rows: slice | Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields for each layer its place among the layers, and these rows' patterns, in double precision, and keys
        that queries may see.
        """
        recorded = self.recorded
        run = run_patterns(self.surface, self.prompts, rows, self.layers) if recorded is None else {}
        for at, layer in enumerate(self.layers):
            pattern, seen = (
                run.pop(layer) if recorded is None else (x[rows] for x in recorded.patterns[layer])
            )
            yield at, pattern.double(), seen


@dataclass(frozen=True)
class PairedPass(PatternPass):
    """The inputs of passes over two inputs that are compared row by row, with a control that pairs other rows.

    Attributes:
        other: the pass over the second input, in the layout of `prompts`.
        order: [batch], the row of the control's pair: a derangement drawn from `seed`.
        seed: also of the bootstrap, of `draws` resamples.
    """

    other: PatternPass
    order: Tensor
    seed: int
    draws: int

    @classmethod
    def parse_pair(
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
        seed, draws = parse_seed(seed, caller), parse_draws(draws, caller)
        first = PatternPass.read(caller, model, tokens, layers, positions)
        second, recorded = parse_run(first.surface, other, caller)
        _check_pairs(first.prompts, second, caller)
        parse_layers(first.layers, first.surface, recorded, caller)
        laid_out = second.like(first.prompts)
        # A record of another layout is of no use.
        known = recorded if laid_out is second else None
        paired = replace(first, prompts=laid_out, recorded=known)
        return cls(**vars(first), other=paired, order=derangement(len(second), seed), seed=seed, draws=draws)

    def zeros(self) -> np.ndarray:
        """Returns zeros [pairing layer head example], to add to; the pairings are the pairs and the control."""
        return np.zeros((2, len(self.layers), self.surface.n_heads, len(self.prompts)))

    @property
    def compared(self) -> Tensor:
        """The queries that count which a row and the other row of its control both have, bool [batch pos]."""
        return self.selected & self.other.prompts.reached[self.order]

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


def run_patterns(
    surface: HookedModel, prompts: Prompts, rows: slice | Tensor, layers: tuple[int, ...]
) -> Patterns:
    """Runs some rows of the prompts in eval mode, without gradients, and returns their patterns, each prompt's own
    tokens first.

    Edits of open blocks are in force; where one has a mask per example, its entries for these rows are used.
    """
    raw: dict[str, Tensor] = {}
    hooks = [KINDS[site].hook.format(layer) for layer in layers for site in ("scores", "pattern")]
    functions: list[tuple[str, Function]] = [(hook, keep_in(raw, hook)) for hook in hooks]
    cut, here = running_rows(surface.model, rows, len(prompts)), prompts[rows]
    with evaluating(surface.model), torch.no_grad(), cut, listening(surface, functions):
        surface.call(here)
    found: Patterns = {}
    for layer in layers:
        scores, pattern = (raw.pop(KINDS[site].hook.format(layer), None) for site in ("scores", "pattern"))
        if scores is None or pattern is None:
            raise CircuitsError(f"patterns: {KINDS['pattern'].hook.format(layer)} never fired in this model")
        pattern, seen = pattern.detach(), visible(scores).expand_as(pattern)
        if prompts.padded:
            axes = KINDS["pattern"].position_axes
            pattern, seen = here.in_order(pattern, axes), here.in_order(seen.to(torch.uint8), axes).bool()
        found[layer] = pattern, seen
    return found


def parse_layers(
    layers: Any, surface: HookedModel, recorded: Recorded | None, caller: str
) -> tuple[int, ...]:
    """Returns the chosen layers, ascending, of those recorded or else of all; None chooses all of these."""
    known = tuple(range(surface.n_layers)) if recorded is None else recorded.layers
    chosen = parse_indices(layers, caller, "layers") or known
    if unknown := [layer for layer in chosen if layer not in known]:
        raise CircuitsError(
            f"{caller}: no layer {unknown[0]}: there are layers {', '.join(map(str, known))}"
            + ("" if recorded is None else " in what was recorded")
        )
    return tuple(sorted(chosen))


def parse_run(surface: HookedModel, tokens: Any, caller: str) -> tuple[Prompts, Recorded | None]:
    """Returns the prompts, and their patterns where these were recorded."""
    if isinstance(tokens, Recorded):
        if tokens.model is not surface.model:
            raise CircuitsError(
                f"{caller}: these patterns were recorded of another model; give the tokens, or record them of this one"
            )
        return tokens.prompts, tokens
    prompts = parse_prompts(surface, tokens, caller)
    surface.check_prompts(prompts, f"{caller}: tokens")
    return prompts, None


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
    chosen = parse_query_positions(positions, caller)
    batch, length = prompts.shape[:2]
    selected = torch.ones(1, length, dtype=torch.bool)
    if isinstance(chosen, Snapshot):
        selected = chosen.tensor.cpu()
        if tuple(selected.shape) not in ((length,), (batch, length)):
            raise CircuitsError(
                f"{caller}: a mask of positions is [pos] or [batch pos], here {[length]} or {[batch, length]}; "
                f"got {list(selected.shape)}"
            )
    elif chosen is not None:
        real = prompts.real if prompts.padded else None
        selected = replace(WHOLE, real=real).selected(chosen, length, caller)
    selected = selected.expand(batch, -1)
    check_no_padding(surface, prompts, selected, caller)
    return prompts.in_order(selected & prompts.real) & prompts.reached


def parse_draws(draws: Any, caller: str) -> int:
    if not is_whole(draws, 1):
        raise CircuitsError(f"{caller}: draws={draws!r}; give the number of bootstrap resamples, at least 1")
    return int(draws)
