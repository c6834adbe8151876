"""Replaces activations by those of another input or of another checkpoint.

Where the source has targets of its own, every metric stands there a second time, ``mse_masked (source)``: the same
output judged by the source's targets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.model.sites import KINDS, Site
from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment, metrics_of_task
from interp_tasks.measurement.heads.classes import NO_CLASSES, head_classes_held_out
from interp_tasks.measurement.heads.edits import (
    HEADS_HELP,
    POSITIONS,
    check_within,
    choices,
    read_specs,
    select_positions,
)
from interp_tasks.measurement.model_parts import ModelParts
from interp_tasks.measurement.options import called, has_heads, parse_positions
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure, swept
from interp_tasks.measurement.source_checkpoints import (
    SourceCheckpoint,
    check_architecture,
    source_checkpoint,
)
from interp_tasks.measurement.subjects import (
    Examples,
    LoadedCheckpoint,
    Options,
    PendingCheckpoint,
    resolve_refs,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tasks import Batch, Metric, Task

RESAMPLE = "resample"
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
    says={"source": None, "site": None, "heads": None, "positions": "all", "by_class": False},
    metrics=metrics_of_task,
)
def patch(
    refs: str | Sequence[str],
    source: Annotated[str, SOURCE],
    site: Annotated[str | Sequence[str], SITE, list[str]] = "z",
    heads: Annotated[str | Sequence[Any] | None, HEADS, list[str]] = None,
    positions: Annotated[str | Sequence[int], POSITIONS, str] = "all",
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
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Options`.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    sites = check_sites(site, heads is not None)
    specs = read_specs("all" if heads is None else heads)
    at = parse_positions(positions)
    examples = Examples.of(options)
    if by_class and examples.tokens is not None:
        raise UserError(NO_CLASSES)
    checkpoint = read_source(source, examples)
    refs = resolve_refs(refs, examples)
    if checkpoint is not None:
        check_architecture([checkpoint], refs)
    chosen = Chosen(source, checkpoint, sites, specs, at, by_class, options.get("device", "cpu"))
    config = {
        "source": source if checkpoint is None else checkpoint.resolved.ref,
        "site": sites,
        "heads": None if heads is None else [str(spec) for spec in specs],
        "positions": at or "all",
        "by_class": by_class,
    }
    note_texts = notes(source, checkpoint, judged=checkpoint is None and examples.tokens is None)
    parts = ModelParts(specs, sites, positions={"--positions": at})
    return measure(
        "patch",
        refs,
        options,
        chosen.measured,
        config=config,
        notes=note_texts,
        parts=parts,
        check=chosen.check,
    )


@dataclass
class Chosen:
    """What is patched, where, and from where."""

    source: str
    checkpoint: SourceCheckpoint | None
    sites: Sequence[str]
    specs: Sequence[Any]
    positions: Any
    by_class: bool
    device: str
    model: Any = None

    def check(self, planned: PendingCheckpoint) -> None:
        select_positions(planned, self.positions)
        check_within(planned, "--positions", self.positions)
        if self.checkpoint is None:
            source_examples(planned, self.source)

    def measured(self, subject: LoadedCheckpoint) -> Measured:
        """Measures one checkpoint with the source's activations at each site and choice of heads."""
        from circuits import cache
        from circuits import patch as patches

        if self.checkpoint is None:
            other = source_examples(subject, self.source)
            given = other if subject.task is None else other.tokens
        else:
            self.model = self.model or self.checkpoint.load(self.device).model
            other, given = None, cache(self.model, subject.tokens, self.sites)
        variants: dict[str, Any] = {}
        names: dict[str, str] = {}
        classes = head_classes_held_out(subject).groups() if self.by_class else {}
        at = select_positions(subject, self.positions)
        for site in self.sites:
            of_site = classes if has_heads(site) and "." not in site else {}
            for label, chosen in (selected(site, self.specs, subject.sizes) | of_site).items():
                row = label if label and len(self.sites) == 1 else f"{site} {label}".strip()
                variants[row] = patches.activations(site, given, chosen, positions=at)
                names[row] = called(site, {"positions": self.positions, "source": self.source})
        if subject.task is None or other is None:
            return swept(subject, variants, names)
        return swept(subject, variants, names, judged_by_both(subject.task), Both(subject.batch, other))


