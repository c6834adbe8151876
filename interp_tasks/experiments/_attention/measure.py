"""Measures what attention heads attend to, and how far attention moves when one aspect of the input changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from interp_tasks.errors import UserError
from interp_tasks.experiments._attention.table import (
    ALL_HEADS,
    BEST,
    COUNTED,
    FOLLOWING,
    FOLLOWS,
    LARGEST,
    MANY,
    MOVED,
    QUANTILES,
)
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.heads.classes import (
    READ,
    THRESHOLD,
    HeadClasses,
    check_scored,
    classify_heads,
    run_once,
)
from interp_tasks.measurement.model_parts import ModelParts
from interp_tasks.measurement.options import parse_positions
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options, PendingCheckpoint
from interp_tasks.pages import Figure

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
    from typing_extensions import Unpack

    from circuits.patterns import Classes, Maps

Examined = TypeVar("Examined", LoadedCheckpoint, PendingCheckpoint)


@dataclass(frozen=True, repr=False)
class AttentionResult(Result):
    """A :class:`Result` with the mean attention maps behind it, by REF.

    Attributes:
        maps: the mean map of every head; of all queries, whatever ``positions`` were scored.
        classes: the class of every head.
    """

    maps: Mapping[str, Maps] = field(default_factory=dict)
    classes: Mapping[str, Classes] = field(default_factory=dict)

    def plot(self, ref: str | None = None) -> plotly.graph_objects.Figure:
        """Returns the mean maps of one checkpoint (default: the last), with each head's class."""
        ref = list(self.maps)[-1] if ref is None else ref
        classes = self.classes[ref]
        titles = {
            head: f"{head.layer}.{head.head} {name}"
            for name, heads in classes.groups.items()
            for head in heads
        }
        return self.titled(self.maps[ref].plot(titles=titles), f"Mean attention, {ref}")

    def over_steps(self) -> plotly.graph_objects.Figure:
        """Scores of every head at the steps of its run: a panel per template and movement."""
        from interp_tasks.experiments._attention.figure import over_steps

        return over_steps(self.frame)

    def page_title(self) -> str:
        return self.experiment

    def figures(self) -> list[Figure]:
        """Returns the maps of every checkpoint; of many checkpoints scores over steps, and two of the maps."""
        figures, refs = [], list(self.maps)
        if len(refs) >= MANY:
            caption = "A line per head. Score: share of attention, corrected for chance."
            figures.append(Figure(self.over_steps(), "Scores over steps", caption))
            refs = [refs[0], refs[-1]]
        return figures + [Figure(self.plot(ref), f"Mean attention, {ref}", self.caption()) for ref in refs]

    def caption(self) -> str:
        return (
            "A map per head, titled with its class: layers down, heads across; queries down, keys across. Mean of the "
            f"unedited model. {self.examples()}"
        ).strip()


