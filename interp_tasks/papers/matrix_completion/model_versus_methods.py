"""Methods that no model was trained for, beside models: on the task, on other data, and entry by entry.

Of ``baseline`` and ``ood`` a row per checkpoint, variation of the task (the ``variant``), method (the ``intervention``)
and metric: ``value`` is the model's, ``baseline`` the method's. What outputs are like whatever is right (their nuclear
norm) has a row against the ``truth`` as well. Methods alone: a row per method (the ``variant``) and metric.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.errors import UserError
from interp_tasks.measurement.activations_in_passes import split_into_passes
from interp_tasks.measurement.confidence_intervals import (
    bootstrap_counts,
    bootstrap_rows,
    paired_columns,
    without_intervals,
)
from interp_tasks.measurement.loaded_checkpoints import LoadedCheckpoint
from interp_tasks.measurement.measure_checkpoints import measure
from interp_tasks.measurement.option_parsing import as_list, check_choice, chosen_names
from interp_tasks.measurement.options_and_examples import DEFAULT_SAMPLES, Examples, Options
from interp_tasks.measurement.result import Result, Row, experiment, tidy_frame

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Unpack

    from tasks import Batch, Task

#: What a row is compared with whose baseline is the right answer's.
TRUTH = "truth"
#: What is varied beside methods, and by default on other data.
SHARES, GROUPS = "p_mask", ("entries", "rank", "rows", "columns")
SOLVERS = ("batched", "cvxpy")
#: The metric that counts positions whose embedding training never used.
UNTRAINED = "untrained_positions"
#: Numbers whose s.d. is below this count as constant; values of the tasks are of order 1.
CONSTANT = 1e-6
#: Examples of one pass hold at most this many tokens, whose activations stay in a processor's cache.
TOKENS_PER_PASS = 4096
PAIRED = "Intervals: 95%, bootstrap over examples; effects are paired with the method on the same examples."
METHODS = typer.Option(
    "--method",
    metavar="NAME",
    help="One that the task declares; repeat. Default: the first; without --ckpt, and of algorithm, all.",
)
SOLVER = typer.Option("--solver", metavar="NAME", help=f"Of convex problems: {' or '.join(SOLVERS)}.")
VARIANTS = typer.Option("--variant", metavar="NAME", help="Only this of them; repeat.", show_default="all")
VARY = typer.Option(
    "--vary", metavar="GROUP", help="Variations of the task; repeat.", show_default=", ".join(GROUPS)
)
ENTRIES = typer.Option(
    "--entries", metavar="KIND", help="Kind of entries it declares; repeat.", show_default="all"
)


@experiment(
    says={"methods": [], "variants": [], "solver": SOLVERS[0]},
    judged_by_task=True,
    without=("tokens", "prompts"),
)
def baseline(
    refs: str | Sequence[str] = (),
    methods: Annotated[str | Sequence[str], METHODS, list[str]] = (),
    variants: Annotated[str | Sequence[str], VARIANTS, list[str]] = (),
    solver: Annotated[str, SOLVER] = SOLVERS[0],
    alone: bool = False,
    **options: Unpack[Options],
) -> Result:
    """Compare models with methods that are not trained, such as completions of least nuclear norm.

    Over shares of hidden entries. Without a checkpoint the methods are tried by themselves: --task matrix-completion
    is 7×7 of rank 2.

    Gopalani, Lubana, Hu 2024, section 3.2, figure 3 and appendix B.

    Args:
        refs: one or several REFs; all see the same examples. None with ``alone``.
        methods: names of those that the task declares in ``baselines()``. Default: the first; alone: all.
        variants: only these shares, as the task's ``variations()`` call them: ``p_mask 0.30``.
        solver: of a task's convex problems: ``"batched"``, all at once, with a certificate, or ``"cvxpy"``.
        alone: look at no model but at the methods themselves, on examples of ``task`` (a name, or a task); so it is
            where there are no REFs. REFs, if there are any, are not read.
        options: samples, seed, split, task, task_config, device, progress: see :class:`Options`.
    """
    methods, variants = as_list(methods), as_list(variants)
    check_choice("--solver", solver, SOLVERS)
    examples = Examples.of(options)
    drawn = SampleSettings(examples.samples, examples.seed, examples.split, solver)
    config = {"methods": methods, "variants": variants, "solver": solver}
    if alone or (not refs and options.get("task") is not None):
        if variants:
            raise UserError("--variant goes with --ckpt: without one use --set, as in --set task.p_mask=0.5")
        return methods_alone(methods, drawn, examples)

    def chosen_methods_and_variants(task: Any) -> tuple[list[str], dict[str, Task]]:
        known, groups = (require_declaration(task, "baselines"), require_declaration(task, "variations"))
        varied = groups[chosen_names(groups, [SHARES], "variations", task)[0]]
        using = chosen_names(known, methods or [*known][:1], "--method", task)
        return using, {name: varied[name] for name in chosen_names(varied, variants, "--variant", task)}

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        using, tasks = chosen_methods_and_variants(subject.task)
        rows = []
        for name, task in tasks.items():
            task.check_model(subject.model)
            output = forward_on_cpu(subject.model, draw_batch(drawn, task).tokens)
            rows += [{**row, "variant": name} for row in comparison_rows(drawn, task, output, using)]
        return rows

    check = lambda subject: chosen_methods_and_variants(subject.task)  # noqa: E731
    result = measure("baseline", refs, options, measure_checkpoint, config=config, check=check)
    using = ", ".join(result.frame["intervention"].unique())
    note = f"baseline: {using}, which nothing trains; effect and ratio: the model against it."
    return replace(result, notes=(PAIRED, note))


def methods_alone(methods: Sequence[str], drawn: SampleSettings, examples: Examples) -> Result:
    """Returns the methods on examples of a task, without a model."""

    task = examples.given_task()
    if task is None:
        raise UserError("without a checkpoint say of which task: --task NAME, such as matrix-completion")
    rows: list[Row] = []
    for name in chosen_names(require_declaration(task, "baselines"), methods, "--method", task):
        metrics = metrics_and_properties(drawn, task, run_method(drawn, task, name))
        truth = property_rows_against_truth(drawn, task, metrics)
        judged = {row["metric"] for row in truth}
        rest = {name: values for name, values in metrics.items() if name not in judged}
        of_method = [*bootstrap_rows(rest, None, drawn.seed), *truth]
        rows += [{"intervention": "alone", **row, "variant": name} for row in of_method]
    labels = {"run": task.name, "ref": task.name, "seed": drawn.seed, "split": drawn.split, "n_runs": 0}
    frame = tidy_frame(rows, experiment="baseline", **labels)
    config = {"methods": list(methods), "alone": True, "solver": drawn.solver, **examples.describe()}
    notes = (
        "Intervals: 95%, bootstrap over examples.",
        "baseline: that of the matrices themselves; effect and ratio: the method against them.",
    )
    return Result("baseline", frame, {**config, "settings": task.model_dump()}, notes)


@experiment(says={"vary": list(GROUPS)}, judged_by_task=True, without=("tokens", "prompts"))
def ood(
    refs: str | Sequence[str],
    vary: Annotated[str | Sequence[str], VARY, list[str]] = GROUPS,
    **options: Unpack[Options],
) -> Result:
    """Try models on other laws of the entries, ranks, numbers of rows and columns than they were trained on.

    Beside each stands a method that is not trained, the first of the task's. Shapes that a model cannot take are named
    in the notes; the metric ``untrained_positions`` counts positions that the task of training has not.

    Gopalani, Lubana, Hu 2024, appendix J.2 and figure 19.

    Args:
        refs: one or several REFs; all see the same examples.
        vary: groups of the task's ``variations()``; ``site`` names the group.
        options: samples, seed, split, task, task_config, device, progress: see :class:`Options`.
    """
    from tasks.errors import TaskError

    examples = Examples.of(options)
    drawn = SampleSettings(examples.samples, examples.seed, examples.split)
    misfits: dict[str, None] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        """Measures one checkpoint on every variation of its task."""
        task: Any = subject.task
        using = list(require_declaration(task, "baselines"))[:1]
        groups = require_declaration(task, "variations")
        rows: list[Row] = []
        # Every group has the task of training among its own.
        measured: dict[Any, list[Row]] = {}
        for group in chosen_names(groups, as_list(vary), "--vary", task):
            for name, other in groups[group].items():
                about = {"variant": name, "site": group}
                batch, new = draw_batch(drawn, other), max(0, other.sequence_length - task.sequence_length)
                count = {"metric": UNTRAINED, "intervention": "untrained positions", "n": len(batch)}
                try:
                    other.check_model(subject.model)
                except TaskError as error:
                    misfits[f"{name}: not measured at {subject.labels['ref']}; {error}."] = None
                    rows.append({**about, **count, "value": math.nan})
                    continue
                if other not in measured:
                    output = forward_on_cpu(subject.model, batch.tokens)
                    measured[other] = comparison_rows(drawn, other, output, using)
                rows.append({**about, **count, "value": float(new)})
                rows += [{**row, **about} for row in measured[other]]
        return rows

    result = measure("ood", refs, options, measure_checkpoint, config={"vary": as_list(vary)})
    notes = (
        PAIRED,
        "baseline: the task's first method, under intervention, on the same examples.",
        "Position m·i + j is entry (i, j): with other columns the same entry stands at another position.",
    )
    return replace(result, notes=(*notes, *misfits))


AGREEMENT = {name: f"{name} [95% CI]" for name in ("distance", "r_predictions", "r_errors")}


@experiment(
    says={"methods": [], "entries": []},
    without=("tokens", "prompts"),
    side_by_side={"intervention": "entries", "variant": "method", **AGREEMENT},
)
def algorithm(
    refs: str | Sequence[str],
    methods: Annotated[str | Sequence[str], METHODS, list[str]] = (),
    entries: Annotated[str | Sequence[str], ENTRIES, list[str]] = (),
    **options: Unpack[Options],
) -> Result:
    """Ask which known method fills in the blanks as the model does: agreement of predictions and of errors.

    A row per method (the ``variant``), ``truth`` among them, kind of entries (the ``intervention``) and metric.

    Args:
        refs: one or several REFs; all see the same examples.
        methods: names of those that the task declares in ``methods()``; default: all.
        entries: kinds of entries that it declares in ``entry_groups(batch)``; default: all.
        options: samples, seed, split, task, task_config, device, progress: see :class:`Options`.
    """
    methods, entries = as_list(methods), as_list(entries)
    known: dict[tuple[Any, str], Tensor] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        """Measures how far one checkpoint's answers agree with each method's, by kind of entry."""
        task: Any = subject.task
        assert subject.batch is not None
        batch = subject.batch.to("cpu")
        truth, by_name = batch.targets.double(), require_declaration(task, "methods")
        groups = require_declaration(task, "entry_groups", batch=batch)
        using = chosen_names(by_name, methods, "--method", task)
        for name in using:
            if (task, name) not in known:
                known[task, name] = by_name[name](batch).squeeze(-1).double()
        others = {name: known[task, name] for name in using} | {TRUTH: truth}
        output = forward_on_cpu(subject.model, subject.tokens).squeeze(-1).double()
        return [
            {**row, "variant": name, "intervention": kind}
            for kind in chosen_names(groups, entries, "--entries", task)
            for name, other in others.items()
            for row in agreement_rows(output, other, truth, groups[kind], subject.seed)
        ]

    config = {"methods": methods, "entries": entries}
    result = measure("algorithm", refs, options, measure_checkpoint, config=config)
    notes = (
        "distance: mean squared difference of output and method; from the truth: the model's error.",
        "r_predictions, r_errors: correlations over entries, of output and method, and of the errors of both.",
        "Intervals: 95%, bootstrap over examples. Differences from the row truth: --format csv.",
    )
    return replace(result, notes=notes)


# ---- what tasks declare


def require_declaration(task: Task, noun: str, **given: Any) -> Mapping[str, Any]:
    """Returns the declaration that a task makes under a name; a UserError says that it makes none."""
    declare = getattr(task, noun, None)
    if declare is None:
        raise UserError(f"task {task.name!r} declares no {noun}: give it a method {noun}({', '.join(given)})")
    values: Mapping[str, Any] = declare(**given)
    return values


def forward_on_cpu(model: Any, tokens: Tensor) -> Tensor:
    """Returns the model's output at all positions, on the CPU."""
    import torch

    from circuits import run

    device = next(model.parameters()).device
    return torch.cat(
        [run(model, part.to(device)).cpu() for part in split_into_passes(tokens, TOKENS_PER_PASS)]
    )


