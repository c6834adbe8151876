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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from circuits.figures.layout import draw
from circuits.figures.panels import Series, curve
from interp_tasks.errors import UserError
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
from interp_tasks.measurement.table import numbers
from interp_tasks.pages import Column, Figure, number, with_interval

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
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
#: From so many checkpoints on people see counts by class and scores over steps.
MANY = 3
Examined = TypeVar("Examined", LoadedCheckpoint, PendingCheckpoint)
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
    refs: str | Sequence[str],
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
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Options`.

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

    scored = {"templates": template_names or "all", "positions": at or "all"}
    config = {**scored, "threshold": threshold, "mask": mask, "moves": moves}
    parts = ModelParts(positions={"--positions": at})
    result = measure("attention", refs, options, measure_checkpoint, config=config, parts=parts, check=check)
    note_texts = notes(classes, result.frame["metric"])
    return replace(result, notes=note_texts, data={"maps": maps, "classes": classes})


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


def over_steps(frame: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Draws scores corrected for chance, and shares that move or follow, by step; colours say the layer."""
    heads = frame[frame["variant"] != ALL_HEADS]
    panels = []
    for metric, rows in heads.groupby("metric", sort=False):
        series = {}
        for (run, variant), part in rows.groupby(["run", "variant"], sort=False):
            line = part.sort_values("step")
            layer = int(line["layer"].iloc[0])
            series[f"{variant} of {run}"] = Series(
                line["step"].tolist(),
                shown(line, str(metric)).tolist(),
                hover=[f"{run}<br>{variant}, step {step}" for step in line["step"]],
                style={"name": f"layer {layer}", "line": {"width": 1.5}},
                look=layer,
            )
        panels.append(curve(series, str(metric), y="", height=200))
    return draw(panels, columns=min(3, len(panels)))


def shown(rows: pandas.DataFrame, metric: str) -> pandas.Series:
    """Returns the values to draw: scores corrected for chance (0 at chance, 1 all attention), shares unchanged."""
    if metric.startswith((MOVED, FOLLOWS)):
        return rows["value"]
    return rows["effect"] / (1 - rows["baseline"])


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
    columns = [
        Column("head", "variant"),
        Column("class", "intervention", _words("intervention")),
        Column("template", "metric", _words("metric")),
        Column("chance", "baseline"),
        Column("score [95% CI]", "value", _interval("value", "value_ci_low", "value_ci_high")),
    ]
    moves = [name for name in rows.columns if str(name).startswith((MOVED, FOLLOWS))]
    return [*columns, *(Column(_in_lines(str(name)), str(name), _moved(str(name))) for name in moves)]


def _in_lines(name: str) -> str:
    """Breaks a header into lines, ``moved by`` above ``mask``, so that four columns of numbers fit."""
    first = MOVED if name.startswith(MOVED) else FOLLOWS
    return "\n".join([first.strip(), *name.removeprefix(first).split("_")])


def _interval(value: str, low: str, high: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: with_interval(number(row[value]), row[low], row[high])


def _words(key: str) -> Callable[[Mapping[str, Any]], str]:
    """Returns a name that can be broken into lines where room is short."""
    return lambda row: str(row[key]).replace("_", " ")


def _moved(name: str) -> Callable[[Mapping[str, Any]], str]:
    def text(row: Mapping[str, Any]) -> str:
        value = row[name]
        return with_interval(number(value[0]), value[1], value[2]) if isinstance(value, tuple) else ""

    return text


def figures(result: Result) -> list[Figure]:
    """Returns the maps of every checkpoint, with each head's class; of many scores over steps, and two of the maps."""
    drawn, refs = [], list(result.data["maps"])
    if len(refs) >= MANY:
        caption = "A line per head. Score: share of attention, corrected for chance."
        drawn.append(Figure(over_steps(result.frame), "Scores over steps", caption))
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
