"""The local learning coefficient of checkpoints, beside their losses: how sharply the loss rises around the weights.

λ = nβ (E[L(w)] − L(w₀)): Langevin chains sample weights w around a checkpoint's w₀, pulled back to it by a spring; L is
the training loss (Lau et al. 2023, arXiv 2308.12108). ``devinterp`` samples and estimates; here are the tables.

Rows of a checkpoint: ``coefficient``, with Student's t interval over chains, and that of each chain, its ``draw``;
``R-hat``; ``training loss``; ``held-out loss``; the task's drop metric, held out. At the last REF of a run with a drop
the steps at which each was half of its way from the plateau to the last checkpoint: ``baseline`` is that of the drop
metric, ``effect`` the difference, negative where it is earlier; the interval is over chains.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.layout import Panel, draw
from circuits.figures.panels import Series, curve, rows_to_series
from interp_tasks.errors import UserError
from interp_tasks.measurement.intervals import interval_over_runs
from interp_tasks.measurement.result import (
    COLUMNS,
    Result,
    Row,
    experiment,
    filled,
    measure,
    numbers,
    side_by_side,
    value_text,
)
from interp_tasks.measurement.subjects import (
    Examples,
    LoadedCheckpoint,
    Options,
    by_run,
    check_has_task,
    get_run_name,
    labelled_by_ref,
    resolve_refs,
)
from interp_tasks.pages import Column, Figure

if TYPE_CHECKING:
    import numpy
    import pandas
    from typing_extensions import Unpack

    from interp_tasks.checkpoints import ResolvedCheckpoint

COEFFICIENT, R_HAT, TRAINING, HELD_OUT = "coefficient", "R-hat", "training loss", "held-out loss"
HALF = "step at 50%"
#: Points of a chain's trace in the figure.
POINTS = 150
SAMPLES = 4096
NOTES = (
    "coefficient: mean over chains, with Student's t interval over them (not over training runs).",
    "R-hat: above 1.1 the chains disagree, or still drift.",
    "step at 50%: of the way from the plateau to the last checkpoint, of held-out loss by its logarithm.",
)


@experiment("runs", samples=SAMPLES)
def llc(
    refs: str | Sequence[str],
    step_size: Annotated[float, typer.Option("--step-size", help="ε of the Langevin steps.")] = 1e-5,
    localization: Annotated[float, typer.Option("--localization", help="γ, the spring's strength.")] = 100.0,
    n_beta: Annotated[
        float | None, typer.Option("--n-beta", help="Inverse temperature nβ.", show_default="n / log n")
    ] = None,
    chains: Annotated[int, typer.Option("--chains", min=2)] = 4,
    draws: Annotated[int, typer.Option("--draws", min=2, help="Of each chain, after burn-in.")] = 300,
    burn_in: Annotated[int, typer.Option("--burn-in", min=0, help="First steps, left out.")] = 200,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Examples in a step.")] = 512,
    **options: Unpack[Options],
) -> Result:
    """Estimate the local learning coefficient of checkpoints, beside their losses.

    Chains must agree and traces be flat: try step sizes first. Needs devinterp: pip install 'interp-tasks[devinterp]'.

    Args:
        refs: REFs of checkpoints, such as ``RUN@all``.
        step_size, localization, n_beta: as the sampler has them; ``n_beta=None``: n / log n of n examples.
        chains, draws, burn_in, batch_size: steps are on minibatches of this size, the same for all chains.
        options: samples (4096, or all of a smaller training split), seed, task, task_config, device, progress; the split
            is the training one.
    """
    if find_spec("devinterp") is None:
        raise UserError("llc needs devinterp: pip install 'interp-tasks[devinterp]'")
    check_has_task("llc", options)
    options = {**options, "samples": options.get("samples") or SAMPLES, "split": "train"}
    runs = by_run(resolve_refs(refs, Examples.of(options)))
    settings: dict[str, Any] = {"lr": step_size, "localization": localization, "num_chains": chains}
    settings |= {"num_draws": draws, "num_burnin_steps": burn_in}
    curves: dict[str, dict[str, dict[int, Any]]] = {}
    traces: dict[str, Any] = {}
    marks: dict[str | None, dict[str, int]] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        n, run = len(subject.tokens), get_run_name(subject)
        temperature = n / math.log(n) if n_beta is None else n_beta
        sampled = sample_around(
            subject, {**settings, "n_beta": temperature, "batch_size": min(batch_size, n)}
        )
        traces[str(subject.labels["ref"])] = sampled["loss_trace"].values
        measured = {COEFFICIENT: sampled["llc_per_chain"].values, TRAINING: float(sampled["init_loss"])}
        measured |= held_out(subject)
        for name, value in measured.items():
            curves.setdefault(run, {}).setdefault(name, {})[subject.stored.step] = value
        rows = list(coefficient_rows(measured, traces[str(subject.labels["ref"])][:, burn_in:]))
        if subject.stored.path == runs[run][-1].path and (found := marks_of(runs[run])):
            marks[subject.stored.run_name] = found
            rows += half_way_rows(curves[run], found["pre"])
        return [{"variant": "model", "intervention": "none", "n": n, **row} for row in rows]

    config = {"step_size": step_size, "n_beta": n_beta, "batch_size": batch_size, **settings}
    result = measure("llc", labelled_by_ref(runs), options, measure_checkpoint, config=config)
    return replace(result, notes=NOTES, data={"traces": traces, "marks": marks, "burn_in": burn_in})


def sample_around(subject: LoadedCheckpoint, settings: Mapping[str, Any]) -> Any:
    """Returns what ``devinterp`` estimates from chains around a checkpoint; ``loss_trace`` has the burn-in, too."""
    import torch

    from interp_tasks.training.forward import fastest_forward

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from devinterp.slt.llc import compute_llc
        from devinterp.slt.sampling import sample

    task, batch, model = subject.task, subject.batch, subject.model
    assert task is not None
    assert batch is not None
    forwards: dict[Any, Any] = {}

    def loss(model: Any, rows: Any) -> Any:
        # The sampler takes sequences of tokens and a loss per token: an example's number, twice, is its sequence.
        chosen = batch[rows[:, 0]]
        if model not in forwards:
            forwards[model] = fastest_forward(model, task.read_positions, chosen.tokens)[0]
        return task.loss(forwards[model](chosen.tokens), chosen).float().expand(len(rows), 1)

    rows = [{"input_ids": torch.tensor([row, row])} for row in range(len(batch))]
    trained = {name: None for name, each in model.named_parameters() if each.requires_grad}
    epoch = len(batch) // settings["batch_size"]
    given = {**settings, "param_masks": trained, "loss_fn": loss, "init_seed": subject.seed}
    given |= {"num_init_loss_batches": epoch, "device": str(batch.tokens.device)}
    with TemporaryDirectory() as folder, torch.random.fork_rng(), redirect_stderr(StringIO()):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            samples = sample(model, rows, {}, output_path=Path(folder, "samples"), **given)
        if any("Chain failed" in str(one.message) for one in said):
            raise UserError(f"{subject.name}: the loss of a chain is not finite: give a smaller --step-size")
        kept = compute_llc(samples.isel(step=slice(settings["num_burnin_steps"], None))).load()
        return kept.drop_dims("step").assign(loss_trace=compute_llc(samples)["loss_trace"].load())


def held_out(subject: LoadedCheckpoint) -> dict[str, float]:
    """Returns the loss and the drop metric on test examples."""
    from circuits import run
    from tasks import pool

    task = subject.task
    assert task is not None
    batch = task.sample(SAMPLES, subject.seed, "test").to(str(subject.tokens.device))
    output, name = run(subject.model, batch.tokens), task.drop_metric.name
    return {HELD_OUT: float(task.loss(output, batch)), name: pool(task.metrics(output, batch))[name] or 0.0}


def coefficient_rows(measured: Mapping[str, Any], draws: numpy.ndarray) -> Iterator[Row]:
    """Yields the rows of one checkpoint; ``draws [chains steps]`` are the losses after the burn-in."""
    chains = measured[COEFFICIENT]
    yield {"metric": COEFFICIENT, **numbers(chains.mean(), interval_over_runs(chains))}
    yield from ({"metric": COEFFICIENT, "draw": chain, "value": float(v)} for chain, v in enumerate(chains))
    within, length = draws.var(1, ddof=1).mean(), draws.shape[1]
    yield {"metric": R_HAT, "value": math.sqrt((length - 1) / length + draws.mean(1).var(ddof=1) / within)}
    yield from ({"metric": name, "value": value} for name, value in measured.items() if name != COEFFICIENT)


def marks_of(run: Sequence[ResolvedCheckpoint]) -> dict[str, int]:
    """Returns the marks of a run's drop; none where there is no drop, or no checkpoint on a side of it."""
    from interp_tasks.checkpoints.refs import find_marks

    with suppress(UserError):
        return find_marks(run[0].run_path or run[0].path, run[0].run_name)
    return {}


