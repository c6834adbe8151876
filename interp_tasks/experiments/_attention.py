"""Measures what attention heads attend to, and how far attention moves when one aspect of the input changes.

A row for each head (the ``variant``) and template (the ``metric``): ``value`` is the share of attention on the
template's keys, ``baseline`` that of uniform attention, ``effect`` their difference, ``intervention`` the head's
class. A row for each head and each change that the task declares in ``attention_moves(batch, seed)``: the share of
attention that goes elsewhere; its ``baseline`` is that between unrelated examples. A row for each head and each move
in ``attention_relocations(batch, seed)``: how often attention follows; its ``baseline`` is that judged by another
example's move. And, of all heads: how many are in each class and how many follow, out of ``baseline``; and, without a
threshold, ``best score: median`` and other quantiles over heads of the score, corrected for chance, of the template
that each comes closest to, and ``largest score: row``, the largest of a template's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.head_classes import (
    READ,
    THRESHOLD,
    HeadClasses,
    check_scored,
    classify_heads,
    record_patterns,
)
from interp_tasks.measurement.head_edits import check_positions_below
from interp_tasks.measurement.options import parse_positions
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options, Refs
from interp_tasks.measurement.table import filled, numbers, value_text
from interp_tasks.pages import Column, Figure, number, with_interval

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

    from circuits.patterns import Classes, Maps

#: What metrics of movement and of following begin with; the rest is what was changed, or what moved.
MOVED, FOLLOWS = "moved by ", "follows "
#: What metrics that count heads begin with; the rest is their class, or what they follow.
COUNTED, FOLLOWING = "heads: ", "heads that follow "
#: What metrics of the distribution of scores over heads begin with: of the template that each head comes closest to its
#: quantiles, and the largest score of each template.
BEST, LARGEST = "best score: ", "largest score: "
QUANTILES = {"smallest": 0.0, "10%": 0.1, "25%": 0.25, "median": 0.5, "75%": 0.75, "90%": 0.9, "largest": 1.0}
#: Their variant: they are about no single head.
ALL_HEADS = "all heads"
MOVED_BY = "Moved by: share of attention that goes to other keys where only this changes."
FOLLOWED = "Follows: share of queries that attend most to where this is, before and after."
#: From so many checkpoints on people see counts by class.
MANY = 3
TEMPLATES = typer.Option(
    "--template", metavar="NAME", help="Score this template; repeat for several.", show_default="all"
)
POSITIONS = typer.Option(
    "--positions",
    metavar="WHERE",
    help="Score: read (the positions the task reads), all, hidden, observed, or positions such as 0,3.",
)
THRESHOLD_OPTION = typer.Option(
    "--threshold", help="A template fits from this score on, corrected for chance."
)
MASK = typer.Option("--mask", metavar="MASK", help="One for all examples: rows, columns, or ..#.,#...,... .")
MOVES = typer.Option("--moves/--no-moves", help="Measure how attention moves with the input.")


@experiment(says={"templates": "all", "positions": READ, "threshold": THRESHOLD, "mask": None, "moves": True})
def attention(
    refs: Refs,
    templates: Annotated[str | Sequence[str], TEMPLATES, list[str]] = (),
    positions: Annotated[str | Sequence[int], POSITIONS, str] = READ,
    threshold: Annotated[float, THRESHOLD_OPTION] = THRESHOLD,
    mask: Annotated[str | None, MASK] = None,
    moves: Annotated[bool, MOVES] = True,
    **options: Unpack[Options],
) -> Result:
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
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Examples`.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    names = [templates] if isinstance(templates, str) else list(templates)
    scoring = Scoring(names, parse_positions(positions), threshold, mask, moves)
    result = measure(
        "attention",
        refs,
        options,
        scoring.measured,
        config=scoring.describe(),
        check_sizes=scoring.check_sizes,
        check=scoring.check,
    )
    notes = scoring.notes(set(result.frame["metric"]))
    return replace(result, notes=notes, data={"maps": scoring.maps, "classes": scoring.classes})


@dataclass(frozen=True)
class Scoring:
    """What attention is scored against, where, and what was found: maps and classes of heads by REF."""

    templates: Sequence[str]
    positions: str | tuple[int, ...] | None
    threshold: float
    mask: str | None
    moves: bool
    maps: dict[str, Maps] = field(default_factory=dict)
    classes: dict[str, Classes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise UserError(f"--threshold {self.threshold:g}: above 0 and at most 1")

    def describe(self) -> dict[str, Any]:
        named = {"templates": self.templates or "all", "positions": self.positions or "all"}
        return {**named, "threshold": self.threshold, "mask": self.mask, "moves": self.moves}

    def check_sizes(self, sizes: Any, name: str) -> None:
        """Refuses positions that a model of these sizes lacks."""
        check_positions_below(sizes.n_ctx, "--positions", self.positions, f"{name} has")

    def check(self, subject: LoadedCheckpoint) -> None:
        """Refuses masks, templates and positions that a checkpoint's examples do not have."""
        check_scored(under_mask(subject, self.mask), self.templates, self.positions)

    def measured(self, subject: LoadedCheckpoint) -> Measured:
        """Measures the heads of one checkpoint."""
        from circuits import patterns

        subject = under_mask(subject, self.mask)
        recorded = record_patterns(subject, subject.tokens)
        found = classify_heads(subject, self.templates, self.positions, self.threshold, recorded, self.moves)
        ref = str(subject.labels["ref"])
        self.maps[ref] = patterns.attention(subject.model, recorded)
        self.classes[ref] = found.classes
        return Measured(table(found), {})

    def notes(self, metrics: set[str]) -> tuple[str, ...]:
        """Returns the notes below the table, of what it has."""
        return (
            "Score: share of attention on the template's keys. Chance: that of uniform attention to all keys that the "
            "query may see.",
            # The rule of the classes is the same for all checkpoints.
            *dict.fromkeys(each.rule for each in self.classes.values()),
            *([MOVED_BY] if any(metric.startswith(MOVED) for metric in metrics) else []),
            *([FOLLOWED] if any(metric.startswith(FOLLOWS) for metric in metrics) else []),
            "Intervals: 95%, bootstrap over examples. The other templates: --format csv or json, --out.",
        )


