"""Measures what attention heads attend to, and how far attention moves when one aspect of the input changes.

A row for each head (the ``variant``) and template (the ``metric``): ``value`` is the share of attention on the
template's keys, ``baseline`` that of uniform attention, ``effect`` their difference, ``intervention`` the head's
class. A row for each head and each change that the task declares in ``attention_moves(batch, seed)``: the share of
attention that goes elsewhere; its ``baseline`` is that between unrelated examples. A row for each head and each move
in ``attention_relocations(batch, seed)``: how often attention follows; its ``baseline`` is that judged by another
example's move. And, of all heads: how many are in each class and how many follow, out of ``baseline``; and, without a
threshold, ``best score: median`` and ``largest``, over heads of the score, corrected for chance, of the template
that each comes closest to, and ``largest score: row``, the largest of a template's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.errors import UserError
from interp_tasks.measurement.head_classes import (
    READ,
    HeadClassesAndMovements,
    chosen_templates,
    classify_heads,
    scored_positions,
)
from interp_tasks.measurement.loaded_checkpoints import LoadedCheckpoint, Refs
from interp_tasks.measurement.measure_checkpoints import measure
from interp_tasks.measurement.option_parsing import as_list, parse_positions_or_mask
from interp_tasks.measurement.options_and_examples import Options
from interp_tasks.measurement.result import Result, Row, experiment, number_columns, value_text
from interp_tasks.pages import Column, Figure

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
QUANTILES = {"median": 0.5, "largest": 1.0}
#: Their variant: they are about no single head.
ALL_HEADS = "all heads"
SCORE = (
    "Score: share of attention on the template's keys. Chance: that of uniform attention to all keys that the query "
    "may see."
)
MOVEMENTS = {
    MOVED: "Moved by: share of attention that goes to other keys where only this changes.",
    FOLLOWS: "Follows: share of queries that attend most to where this is, before and after.",
}
INTERVALS = "Intervals: 95%, bootstrap over examples. The other templates: --format csv or json, --out."
TEMPLATES = typer.Option(
    "--template", metavar="NAME", help="Score this template; repeat for several.", show_default="all"
)
WHERE_HELP = "Score: read (the positions the task reads), all, hidden, observed, or positions such as 0,3."
POSITIONS = typer.Option("--positions", metavar="WHERE", help=WHERE_HELP)
MASK = typer.Option("--mask", metavar="MASK", help="One for all examples: rows, columns, or ..#.,#...,... .")
MOVES = typer.Option("--moves/--no-moves", help="Measure how attention moves with the input.")


@experiment(says={"templates": "all", "positions": READ, "mask": None, "moves": True})
def attention(
    refs: Refs,
    templates: Annotated[str | Sequence[str], TEMPLATES, list[str]] = (),
    positions: Annotated[str | int | Sequence[int], POSITIONS, str] = READ,
    mask: Annotated[str | None, MASK] = None,
    moves: Annotated[bool, MOVES] = True,
    **options: Unpack[Options],
) -> Result:
    """See what each attention head attends to: scores against templates, a class per head, mean maps.

    A score is the share of attention on the template's keys, beside that of uniform attention. Where the task says how,
    also how far attention moves when only the mask changes, or only the values, and whether it follows a column.

    Args:
        refs: one or several REFs; all see the same examples.
        templates: those that the task declares in ``attention_templates()``, or ``"identity"``, ``"previous"``,
            ``"first"``, ``"duplicate"`` (earlier positions with the query's token) and ``"induction"`` (those right
            after them). Default: all of the task's, without a task those five.
        positions: score these: ``"read"`` (those that the task reads), ``"all"``, positions, or a boolean mask of the
            task's examples by name (``"hidden"``, ``"observed"``).
        mask: one mask for all examples, as the task's ``with_mask(batch, mask)`` reads it: of matrix completion
            ``"rows"``, ``"columns"``, or rows of ``.`` and ``#`` divided by commas. Default: the examples' own.
        moves: measure how far attention moves and what it follows, which takes most of the time; without it no head is
            in a class of heads whose attention must stay.
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Examples`.
    """
    from circuits import patterns

    names = as_list(templates)
    at = parse_positions_or_mask(positions)
    maps: dict[str, Maps] = {}
    classes: dict[str, Classes] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> pandas.DataFrame:
        found = classify_heads(mask_subject_examples(subject, mask), names, at, moves)
        ref = str(subject.labels["ref"])
        maps[ref], classes[ref] = patterns.attention(subject.model, found.recorded), found.classes
        return rows_per_head_and_overall(found)

    def check(subject: LoadedCheckpoint) -> None:
        subject = mask_subject_examples(subject, mask)
        chosen_templates(subject, names)
        scored_positions(subject, at)

    config = {"templates": names or "all", "positions": at, "mask": mask, "moves": moves}
    result = measure("attention", refs, options, measure_checkpoint, config=config, check=check)
    metrics = result.frame["metric"].str
    # The rule of the classes is the same for all checkpoints.
    rules = dict.fromkeys(each.rule for each in classes.values())
    moved = [note for start, note in MOVEMENTS.items() if metrics.startswith(start).any()]
    return replace(result, notes=(SCORE, *rules, *moved, INTERVALS), data={"maps": maps, "classes": classes})


def mask_subject_examples(subject: LoadedCheckpoint, mask: str | None) -> LoadedCheckpoint:
    """Returns the checkpoint with its examples under one mask."""
    if mask is None:
        return subject
    hide = getattr(subject.task, "with_mask", None)
    if hide is None:
        raise UserError(f"--mask {mask}: the examples of {subject.name} are not hidden by a mask")
    return subject.shown(hide(subject.batch, mask))


def rows_per_head_and_overall(found: HeadClassesAndMovements) -> pandas.DataFrame:
    """Returns a checkpoint's rows: each head's templates, movements and relocations, then those of all heads."""
    import pandas

    from circuits.patterns._template_scores_and_classes import OTHER, UNCLEAR

    def tidy_columns(frame: pandas.DataFrame, number: str, baseline: str, metric: Any) -> pandas.DataFrame:
        names = {f"{number}{end}": f"value{end}" for end in ("", "_ci_low", "_ci_high")}
        frame = frame.drop(columns="value", errors="ignore").rename(columns={**names, baseline: "baseline"})
        shared = ["layer", "head", "effect", "effect_ci_low", "effect_ci_high", "n"]
        return frame[[*shared, *names.values(), "baseline"]].assign(metric=metric)

    scores, moved, followed = found.scores, found.moves.items(), found.followed.items()
    parts = [
        tidy_columns(scores.frame, "score", "chance", scores.frame["template"]),
        *(tidy_columns(one.frame, "distance", "unpaired", f"{MOVED}{name}") for name, one in moved),
        *(tidy_columns(one.frame, "share", "unpaired", f"{FOLLOWS}{name}") for name, one in followed),
    ]
    frame = pandas.concat(parts, ignore_index=True)
    frame = frame.sort_values(["layer", "head"], kind="stable", ignore_index=True)
    heads = list(zip(frame["layer"], frame["head"], strict=True))
    frame = frame.assign(
        variant=[f"{layer}.{head}" for layer, head in heads],
        intervention=[found.classes[head] for head in heads],
    )
    # How many heads are in each class, and how many surely follow at half of the queries or more.
    classes = (*found.possible, UNCLEAR, OTHER)
    counts = {f"{COUNTED}{name}": len(found.classes.groups.get(name, ())) for name in classes}
    counts |= {f"{FOLLOWING}{name}": len(one.heads()) for name, one in followed}
    number_of = float(len(scores.heads))
    counted = [{"metric": name, "value": float(n), "baseline": number_of} for name, n in counts.items()]
    of_all = pandas.DataFrame([*counted, *score_distribution_rows(found)]).assign(
        variant=ALL_HEADS, n=scores.mass.shape[-1]
    )
    alone = isinstance(found.positions, (list, tuple)) and len(found.positions) == 1
    return pandas.concat([frame, of_all], ignore_index=True).assign(
        site="pattern", position=found.positions[0] if alone else None, engine="naive"
    )


def score_distribution_rows(found: HeadClassesAndMovements) -> Iterator[Row]:
    """Yields the distribution over heads of scores, corrected for chance, with intervals over examples.

    A quantile, or the largest, is taken in each resample anew.
    """
    import numpy as np

    from circuits.statistics import LEVEL, percentile_bounds, ratio

    scores, possible = found.scores, found.possible
    columns = [scores.templates.index(name) for name in possible]

    def best_and_largest_scores(score: Any, expected: Any) -> dict[str, Any]:
        """Returns values [draw] by metric."""
        corrected = ratio(score - expected, 1 - expected)[..., columns]
        # A template without a query, or that is all that can be seen, is no template for anybody.
        corrected = np.where(np.isnan(corrected), -np.inf, corrected)
        best, largest = corrected.max(-1), corrected.max(-2)
        named = {f"{BEST}{name}": np.quantile(best, at, axis=-1) for name, at in QUANTILES.items()}
        return named | {f"{LARGEST}{name}": largest[..., at] for at, name in enumerate(possible)}

    mass, chance, queries = (part.sum(-1)[None] for part in (scores.mass, scores.chance, scores.queries))
    values = best_and_largest_scores(ratio(mass, queries), ratio(chance, queries))
    # Of one example there are no resamples.
    resampled = best_and_largest_scores(*scores.resampled()) if scores.mass.shape[-1] > 1 else {}
    for metric, (value,) in values.items():
        if np.isfinite(value):
            low, high = np.full((2, 1), np.nan)
            if resampled:
                # A resample in which the template has no query says nothing of it.
                known = np.where(np.isneginf(resampled[metric]), np.nan, resampled[metric])[:, None]
                low, high = percentile_bounds(known, LEVEL)
            yield {"metric": metric, **number_columns(value, (low[0], high[0]))}


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row per head: its template, and a text of a number with its interval for each movement."""
    counted = frame.loc[frame["variant"] == ALL_HEADS, "metric"].str
    possible = counted.removeprefix(COUNTED)[counted.startswith(COUNTED)]
    frame = frame[frame["variant"] != ALL_HEADS]
    # Templates that only keep others from being classes say little of a head, and have long names.
    templates = frame[frame["metric"].isin(possible)]
    corrected = templates["effect"] / (1 - templates["baseline"])
    # Its own template where the class is one, else the one that comes closest to it.
    order = templates.assign(corrected=corrected, own=templates["metric"] == templates["intervention"])
    order = order.sort_values(["own", "corrected"], ascending=False, kind="stable")
    order = order.drop(columns=["corrected", "own"])
    rows = order.groupby(["ref", "variant"], sort=False).head(1).sort_index()
    moving = frame[frame["metric"].str.startswith((MOVED, FOLLOWS))]
    texts = moving.assign(text=[value_text(row) for row in moving.to_dict("records")])
    for change, part in texts.groupby("metric", sort=False):
        of = part.set_index(["ref", "variant"])["text"]
        rows[change] = [of.get(key, "") for key in zip(rows["ref"], rows["variant"], strict=True)]
    return rows.reset_index(drop=True)


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    """Returns the columns that people see of heads."""
    moves = [str(name) for name in rows.columns if str(name).startswith((MOVED, FOLLOWS))]
    # Headers and names that can be broken into lines where room is short.
    headers = {name: re.sub("[ _]", "\n", name).replace("moved\nby", "moved by") for name in moves}
    return [
        Column("head", "variant"),
        Column("class", "intervention", lambda row: str(row["intervention"]).replace("_", " ")),
        Column("template", "metric", lambda row: str(row["metric"]).replace("_", " ")),
        Column("chance", "baseline"),
        Column("score [95% CI]", "value", value_text),
        *(Column(header, name) for name, header in headers.items()),
    ]


def figures(result: Result) -> list[Figure]:
    """Returns the maps of every checkpoint, with each head's class."""
    caption = (
        "A map per head, titled with its class: layers down, heads across; queries down, keys across. Mean of the "
        f"unedited model. {result.examples()}"
    ).strip()
    drawn = []
    for ref, maps in result.data["maps"].items():
        groups = result.data["classes"][ref].groups
        titles = {head: f"{head.layer}.{head.head} {name}" for name, of in groups.items() for head in of}
        drawn.append(Figure(maps.plot(titles=titles), f"Mean attention, {ref}", caption))
    return drawn