def half_way_rows(curves: Mapping[str, Mapping[int, Any]], plateau: int) -> Iterator[Row]:
    """Yields the step at which each quantity was half of its way for good, from the step nearest to ``plateau``."""
    import numpy as np

    from interp_tasks.measurement.level_crossing_steps import crossing

    *_, drop = curves
    steps = sorted(curves[drop])
    steps = steps[steps.index(min(steps, key=lambda step: abs(step - plateau))) :]
    found = {}
    for name in (drop, HELD_OUT, COEFFICIENT):
        values = np.stack([np.atleast_1d(curves[name][step]) for step in steps], 1)
        values = np.log(values) if name == HELD_OUT else values
        found[name] = half = crossing(steps, values, 0.5, values[:, 0], values[:, -1])
        own = interval_over_runs(half), float(found[drop][0]), interval_over_runs(half - found[drop])
        yield {"variant": name, "metric": HALF, **numbers(half.mean(), *(own[:1] if name == drop else own))}


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row for each checkpoint, and below those of a run one for the steps of half of the way."""
    shown = frame[frame["draw"].isna()]
    half = shown["metric"] == HALF
    named = {"at": shown["step"].astype("string").mask(half, "50% at")}
    named |= {
        "metric": shown["metric"].mask(half, shown["variant"]),
        "ref": shown["run"].fillna(shown["ref"]),
    }
    return side_by_side(
        shown.assign(**named),
        lambda row: (row["ref"], row["at"]),
        lambda row: {row["metric"]: value_text(row)},
    )


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    names = [name for name in frame.columns if name not in (*COLUMNS, "at")]
    return [Column("step", "at"), *(Column(name, name, filled(name, str)) for name in names)]


def figures(result: Result) -> list[Figure]:
    """Returns coefficients and losses over the steps of each run, and the traces of all chains."""
    frame, panels = result.frame[result.frame["metric"] != HALF], list[Panel]()
    whole = frame[frame["draw"].isna()]
    for run, rows in whole.groupby("run", sort=False, dropna=False):
        marks = result.data["marks"].get(run, {})
        lines = [
            {"x": marks[name], "line": {"dash": "dot", "width": 1}} for name in ("onset", "end") if marks
        ]
        for title, names in ((COEFFICIENT, (COEFFICIENT,)), ("loss", (TRAINING, HELD_OUT))):
            series = {name: rows_to_series(rows[rows["metric"] == name], "step") for name in names}
            log = title == "loss"
            panels.append(curve(series, f"{run}: {title}", y=title, log_y=log, lines=lines, width=420))
    traces = []
    for ref, losses in result.data["traces"].items():
        every = max(1, losses.shape[1] // POINTS)
        at = list(range(0, losses.shape[1], every))
        chains = {
            f"chain {chain}": Series(at, losses[chain, ::every].tolist()) for chain in range(len(losses))
        }
        burn_in = [{"x": result.data["burn_in"], "line": {"dash": "dot", "width": 1}}]
        traces.append(curve(chains, ref, x="Langevin step", y="loss", lines=burn_in, width=260, height=180))
    return [
        Figure(
            draw(panels, columns=2), "Coefficient and loss", "Band: 95%, over chains. Dotted: onset and end."
        ),
        Figure(
            draw(traces, columns=3),
            "Traces of chains",
            "Flat and together after the dotted burn-in is as it should be.",
        ),
    ]
