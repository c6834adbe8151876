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
from interp_tasks.measurement.activations import in_passes
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.options import check_choice
from interp_tasks.measurement.paired import LEVEL, paired, resamples, without_intervals
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import measure
from interp_tasks.measurement.subjects import Examples, LoadedCheckpoint, Options, check_has_task
from interp_tasks.measurement.table import Row, numbers, tidy

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Unpack

    from tasks import Batch, Task

#: What a row is compared with whose baseline is the right answer's; whose rows they are where there is no model.
TRUTH, ALONE = "truth", "alone"
#: What is varied beside methods, and by default on other data.
SHARES, GROUPS = "p_mask", ("entries", "rank", "rows", "columns")
SOLVERS = ("batched", "cvxpy")
#: The metric that counts positions whose embedding training never used.
UNTRAINED = "untrained_positions"
#: Metrics of agreement: of the distance of predictions, of the correlation of predictions and of errors.
DISTANCE, PREDICTIONS, ERRORS = "distance", "r_predictions", "r_errors"
#: Numbers whose s.d. is below this count as constant; values of the tasks are of order 1.
CONSTANT = 1e-6
#: Examples of one pass hold at most this many tokens, whose activations stay in a processor's cache.
TOKENS_PER_PASS = 4096
PAIRED = "Intervals: 95%, bootstrap over examples; effects are paired with the method on the same examples."
METHODS = typer.Option(
    "--method",
    metavar="NAME",
    help="One that the task declares; repeat.",
    show_default="the first; without --ckpt all",
)
ALL_METHODS = typer.Option(
    "--method", metavar="NAME", help="One that the task declares; repeat.", show_default="all"
)
SOLVER = typer.Option("--solver", metavar="NAME", help=f"Of convex problems: {' or '.join(SOLVERS)}.")
VARIANTS = typer.Option("--variant", metavar="NAME", help="Only this of them; repeat.", show_default="all")
VARY = typer.Option(
    "--vary", metavar="GROUP", help="Variations of the task; repeat.", show_default=", ".join(GROUPS)
)
ENTRIES = typer.Option(
    "--entries", metavar="KIND", help="Kind of entries it declares; repeat.", show_default="all"
)


@experiment("matrix", says={"methods": [], "variants": [], "solver": SOLVERS[0]}, judged_by_task=True)
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

    Raises:
        UserError, TaskError: in one line.
    """
    methods, variants = listed(methods), listed(variants)
    check_choice("--solver", solver, SOLVERS)
    check_has_task("baseline", options)
    if alone or (not refs and options.get("task") is not None):
        if variants:
            raise UserError("--variant goes with --ckpt: without one use --set, as in --set task.p_mask=0.5")
        return methods_alone(methods, solver, options)
    comparison = Comparison(Examples.of(options), solver)

    def chosen_of(task: Any) -> tuple[list[str], dict[str, Task]]:
        known, groups = declared(task, "baselines"), declared(task, "variations")
        (varied,) = (groups[name] for name in chosen(groups, [SHARES], "variations", task))
        using = chosen(known, methods or [*known][:1], "--method", task)
        return using, {name: varied[name] for name in chosen(varied, variants, "--variant", task)}

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        using, tasks = chosen_of(subject.task)
        rows = []
        for name, task in tasks.items():
            task.check_model(subject.model)
            output = forward(subject.model, comparison.batch(task).tokens)
            rows += [{**row, "variant": name} for row in comparison.rows(task, output, using, subject.seed)]
        return rows

    config = {"methods": methods, "variants": variants, "solver": solver}
    check = lambda subject: chosen_of(subject.task)  # noqa: E731
    result = measure("baseline", refs, options, measure_checkpoint, config=config, check=check)
    note = "baseline: the method named under intervention; effect and ratio: the model against it."
    return replace(result, notes=(PAIRED, note))


def methods_alone(methods: Sequence[str], solver: str, options: Options) -> Result:
    """Returns the methods on examples of a task, without a model."""
    import pandas

    examples = Examples.of(options)
    task = examples.own_task()
    if task is None:
        raise UserError("without a checkpoint say of which task: --task NAME, such as matrix-completion")
    comparison = Comparison(examples, solver)
    rows: list[Row] = []
    for name in chosen(declared(task, "baselines"), methods, "--method", task):
        by_method = comparison.metrics(task, comparison.output_of(task, name))
        truth = comparison.beside_truth(task, by_method, examples.seed)
        compared = {row["metric"] for row in truth}
        rest = {metric: values for metric, values in by_method.items() if metric not in compared}
        of_method = [*paired(rest, None, examples.seed), *truth]
        rows += [{"intervention": ALONE, **row, "variant": name} for row in of_method]
    labels = {"run": task.name, "ref": task.name, "seed": examples.seed, "split": examples.split, "n_runs": 0}
    frame = pandas.DataFrame(rows).assign(experiment="baseline", **labels)
    config = {"methods": list(methods), "alone": True, "solver": solver, **examples.describe()}
    notes = (
        "Intervals: 95%, bootstrap over examples.",
        "baseline: that of the matrices themselves; effect and ratio: the method against them.",
    )
    return Result("baseline", tidy(frame), {**config, "settings": task.model_dump()}, notes)


OOD_NOTES = (
    PAIRED,
    "baseline: the first method of the task, on the same examples.",
    "Position m·i + j is entry (i, j): with other columns the same entry stands at another position.",
)


@experiment("matrix", says={"vary": list(GROUPS)}, judged_by_task=True)
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

    Raises:
        UserError, TaskError: in one line.
    """
    from tasks.errors import TaskError

    check_has_task("ood", options)
    comparison = Comparison(Examples.of(options))
    misfits: dict[str, None] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        """Measures one checkpoint on every variation of its task."""
        task: Any = subject.task
        using, groups = list(declared(task, "baselines"))[:1], declared(task, "variations")
        rows: list[Row] = []
        # Every group has the task of training among its own.
        compared: dict[Any, list[Row]] = {}
        for group in chosen(groups, listed(vary), "--vary", task):
            for name, other in groups[group].items():
                about = {"variant": name, "site": group}
                batch, new = comparison.batch(other), max(0, other.sequence_length - task.sequence_length)
                count = {"metric": UNTRAINED, "intervention": "untrained positions", "n": len(batch)}
                try:
                    other.check_model(subject.model)
                except TaskError as error:
                    misfits[f"{name}: not measured at {subject.labels['ref']}; {error}."] = None
                    rows.append({**about, **count, "value": math.nan})
                    continue
                if other not in compared:
                    output = forward(subject.model, batch.tokens)
                    compared[other] = comparison.rows(other, output, using, subject.seed)
                rows += [
                    {**about, **count, "value": float(new)},
                    *({**row, **about} for row in compared[other]),
                ]
        return rows

    result = measure("ood", refs, options, measure_checkpoint, config={"vary": listed(vary)})
    return replace(result, notes=(*OOD_NOTES, *misfits))


