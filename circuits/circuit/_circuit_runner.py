"""Examples with their source and metric, and what is measured on them under circuits: each circuit once."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
from torch import Tensor

from circuits.circuit._circuit import Circuit
from circuits.circuit._circuit_edit import CircuitEdit, is_sender_hook, replacement_from_cache
from circuits.circuit._graph_and_names import EVERYWHERE, Edge, Graph, Member, PositionSet
from circuits.errors import CircuitsError
from circuits.interventions.base import MeanOverExamples, PassRequest, Replacement
from circuits.interventions.clean_passes_and_edit_hooks import run_clean_passes
from circuits.interventions.intervene_run_cache import run
from circuits.interventions.replacements import Zero, align_means_to_prompts, parse_source_prompts
from circuits.model.activation_recording import hold_eval_mode
from circuits.model.batch_size import choose_batch_size, run_within_memory
from circuits.model.edit_state import assert_weights_unchanged, get_edit_state
from circuits.model.hooked_model import HookedModel
from circuits.model.prompt_parsing import parse_prompts
from circuits.model.prompts_with_mask import Prompts
from circuits.model.sites import Site
from circuits.statistics import LEVEL, bootstrap_ratios, ratio
from circuits.sweeps.metric import Metric, PerExample, Row, metric_label, top_two_logit_diff
from circuits.table_printing import interval_columns

Self = TypeVar("Self", bound="PatchSetup")


@dataclass(frozen=True)
class PatchSetup:
    """The inputs of patches from `source` into `base`, and the metric of their effect.

    Attributes:
        source: in the layout of base, or a batch of 1; for means of any batch, at least as long; None for zeros.
        how: "resample", "mean" or "zero".
    """

    caller: str
    hooked: HookedModel
    base: Prompts
    source: Prompts | None
    metric: Metric
    how: str = "resample"

    @classmethod
    def parse(
        cls: type[Self], caller: str, model: Any, base: Any, source: Any, metric: Any, batch: Any, how: str
    ) -> Self:
        """Reads the arguments, and refuses what does not fit.

        Args:
            metric: as in `sweep`; by default the logit difference between the clean run's first and second choice.
        """
        hooked = HookedModel(model)
        prompts = parse_prompts(hooked, base, caller, "base")
        other = parse_source_prompts(source, prompts, hooked, how, caller)
        measured = Metric.parse(metric, batch, (hooked, prompts), caller, default=top_two_logit_diff)
        return cls(caller, hooked, prompts, other, measured, how)

    def check_not_inside_intervene(self: Self) -> Self:
        """Raises `CircuitsError` inside a block, whose edits some of the runs would have and others not.

        This holds even where the edits do not change base, because they may change a patched run.
        """
        if get_edit_state(self.hooked.model).plans:
            raise CircuitsError(
                f"{self.caller}: a block around this call edits the model, and not all runs would have its edits; call "
                "it outside"
            )
        return self

    def iter_chunks(self: Self, size: int) -> Iterator[Self]:
        """Yields at most `size` examples at a time, in order; one source of a batch of 1 serves all."""
        for start in range(0, len(self.base), size):
            rows = slice(start, min(start + size, len(self.base)))
            source = self.source
            if source is not None and self.how == "resample" and len(source) > 1:
                source = source[rows]
            yield replace(self, base=self.base[rows], source=source, metric=self.metric.for_rows(rows))

    def source_means(self, hooks: Iterable[str], size: int) -> dict[str, Tensor]:
        """Returns the means over the source's examples at their own positions, [1 pos ...], `size` in a forward."""
        assert self.source is not None
        wanted = {hook: PassRequest(self.source, hook, Site(hook).kind, MeanOverExamples()) for hook in hooks}
        means = run_clean_passes(self.hooked, wanted.values(), {}, size)
        return {hook: means[one] for hook, one in wanted.items()}

    def check_output(self, output: Any) -> Tensor:
        """Returns the output of the model; refuses one that no metric can read."""
        if not isinstance(output, Tensor) or not output.is_floating_point():
            raise CircuitsError(f"{self.caller}: the output is {type(output).__name__}, no tensor of numbers")
        return output


def concat_per_example(parts: Sequence[PerExample]) -> PerExample:
    """Concatenates sums and counts over examples, by metric."""
    found: PerExample = {}
    for name in parts[0]:
        sums, counts = zip(*(part[name] for part in parts), strict=True)
        found[name] = np.concatenate(sums), np.concatenate(counts)
    return found


