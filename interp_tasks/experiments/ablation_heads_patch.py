"""Edits activations, and measures which metrics move: attention heads are ablated, any activations patched.

Of all three the ``frame`` has a row for each checkpoint, variant and metric. The metrics are the task's, or for bare
tokens the distance of the output from the unedited one. ``plot()`` of :func:`heads` shows effects as a map, layer by
head, and groups as points. Where the source of a patch has targets of its own, every metric stands there a second time,
``mse_masked (source)``: the same output judged by the source's targets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.model.sites import KINDS, Site
from interp_tasks.errors import UserError
from interp_tasks.measurement.head_classes import NO_CLASSES, head_classes_held_out
from interp_tasks.measurement.head_options_and_edits import (
    ALL,
    EACH,
    EACH_LAYER,
    HEADS,
    HEADS_HELP,
    KEYS,
    MODE,
    POSITIONS,
    SCALE,
    HeadGroups,
    head_groups_by_label,
    head_specs_to_labels,
    make_head_edits,
    parse_attention_heads,
    parse_edit_options,
    resolve_positions_or_mask,
)
from interp_tasks.measurement.loaded_checkpoints import (
    RESAMPLE,
    LoadedCheckpoint,
    Refs,
    load_source_model,
    resolve_and_check_sources,
    resolve_refs,
    source_batch,
)
from interp_tasks.measurement.measure_checkpoints import MeasuredRows, measure, run_sweep
from interp_tasks.measurement.option_parsing import (
    as_list,
    check_draws,
    check_layer,
    edit_name,
    layer_of_site,
    parse_positions_or_mask,
    site_has_heads,
)
from interp_tasks.measurement.options_and_examples import Examples, Options
from interp_tasks.measurement.result import Result, experiment

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from interp_tasks.checkpoints import ResolvedCheckpoint

GROUPS = typer.Option(
    "--group", metavar="NAME=HEADS", help="Some heads together, as in copying=0.1+2.3-5. Repeat."
)
BY_CLASS = typer.Option(
    "--by-class", help="Groups are classes by what heads attend to on other examples; with ratios."
)
LEAST = typer.Option("--least", help="With --by-class: the N heads closest to no template, as a group.")
RANDOM = typer.Option("--random", help="Beside groups N draws of as many heads at random.")
RANDOM_SIZE = typer.Option(
    "--random-size", metavar="K", help="Random draws of K heads alone.", show_default="as each group"
)
#: What a task may call a source. Everything else is a REF.
NAME = re.compile(r"[A-Za-z_][\w-]*")
SOURCE = typer.Option("--source", metavar="SOURCE", help="REF, resample, or a name of the task's.")
SITE = typer.Option(
    "--site", metavar="SITE", help=f"{', '.join(KINDS)}; in layer 1 alone z.1. Repeat for rows."
)
PATCHED_HEADS = typer.Option(
    "--heads", metavar="SPEC", help=HEADS_HELP, show_default="all, where there are heads"
)
CLASSES = typer.Option("--by-class", help="A row more for each class of heads, by what they attend to.")
EDIT: dict[str, Any] = {"mode": None, "keys": None, "positions": ALL}


@experiment(says={**EDIT, "scale": None}, judged_by_task=True)
def ablation(
    refs: Refs,
    heads: Annotated[str | Sequence[Any], HEADS, list[str]] = ALL,
    mode: Annotated[str, MODE] = "uniform",
    keys: Annotated[str | Sequence[int] | None, KEYS, str | None] = None,
    positions: Annotated[str | int | Sequence[int], POSITIONS, str] = ALL,
    scale: Annotated[int | float | None, SCALE, float | None] = None,
    **options: Unpack[Options],
) -> Result:
    """Ablate attention heads, by default with uniform attention, and see which metrics move.

    Every number is compared with the unedited model on the same examples.

    Args:
        refs: one or several REFs; all see the same examples.
        heads: ``"all"``, ``"each"`` (a row per head), ``"each-layer"`` or a spec such as ``"0.1+2.3-5"``; a list: a
            row each.
        mode: ``uniform`` attention, the ``mean_pattern`` (of the unedited model, or within the edited pass:
            ``edited_mean_pattern``), or the heads' output ``zero``, its ``mean``, that of another example
            (``resample``) or with Gaussian ``noise``. Means and resamples are over the examples evaluated.
        keys: with ``uniform``, attend uniformly to these positions only.
        positions: edit only here: positions, or a mask of the task's examples (``"hidden"``, ``"observed"``).
        scale: with ``noise``, its standard deviation.
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Examples`.
    """
    labels, limits = head_specs_to_labels(heads), parse_edit_options(mode, keys, positions, scale)

    def measure_checkpoint(subject: LoadedCheckpoint) -> MeasuredRows:
        chosen = head_groups_by_label(labels, subject.stored.model_config)
        return run_sweep(subject, make_head_edits(subject, mode, limits, chosen), edit_name(mode, limits))

    return measure(
        "ablation",
        refs,
        options,
        measure_checkpoint,
        config={"heads": labels, "mode": mode, **limits},
        check_sizes=lambda sizes, _: head_groups_by_label(labels, sizes),
        check=lambda subject: make_head_edits(subject, mode, limits, {}),
    )


@experiment(
    says={**EDIT, "scale": None, "by_class": False, "least": 0, "random": 0, "random_size": None},
    judged_by_task=True,
)
def heads(
    refs: Refs,
    mode: Annotated[str, MODE] = "uniform",
    keys: Annotated[str | Sequence[int] | None, KEYS, str | None] = None,
    positions: Annotated[str | int | Sequence[int], POSITIONS, str] = ALL,
    groups: Annotated[Mapping[str, str] | Sequence[str], GROUPS, list[str]] = (),
    by_class: Annotated[bool, BY_CLASS] = False,
    least: Annotated[int, LEAST] = 0,
    random: Annotated[int, RANDOM] = 0,
    random_size: Annotated[int | None, RANDOM_SIZE] = None,
    scale: Annotated[int | float | None, SCALE, float | None] = None,
    **options: Unpack[Options],
) -> Result:
    """Ablate every head alone, each layer's heads together, all heads, and groups of your own.

    Args:
        refs: one or several REFs; all see the same examples.
        mode: what is done to the heads, as in :func:`ablation`.
        keys: likewise.
        positions: likewise.
        groups: name -> heads (``{"copying": "0.1+2.3-5"}``), or texts ``"copying=0.1+2.3-5"``.
        by_class: a table of groups instead: the heads of each class that :func:`attention` finds on as many other
            examples, those without one together as ``"uninterpretable"``, all heads, and groups of your own. After each
            metric, ``"mse_masked ratio"`` and so on: the metric with the edit over that without.
        least: with ``by_class``, a group more, ``"least patterned 5"``: so many heads, those that come least close to
            any template. No threshold decides who they are.
        random: beside the groups as many heads drawn at random, ``"random 5"`` for every size of a group (but that of
            all heads): so many draws from the seed, each a row with its ``draw``, after one that pools them.
        random_size: with ``random``, draws of so many heads alone.
        scale: with the mode ``"noise"``, its standard deviation.
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Examples`.
    """
    limits, named = parse_edit_options(mode, keys, positions, scale), parse_groups(groups)
    check_counts(least, random, random_size, by_class=by_class, grouped=by_class or bool(named))
    found: dict[str, HeadGroups] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> MeasuredRows:
        own = {name: parse_attention_heads(spec, subject.stored.model_config) for name, spec in named.items()}
        rows = (
            head_classes_held_out(subject).heads_by_class(least)
            if by_class
            else head_groups_by_label([EACH, EACH_LAYER], subject.stored.model_config)
        )
        if taken := own.keys() & rows.keys():
            raise UserError(f"--group {taken.pop()}: there is a class of that name; choose another")
        found[str(subject.labels["ref"])] = rows
        every = head_groups_by_label([ALL], subject.stored.model_config)[ALL]
        variants: dict[str, Any] = {**make_head_edits(subject, mode, limits, {**rows, ALL: every, **own})}
        grouped = {**(rows if by_class else {}), **own}.values()
        sizes = {random_size} if random_size else {len(group) for group in grouped} - {len(every)}
        for size in sorted(sizes) if random else ():
            variants[f"random {size}"] = random_heads_edit(subject, mode, limits, size, random)
        return run_sweep(subject, variants, edit_name(mode, limits), ratios=by_class)

    config = {"mode": mode, **limits, "groups": named, "by_class": by_class, "least": least}
    config |= {"random": random, "random_size": random_size}
    checks: Any = {"check_sizes": partial(check_groups, named, least, random_size)}
    checks["check"] = lambda subject: make_head_edits(subject, mode, limits, {})
    result = measure("heads", refs, options, measure_checkpoint, config=config, **checks)
    return replace(result, notes=(*result.notes, *(ratio_and_class_notes(found) if by_class else ())))


def check_groups(
    named: Mapping[str, str], least: int, random_size: int | None, sizes: Any, name: str
) -> None:
    """Refuses heads that a model of these sizes lacks, and as many as it has."""
    for spec in named.values():
        parse_attention_heads(spec, sizes, "--group")
    count = sizes.n_layers * sizes.n_heads
    for option, number in (("least", least), ("random-size", random_size or 0)):
        if number >= count:
            raise UserError(f"--{option} {number}: {name} has {count} heads; fewer than that")


def check_counts(least: int, random: int, random_size: int | None, *, by_class: bool, grouped: bool) -> None:
    """Refuses numbers of heads and draws that mean nothing."""
    if least and (least < 0 or not by_class):
        raise UserError(f"--least {least}: a number of heads, which --by-class scores against templates")
    if random:
        check_draws(random, "--random")
    if random_size is not None and (random_size < 1 or not random):
        raise UserError(f"--random-size {random_size}: at least 1 head, and goes with --random, the draws")
    if random and not (grouped or random_size):
        raise UserError(f"--random {random} draws: give --group or --by-class, or --random-size")


def parse_groups(groups: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """Returns heads by the name of their group, of ``NAME=HEADS`` texts or a mapping."""
    pairs = groups.items() if isinstance(groups, Mapping) else [spec.partition("=")[::2] for spec in groups]
    named: dict[str, str] = {}
    for name, spec in (
        (name.strip(), re.sub(r"\s+", "", str(spec)).replace(",", "+")) for name, spec in pairs
    ):
        if not name or not spec:
            raise UserError(f"--group {name + spec!r}: write NAME=HEADS, such as copying=0.1+2.3-5")
        if name in named or name in (ALL, EACH) or re.match(r"(layer|random) \d+$|\d+\.\d", name):
            raise UserError(f"--group {name}={spec}: there is a row of that name already; choose another")
        named[name] = spec
    return named


def ratio_and_class_notes(found: Mapping[str, HeadGroups]) -> list[str]:
    """Returns what a ratio is, and the heads of each class by REF: ``row 0.0+0.3, mask_ignore 1.2``."""
    notes = ["ratio: the metric with the edit over that without."]
    for ref, groups in found.items():
        listed = ", ".join(f"{name} {'+'.join(map(str, heads))}" for name, heads in groups.items())
        notes.append(f"Classes of {ref}, found on other examples: {listed}.")
    return notes


def random_heads_edit(
    subject: LoadedCheckpoint, mode: str, limits: Mapping[str, Any], size: int, count: int
) -> Any:
    """Returns the edit of so many heads at random, without repeats, drawn anew so many times."""
    import numpy as np

    from circuits import draws

    every = head_groups_by_label([ALL], subject.stored.model_config)[ALL]

    def draw_edit(seed: int) -> Any:
        chosen = np.random.default_rng(seed).choice(len(every), size, replace=False)
        return make_head_edits(subject, mode, limits, {"": tuple(every[at] for at in sorted(chosen))})[""]

    return draws(draw_edit, count, subject.seed)


@experiment(
    says={"source": None, "site": None, "heads": None, "positions": ALL, "by_class": False},
    judged_by_task=True,
)
def patch(
    refs: Refs,
    source: Annotated[str, SOURCE],
    site: Annotated[str | Sequence[str], SITE, list[str]] = "z",
    heads: Annotated[str | Sequence[Any] | None, PATCHED_HEADS, list[str]] = None,
    positions: Annotated[str | int | Sequence[int], POSITIONS, str] = ALL,
    by_class: Annotated[bool, CLASSES] = False,
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
    """
    examples = Examples.of(options)
    sites = list(dict.fromkeys(str(Site.parse(each)) for each in as_list(site)))
    for each in sites:
        if heads and not site_has_heads(each):
            raise UserError(f"--heads with --site {each}: this site has no heads; leave --heads out")
    of_input = source == RESAMPLE or bool(NAME.fullmatch(source) and not Path(source).is_dir())
    if examples.tokens is not None and by_class:
        raise UserError(NO_CLASSES)
    if examples.tokens is not None and of_input and source != RESAMPLE:
        raise UserError(f"--source {source}: tokens have no task to name it; write resample or a REF")
    found = resolve_refs(refs, examples)
    lender = None if of_input else resolve_and_check_sources(source, found, single=True)[0]
    given = head_specs_to_labels(heads or ALL), parse_positions_or_mask(positions), by_class
    patching = PatchPlan(source, lender, sites, *given)
    notes = [f"Activations come from {patching.source_text}."]
    if of_input and examples.of_task:
        notes.append(
            "(source): the same output judged by the source's targets; low where it follows the source."
        )
    config: dict[str, Any] = {"source": source if lender is None else lender.ref, "site": sites}
    config |= {"positions": given[1], "by_class": by_class, "heads": given[0] if heads else None}
    checks: Any = {"check_sizes": patching.check_sizes, "check": patching.check}
    return measure("patch", found, options, patching.measure_checkpoint, config=config, notes=notes, **checks)


