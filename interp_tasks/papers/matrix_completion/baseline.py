"""A model beside the exact baselines of its task; and those baselines alone, for which no model is needed.

A row per checkpoint, variation (the ``variant``), method (the ``intervention``) and metric: ``value`` is the model's,
``baseline`` the method's. What outputs are like whatever is right (their nuclear norm) has a row against the
``truth`` as well. Alone: a row per method (the ``variant``) and metric.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.options import check_choice
from interp_tasks.measurement.paired import paired
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import measure
from interp_tasks.measurement.subjects import (
    Examples,
    LoadedCheckpoint,
    Options,
    check_has_task,
)
from interp_tasks.measurement.table import Row, tidy
from interp_tasks.papers.matrix_completion.comparison import (
    BATCHED,
    PAIRED,
    Comparison,
    chosen,
    declared,
    figures,
    forward,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tasks import Task

__all__ = ["baseline", "figures"]

#: What is varied, unless another group of the task's variations is asked for.
VARY = "p_mask"
SOLVERS = (BATCHED, "cvxpy")
#: Whose rows they are where no model is looked at.
ALONE = "alone"
METHODS = typer.Option(
    "--method",
    metavar="NAME",
    help="One that the task declares; repeat.",
    show_default="the first; without --ckpt all",
)
VARY_OPTION = typer.Option("--vary", metavar="GROUP", help="Variations of the task to go through.")
SOLVER = typer.Option("--solver", metavar="NAME", help=f"Of convex problems: {' or '.join(SOLVERS)}.")
VARIANTS = typer.Option("--variant", metavar="NAME", help="Only this of them; repeat.", show_default="all")


@experiment(
    "matrix",
    says={"methods": [], "vary": VARY, "variants": [], "solver": BATCHED},
    judged_by_task=True,
)
def baseline(
    refs: str | Sequence[str] = (),
    methods: Annotated[str | Sequence[str], METHODS, list[str]] = (),
    vary: Annotated[str, VARY_OPTION] = VARY,
    variants: Annotated[str | Sequence[str], VARIANTS, list[str]] = (),
    solver: Annotated[str, SOLVER] = BATCHED,
    alone: bool = False,
    **options: Unpack[Options],
) -> Result:
    """Compare models with methods that are not trained, such as completions of least nuclear norm.

    Over a group of variations of the task, such as the share of hidden entries. Without a checkpoint the methods are
    tried by themselves: --task matrix-completion is 7×7 of rank 2.

    Gopalani, Lubana, Hu 2024, section 3.2, figure 3 and appendix B.

    Args:
        refs: one or several REFs; all see the same examples. None with ``alone``.
        methods: names of those that the task declares in ``baselines()``. Default: the first; alone: all.
        vary: the group of the task's ``variations()`` to go through.
        variants: only these of the group.
        solver: of a task's convex problems: ``"batched"``, all at once, with a certificate, or ``"cvxpy"``.
        alone: look at no model but at the methods themselves, on examples of ``task`` (a name, or a task); so it is
            where there are no REFs. REFs, if there are any, are not read.
        options: samples, seed, split, task, task_config, device, progress: see :class:`Options`.

    Raises:
        UserError, TaskError: in one line.
    """
    methods, variants = ([given] if isinstance(given, str) else list(given) for given in (methods, variants))
    check_choice("--solver", solver, SOLVERS)
    check_has_task("baseline", options)
    if alone or (not refs and options.get("task") is not None):
        if variants or vary != VARY:
            raise UserError(
                "--vary and --variant go with --ckpt: without one use --set, as in --set task.p_mask=0.5"
            )
        return methods_alone(methods, solver, options)
    comparison = Comparison(Examples.of(options), solver)

    def check(subject: LoadedCheckpoint) -> None:
        methods_and_variations(subject.task, methods, vary, variants)

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        using, tasks = methods_and_variations(subject.task, methods, vary, variants)
        rows = []
        for name, task in tasks.items():
            task.check_model(subject.model)
            output = forward(subject.model, comparison.batch(task).tokens)
            rows += [{**row, "variant": name} for row in comparison.rows(task, output, using, subject.seed)]
        return rows

    config = {"methods": methods, "vary": vary, "variants": variants, "solver": solver}
    result = measure("baseline", refs, options, measure_checkpoint, config=config, check=check)
    note = "baseline: the method named under intervention; effect and ratio: the model against it."
    return replace(result, notes=(PAIRED, note))


def methods_and_variations(
    task: Task | None, methods: Sequence[str], vary: str, variants: Sequence[str]
) -> tuple[list[str], dict[str, Task]]:
    """Returns the methods and the variations to go through."""
    assert task is not None
    known, groups = declared(task, "baselines"), declared(task, "variations")
    using = chosen(known, methods or [*known][:1], "--method", task)
    (group,) = chosen(groups, [vary], "--vary", task)
    return using, {name: groups[group][name] for name in chosen(groups[group], variants, "--variant", task)}


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
        by_method = comparison.by_method(task, name)
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
