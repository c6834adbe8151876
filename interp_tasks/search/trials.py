"""One trial: a run of the shared trainer, and the number it is judged by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna import Study
from optuna.trial import Trial, TrialState
from pydantic import ValidationError

from interp_tasks.checkpoints.run_files import METRICS_FILE, log_file, read_metrics
from interp_tasks.errors import Diverged, UserError
from interp_tasks.measurement.subjects import Progress
from interp_tasks.search.plan import LAST, Direction, Objective, Plan
from interp_tasks.training.config import Resolved
from interp_tasks.training.forward import HookedForward
from interp_tasks.training.trainer import model_settings, train
from tasks import get
from tasks.base import Task, pool_parts
from tasks.errors import TaskError
from tasks.settings import ModelSettings


def run_name(number: int) -> str:
    return f"trial-{number:04d}"


def built(resolved: Resolved) -> tuple[Task, ModelSettings]:
    """Returns the task and the architecture of a configuration.

    Raises:
        ValueError: (``UserError``, ``TaskError``) where there is none.
    """
    task = get(resolved.task_name, **resolved.task)
    return task, model_settings(task, resolved.model)


def resolve_objective(objective: Objective, task: Task, settings: ModelSettings) -> tuple[str, Direction]:
    """Returns the metric and its direction; metrics are asked of an untrained model on two examples.

    Raises:
        UserError: for a metric that a run of the task does not log.
    """
    forward = HookedForward(task.build_model(0, settings), task.read_positions)
    with torch.no_grad():
        parts = {}
        for name, part in (task.parts() or {"": task}).items():
            batch = part.sample(2, seed=0, split="validation")
            parts[name] = part.metrics(forward(batch.tokens), batch)
    logged = list(pool_parts(parts))
    drop = task.drop_metric
    key = objective.key or ("loss" if "loss" in logged else drop.name)
    if key not in logged:
        raise UserError(f"no metric {key!r} is logged: --objective takes {', '.join(logged)}")
    if objective.direction is not None:
        return key, objective.direction
    upward = drop.direction == "up" if key == drop.name else key.startswith("accuracy")
    return key, "maximize" if upward else "minimize"


def value_of(lines: Sequence[Mapping[str, Any]], key: str) -> float:
    """Returns the mean of a validation metric over the last evaluations of a log.

    Raises:
        Diverged: if one of them is not finite.
    """
    values = [line["validation"][key] for line in lines if "validation" in line][-LAST:]
    if not values or not all(value is not None and math.isfinite(value) for value in values):
        raise Diverged(f"{key} is not finite in the last evaluations")
    return math.fsum(values) / len(values)


def carry_out(
    plan: Plan, study: Study, trial: Trial, out: Path, key: str, device: str, progress: Progress | None
) -> None:
    """Trains the run of a trial, from where it was if it was interrupted, and tells the study.

    A combination that was tried before is not trained again: training is deterministic, so its value is taken. One
    that cannot be built is told as failed, and one that diverges as pruned, which the sampler learns from. Any other
    error leaves the trial to the next call.
    """
    params = {one.key: one.suggest(trial) for one in plan.space.dimensions}
    twin = tried(study, trial, params)
    if twin is not None:
        trial.set_user_attr("same_as", twin.number)
        study.tell(trial, twin.value)
        return
    run = out / run_name(trial.number)
    try:
        resolved = plan.resolved(params)
        task, settings = built(resolved)
        # What only building the model tells.
        task.check_model(task.build_model(resolved.train.seed, settings))
    except (UserError, TaskError, ValidationError) as error:
        trial.set_user_attr("reason", " ".join(str(error).split()))
        study.tell(trial, state=TrialState.FAIL)
        return
    judge = Judge(trial, run, key) if plan.prune else None

    def logged(step: int, steps: int, line: Mapping[str, Any]) -> None:
        if judge is not None:
            judge(step, line)
        if progress is not None and key in line.get("validation", {}):
            progress(step, steps, f"{key} {line['validation'][key]:.4g}  {run}")

    try:
        train(
            task,
            out=run,
            preset=resolved.preset,
            settings=settings,
            config=resolved.train,
            device=device,
            progress=logged,
        )
        value = value_of(read_metrics(run), key)
    except optuna.TrialPruned as pruned:
        trial.set_user_attr("reason", str(pruned))
        study.tell(trial, state=TrialState.PRUNED)
    except Diverged as error:
        trial.set_user_attr("reason", f"diverged: {error}")
        study.tell(trial, state=TrialState.PRUNED)
    else:
        study.tell(trial, value)


def tried(study: Study, trial: Trial, params: Mapping[str, Any]) -> optuna.trial.FrozenTrial | None:
    """Returns a finished trial with the same settings, and a run of its own."""
    for other in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        if other.number != trial.number and other.params == params and "same_as" not in other.user_attrs:
            return other
    return None


class Judge:
    """Tells the pruner how a trial stands at every evaluation, and stops it where the pruner says so."""

    def __init__(self, trial: Trial, run: Path, key: str) -> None:
        self.trial, self.key = trial, key
        self.reported = set(trial.study.trials[trial.number].intermediate_values)
        # Of a run that goes on: the trainer logs again what came after its last checkpoint.
        before = read_metrics(run) if log_file(run, METRICS_FILE).is_file() else []
        self.lines = {line["step"]: line for line in before}

    def __call__(self, step: int, line: Mapping[str, Any]) -> None:
        if "validation" not in line:
            return
        self.lines[step] = dict(line)
        if step not in self.reported:
            so_far = [self.lines[at] for at in sorted(self.lines) if at <= step]
            self.trial.report(value_of(so_far, self.key), step)
            self.reported.add(step)
        if self.trial.should_prune():
            raise optuna.TrialPruned(f"at step {step}, behind the median of other trials")