@dataclass(frozen=True)
class PatchPlan:
    """What is patched, where, and from where; ``lender``: the checkpoint, ``None`` for another input of the model."""

    source: str
    lender: ResolvedCheckpoint | None
    sites: Sequence[str]
    labels: Sequence[str]
    positions: str | tuple[int, ...]
    by_class: bool

    @property
    def source_text(self) -> str:
        """Where activations come from, in words."""
        if self.lender is not None:
            return f"{self.lender.label} (step {self.lender.step}) on the same examples"
        if self.source == RESAMPLE:
            return "another example of the batch, the same at every site"
        return f"the input that the task calls {self.source}"

    def check_sizes(self, sizes: Any, name: str) -> None:
        """Refuses layers and heads that a model of these sizes lacks."""
        for site in self.sites:
            check_layer(f"--site {site}", layer_of_site(site), sizes, name)
            if site_has_heads(site):
                head_groups_by_label(self.labels, sizes)

    def check(self, subject: LoadedCheckpoint) -> None:
        """Refuses positions and sources that a checkpoint's examples do not have."""
        resolve_positions_or_mask(subject, self.positions)
        if self.lender is None:
            source_examples(subject, self.source)

    def measure_checkpoint(self, subject: LoadedCheckpoint) -> MeasuredRows:
        """Measures one checkpoint with the source's activations at each site and choice of heads."""
        from circuits import cache
        from circuits import patch as patches

        if self.lender is not None:
            lender = load_source_model(self.lender, str(subject.tokens.device))
            other, given = None, cache(lender, subject.tokens, self.sites)
        else:
            other = source_examples(subject, self.source)
            given = other if subject.task is None else other.tokens
        where, variants, names = resolve_positions_or_mask(subject, self.positions), {}, {}
        classes = head_classes_held_out(subject).heads_by_class() if self.by_class else {}
        for site in self.sites:
            rows: dict[str, Any] = {"": None}
            if site_has_heads(site):
                rows = head_groups_by_label(self.labels, subject.stored.model_config, layer_of_site(site))
                rows |= classes if layer_of_site(site) is None else {}
            for label, chosen in rows.items():
                row = label if label and len(self.sites) == 1 else f"{site} {label}".strip()
                variants[row] = patches.activations(site, given, chosen, positions=where)
                names[row] = edit_name(site, {"positions": self.positions, "source": self.source})
        # The source of a file's prompts has no answers of its own.
        if subject.task is None or other is None or subject.task.name == "prompts":
            return run_sweep(subject, variants, names)
        return run_sweep(
            subject, variants, names, paired_metrics(subject.task), BatchPair(subject.batch, other)
        )


@dataclass(frozen=True)
class BatchPair:
    """The examples of the run, and row by row those of the source; what ``circuits.sweep`` takes as a batch."""

    run: Any
    source: Any

    def __len__(self) -> int:
        return len(self.run)

    def __getitem__(self, rows: slice) -> BatchPair:
        return BatchPair(self.run[rows], self.source[rows])


def paired_metrics(task: Any) -> Any:
    """Returns the task's metrics by the targets of the run, and of the same output by those of the source."""

    def metrics(output: Any, both: BatchPair) -> dict[str, Any]:
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