# ---- metrics of a model beside those of a method


@dataclass(frozen=True)
class SampleSettings:
    """The examples of each variation of a task that every model and method sees, and how convex problems are solved."""

    samples: int | None
    seed: int
    split: str
    solver: str = SOLVERS[0]


@lru_cache(maxsize=64)
def draw_batch(drawn: SampleSettings, task: Task) -> Batch:
    """Returns the examples of a task, the same ones each time."""
    from tasks.base import checked_sample

    split: Any = drawn.split
    return checked_sample(task, drawn.samples or DEFAULT_SAMPLES, drawn.seed, split)


@lru_cache(maxsize=64)
def run_method(drawn: SampleSettings, task: Task, method: str) -> Tensor:
    """Returns what a method makes of a task's examples, solved once per process: all models have the same ones."""
    given = {} if drawn.solver == SOLVERS[0] else {"solver": drawn.solver}
    output: Tensor = require_declaration(task, "baselines", **given)[method](draw_batch(drawn, task))
    return output


def metrics_and_properties(drawn: SampleSettings, task: Any, output: Tensor) -> dict[str, Any]:
    """Returns the task's metrics of an output, and its properties where the task names some."""
    properties = task.properties(output) if hasattr(task, "properties") else {}
    return {**task.metrics(output, draw_batch(drawn, task)), **properties}


