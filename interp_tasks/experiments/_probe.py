"""Fits linear probes to activations, beside the same on shuffled targets and on an untrained model.

Per target, site, metric and split of the entries a row whose ``baseline`` is the same probe on shuffled targets, so
that ``effect`` is the selectivity, and one whose ``baseline`` is the same probe on the untrained model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from circuits.model.sites import KINDS
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.probes import SAMPLES, ProbeSettings, probed
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options, check_has_task
from interp_tasks.measurement.table import value_text
from interp_tasks.pages import Column, Figure, signed

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

#: How ``intervention`` ends, which says of a row what its baseline is.
AGAINST_SHUFFLED, AGAINST_UNTRAINED = "against shuffled targets", "against the untrained model"
#: Metrics that are left out: r2 and abs_cosine say the same on a scale that all targets share.
NOT_SHOWN = ("mse", "cosine")
SITES = typer.Option(
    "--site", metavar="SITE", help=f"{', '.join(KINDS)}; in layer 1 alone z.1. Repeat for several."
)
TARGETS = typer.Option("--target", metavar="NAME", help="One that the task declares; repeat. Default: all.")
HEADS = typer.Option("--heads", metavar="SPEC", help="These heads one by one, or all.")
POSITIONS = typer.Option("--positions", metavar="0,2", help="Look there, not where the task says.")
EACH_POSITION = typer.Option("--each-position", help="A probe for each position, not one for all.")
INTERCEPT = typer.Option("--intercept", help="Fit an intercept.")
RIDGE = typer.Option("--ridge", metavar="0.1,1,10", help="Penalty; of several the best by cross-validation.")
FOLDS = typer.Option("--folds", help="Folds of examples, for choosing a penalty.")
HELD_OUT = typer.Option("--held-out", help="Fraction, or number, of examples to score on.")
SHUFFLES = typer.Option("--shuffles", help="How often targets are shuffled.")
UNTRAINED = typer.Option("--untrained/--no-untrained", help="Compare with an untrained model.")


@experiment(
    says={
        "method": None,
        "sites": ["resid_post"],
        "heads": None,
        "positions": None,
        "each_position": False,
        "intercept": False,
        "held_out": 0.25,
        "shuffles": 1,
    },
    samples=SAMPLES,
)
def probe(
    refs: str | Sequence[str],
    sites: Annotated[str | Sequence[str], SITES, list[str]] = ("resid_post",),
    targets: Annotated[str | Sequence[str], TARGETS, list[str]] = (),
    *,
    heads: Annotated[str | None, HEADS] = None,
    positions: Annotated[str | Sequence[int] | None, POSITIONS, str | None] = None,
    each_position: Annotated[bool, EACH_POSITION] = False,
    intercept: Annotated[bool, INTERCEPT] = False,
    ridge: Annotated[str | Sequence[float] | None, RIDGE, str | None] = None,
    folds: Annotated[int, FOLDS] = 5,
    held_out: Annotated[float | int, HELD_OUT, float] = 0.25,
    shuffles: Annotated[int, SHUFFLES] = 1,
    untrained: Annotated[bool, UNTRAINED] = True,
    **options: Unpack[Options],
) -> Result:
    """Fit linear probes from activations to what the task declares, and score them on other examples.

    Beside each stands the same probe on shuffled targets, and on an untrained model.

    Args:
        sites: ``"resid_post"``, ``"z.1"``, ...; a probe of its own in each layer.
        targets: names of the task's ``probe_targets``; none: all.
        heads: at q, k, v, z, scores and pattern, these heads one by one (``"all"``, ``"0.1+1.0-2"``).
        positions: look there (``"0,2"``), not where the task says; ``each_position``: a probe for each.
        ridge, folds: ``None``: least squares; a penalty, or several (``"0.1,1,10"``) to choose from by folds.
        held_out: the fraction, or from 2 the number, of examples that probes are scored on.
        shuffles, untrained: how often targets are exchanged for the control; whether there is an untrained model.
        options: as :class:`Options` has them; 2048 samples by default.

    Raises:
        UserError, TaskError, CircuitsError: in one line; a UserError for a task that declares no targets.
    """
    settings = ProbeSettings.read(
        sites=sites,
        targets=targets,
        heads=heads,
        positions=positions,
        each_position=each_position,
        intercept=intercept,
        ridge=ridge,
        folds=folds,
        held_out=held_out,
        shuffles=shuffles,
        untrained=untrained,
    )
    check_has_task("probe", options)
    tables: dict[str, pandas.DataFrame] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        table = probed(subject, settings)
        tables[str(subject.labels["ref"])] = table
        return Measured(tidy_rows(table, settings), {})

    options = {**options, "samples": options.get("samples") or SAMPLES}
    config, parts = {"method": settings.method, **settings.describe()}, settings.parts()
    result = measure(
        "probe", refs, options, measure_checkpoint, config=config, parts=parts, check=settings.check
    )
    return replace(result, notes=tuple(notes(settings, tables)), data={"tables": tables})


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns rows against shuffled targets, the other row's control in a column ``untrained``."""
    frame = frame[~frame["metric"].str.split(" ").str[0].isin(NOT_SHOWN)]
    other = frame["intervention"].str.endswith(AGAINST_UNTRAINED)
    keys = ["ref", "variant", "metric"]
    untrained_rows = frame.loc[other, [*keys, "baseline"]].rename(columns={"baseline": "untrained"})
    return frame[~other].merge(untrained_rows, how="left", on=keys)


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns in which readers see ``view_rows``."""
    untrained = [Column("untrained", "untrained")] if frame["untrained"].notna().any() else []
    return [
        Column("variant", "variant"),
        Column("metric", "metric"),
        Column("baseline", "baseline"),
        *untrained,
        Column("value [95% CI]", "value", value_text),
        Column("effect", "effect", lambda row: signed(row["effect"])),
    ]


def tidy_rows(table: pandas.DataFrame, settings: ProbeSettings) -> pandas.DataFrame:
    """Returns rows of the tidy table: one per control, beside each other."""
    import pandas

    # Target by target, however many places there are.
    order = {target: number for number, target in enumerate(dict.fromkeys(table["target"]))}
    table = table.sort_values("target", key=lambda names: names.map(order), kind="stable", ignore_index=True)
    site = table["site"] + table["layer"].map(lambda layer: "" if pandas.isna(layer) else f".{layer}")
    for column, mark in (("head", "."), ("position", "@")):
        site += table[column].map(lambda number, mark=mark: "" if pandas.isna(number) else f"{mark}{number}")
    split = table["split"].map(lambda split: "" if split == "all" else f" ({split})")
    common = table[
        ["site", "layer", "head", "position", "value", "value_ci_low", "value_ci_high", "n"]
    ].assign(variant=table["target"] + " " + site, metric=table["metric"] + split, engine="streamed")
    controls = [("shuffled", "selectivity", AGAINST_SHUFFLED)]
    if settings.untrained:
        controls.append(("untrained", "over_untrained", AGAINST_UNTRAINED))
    parts = [
        common.assign(
            intervention=f"{settings.method}, {against}",
            baseline=table[control],
            effect=table[difference],
            effect_ci_low=table[f"{difference}_ci_low"],
            effect_ci_high=table[f"{difference}_ci_high"],
        )
        for control, difference, against in controls
    ]
    return pandas.concat(parts).sort_index(kind="stable").reset_index(drop=True)


def notes(settings: ProbeSettings, tables: Mapping[str, pandas.DataFrame]) -> list[str]:
    """Returns the notes below the table."""
    first = next(iter(tables.values()))
    fitted, scored = int(first["fit_n"].iloc[0]), int(first["n"].iloc[0])
    intercept = "with" if settings.intercept else "without"
    texts = [
        f"Probes: {settings.method} {intercept} intercept, fitted on {fitted} examples, scored on {scored} others.",
        "baseline: the same probe on targets exchanged between examples. effect: value − baseline, the selectivity.",
    ]
    if settings.untrained:
        texts.append("untrained: the same probe on a model of this architecture before any training.")
    return [
        *texts,
        "Intervals: 95%, bootstrap over held-out examples, differences paired; how else fits could have come out "
        "is not in them.",
        *also_measured(tables),
    ]


def also_measured(tables: Mapping[str, pandas.DataFrame]) -> list[str]:
    """Returns a note on the measured metrics that the printed table leaves out; none for classes."""
    measured = {metric for table in tables.values() for metric in table["metric"]}
    left_out = [metric for metric in NOT_SHOWN if metric in measured]
    if not left_out:
        return []
    return [f"Also measured: {' and '.join(left_out)}; see --format json or csv, --out, --plot."]


def figures(result: Result) -> list[Figure]:
    """Returns a row of panels per target, a panel per metric: values over layers, with both controls."""
    import pandas

    from circuits.figures.results import probe_figure

    caption = (
        "Lines: probes on held-out examples, bands their 95% intervals. Dotted: the same on targets that were "
        "exchanged between examples. Dashed: the same on an untrained model. Of a single layer: points, crosses "
        "and open circles."
    )
    tables = [table.assign(ref=ref) for ref, table in result.data["tables"].items()]
    figure = probe_figure(pandas.concat(tables, ignore_index=True), by="ref")
    return [Figure(figure, "Scores of probes on held-out examples, by layer", caption)]