@experiment(says={"templates": "all", "positions": READ, "threshold": THRESHOLD, "mask": None, "moves": True})
def attention(
    refs: str | Sequence[str],
    templates: Annotated[
        str | Sequence[str],
        typer.Option(
            "--template", metavar="NAME", help="Score this template; repeat for several.", show_default="all"
        ),
        list[str],
    ] = (),
    positions: Annotated[
        str | Sequence[int],
        typer.Option(
            "--positions",
            metavar="WHERE",
            help="Score: read (the positions the task reads), all, hidden, observed, or positions such as 0,3.",
        ),
        str,
    ] = READ,
    threshold: Annotated[
        float, typer.Option("--threshold", help="A template fits from this score on, corrected for chance.")
    ] = THRESHOLD,
    mask: Annotated[
        str | None,
        typer.Option(
            "--mask", metavar="MASK", help="One for all examples: rows, columns, or ..#.,#...,... ."
        ),
    ] = None,
    moves: Annotated[
        bool, typer.Option("--moves/--no-moves", help="Measure how attention moves with the input.")
    ] = True,
    **options: Unpack[Options],
) -> AttentionResult:
    """See what each attention head attends to: scores against templates, a class per head, mean maps.

    Templates are the task's (row, column, identity, ... of a matrix), or identity, previous, first, duplicate and
    induction. A score is the share of attention on the template's keys, beside that of uniform attention. Where the
    task says how, also how far attention moves when only the mask changes, or only the values, and whether it follows a
    column that moves. Of three checkpoints or more the table counts heads by class.

    Args:
        refs: one or several REFs; all see the same examples.
        templates: names of templates that the task declares in ``attention_templates()``, or ``"identity"``,
            ``"previous"``, ``"first"``, ``"duplicate"`` (earlier positions with the query's token) and ``"induction"``
            (those right after them), which need no task. Default: all of the task's, without a task those five.
        positions: score these: ``"read"``, the positions whose output the task reads, ``"all"``, positions, or a
            boolean mask of the task's examples by name (``"hidden"``, ``"observed"``).
        threshold: of ``circuits.patterns.classify``.
        mask: one mask for all examples, as the task's ``with_mask(batch, mask)`` reads it: of matrix completion
            ``"rows"``, ``"columns"``, or rows of ``.`` and ``#`` divided by commas. Default: the examples' own.
        moves: measure how far attention moves and what it follows, which takes most of the time; without it no head is
            in a class of heads whose attention must stay.
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Options`.

    Returns:
        An :class:`AttentionResult`. A row for each head (the ``variant``) and template (the ``metric``): ``value``
        is the share of attention on the template's keys, ``baseline`` that of uniform attention, ``effect`` their
        difference, ``intervention`` the head's class. A row for each head and each change that the task declares in
        ``attention_moves(batch, seed)``: the share of attention that goes elsewhere; its ``baseline`` is that between
        unrelated examples. A row for each head and each move in ``attention_relocations(batch, seed)``: how often
        attention follows; its ``baseline`` is that judged by another example's move. And, of all heads: how many are in
        each class and how many follow, out of ``baseline``; and, without a threshold, ``best score: median`` and other
        quantiles over heads of the score, corrected for chance, of the template that each comes closest to, and
        ``largest score: row``, the largest of a template's.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    template_names = [templates] if isinstance(templates, str) else list(templates)
    at = parse_positions(positions)
    check_threshold(threshold)
    maps: dict[str, Maps] = {}
    classes: dict[str, Classes] = {}

    def check(planned: PendingCheckpoint) -> None:
        check_scored(under(planned, mask), template_names, at)

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        from circuits import patterns

        subject = under(subject, mask)
        recorded = run_once(subject, subject.tokens)
        head_classes = classify_heads(subject, template_names, at, threshold, recorded, moves)
        ref = str(subject.labels["ref"])
        maps[ref] = patterns.attention(subject.model, recorded)
        classes[ref] = head_classes.classes
        return Measured(table(head_classes), {})

    result = measure(
        "attention",
        refs,
        options,
        measure_checkpoint,
        config={
            "templates": template_names or "all",
            "positions": at or "all",
            "threshold": threshold,
            "mask": mask,
            "moves": moves,
        },
        parts=ModelParts(positions={"--positions": at}),
        check=check,
    )
    return AttentionResult.of(
        result, notes=notes(classes, result.frame["metric"]), maps=maps, classes=classes
    )


def under(subject: Examined, mask: str | None) -> Examined:
    """Returns the subject with its examples under one mask.

    Raises:
        UserError, TaskError: where the task has no masks, or none of that name.
    """
    if mask is None:
        return subject
    hide = getattr(subject.task, "with_mask", None)
    if hide is None:
        raise UserError(f"--mask {mask}: the examples of {subject.name} are not hidden by a mask")
    batch = hide(subject.batch, mask)
    return replace(subject, batch=batch, tokens=batch.tokens)


def notes(classes: Mapping[str, Classes], metrics: pandas.Series) -> tuple[str, ...]:
    """Returns the notes below the table; the rule of the classes is the same for all checkpoints."""
    rules = list(dict.fromkeys(head_classes.rule for head_classes in classes.values()))
    moved = metrics.str.startswith(MOVED).any()
    follows = metrics.str.startswith(FOLLOWS).any()
    return (
        "Score: share of attention on the template's keys. Chance: that of uniform attention to all keys that the "
        "query may see.",
        *rules,
        *(["Moved by: share of attention that goes to other keys where only this changes."] if moved else []),
        *(
            ["Follows: share of queries that attend most to where this is, before and after."]
            if follows
            else []
        ),
        "Intervals: 95%, bootstrap over examples. The other templates: --format csv or json, --out.",
    )


def check_threshold(threshold: float) -> None:
    if not 0 < threshold <= 1:
        raise UserError(f"--threshold {threshold:g}: above 0 and at most 1")


def table(head_classes: HeadClasses) -> pandas.DataFrame:
    """Returns a checkpoint's rows: each head's templates, movements and relocations, then counts of heads."""
    import pandas

    shared = ["layer", "head", "effect", "effect_ci_low", "effect_ci_high", "n"]

    def measured(frame: pandas.DataFrame, number: str, baseline: str) -> pandas.DataFrame:
        names = {f"{number}{end}": f"value{end}" for end in ("", "_ci_low", "_ci_high")}
        return frame[[*shared, *names, baseline]].rename(columns=names | {baseline: "baseline"})

    scores = head_classes.scores.frame
    parts = [measured(scores, "score", "chance").assign(metric=scores["template"])]
    for change, movement in head_classes.moves.items():
        parts.append(measured(movement.frame, "distance", "unpaired").assign(metric=f"{MOVED}{change}"))
    for name, following in head_classes.followed.items():
        parts.append(measured(following.frame, "share", "unpaired").assign(metric=f"{FOLLOWS}{name}"))
    frame = pandas.concat(parts, ignore_index=True).sort_values(
        ["layer", "head"], kind="stable", ignore_index=True
    )
    of_head = {
        (row["layer"], row["head"]): row["class"] for row in head_classes.classes.frame.to_dict("records")
    }
    heads = list(zip(frame["layer"], frame["head"], strict=True))
    alone = isinstance(head_classes.positions, (list, tuple)) and len(head_classes.positions) == 1
    frame = frame.assign(
        variant=[f"{layer}.{head}" for layer, head in heads],
        intervention=[of_head[head] for head in heads],
    )
    return pandas.concat([frame, counts(head_classes), distribution(head_classes)], ignore_index=True).assign(
        site="pattern", position=head_classes.positions[0] if alone else None, engine="naive"
    )


def counts(head_classes: HeadClasses) -> pandas.DataFrame:
    """Counts the heads in each class, and those that surely follow at half of the queries or more."""
    import pandas

    from circuits.patterns._classes import OTHER, UNCLEAR

    classes = (*head_classes.possible, UNCLEAR, OTHER)
    numbers = {f"{COUNTED}{name}": len(head_classes.classes.groups.get(name, ())) for name in classes}
    numbers |= {f"{FOLLOWING}{name}": len(each.heads()) for name, each in head_classes.followed.items()}
    return pandas.DataFrame(
        {
            "variant": ALL_HEADS,
            "metric": list(numbers),
            "value": [float(number) for number in numbers.values()],
            "baseline": float(len(head_classes.scores.heads)),
            "n": head_classes.scores.mass.shape[-1],
        }
    )


def distribution(head_classes: HeadClasses) -> pandas.DataFrame:
    """Returns the distribution over heads of scores, corrected for chance, with intervals over examples.

    A quantile, or the largest, is taken in each resample anew.
    """
    import numpy as np
    import pandas

    from circuits.statistics import LEVEL, interval, ratio

    scores = head_classes.scores
    mass, chance, queries = (part.sum(-1)[None] for part in (scores.mass, scores.chance, scores.queries))
    resampled_scores, by_chance = scores.resampled()
    examples = scores.mass.shape[-1]

    def of(score: Any, expected: Any) -> dict[str, Any]:
        """Returns values [draw] by metric."""
        corrected = ratio(score - expected, 1 - expected)[
            ..., [scores.templates.index(n) for n in head_classes.possible]
        ]
        # A template without a query, or that is all that can be seen, is no template for anybody.
        corrected = np.where(np.isnan(corrected), -np.inf, corrected)
        best, largest = corrected.max(-1), corrected.max(-2)
        named = {f"{BEST}{name}": np.quantile(best, at, axis=-1) for name, at in QUANTILES.items()}
        return named | {f"{LARGEST}{name}": largest[..., at] for at, name in enumerate(head_classes.possible)}

    values = of(ratio(mass, queries), ratio(chance, queries))
    resampled = of(resampled_scores, by_chance)
    rows = []
    for metric, (value,) in values.items():
        if not np.isfinite(value):
            continue
        # A resample in which the template has no query says nothing of it.
        known = np.where(np.isneginf(resampled[metric]), np.nan, resampled[metric])[:, None]
        low, high = interval(known, LEVEL) if examples > 1 else ([np.nan], [np.nan])
        rows.append({"metric": metric, "value": value, "value_ci_low": low[0], "value_ci_high": high[0]})
    return pandas.DataFrame(rows).assign(variant=ALL_HEADS, n=examples)
