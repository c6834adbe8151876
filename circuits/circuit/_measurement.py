"""Measures a metric under circuits on one set of examples: each circuit once, the source and the clean run once."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from circuits.circuit._graph import EVERYWHERE, Edge, Graph, Member, Where
from circuits.circuit._intervention import CircuitEdit, is_sender, stored
from circuits.circuit._value import Circuit
from circuits.engine.batch_size import batch_size as rows_in_a_forward
from circuits.engine.batch_size import within_memory
from circuits.errors import CircuitsError
from circuits.interventions.apply import run
from circuits.interventions.base import MeanOver, Replacement
from circuits.interventions.replacements import Zero, align_mean, parse_source
from circuits.model.edit_state import inside_block
from circuits.model.hooked_model import HookedModel
from circuits.model.inputs import parse_prompts
from circuits.model.prompts import Prompts
from circuits.model.sites import Site
from circuits.statistics import LEVEL, bootstrap, interval, ratio
from circuits.sweeps.metrics import Metric, PerExample, Row, first_choice, in_errors

CLEAN, SOURCE = "the clean run", "the source run"


def parse_pair(
    caller: str, model: Any, base: Any, source: Any, metric: Any, batch: Any, how: str
) -> tuple[HookedModel, Prompts, Prompts | None, Metric]:
    """Reads what all that patches a source into base is given: the model, base and source, and the metric.

    Args:
        base: tokens [n pos], or anything that `prompts` takes.
        source: the same; where activations are resampled its prompts are as long as their partners in base, or it is a
            single one; for "mean" of any batch, at least as long; None for "zero".
        metric: as in `sweep`; by default the logit difference between the clean run's first and second choice.
    """
    surface = HookedModel.of(model)
    prompts = parse_prompts(surface, base, caller, "base")
    surface.check_prompts(prompts, f"{caller}: base tokens")
    other = parse_source(source, prompts, surface, how, caller)
    return surface, prompts, other, Metric.of(metric, batch, (surface, prompts), caller, default=first_choice)


def check_outside_blocks(surface: HookedModel, caller: str) -> None:
    """Raises `CircuitsError` inside a block, whose edits some of the runs would have and others not.

    This holds even where the edits do not change base, because they may change a patched run.
    """
    if inside_block(surface.model):
        raise CircuitsError(
            f"{caller}: a block around this call edits the model, and not all runs would have its edits; call it "
            "outside"
        )


@dataclass
class _Piece:
    """Some examples that are run together, and what edges that are cut carry in them."""

    prompts: Prompts
    metric: Metric
    replacement: Replacement
    clean: Tensor | None  # the clean output, where the metric compares with it


@dataclass
class Measurement:
    """One set of examples with their source and metric, and what was measured on them.

    Attributes:
        size: examples in a forward.
        seed: of the resamples of examples, of which there are `draws`.
        clean: the metric's sums and counts per example of the run without edits.
        source: the same of the empty circuit, which is the source's run where edges are resampled.
        forwards: how often the model was run on a piece of the examples, sources too.
    """

    caller: str
    surface: HookedModel
    graph: Graph
    how: str
    metric: Metric
    base: Prompts
    sources: Prompts | None
    size: int
    seed: int
    draws: int
    clean: PerExample = field(default_factory=dict)
    source: PerExample = field(default_factory=dict)
    forwards: int = 0
    pieces: list[_Piece] = field(default_factory=list)
    _known: dict[tuple[Circuit, bool], PerExample] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        caller: str,
        model: Any,
        base: Any,
        source: Any,
        metric: Any,
        batch: Any,
        how: str,
        batch_size: int | None,
        seed: int,
        draws: int,
    ) -> Measurement:
        """Runs the model on base and source, with the activations of the source's senders kept."""
        surface, base, source, measured = parse_pair(caller, model, base, source, metric, batch, how)
        check_outside_blocks(surface, caller)
        graph = Graph.of(surface)
        # What every sender changes of the stream.
        kept = len(graph.nodes) * (surface.sizes["d_model"] or 1)
        size = rows_in_a_forward(surface, base.shape[1], batch_size, caller, kept=kept)
        measurement = cls(caller, surface, graph, how, measured, base, source, size, seed, draws)
        within_memory(size, measurement._prepare)
        return measurement

    def settings(self) -> Row:
        """Returns the settings of a result, once all circuits have been run."""
        n = len(next(iter(self.clean.values()))[0])
        how = {"how": self.how, "seed": self.seed, "draws": self.draws, "level": LEVEL, "n": n}
        return how | {"batch_size": self.size, "forwards": self.forwards, **self.surface.settings}

    def baseline(self) -> pd.DataFrame:
        """Tabulates the clean and the source run, a row per metric.

        Warns of a metric by which the two runs do not surely differ: faithfulness is then a share of nothing.
        """
        rows: list[Row] = []
        for metric, measured in self.faithfulness([]):
            (clean, source), drawn = measured.ends
            gap = with_interval("gap", clean - source, drawn[:, 0] - drawn[:, 1])
            low, high = gap["gap_ci_low"], gap["gap_ci_high"]
            if low <= 0 <= high:
                warnings.warn(
                    f"{self.caller}: {metric}: the gap between clean and source run is {clean - source:.3g} "
                    f"[{low:.3g}, {high:.3g}], so that faithfulness may be a share of nothing; does the metric "
                    "belong to these examples?",
                    stacklevel=3,
                )
            rows.append({"metric": metric, "clean": clean, "source": source, **gap, "n": measured.n})
        return pd.DataFrame(rows)

    def _prepare(self, step: int) -> None:
        """Cuts the examples into pieces, each with its replacement, and measures the clean and the source run."""
        base, source, self.size, self.pieces = self.base, self.sources, step, []
        clean: list[PerExample] = []
        sources: list[PerExample] = []
        means = self._means(source, step) if source is not None and self.how == "mean" else {}
        output: Tensor | None = None
        replacement: Replacement = Zero()
        for start in range(0, len(base), step):
            rows = slice(start, min(start + step, len(base)))
            prompts = base[rows]
            # One source of a batch of 1 serves all pieces.
            if source is not None and self.how == "resample" and (len(source) > 1 or output is None):
                output, activations = self._run(source if len(source) == 1 else source[rows])
                replacement = stored(activations, self.caller)
            elif means:
                replacement = stored({hook: align_mean(x, prompts) for hook, x in means.items()}, self.caller)
            clean_output = self._output(prompts)
            kept = clean_output if self.metric.function is None else None
            piece = _Piece(prompts, self.metric.at(rows), replacement, kept)
            self.pieces.append(piece)
            clean.append(self._values(piece, clean_output, CLEAN))
            if output is not None:
                sources.append(self._values(piece, output.expand(len(prompts), *output.shape[1:]), SOURCE))
        self.clean = concatenated(clean)
        self.source = concatenated(sources) if sources else self._measure(Circuit.of("edges", {}), True)

    def _run(self, prompts: Prompts) -> tuple[Tensor, dict[str, Tensor]]:
        self.forwards += 1
        hooks = [hook for hook in self.surface.hooks if is_sender(hook)]
        output, activations = run(self.surface.model, prompts, cache=hooks)
        return self._checked(output), dict(activations)

    def _means(self, source: Prompts, step: int) -> dict[str, Tensor]:
        """Returns the means over all examples of the source at their own positions, [1 pos ...]."""
        total: dict[str, Tensor] = {}
        for start in range(0, len(source), step):
            prompts = source[start : start + step]
            for hook, x in self._run(prompts)[1].items():
                total[hook] = total.get(hook, 0) + MeanOver().piece(x, prompts, Site(hook).kind)
        return {hook: MeanOver().finish(x, source, Site(hook).kind) for hook, x in total.items()}

    def _output(self, prompts: Prompts, *edits: CircuitEdit) -> Tensor:
        self.forwards += 1
        return self._checked(run(self.surface.model, prompts, *edits))

    def _checked(self, output: Any) -> Tensor:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            got = type(output).__name__
            raise CircuitsError(f"{self.caller}: the model's output is {got}, not a tensor of numbers")
        return output

    def _values(self, piece: _Piece, output: Tensor, name: str) -> PerExample:
        return piece.metric.measure(output, output if piece.clean is None else piece.clean, name)

    # ---- Circuits

    def candidates(self, kind: str) -> frozenset[Member]:
        """Returns the members of the graph that can carry anything else than in the clean run.

        Position embeddings are the same in any two prompts, and in means over prompts.
        """
        members = self.graph.members(kind)
        if self.how == "zero":
            return members
        senders = ((one, one.sender if isinstance(one, Edge) else one) for one in members)
        return frozenset(one for one, sender in senders if sender.site != "pos_embed")

    @property
    def positions(self) -> int:
        """The positions of the longest example."""
        return self.base.shape[1]

    def share_of(self, members: Iterable[tuple[Member, Where]], of: int) -> float:
        """Returns the share of `of` members that these are; a member at some positions counts by its share of them."""
        return sum(at.number_in(self.positions) for _, at in members) / (of * self.positions)

    def kept(self, circuit: Circuit) -> PerExample:
        """Returns the metric's sums and counts per example where a circuit is kept."""
        return self._of(circuit, True)

    def without(self, circuit: Circuit) -> PerExample:
        """Returns the same where a circuit is cut, and all else kept."""
        return self._of(circuit, False)

    def _of(self, circuit: Circuit, keep: bool) -> PerExample:
        if (circuit, keep) not in self._known:
            where = self.graph.fitted(circuit.where, circuit.kind, self.caller)
            candidates = self.candidates(circuit.kind)
            present = {member: at for member, at in where.items() if member in candidates}
            if not present:
                found = self.source if keep else self.clean
            elif len(present) == len(candidates) and set(present.values()) == {EVERYWHERE}:
                found = self.clean if keep else self.source
            else:
                found = self._measure(circuit, keep)
            self._known[circuit, keep] = found
        return self._known[circuit, keep]

    def _measure(self, circuit: Circuit, keep: bool) -> PerExample:
        def measured(size: int) -> PerExample:
            if size != self.size:
                self._prepare(size)
            parts: list[PerExample] = []
            for piece in self.pieces:
                edit = CircuitEdit(circuit, piece.replacement, keep)
                parts.append(self._values(piece, self._output(piece.prompts, edit), edit.label))
            return concatenated(parts)

        return within_memory(self.size, measured)

    # ---- Statistics

    def faithfulness(self, runs: Sequence[PerExample]) -> Iterator[tuple[str, Faithfulness]]:
        """Yields each metric with the faithfulness of runs under it."""
        for metric in self.clean:
            sums, counts = stacked([self.clean, self.source, *runs], metric)
            value, drawn = ratio(sums.sum(1), counts.sum(1)), bootstrap(sums, counts, self.seed, self.draws)
            share, drawn_share = (
                ratio(x[..., 2:] - x[..., 1:2], np.broadcast_to(x[..., :1] - x[..., 1:2], x[..., 2:].shape))
                for x in (value, drawn)
            )
            if sums.shape[1] < 2:
                drawn, drawn_share = np.full_like(drawn, np.nan), np.full_like(drawn_share, np.nan)
            # Adding 0.0 turns -0.0 into 0.0: a circuit that equals the source run has it where the gap is negative.
            yield (
                metric,
                Faithfulness(
                    value[2:],
                    share + 0.0,
                    drawn_share,
                    drawn[:, 2:],
                    (value[:2], drawn[:, :2]),
                    sums.shape[1],
                ),
            )


