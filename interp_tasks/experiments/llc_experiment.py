"""The local learning coefficient of checkpoints, beside their losses: how sharply the loss rises around the weights.

λ = nβ (E[L(w)] − L(w₀)): Langevin chains sample weights w around a checkpoint's w₀, pulled back to it by a spring; L is
the training loss (Lau et al. 2023, arXiv 2308.12108). ``devinterp`` samples and estimates.

Rows of a checkpoint: ``coefficient``, with Student's t interval over chains, and that of each chain, its ``draw``;
``R-hat``, losses, the task's drop metric. At the last REF of a run with marks the step at which each was half of its
way from the plateau to there, for good: ``baseline`` is the drop metric's, ``effect`` negative where it is earlier.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.panel_grid import draw_panels
from circuits.figures.panel_kinds import Series, curve, rows_to_one_series
from interp_tasks.errors import UserError
from interp_tasks.measurement.confidence_intervals import interval_over_runs, mean
from interp_tasks.measurement.loaded_checkpoints import LoadedCheckpoint, checkpoints_by_run, resolve_refs
from interp_tasks.measurement.measure_checkpoints import measure
from interp_tasks.measurement.options_and_examples import Options
from interp_tasks.measurement.result import Result, Row, experiment, number_columns
from interp_tasks.pages import Figure

if TYPE_CHECKING:
    from typing_extensions import Unpack

COEFFICIENT, R_HAT, TRAINING, HELD_OUT = "coefficient", "R-hat", "training loss", "held-out loss"
HALF = "step at 50%"
#: What the REF of a checkpoint has after its run.
STEP = r"@\d+"
SAMPLES = 4096
NOTES = (
    "Intervals: 95%, over chains; what other runs give is not in them. R-hat above 1.1: chains disagree or drift.",
    "step at 50%: of the way from the plateau to the last checkpoint, of held-out loss by its logarithm.",
)


@experiment(samples=SAMPLES, without=("tokens", "prompts", "split"))
def llc(
    refs: str | Sequence[str],
    step_size: Annotated[float, typer.Option("--step-size", help="ε of the Langevin steps.")] = 3e-5,
    localization: Annotated[float, typer.Option("--localization", help="γ, of the spring.")] = 1000.0,
    n_beta: Annotated[float | None, typer.Option("--n-beta", help="nβ.", show_default="n / log n")] = None,
    chains: Annotated[int, typer.Option("--chains", min=2)] = 4,
    draws: Annotated[int, typer.Option("--draws", min=2, help="Steps of a chain that count.")] = 200,
    burn_in: Annotated[int, typer.Option("--burn-in", min=0, help="Steps before them.")] = 200,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Examples in a step.")] = 256,
    **options: Unpack[Options],
) -> Result:
    """Estimate the local learning coefficient of checkpoints, beside their losses.

    Try step sizes first: chains must agree, traces be flat. Needs devinterp: pip install 'interp-tasks[devinterp]'.

    Args:
        refs: REFs of checkpoints, such as ``RUN@all``.
        step_size: ε of the Langevin steps.
        localization: γ, how strongly a spring draws a chain back to the checkpoint.
        n_beta: nβ, the inverse temperature; ``None``: n / log n of n examples.
        chains: how many chains, which see the same minibatches.
        draws: steps of a chain that count.
        burn_in: steps before them.
        batch_size: examples in a step.
        options: samples (4096 of the training split, at most all of it), seed, task, task_config, device, progress.
    """
    if find_spec("devinterp") is None:
        raise UserError("llc needs devinterp: pip install 'interp-tasks[devinterp]'")
    options = {**options, "split": "train"}
    runs = checkpoints_by_run(resolve_refs(refs))
    settings: dict[str, Any] = {"lr": step_size, "localization": localization, "n_beta": n_beta}
    settings |= {"num_chains": chains, "num_draws": draws, "num_burnin_steps": burn_in}
    settings["batch_size"] = batch_size
    curves: dict[str, dict[str, dict[int, Any]]] = {}
    traces: dict[str, Any] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        ref = str(subject.labels["ref"])
        own = curves.setdefault(re.sub(STEP, "", ref), {})
        found = estimate_llc(subject, settings)
        traces[ref], lambdas = found["loss_trace"].values, found["llc_per_chain"].values
        kept = traces[ref][:, burn_in:]
        between = kept.mean(1).var(ddof=1) / kept.var(1, ddof=1).mean()
        measured = {COEFFICIENT: lambdas, R_HAT: math.sqrt((draws - 1) / draws + between)}
        measured |= {TRAINING: float(found["init_loss"].values), **held_out_loss_and_metric(subject)}
        for name, value in measured.items():
            own.setdefault(name, {})[subject.stored.step] = value
        rows: list[Row] = [{"metric": name, "value": value} for name, value in measured.items()]
        rows[0] |= number_columns(lambdas.mean(), interval_over_runs(lambdas))
        rows += ({"metric": COEFFICIENT, "draw": at, "value": float(one)} for at, one in enumerate(lambdas))
        if any(subject.stored.path == several[-1].path for several in runs.values()):
            rows += half_way_rows(own, subject)
        return [{"variant": "model", "intervention": "none", "n": len(subject.tokens), **row} for row in rows]

    ordered = [one for several in runs.values() for one in several]
    result = measure("llc", ordered, options, measure_checkpoint, config=settings)
    return replace(result, notes=NOTES, data={"traces": traces, "burn_in": burn_in})


def estimate_llc(subject: LoadedCheckpoint, settings: Mapping[str, Any]) -> Any:
    """Returns what ``devinterp`` estimates from chains around a checkpoint; its ``loss_trace`` has the burn-in, too."""
    import torch

    from interp_tasks.training.fused_forward import fastest_forward

    task: Any = subject.task
    batch: Any = subject.batch
    model, forwards = subject.model, dict[Any, Any]()

    def loss(model: Any, rows: Any) -> Any:
        # The sampler takes sequences of tokens and a loss per token: an example's number, twice, is its sequence.
        chosen = batch[rows[:, 0]]
        if model not in forwards:
            forwards[model] = fastest_forward(model, task.read_positions, chosen.tokens)[0]
        return task.loss(forwards[model](chosen.tokens), chosen).float().expand(len(rows), 1)

    n = len(batch)
    rows: Any = [{"input_ids": torch.tensor([row, row])} for row in range(n)]
    trained = {name: None for name, each in model.named_parameters() if each.requires_grad}
    size, temperature = min(settings["batch_size"], n), settings["n_beta"] or n / math.log(n)
    given = {**settings, "batch_size": size, "num_init_loss_batches": n // size, "n_beta": temperature}
    given |= {"loss_fn": loss, "param_masks": trained, "init_seed": subject.seed}
    given["device"] = str(batch.tokens.device)
    with (
        TemporaryDirectory() as folder,
        torch.random.fork_rng(),
        redirect_stderr(StringIO()),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        from devinterp.slt.llc import compute_llc
        from devinterp.slt.sampling import sample

        samples = sample(model, rows, {}, output_path=Path(folder, "samples"), **given)
        # Its estimator averages over the burn-in, too.
        kept = compute_llc(samples.isel(step=slice(settings["num_burnin_steps"], None))).load()
        trace = compute_llc(samples)["loss_trace"].load()
    if any("Chain failed" in str(one.message) for one in caught):
        raise UserError(f"{subject.name}: the loss of a chain is not finite: give a smaller --step-size")
    return kept.drop_dims("step").assign(loss_trace=trace)


def held_out_loss_and_metric(subject: LoadedCheckpoint) -> dict[str, Any]:
    """Returns the loss and the drop metric on test examples."""
    from circuits import run
    from tasks import pool

    task: Any = subject.task
    batch = task.sample(SAMPLES, subject.seed, "test").to(str(subject.tokens.device))
    output, name = run(subject.model, batch.tokens), task.drop_metric.name
    value = pool(task.metrics(output, batch))[name]
    return {HELD_OUT: float(task.loss(output, batch)), f"held-out {name}": value}


def half_way_rows(curves: Mapping[str, Mapping[int, Any]], last: LoadedCheckpoint) -> Iterator[Row]:
    """Yields the step at which each quantity was half of its way; none for a run without marks."""
    import numpy as np

    from interp_tasks.checkpoints.steps_around_drop import find_marks
    from interp_tasks.measurement.level_crossing_steps import lasting_crossing_steps

    try:
        plateau = find_marks(last.stored.run_path or last.stored.path, last.stored.run_name)["pre"]
    except UserError:
        return
    nearest = min(curves[COEFFICIENT], key=lambda step: abs(step - plateau))
    steps = [step for step in sorted(curves[COEFFICIENT]) if step >= nearest]
    found: dict[str, Any] = {}
    *_, drop = curves
    for name in dict.fromkeys((drop, HELD_OUT, TRAINING, COEFFICIENT)):
        values = np.stack([np.atleast_1d(curves[name][step]) for step in steps], 1)
        values = np.log(values) if name == HELD_OUT else values
        found[name] = lasting_crossing_steps(steps, values, 0.5, values[:, 0], values[:, -1])
        half, gap = found[name].tolist(), (found[name] - found[drop]).tolist()
        compared = () if name == drop else (found[drop][0], interval_over_runs(gap))
        yield {
            "variant": name,
            "metric": HALF,
            **number_columns(mean(half), interval_over_runs(half), *compared),
        }


def figures(result: Result) -> list[Figure]:
    """Returns coefficients and losses over the steps of each run, and the traces of all chains."""
    rows, drawn, traces = result.frame[result.frame["draw"].isna()], [], []
    for run, of_run in rows.groupby(rows["ref"].str.replace(STEP, "", regex=True), sort=False):
        for y, names in ((COEFFICIENT, (COEFFICIENT,)), ("loss", (TRAINING, HELD_OUT))):
            series = {name: rows_to_one_series(of_run[of_run["metric"] == name], "step") for name in names}
            others = of_run["variant"].isin((TRAINING, HELD_OUT))
            halves = of_run[of_run["metric"].eq(HALF) & ~others]["value"].dropna()
            lines = [{"x": step, "line": {"dash": "dot", "width": 1}} for step in halves]
            drawn.append(curve(series, f"{run}: {y}", y=y, log_y=y == "loss", lines=lines, width=420))
    for ref, losses in result.data["traces"].items():
        every = max(1, losses.shape[1] // 150)
        at = list(range(0, losses.shape[1], every))
        chains = {f"chain {n}": Series(at, one[::every].tolist()) for n, one in enumerate(losses)}
        line = {"x": result.data["burn_in"], "line": {"dash": "dot", "width": 1}}
        traces.append(curve(chains, ref, x="Langevin step", y="loss", lines=[line], width=260, height=180))
    caption = "Band: 95%, over chains. Dotted: where coefficient and drop metric are half of their way."
    whole = Figure(draw_panels(drawn, columns=2), "Coefficient and losses over training", caption)
    flat = "Right of the dotted line, the burn-in, traces should be flat and together."
    return [whole, Figure(draw_panels(traces, columns=3), "Traces of the chains", flat)]