@experiment("matrix", says={"methods": [], "entries": []})
def algorithm(
    refs: str | Sequence[str],
    methods: Annotated[str | Sequence[str], ALL_METHODS, list[str]] = (),
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

    Raises:
        UserError, TaskError, CircuitsError: in one line; a UserError for a task that declares no methods.
    """
    methods, entries = listed(methods), listed(entries)
    check_has_task("algorithm", options)
    known: dict[tuple[Any, str], Tensor] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        """Measures how far one checkpoint's answers agree with each method's, by kind of entry."""
        task: Any = subject.task
        assert subject.batch is not None
        batch = subject.batch.to("cpu")
        truth, groups = batch.targets.double(), task.entry_groups(batch)
        using = chosen(declared(task, "methods"), methods, "--method", task)
        kinds = chosen(groups, entries, "--entries", task)
        for name in using:
            if (task, name) not in known:
                known[task, name] = declared(task, "methods")[name](batch).squeeze(-1).double()
        others = {name: known[task, name] for name in using} | {TRUTH: truth}
        output = forward(subject.model, subject.tokens).squeeze(-1).double()
        return [
            {**row, "variant": name, "intervention": kind}
            for kind in kinds
            for name, other in others.items()
            for row in agreement(output, other, truth, groups[kind], subject.seed)
        ]

    config = {"methods": methods, "entries": entries}
    result = measure("algorithm", refs, options, measure_checkpoint, config=config)
    notes = (
        "distance: mean squared difference of output and method; baseline: of output and truth.",
        "r_predictions, r_errors: correlations over entries of predictions (baseline: with the truth), and of errors.",
        "Intervals: 95%, bootstrap over examples.",
    )
    return replace(result, notes=notes)


# ---- what tasks declare


def listed(given: str | Sequence[str]) -> list[str]:
    """Returns one name, or several, as a list."""
    return [given] if isinstance(given, str) else list(given)


def declared(task: Task, noun: str, **given: Any) -> Mapping[str, Any]:
    """Returns the declaration that a task makes under a name; a UserError says that it makes none."""
    declare = getattr(task, noun, None)
    if declare is None:
        raise UserError(f"task {task.name!r} declares no {noun}: give it a method {noun}()")
    values: Mapping[str, Any] = declare(**given)
    return values


def chosen(known: Mapping[str, Any], names: Sequence[str], option: str, task: Task) -> list[str]:
    """Returns the chosen names, each known to the task; all that it knows where none is chosen."""
    for name in names:
        if name not in known:
            raise UserError(f"{option} {name!r}: task {task.name!r} declares {', '.join(known)}")
    return list(dict.fromkeys(names or known))


def forward(model: Any, tokens: Tensor) -> Tensor:
    """Returns the model's output at all positions, on the CPU."""
    import torch

    from circuits import run

    device = next(model.parameters()).device
    return torch.cat([run(model, part.to(device)).cpu() for part in in_passes(tokens, TOKENS_PER_PASS)])


# ---- metrics of a model beside those of a method


@dataclass(frozen=True)
class Comparison:
    """Methods beside models on the same examples of a task's variations."""

    examples: Examples
    solver: str = SOLVERS[0]

    def batch(self, task: Task) -> Batch:
        return batch_of(task, self.examples.samples, self.examples.seed, self.examples.split)

    def output_of(self, task: Task, method: str) -> Tensor:
        drawn = self.examples.samples, self.examples.seed, self.examples.split
        return output_of_method(task, method, *drawn, self.solver)

    def metrics(self, task: Any, output: Tensor) -> dict[str, Any]:
        """Returns the task's metrics of an output, and its properties where the task names some."""
        properties = task.properties(output) if hasattr(task, "properties") else {}
        return {**task.metrics(output, self.batch(task)), **properties}

    def rows(self, task: Task, output: Tensor, methods: Sequence[str], seed: int) -> list[Row]:
        """Returns the model beside each method, and beside the truth as far as that has properties."""
        metrics = self.metrics(task, output)
        rows = [
            {**row, "intervention": name}
            for name in methods
            for row in paired(metrics, self.metrics(task, self.output_of(task, name)), seed)
        ]
        return rows + self.beside_truth(task, metrics, seed)

    def beside_truth(self, task: Any, metrics: Mapping[str, Any], seed: int) -> list[Row]:
        targets = self.batch(task).targets[..., None]
        right = task.properties(targets) if hasattr(task, "properties") else {}
        compared = paired({name: metrics[name] for name in right}, right, seed)
        return [{**row, "intervention": TRUTH} for row in compared]


@lru_cache(maxsize=64)
def batch_of(task: Task, samples: int | None, seed: int, split: str) -> Batch:
    """Returns the examples of a task, the same ones each time."""
    return Examples(samples, seed, split).sample(task)


@lru_cache(maxsize=64)
def output_of_method(
    task: Task, name: str, samples: int | None, seed: int, split: str, solver: str
) -> Tensor:
    """Returns what a method makes of a task's examples, solved once per process: all models have the same ones."""
    given = {} if solver == SOLVERS[0] else {"solver": solver}
    output: Tensor = declared(task, "baselines", **given)[name](batch_of(task, samples, seed, split))
    return output


# ---- agreement, entry by entry


def agreement(output: Tensor, other: Tensor, truth: Tensor, mask: Tensor, seed: int) -> list[Row]:
    """Returns the rows of one method and kind of entries; all tensors are [batch pos]."""

    def squares(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        return (one - two).square().masked_fill(~mask, 0).sum(1), mask.sum(1)

    rows = paired({DISTANCE: squares(output, other)}, {DISTANCE: squares(output, truth)}, seed)
    rows.append({"metric": PREDICTIONS, **correlation(output, other, mask, seed, control=truth)})
    if other is not truth:
        rows.append({"metric": ERRORS, **correlation(output - truth, other - truth, mask, seed)})
    return rows


def correlation(one: Tensor, two: Tensor, mask: Tensor, seed: int, control: Tensor | None = None) -> Row:
    """Returns Pearson's r over the chosen entries, pooled; ``baseline`` is that of ``one`` and ``control``.

    Intervals: 95%, bootstrap over examples. Where one of the two is constant there is no correlation: NaN.
    """
    import numpy as np

    from circuits.statistics import interval

    others = [two] if control is None else [two, control]
    moments = np.stack([moments_of(one, other, mask) for other in others])
    pooled, weights = pearson(moments.sum(1)), resamples(seed, len(one))
    # [draws series]
    resampled = np.stack([pearson(weights @ series) for series in moments], axis=1)
    compared: tuple[Any, ...] = ()
    if control is not None:
        compared = pooled[1], np.stack(interval(resampled[:, :1] - resampled[:, 1:], LEVEL))[:, 0]
    row = {**numbers(pooled[0], np.stack(interval(resampled, LEVEL))[:, 0], *compared), "n": len(one)}
    return row if len(one) > 1 else without_intervals(row)


def moments_of(one: Tensor, two: Tensor, mask: Tensor) -> Any:
    """Returns [batch 6]: number of entries, and sums of x, y, x², y², xy over them."""
    import numpy as np

    x, y, w = (part.double().numpy() for part in (one, two, mask))
    return np.stack([(w * part).sum(1) for part in (np.ones_like(x), x, y, x * x, y * y, x * y)], axis=1)


def pearson(moments: Any) -> Any:
    """Computes r from the sums [... 6] that :func:`moments_of` gives."""
    import numpy as np

    count, x, y, xx, yy, xy = (moments[..., part] for part in range(6))
    count = np.maximum(count, 1)
    spread_x, spread_y = xx - x * x / count, yy - y * y / count
    # What rounding and a solver's tolerance leave of a constant is no spread.
    real = np.minimum(spread_x, spread_y) > count * CONSTANT**2
    product = np.where(real, spread_x * spread_y, 1.0)
    return np.where(real, (xy - x * y / count) / np.sqrt(product), np.nan)