def comparison_rows(drawn: SampleSettings, task: Task, output: Tensor, methods: Sequence[str]) -> list[Row]:
    """Returns a model's output beside each method, and beside the truth as far as that has properties."""
    metrics = metrics_and_properties(drawn, task, output)
    rows = [
        {**row, "intervention": name}
        for name in methods
        for row in bootstrap_rows(
            metrics, metrics_and_properties(drawn, task, run_method(drawn, task, name)), drawn.seed
        )
    ]
    return rows + property_rows_against_truth(drawn, task, metrics)


def property_rows_against_truth(drawn: SampleSettings, task: Any, metrics: Mapping[str, Any]) -> list[Row]:
    """Returns the properties of an output beside those of the right answers; none where the task names none."""
    targets = draw_batch(drawn, task).targets[..., None]
    right = task.properties(targets) if hasattr(task, "properties") else {}
    rows = bootstrap_rows({name: metrics[name] for name in right}, right, drawn.seed)
    return [{**row, "intervention": TRUTH} for row in rows]


# ---- agreement, entry by entry


def agreement_rows(output: Tensor, other: Tensor, truth: Tensor, mask: Tensor, seed: int) -> list[Row]:
    """Returns the rows of one method and kind of entries; all tensors are [batch pos]."""

    def squares(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        return (one - two).square().masked_fill(~mask, 0).sum(1), mask.sum(1)

    rows = bootstrap_rows({"distance": squares(output, other)}, {"distance": squares(output, truth)}, seed)
    rows.append({"metric": "r_predictions", **correlation_row(output, [other, truth], mask, seed)})
    if other is not truth:
        rows.append({"metric": "r_errors", **correlation_row(output - truth, [other - truth], mask, seed)})
    return rows


def correlation_row(one: Tensor, others: Sequence[Tensor], mask: Tensor, seed: int) -> Row:
    """Returns Pearson's r with the first of the others over the chosen entries, pooled; with the second as baseline.

    Intervals: 95%, bootstrap over examples. Where one of the two is constant there is no correlation: NaN.
    """
    import numpy as np

    moments = np.stack([correlation_sums(one, other, mask) for other in others])
    weights = bootstrap_counts(seed, len(one))
    pooled = pearson_from_sums(moments.sum(1))
    # [draws series]
    resampled = np.stack([pearson_from_sums(weights @ series) for series in moments], axis=1)
    row = paired_columns(pooled, resampled)
    return {**(row if len(one) > 1 else without_intervals(row)), "n": len(one)}


def correlation_sums(one: Tensor, two: Tensor, mask: Tensor) -> Any:
    """Returns [batch 6]: number of entries, and sums of x, y, x², y², xy over them."""
    import numpy as np

    x, y, w = (part.double().numpy() for part in (one, two, mask))
    return np.stack([(w * part).sum(1) for part in (np.ones_like(x), x, y, x * x, y * y, x * y)], axis=1)


def pearson_from_sums(moments: Any) -> Any:
    """Computes r from the sums [... 6] that :func:`correlation_sums` gives."""
    import numpy as np

    count, x, y, xx, yy, xy = (moments[..., part] for part in range(6))
    count = np.maximum(count, 1)
    spread_x, spread_y = xx - x * x / count, yy - y * y / count
    # What rounding and a solver's tolerance leave of a constant is no spread.
    real = np.minimum(spread_x, spread_y) > count * CONSTANT**2
    product = np.where(real, spread_x * spread_y, 1.0)
    return np.where(real, (xy - x * y / count) / np.sqrt(product), np.nan)