@dataclass(frozen=True)
class Both:
    """The examples of the run, and row by row those of the source; what ``circuits.sweep`` takes as a batch."""

    run: Any
    source: Any

    def __len__(self) -> int:
        return len(self.run)

    def __getitem__(self, rows: slice) -> Both:
        return Both(self.run[rows], self.source[rows])


def judged_by_both(task: Task) -> Callable[[Any, Both], dict[str, Metric]]:
    """Returns the task's metrics by the targets of the run, and of the same output by those of the source."""

    def metrics(output: Any, both: Both) -> dict[str, Metric]:
        by_source = task.metrics(output, both.source)
        return task.metrics(output, both.run) | {
            f"{name} (source)": metric for name, metric in by_source.items()
        }

    return metrics


def check_sites(site: str | Sequence[str], heads_given: bool) -> list[str]:
    """Parses sites as users write them, and tells whether heads can be chosen there.

    Raises:
        UserError: in one line.
    """
    sites = [str(Site.parse(each)) for each in ([site] if isinstance(site, str) else site)]
    if not sites:
        raise UserError("--site: nothing to patch; write z, resid_pre.1, ...")
    for each in sites:
        if heads_given and not has_heads(each):
            raise UserError(
                f"--heads with --site {each}: this site has no heads; leave --heads out, or choose among "
                f"{', '.join(name for name in KINDS if has_heads(name))}"
            )
    return list(dict.fromkeys(sites))


def read_source(source: str, examples: Examples) -> SourceCheckpoint | None:
    """Returns the checkpoint that activations come from; ``None`` where the source is another input of the same model.

    Raises:
        UserError: in one line. Whether the task knows a name shows only when there is a task.
    """
    if source == RESAMPLE:
        return None
    if NAME.fullmatch(source) and not Path(source).is_dir():
        if examples.tokens is not None:
            raise UserError(
                f"--source {source}: tokens of your own have no task to name it; write resample or a REF"
            )
        return None
    return source_checkpoint(source)


def source_examples(subject: LoadedCheckpoint | PendingCheckpoint, source: str) -> Any:
    """Returns the input that activations come from, row by row: a batch of the task, or bare tokens ``[batch pos]``.

    Raises:
        UserError: for a name that the task does not declare.
    """
    if source == RESAMPLE:
        from circuits.interventions.replacements import derangement

        order = derangement(len(subject.tokens), subject.seed).to(subject.tokens.device)
        return subject.tokens[order] if subject.batch is None else subject.batch[order]
    # Names were refused where there is no task.
    task: Any = subject.task
    declared: dict[str, Batch] = task.patch_sources(subject.batch) if hasattr(task, "patch_sources") else {}
    if source not in declared:
        has = f"declares {', '.join(declared)}" if declared else "declares none"
        raise UserError(
            f"--source {source}: no such source of task {task.name}, which {has}; write one of those, resample, "
            "or a REF"
        )
    return declared[source].to(str(subject.tokens.device))


def selected(site: str, specs: Sequence[Any], sizes: Any) -> dict[str, Any]:
    """Returns the heads of each row; one row without a label where the site has no heads."""
    if not has_heads(site):
        return {"": None}
    layer = site.partition(".")[2]
    return choices(specs, sizes, int(layer) if layer else None)


def notes(source: str, checkpoint: SourceCheckpoint | None, judged: bool) -> tuple[str, ...]:
    """Returns the notes below the table."""
    if checkpoint is not None:
        return (f"Activations come from {checkpoint} on the same examples.",)
    if source == RESAMPLE:
        sentence = "Activations come from another example of the batch, the same at every site."
    else:
        sentence = f"Activations come from the input that the task calls {source}."
    if not judged:
        return (sentence,)
    return (
        sentence,
        "(source): the same output judged by the source's targets; low where it follows the source.",
    )