def under_mask(subject: LoadedCheckpoint, mask: str | None) -> LoadedCheckpoint:
    """Returns the checkpoint with its examples under one mask.

    Raises:
        UserError, TaskError: where the task has no masks, or none of that name.
    """
    if mask is None:
        return subject
    hide = getattr(subject.task, "with_mask", None)
    if hide is None:
        raise UserError(f"--mask {mask}: the examples of {subject.name} are not hidden by a mask")
    return subject.shown(hide(subject.batch, mask))


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
        variant=[f"{layer}.{head}" for layer, head in heads], intervention=[of_head[head] for head in heads]
    )
    return pandas.concat([frame, counts(head_classes), distribution(head_classes)], ignore_index=True).assign(
        site="pattern", position=head_classes.positions[0] if alone else None, engine="naive"
    )


def counts(head_classes: HeadClasses) -> pandas.DataFrame:
    """Counts the heads in each class, and those that surely follow at half of the queries or more."""
    import pandas

    from circuits.patterns._scores import OTHER, UNCLEAR

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
        rows.append({"metric": metric, **numbers(value, (low[0], high[0]))})
    return pandas.DataFrame(rows).assign(variant=ALL_HEADS, n=examples)


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row per head, with a (value, low, high) column for each movement; a row each of many checkpoints."""
    if frame["ref"].nunique() >= MANY:
        return counted(frame)
    possible = [
        str(name).removeprefix(COUNTED)
        for name in frame.loc[frame["variant"] == ALL_HEADS, "metric"]
        if str(name).startswith(COUNTED)
    ]
    frame = frame[frame["variant"] != ALL_HEADS]
    moving = frame["metric"].str.startswith((MOVED, FOLLOWS))
    # Templates that only keep others from being classes say little of a head, and have long names.
    templates = frame[frame["metric"].isin(possible)]
    corrected = templates["effect"] / (1 - templates["baseline"])
    # Its own template where the class is one, else the one that comes closest to it.
    order = templates.assign(corrected=corrected, own=templates["metric"] == templates["intervention"])
    order = order.sort_values(["own", "corrected"], ascending=False, kind="stable")
    rows = (
        order.groupby(["ref", "variant"], sort=False).head(1).sort_index().drop(columns=["corrected", "own"])
    )
    of = {
        (row["ref"], row["variant"], row["metric"]): (row["value"], row["value_ci_low"], row["value_ci_high"])
        for row in frame[moving].to_dict("records")
    }
    for change in dict.fromkeys(frame.loc[moving, "metric"]):
        rows[change] = [of.get((*key, change)) for key in zip(rows["ref"], rows["variant"], strict=True)]
    return rows.reset_index(drop=True)


def counted(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row per checkpoint, with the number of heads in each class that occurs."""
    of_all = frame[(frame["variant"] == ALL_HEADS) & frame["metric"].str.startswith((COUNTED, FOLLOWING))]
    rows = of_all.drop_duplicates("ref").reset_index(drop=True)
    for metric in dict.fromkeys(of_all["metric"]):
        values = of_all[of_all["metric"] == metric].set_index("ref")["value"]
        if values.any():
            rows[metric] = [int(values.get(ref, 0)) for ref in rows["ref"]]
    steps = [str(step) for step in rows["step"]]
    return rows.assign(
        checkpoint=rows["ref"], ref=f"{len(rows)} checkpoints", step=f"{steps[0]} to {steps[-1]}"
    )


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    """Returns the columns that people see: of heads, or of counts of heads over checkpoints."""
    if "checkpoint" in rows:
        names = [str(name) for name in rows.columns if str(name).startswith((COUNTED, FOLLOWING))]
        short = {
            name: name.removeprefix(COUNTED).removeprefix("heads that ").replace("_", " ") for name in names
        }
        return [Column("checkpoint", "checkpoint"), *(Column(short[name], name) for name in names)]
    moves = [str(name) for name in rows.columns if str(name).startswith((MOVED, FOLLOWS))]
    return [
        Column("head", "variant"),
        # A name that can be broken into lines where room is short.
        Column("class", "intervention", lambda row: str(row["intervention"]).replace("_", " ")),
        Column("template", "metric", lambda row: str(row["metric"]).replace("_", " ")),
        Column("chance", "baseline"),
        Column("score [95% CI]", "value", value_text),
        *(Column(in_lines(name), name, filled(name, interval_text)) for name in moves),
    ]


def in_lines(name: str) -> str:
    """Breaks a header into lines, ``moved by`` above ``mask``, so that four columns of numbers fit."""
    first = MOVED if name.startswith(MOVED) else FOLLOWS
    return "\n".join([first.strip(), *name.removeprefix(first).split("_")])


def interval_text(value: tuple[float, float, float]) -> str:
    """Returns a number with its interval."""
    return with_interval(number(value[0]), *value[1:])


def figures(result: Result) -> list[Figure]:
    """Returns the maps of every checkpoint, with each head's class; of many those of the first and the last."""
    drawn, refs = [], list(result.data["maps"])
    if len(refs) >= MANY:
        refs = [refs[0], refs[-1]]
    caption = (
        "A map per head, titled with its class: layers down, heads across; queries down, keys across. Mean of the "
        f"unedited model. {result.examples()}"
    ).strip()
    for ref in refs:
        groups = result.data["classes"][ref].groups
        titles = {
            head: f"{head.layer}.{head.head} {name}" for name, heads in groups.items() for head in heads
        }
        drawn.append(Figure(result.data["maps"][ref].plot(titles=titles), f"Mean attention, {ref}", caption))
    return drawn