@dataclass(frozen=True)
class Faithfulness:
    """Faithfulness of several runs under one metric: 0 as the source run, 1 as the clean one.

    Attributes:
        value: the metric of each run, [run].
        share: (value − source) / (clean − source), [run]; NaN where clean and source are equal.
        drawn: the same in resamples of the examples, [draw run]; the same examples for all runs.
        drawn_value: the metric in these, [draw run].
        ends: the metric of the clean and of the source run, with their resamples [draw 2].
    """

    value: np.ndarray
    share: np.ndarray
    drawn: np.ndarray
    drawn_value: np.ndarray
    ends: tuple[np.ndarray, np.ndarray]
    n: int

    def columns(self, run: int) -> Row:
        """Returns the metric of a run and its faithfulness, with their intervals."""
        return with_interval("value", self.value[run], self.drawn_value[:, run]) | with_interval(
            "faithfulness", self.share[run], self.drawn[:, run]
        )


def with_interval(name: str, value: float, drawn: np.ndarray) -> Row:
    """Returns the columns of a value and of its interval, over resamples [draw]."""
    (low,), (high,) = interval(drawn[:, None], LEVEL)
    return {name: value, f"{name}_ci_low": low, f"{name}_ci_high": high}


def stacked(runs: Sequence[PerExample], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns sums and counts [run example]."""
    for one in runs:
        if metric not in one:
            raise CircuitsError(f"{in_errors(metric)}: returned for some circuits only")
    return np.stack([one[metric][0] for one in runs]), np.stack([one[metric][1] for one in runs])


def concatenated(parts: Sequence[PerExample]) -> PerExample:
    """Concatenates sums and counts over examples, by metric."""
    for name in sorted({name for part in parts for name in part}):
        if any(name not in part for part in parts):
            raise CircuitsError(f"{in_errors(name)}: returned for some examples only")
    found: PerExample = {}
    for name in parts[0]:
        sums, counts = zip(*(part[name] for part in parts), strict=True)
        found[name] = np.concatenate(sums), np.concatenate(counts)
    return found