class _ChunkAndReplacement(NamedTuple):
    """Some examples that are run together, what edges that are cut carry in them, and the clean output."""

    examples: PatchSetup
    replacement: Replacement
    clean: Tensor | None  # kept where the metric compares with it

    def measure_output(self, output: Tensor, name: str) -> PerExample:
        metric, clean = self.examples.metric, output if self.clean is None else self.clean
        model = self.examples.hooked.model
        with hold_eval_mode(model), assert_weights_unchanged(model, metric_label(metric.name)):
            return metric.measure(output, clean, name)


@dataclass
class CircuitRunner:
    """One set of examples, and what was measured on them.

    Attributes:
        size: examples in a forward.
        seed: of the resamples of examples, of which there are `draws`.
        clean: the metric's sums and counts per example of the run without edits.
        source: the same of the empty circuit, which is the source's run where edges are resampled.
        forwards: how often the model was run on a part of the examples, sources too.
    """

    examples: PatchSetup
    graph: Graph
    size: int
    seed: int
    draws: int
    clean: PerExample = field(default_factory=dict)
    source: PerExample = field(default_factory=dict)
    forwards: int = 0
    _parts: list[_ChunkAndReplacement] = field(default_factory=list)
    _known: dict[tuple[Circuit, bool], PerExample] = field(default_factory=dict)

    @classmethod
    def after_clean_and_source(
        cls, examples: PatchSetup, batch_size: int | None, seed: int, draws: int
    ) -> CircuitRunner:
        """Runs the model on base and source, with the activations of the source's senders kept."""
        hooked = examples.check_not_inside_intervene().hooked
        graph = Graph.of_model(hooked)
        # What every sender changes of the stream.
        kept = len(graph.nodes) * (hooked.sizes["d_model"] or 1)
        size = choose_batch_size(hooked, examples.base.shape[1], batch_size, examples.caller, kept=kept)
        measurement = cls(examples, graph, size, seed, draws)
        run_within_memory(size, measurement._split_and_run_baselines)
        return measurement

    def result_settings(self) -> Row:
        """Returns the settings of a result, once all circuits have been run."""
        how = {"how": self.examples.how, "seed": self.seed, "draws": self.draws, "level": LEVEL}
        how |= {"n": len(self.examples.base), "batch_size": self.size, "forwards": self.forwards}
        return how | self.examples.hooked.setting_if_unchecked

    def tabulate_clean_and_source(self) -> pd.DataFrame:
        """Tabulates the clean and the source run, a row per metric.

        Warns of a metric by which the two runs do not surely differ: faithfulness is then a share of nothing.
        """
        rows: list[Row] = []
        for metric, measured in self.faithfulness_by_metric([]):
            (clean, source), drawn = measured.ends
            gap = interval_columns("gap", clean - source, drawn[:, 0] - drawn[:, 1])
            low, high = gap["gap_ci_low"], gap["gap_ci_high"]
            if low <= 0 <= high:
                warnings.warn(
                    f"{self.examples.caller}: {metric}: the gap between clean and source run is {clean - source:.3g} "
                    f"[{low:.3g}, {high:.3g}], so that faithfulness may be a share of nothing; does the metric "
                    "belong to these examples?",
                    stacklevel=3,
                )
            rows.append({"metric": metric, "clean": clean, "source": source, **gap, "n": measured.n})
        return pd.DataFrame(rows)

    def _split_and_run_baselines(self, size: int) -> None:
        """Cuts the examples into parts, each with its replacement, and measures the clean and the source run."""
        examples, caller, self.size, self._parts = self.examples, self.examples.caller, size, []
        clean: list[PerExample] = []
        source: list[PerExample] = []
        model, output = examples.hooked.model, None
        hooks = [hook for hook in examples.hooked.hooks if is_sender_hook(hook)]
        means = {}
        if examples.source is not None and examples.how == "mean":
            means = examples.source_means(hooks, size)
            self.forwards += -(-len(examples.source) // size)
        replacement: Replacement = Zero()
        serves_all = examples.source is not None and len(examples.source) == 1
        for part in examples.iter_chunks(size):
            if part.source is not None and not means and (output is None or not serves_all):
                output, activations = run(model, part.source, cache=hooks)
                output, self.forwards = part.check_output(output), self.forwards + 1
                replacement = replacement_from_cache(dict(activations), caller)
            elif means:
                at_own = {hook: align_means_to_prompts(x, part.base) for hook, x in means.items()}
                replacement = replacement_from_cache(at_own, caller)
            unedited = part.check_output(run(model, part.base))
            self.forwards += 1
            one = _ChunkAndReplacement(part, replacement, unedited if part.metric.function is None else None)
            self._parts.append(one)
            clean.append(one.measure_output(unedited, "the clean run"))
            if output is not None:
                of_all = output.expand(len(part.base), *output.shape[1:])
                source.append(one.measure_output(of_all, "the source run"))
        self.clean = concat_per_example(clean)
        empty = Circuit.of("edges", {})
        self.source = concat_per_example(source) if source else self._run_circuit(empty, True)

    # ---- Circuits

    def members_that_can_differ(self, kind: str) -> frozenset[Member]:
        """Returns the members of the graph that can carry anything else than in the clean run.

        Position embeddings are the same in any two prompts, and in means over prompts.
        """
        members = self.graph.all_members(kind)
        if self.examples.how == "zero":
            return members
        senders = ((one, one.sender if isinstance(one, Edge) else one) for one in members)
        return frozenset(one for one, sender in senders if sender.site != "pos_embed")

    @property
    def position_count(self) -> int:
        """The positions of the longest example."""
        return self.examples.base.shape[1]

    def share_of_members(self, members: Iterable[tuple[Member, PositionSet]], of: int) -> float:
        """Returns the share of `of` members that these are; a member at some positions counts by its share of them."""
        return sum(at.count_positions(self.position_count) for _, at in members) / (of * self.position_count)

    def measure_circuit(self, circuit: Circuit, keep: bool = True) -> PerExample:
        """Returns the metric's sums and counts per example where a circuit is kept; or cut, and all else kept."""
        if (circuit, keep) not in self._known:
            candidates = self.members_that_can_differ(circuit.kind)
            present = {member: at for member, at in circuit.members if member in candidates}
            if not present:
                found = self.source if keep else self.clean
            elif len(present) == len(candidates) and set(present.values()) == {EVERYWHERE}:
                found = self.clean if keep else self.source
            else:
                found = self._run_circuit(circuit, keep)
            self._known[circuit, keep] = found
        return self._known[circuit, keep]

    def _run_circuit(self, circuit: Circuit, keep: bool) -> PerExample:
        def run_chunks(size: int) -> PerExample:
            if size != self.size:
                self._split_and_run_baselines(size)
            found: list[PerExample] = []
            for part in self._parts:
                edit = CircuitEdit(circuit, part.replacement, keep)
                output = run(self.examples.hooked.model, part.examples.base, edit)
                found.append(part.measure_output(self.examples.check_output(output), edit.label))
            self.forwards += len(found)
            return concat_per_example(found)

        return run_within_memory(self.size, run_chunks)

    # ---- Statistics

    def faithfulness_by_metric(self, runs: Sequence[PerExample]) -> Iterator[tuple[str, FaithfulnessOfRuns]]:
        """Yields each metric with the faithfulness of runs under it."""
        for metric in self.clean:
            sums, counts = stack_sums_and_counts([self.clean, self.source, *runs], metric)
            value, drawn = (
                ratio(sums.sum(1), counts.sum(1)),
                bootstrap_ratios(sums, counts, self.seed, self.draws),
            )
            # Adding 0.0 turns -0.0 into 0.0: a circuit that equals the source run has it where the gap is negative.
            share, drawn_share = (
                ratio(x[..., 2:] - x[..., 1:2], np.broadcast_to(x[..., :1] - x[..., 1:2], x[..., 2:].shape))
                + 0.0
                for x in (value, drawn)
            )
            ends = value[:2], drawn[:, :2]
            yield metric, FaithfulnessOfRuns(value[2:], share, drawn_share, drawn[:, 2:], ends, sums.shape[1])


class FaithfulnessOfRuns(NamedTuple):
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

    def row_of_run(self, run: int) -> Row:
        """Returns the metric of a run and its faithfulness, with their intervals."""
        value = interval_columns("value", self.value[run], self.drawn_value[:, run])
        return value | interval_columns("faithfulness", self.share[run], self.drawn[:, run])


def stack_sums_and_counts(runs: Sequence[PerExample], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns sums and counts [run example]."""
    return np.stack([one[metric][0] for one in runs]), np.stack([one[metric][1] for one in runs])
