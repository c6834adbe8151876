"""Replaces activations by those of another input or of another checkpoint.

Where the source has targets of its own, every metric stands there a second time, ``mse_masked (source)``: the same
output judged by the source's targets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.model.sites import KINDS, Site
from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.head_classes import NO_CLASSES, head_classes_held_out
from interp_tasks.measurement.head_edits import (
    POSITIONS,
    Choices,
    parse_choices,
    resolve_choices,
    select_positions,
)
from interp_tasks.measurement.options import called, check_layer, has_heads, layer_of, parse_positions
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure, run_sweep
from interp_tasks.measurement.subjects import (
    Examples,
    LoadedCheckpoint,
    Options,
    Refs,
    check_architecture,
    one_source,
    resolve_refs,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from interp_tasks.checkpoints import ResolvedCheckpoint
    from tasks import Batch, Metric, Task

RESAMPLE = "resample"
#: What a task may call a source. Everything else is a REF.
NAME = re.compile(r"[A-Za-z_][\w-]*")
SOURCE = typer.Option("--source", metavar="SOURCE", help="REF, resample, or a name of the task's.")
SITE = typer.Option(
    "--site", metavar="SITE", help=f"{', '.join(KINDS)}; in layer 1 alone z.1. Repeat for rows."
)
HEADS = typer.Option(
    "--heads",
    metavar="SPEC",
    help="all, each (a row per head), each-layer, or heads such as 0.1+2.3-5. Repeat for rows.",
    show_default="all, where there are heads",
)
BY_CLASS = typer.Option("--by-class", help="A row more for each class of heads, by what they attend to.")


@experiment(
    "Intervene",
    says={"source": None, "site": None, "heads": None, "positions": "all", "by_class": False},
    judged_by_task=True,
)
def patch(
    refs: Refs,
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
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Examples`.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    examples = Examples.of(options)
    sites, choices, at = parse_sites(site), parse_choices(heads or "all"), parse_positions(positions)
    is_name = source == RESAMPLE or bool(NAME.fullmatch(source) and not Path(source).is_dir())
    for each in sites:
        if heads and not has_heads(each):
            raise UserError(f"--heads with --site {each}: this site has no heads; leave --heads out")
    if by_class and examples.tokens is not None:
        raise UserError(NO_CLASSES)
    if is_name and source != RESAMPLE and examples.tokens is not None:
        raise UserError(
            f"--source {source}: tokens of your own have no task to name it; write resample or a REF"
        )
    checkpoint, found = None if is_name else one_source(source), resolve_refs(refs, examples)
    if checkpoint is not None:
        check_architecture([checkpoint], found)
    patching = Patching(source, checkpoint, sites, choices, at, by_class)
    judged = is_name and examples.tokens is None and examples.prompts is None
    return measure(
        "patch",
        found,
        options,
        patching.measured,
        config=patching.describe() | {"heads": list(choices) if heads else None},
        notes=patching.notes(judged=judged),
        check_sizes=patching.check_sizes,
        check=patching.check,
    )


@dataclass(frozen=True)
class Patching:
    """What is patched, where, and from where; ``checkpoint``: ``None`` where that is another input of the model."""

    source: str
    checkpoint: ResolvedCheckpoint | None
    sites: Sequence[str]
    choices: Choices
    positions: str | tuple[int, ...] | None
    by_class: bool

    def describe(self) -> dict[str, Any]:
        source = self.source if self.checkpoint is None else self.checkpoint.ref
        at = self.positions or "all"
        return {"source": source, "site": self.sites, "positions": at, "by_class": self.by_class}

    def notes(self, *, judged: bool) -> list[str]:
        """Returns the notes below the table: where activations come from, and by what outputs are judged."""
        whose = f"the input that the task calls {self.source}"
        if self.source == RESAMPLE:
            whose = "another example of the batch, the same at every site"
        if self.checkpoint is not None:
            whose = f"{self.checkpoint.label} (step {self.checkpoint.step}) on the same examples"
        by_source = (
            "(source): the same output judged by the source's targets; low where it follows the source."
        )
        return [f"Activations come from {whose}.", *([by_source] if judged else [])]

    def check_sizes(self, sizes: Any, name: str) -> None:
        """Refuses layers and heads that a model of these sizes lacks."""
        for site in self.sites:
            check_layer(f"--site {site}", layer_of(site), sizes, name)
        if any(map(has_heads, self.sites)):
            resolve_choices(self.choices, sizes)

    def check(self, subject: LoadedCheckpoint) -> None:
        """Refuses positions and sources that a checkpoint's examples do not have."""
        select_positions(subject, self.positions)
        if self.checkpoint is None:
            source_examples(subject, self.source)

    def measured(self, subject: LoadedCheckpoint) -> Measured:
        """Measures one checkpoint with the source's activations at each site and choice of heads."""
        from circuits import cache
        from circuits import patch as patches

        other = None
        if self.checkpoint is not None:
            source_model = model_of(self.checkpoint, subject.tokens.device)
            given = cache(source_model, subject.tokens, self.sites)
        else:
            other = source_examples(subject, self.source)
            given = other if subject.task is None else other.tokens
        variants, names, where = {}, {}, select_positions(subject, self.positions)
        classes = head_classes_held_out(subject).groups() if self.by_class else {}
        for site in self.sites:
            rows: dict[str, Any] = {"": None}
            if has_heads(site):
                rows = resolve_choices(self.choices, subject.sizes, layer_of(site))
                rows |= classes if layer_of(site) is None else {}
            for label, chosen in rows.items():
                row = label if label and len(self.sites) == 1 else f"{site} {label}".strip()
                variants[row] = patches.activations(site, given, chosen, positions=where)
                names[row] = called(site, {"positions": self.positions, "source": self.source})
        # The source of a file's prompts has no answers of its own.
        if subject.task is None or other is None or subject.task.name == "prompts":
            return run_sweep(subject, variants, names)
        return run_sweep(subject, variants, names, judged_by_both(subject.task), Both(subject.batch, other))


@lru_cache(maxsize=1)
def model_of(checkpoint: ResolvedCheckpoint, device: Any) -> Any:
    """Returns the model of the checkpoint that activations come from, loaded once."""
    from interp_tasks.checkpoints.load import load_resolved

    return load_resolved(checkpoint, str(device)).model


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


def parse_sites(site: str | Sequence[str]) -> list[str]:
    """Parses sites as users write them, each once.

    Raises:
        UserError: in one line.
    """
    sites = [str(Site.parse(each)) for each in ([site] if isinstance(site, str) else site)]
    if not sites:
        raise UserError("--site: nothing to patch; write z, resid_pre.1, ...")
    return list(dict.fromkeys(sites))


def source_examples(subject: LoadedCheckpoint, source: str) -> Any:
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
