"""Replaces activations by those of another input or of another checkpoint.

Where the source has targets of its own, every metric stands there a second time, ``mse_masked (source)``: the same
output judged by the source's targets.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.model.sites import KINDS, Site
from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.head_classes import NO_CLASSES, head_classes_held_out
from interp_tasks.measurement.head_edits import (
    ALL,
    HEADS_HELP,
    POSITIONS,
    chosen_heads,
    head_labels,
    select_positions,
)
from interp_tasks.measurement.options import called, check_layer, has_heads, layer_of, parse_positions
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure, run_sweep
from interp_tasks.measurement.subjects import (
    RESAMPLE,
    Examples,
    LoadedCheckpoint,
    Options,
    Refs,
    resolve_refs,
    resolve_sources,
    source_batch,
    source_model,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from interp_tasks.checkpoints import ResolvedCheckpoint

#: What a task may call a source. Everything else is a REF.
NAME = re.compile(r"[A-Za-z_][\w-]*")
SOURCE = typer.Option("--source", metavar="SOURCE", help="REF, resample, or a name of the task's.")
SITE = typer.Option(
    "--site", metavar="SITE", help=f"{', '.join(KINDS)}; in layer 1 alone z.1. Repeat for rows."
)
HEADS = typer.Option("--heads", metavar="SPEC", help=HEADS_HELP, show_default="all, where there are heads")
BY_CLASS = typer.Option("--by-class", help="A row more for each class of heads, by what they attend to.")


@experiment(
    "Intervene",
    says={"source": None, "site": None, "heads": None, "positions": ALL, "by_class": False},
    judged_by_task=True,
)
def patch(
    refs: Refs,
    source: Annotated[str, SOURCE],
    site: Annotated[str | Sequence[str], SITE, list[str]] = "z",
    heads: Annotated[str | Sequence[Any] | None, HEADS, list[str]] = None,
    positions: Annotated[str | Sequence[int], POSITIONS, str] = ALL,
    by_class: Annotated[bool, BY_CLASS] = False,
    **options: Unpack[Options],
) -> Result:
    """Put activations from a source into a run, and see which metrics move.

    The source is another checkpoint on the same examples, another example (resample), or an input that the task
    declares (negated, for matrix completion). Metrics marked (source) judge the same output by the targets of the
    source.

    Args:
        refs: one or several REFs; all see the same examples.
        source: the REF of one checkpoint of the same architecture (its activations on the same examples);
            ``"resample"`` (those on another example of the batch, by one derangement); or a name that the task
            declares in ``patch_sources(batch)``, such as ``"negated"`` (those on that input).
        site: ``"z"`` (every layer at once), ``"z.1"``, ``"resid_pre.1"``, ...; a list: rows for each.
        heads: at sites that have heads, ``"all"`` (the default), ``"each"``, ``"each-layer"`` or a spec; a list: a row
            each.
        positions: patch only here: positions, or a boolean mask of the task's examples by name.
        by_class: at sites of heads in all layers, a row more for each class of heads, as :func:`heads` has them.
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Examples`.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    examples = Examples.of(options)
    sites = list(dict.fromkeys(str(Site.parse(each)) for each in ([site] if isinstance(site, str) else site)))
    for each in sites:
        if heads and not has_heads(each):
            raise UserError(f"--heads with --site {each}: this site has no heads; leave --heads out")
    of_input = source == RESAMPLE or bool(NAME.fullmatch(source) and not Path(source).is_dir())
    if examples.tokens is not None and by_class:
        raise UserError(NO_CLASSES)
    if examples.tokens is not None and of_input and source != RESAMPLE:
        raise UserError(f"--source {source}: tokens have no task to name it; write resample or a REF")
    found = resolve_refs(refs, examples)
    lender = None if of_input else resolve_sources(source, found, one=True)[0]
    given = head_labels(heads or ALL), parse_positions(positions), by_class
    patching = Patching(source, lender, sites, *given)
    notes = [f"Activations come from {patching.whose}."]
    if of_input and examples.of_task:
        notes.append(
            "(source): the same output judged by the source's targets; low where it follows the source."
        )
    config: dict[str, Any] = {"source": source if lender is None else lender.ref, "site": sites}
    config |= {"positions": given[1] or ALL, "by_class": by_class, "heads": given[0] if heads else None}
    checks: Any = {"check_sizes": patching.check_sizes, "check": patching.check}
    return measure("patch", found, options, patching.measured, config=config, notes=notes, **checks)


@dataclass(frozen=True)
class Patching:
    """What is patched, where, and from where; ``lender``: the checkpoint, ``None`` for another input of the model."""

    source: str
    lender: ResolvedCheckpoint | None
    sites: Sequence[str]
    labels: Sequence[str]
    positions: str | tuple[int, ...] | None
    by_class: bool

    @property
    def whose(self) -> str:
        """Where activations come from, in words."""
        if self.lender is not None:
            return f"{self.lender.label} (step {self.lender.step}) on the same examples"
        if self.source == RESAMPLE:
            return "another example of the batch, the same at every site"
        return f"the input that the task calls {self.source}"

    def check_sizes(self, sizes: Any, name: str) -> None:
        """Refuses layers and heads that a model of these sizes lacks."""
        for site in self.sites:
            check_layer(f"--site {site}", layer_of(site), sizes, name)
            if has_heads(site):
                chosen_heads(self.labels, sizes)

    def check(self, subject: LoadedCheckpoint) -> None:
        """Refuses positions and sources that a checkpoint's examples do not have."""
        select_positions(subject, self.positions)
        if self.lender is None:
            source_examples(subject, self.source)

    def measured(self, subject: LoadedCheckpoint) -> Measured:
        """Measures one checkpoint with the source's activations at each site and choice of heads."""
        from circuits import cache
        from circuits import patch as patches

        if self.lender is not None:
            lender = source_model(self.lender, str(subject.tokens.device))
            other, given = None, cache(lender, subject.tokens, self.sites)
        else:
            other = source_examples(subject, self.source)
            given = other if subject.task is None else other.tokens
        where, variants, names = select_positions(subject, self.positions), {}, {}
        classes = head_classes_held_out(subject).groups() if self.by_class else {}
        for site in self.sites:
            rows: dict[str, Any] = {"": None}
            if has_heads(site):
                rows = chosen_heads(self.labels, subject.sizes, layer_of(site))
                rows |= classes if layer_of(site) is None else {}
            for label, chosen in rows.items():
                row = label if label and len(self.sites) == 1 else f"{site} {label}".strip()
                variants[row] = patches.activations(site, given, chosen, positions=where)
                names[row] = called(site, {"positions": self.positions, "source": self.source})
        # The source of a file's prompts has no answers of its own.
        if subject.task is None or other is None or subject.task.name == "prompts":
            return run_sweep(subject, variants, names)
        return run_sweep(subject, variants, names, judged_by_both(subject.task), Both(subject.batch, other))


@dataclass(frozen=True)
class Both:
    """The examples of the run, and row by row those of the source; what ``circuits.sweep`` takes as a batch."""

    run: Any
    source: Any

    def __len__(self) -> int:
        return len(self.run)

    def __getitem__(self, rows: slice) -> Both:
        return Both(self.run[rows], self.source[rows])


def judged_by_both(task: Any) -> Any:
    """Returns the task's metrics by the targets of the run, and of the same output by those of the source."""

    def metrics(output: Any, both: Both) -> dict[str, Any]:
        by_source = task.metrics(output, both.source)
        return task.metrics(output, both.run) | {f"{name} (source)": one for name, one in by_source.items()}

    return metrics


def source_examples(subject: LoadedCheckpoint, source: str) -> Any:
    """Returns the input that activations come from, row by row: a batch of the task, or bare tokens ``[batch pos]``."""
    if (named := source_batch(subject, source)) is not None:
        return named
    from circuits.interventions.replacements import derangement

    order = derangement(len(subject.tokens), subject.seed).to(subject.tokens.device)
    return subject.tokens[order] if subject.batch is None else subject.batch[order]
