"""Fits linear probes to activations, beside the same on shuffled targets and on an untrained model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from circuits.model.sites import KINDS
from interp_tasks.experiments._probe.table import notes, tidy_rows
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.probes import SAMPLES, ProbeSettings, probed
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options, check_has_task

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
    from typing_extensions import Unpack


@dataclass(frozen=True, repr=False)
class ProbeResult(Result):
    """A :class:`Result` with the tables of ``circuits.probe`` behind it, by REF."""

    tables: Mapping[str, pandas.DataFrame] = field(default_factory=dict)

    def plot(self) -> plotly.graph_objects.Figure:
        """Returns a row of panels per target, a panel per metric: values over layers, with both controls."""
        from interp_tasks.experiments._probe.figure import figure

        return self.titled(figure(self.tables), self.heading())

    def page_title(self) -> str:
        return f"probe: {self.config['method']}"

    def heading(self) -> str:
        return "Scores of probes on held-out examples, by layer"

    def caption(self) -> str:
        return (
            "Lines: probes on held-out examples, bands their 95% intervals. Dotted: the same on targets that were "
            "exchanged between examples. Dashed: the same on an untrained model. Of a single layer: points, crosses "
            "and open circles."
        )


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
    sites: Annotated[
        str | Sequence[str],
        typer.Option(
            "--site", metavar="SITE", help=f"{', '.join(KINDS)}; in layer 1 alone z.1. Repeat for several."
        ),
        list[str],
    ] = ("resid_post",),
    targets: Annotated[
        str | Sequence[str],
        typer.Option("--target", metavar="NAME", help="One that the task declares; repeat. Default: all."),
        list[str],
    ] = (),
    *,
    heads: Annotated[
        str | None, typer.Option("--heads", metavar="SPEC", help="These heads one by one, or all.")
    ] = None,
    positions: Annotated[
        str | Sequence[int] | None,
        typer.Option("--positions", metavar="0,2", help="Look there, not where the task says."),
        str | None,
    ] = None,
    each_position: Annotated[
        bool, typer.Option("--each-position", help="A probe for each position, not one for all.")
    ] = False,
    intercept: Annotated[bool, typer.Option("--intercept", help="Fit an intercept.")] = False,
    ridge: Annotated[
        str | Sequence[float] | None,
        typer.Option("--ridge", metavar="0.1,1,10", help="Penalty; of several the best by cross-validation."),
        str | None,
    ] = None,
    folds: Annotated[int, typer.Option("--folds", help="Folds of examples, for choosing a penalty.")] = 5,
    held_out: Annotated[
        float | int, typer.Option("--held-out", help="Fraction, or number, of examples to score on."), float
    ] = 0.25,
    shuffles: Annotated[int, typer.Option("--shuffles", help="How often targets are shuffled.")] = 1,
    untrained: Annotated[
        bool, typer.Option("--untrained/--no-untrained", help="Compare with an untrained model.")
    ] = True,
    **options: Unpack[Options],
) -> ProbeResult:
    """Fit linear probes from activations to what the task declares, and score them on other examples.

    Beside each stands the same probe on shuffled targets, and on an untrained model.

    Args:
        refs: one or several REFs; all see the same examples.
        sites: ``"resid_post"``, ``"z.1"``, ...; a probe of its own in each layer.
        targets: names of the task's ``probe_targets``; none: all.
        heads: at q, k, v, z, scores and pattern, these heads one by one (``"all"``, ``"0.1+1.0-2"``).
        positions: look there (``"0,2"``), not where the task says; ``each_position``: a probe for each.
        intercept: fit one.
        ridge: ``None``: least squares; a penalty, or several (``"0.1,1,10"``) to choose from, target by target, over
            ``folds`` folds of examples.
        held_out: the fraction, or from 2 the number, of examples that probes are scored on.
        shuffles: how often targets are exchanged for the control.
        untrained: compare with an untrained model as well.
        options: samples (default 2048), seed, split, task, task_config, tokens, device, progress: see
            :class:`Options`.

    Returns:
        A :class:`ProbeResult`: per target, site, metric and split of the entries a row whose ``baseline`` is the same
        probe on shuffled targets, so that ``effect`` is the selectivity, and one whose ``baseline`` is the same
        probe on the untrained model.

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
    result = measure(
        "probe",
        refs,
        options,
        measure_checkpoint,
        config={"method": settings.method, **settings.describe()},
        parts=settings.parts(),
        check=settings.check,
    )
    return ProbeResult.of(result, notes=tuple(notes(settings, tables)), tables=tables)
