"""Runs a search: an Optuna study whose trials are runs, and what came of it."""

from __future__ import annotations

import json
import math
import sqlite3
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.trial import Trial, TrialState
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from interp_tasks.checkpoints.run_config import differences, listed
from interp_tasks.checkpoints.run_files import check_free, read_json, read_metrics
from interp_tasks.devices import check_device
from interp_tasks.disk import atomic_write, lock_folder, write_together
from interp_tasks.errors import Diverged, UserError
from interp_tasks.measurement.result import json_value
from interp_tasks.measurement.subjects import Progress
from interp_tasks.pages import Figure, Page, Table, Text, versions
from interp_tasks.search.plan import LAST, Direction, Plan, Scalar, Values, ends
from interp_tasks.settings import import_file
from interp_tasks.texts import brief, counted
from interp_tasks.training.config import Resolved
from interp_tasks.training.trainer import check_memory, check_precision, model_settings, train_resolved
from interp_tasks.workers import pool_of
from tasks import get
from tasks.base import Task
from tasks.errors import TaskError
from tasks.seeds import derive_seed
from tasks.settings import ModelSettings

if TYPE_CHECKING:
    import pandas

STUDY = "interp-run search"
#: Seconds for which a database that another process has locked is waited for.
WAIT = 120
#: Trials with a value that fANOVA needs at least to say anything.
MIN_TRIALS = 4


def search(
    plan: Plan,
    *,
    out: str | Path,
    trials: int = 10,
    jobs: int = 1,
    device: str = "cpu",
    imports: Sequence[str | Path] = (),
    progress: Progress | None = None,
) -> SearchResult:
    """Trains runs until the search has so many trials, those of earlier calls counted.

    Trials that a killed process left are taken up where their runs stopped. What trial number n tries depends on the
    seed, n and the trials told before, so a search that was killed goes on to the same end (with several ``jobs`` on
    which of them ended first, too).

    Args:
        out: the folder of the search: a run folder per trial, ``trials.csv``, ``trials.json``, ``search.html``, and
            ``search.db``, which Optuna's own tools open.
        jobs: trials at a time, in processes of their own where there are several.
        imports: files that register tasks, for those processes.

    Raises:
        UserError: in one line, for settings that cannot be, for a folder that holds another search or is at work, and
            for what stops a run other than divergence; such a trial is taken up again by the next call.
    """
    if trials < 1 or jobs < 1:
        raise UserError(f"--trials {trials}, --jobs {jobs}: at least 1")
    check_device(device)
    out = Path(out)
    check_free(out, "search")
    key, direction = checked(plan, device)
    identity = json.loads(json.dumps(plan.identity(key, direction)))
    file = out / "search.json"
    if file.exists():
        check_same(out, read_json(file, "what is searched"), identity)
    with warnings.catch_warnings(), ExitStack() as stack:
        # Of what Optuna says about its own future.
        warnings.filterwarnings("ignore", module="optuna")
        stack.callback(lock_folder(out).release)
        study = stack.enter_context(opened(out / "search.db", direction))
        check_same(out, study.user_attrs.get("search", identity), identity)
        study.set_user_attr("search", identity)
        atomic_write(file, json.dumps(identity, indent=1) + "\n")
        how = {"key": key, "device": device, "imports": [Path(path).resolve() for path in imports]}
        run_trials(plan, study, out, trials, jobs, how, progress)
        result = result_of(study, identity, out)
        write(result, study, out)
    return result


def checked(plan: Plan, device: str) -> tuple[str, Direction]:
    """Returns the objective of a plan and the way that is better.

    Raises:
        UserError: for values that no trial can have.
    """

    def valid(resolved: Resolved) -> None:
        check_precision(resolved.train, device)
        built(resolved)

    plan.check_values(valid)
    first = plan.resolved({key: ends(values)[0] for key, values in plan.vary.items()})
    task, settings = built(first)
    check_memory(task, settings, first.train, device)
    return resolve_objective(plan, task)


def check_same(out: Path, stored: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    # Up to 0.2 a search had a name.
    if found := differences({name: stored[name] for name in stored if name != "name"}, identity):
        raise UserError(f"{out} holds another search ({listed(found)}): choose another --out")


@contextmanager
def opened(file: Path, direction: Direction) -> Iterator[optuna.Study]:
    """Opens the study of a search, or begins it; its connections are closed at the end.

    Raises:
        UserError: for a database that cannot be opened or read.
    """

    def unusable(error: Exception) -> UserError:
        cause = getattr(error.__cause__ or error, "orig", None) or error.__cause__ or error
        return UserError(
            f"{file} cannot be used: {' '.join(str(cause).split())[:200] or type(cause).__name__}"
        )

    try:
        check_tables(file)
        waiting = {"connect_args": {"timeout": WAIT}}
        storage = optuna.storages.RDBStorage(f"sqlite:///{file}", engine_kwargs=waiting)
        how: dict[str, Any] = {"storage": storage, "load_if_exists": True, "direction": direction}
        study = optuna.create_study(study_name=STUDY, **how)
        check_trials(study)
    # Each kind of damage to what is stored is another error of Optuna's or SQLAlchemy's.
    except Exception as error:
        raise unusable(error) from None
    try:
        yield study
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
        raise unusable(error) from None
    finally:
        storage.remove_session()
        storage.engine.dispose()


def check_tables(file: Path) -> None:
    """Refuses a database with views or triggers, which run what somebody else wrote, perhaps without end."""
    if not file.exists():
        return
    with closing(sqlite3.connect(file, timeout=WAIT)) as database:
        query = "SELECT type, name FROM sqlite_master WHERE type IN ('view', 'trigger')"
        found = database.execute(query).fetchone()
    if found is not None:
        raise ValueError(f"Optuna made no {found[0]} {brief(found[1])!r}")


def check_trials(study: optuna.Study) -> None:
    """Refuses a value that is no finite number, and a setting outside what it was drawn from: no search told them."""
    _ = study.user_attrs  # which are text in the database
    for trial in study.get_trials(deepcopy=False):
        if trial.state is TrialState.COMPLETE and not math.isfinite(trial.values[0]):
            raise ValueError(f"trial {trial.number} has the value {trial.values[0]}")
        for name, value in trial.params.items():
            distribution = trial.distributions[name]
            if not distribution._contains(distribution.to_internal_repr(value)):
                raise ValueError(f"trial {trial.number} has {name} = {brief(str(value))}")


# ---- Trials


def run_trials(
    plan: Plan,
    study: optuna.Study,
    out: Path,
    trials: int,
    jobs: int,
    how: Mapping[str, Any],
    progress: Progress | None,
) -> None:
    """Takes up what a killed process left, then asks for new trials, so many at a time, and tells what came of them.

    A combination that was tried before goes on in the run that there is of it, which is at its end.
    """
    left = [each for each in study.get_trials(deepcopy=False) if each.state is TrialState.RUNNING]
    asked = len(study.get_trials(deepcopy=False))
    running: dict[Future[tuple[TrialState, float | None, str]], Trial] = {}
    with pool_of(jobs) as pool:
        while True:
            while len(running) < jobs and (left or asked < trials):
                number = left[0].number if left else asked
                # One sampler for all trials would begin again with its first draws after an interruption.
                seed = derive_seed(plan.seed, "trial", number) % 2**32
                study.sampler = optuna.samplers.TPESampler(seed=seed)
                trial = Trial(study, left.pop(0)._trial_id) if left else study.ask()
                asked = max(asked, number + 1)
                params = {name: suggest(trial, name, values) for name, values in plan.vary.items()}
                told = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
                same = next((each for each in told if each.params == params), trial)
                trial.set_user_attr("run", same.user_attrs.get("run", run_name(same.number)))
                run = out / trial.user_attrs["run"]
                running[pool.submit(objective_of, plan, params, run, **how)] = trial
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                trial = running.pop(future)
                state, value, reason = future.result()
                if reason:
                    trial.set_user_attr("reason", reason)
                study.tell(trial, value, state)
                if progress is not None:
                    progress(
                        asked - len(running),
                        trials,
                        f"trial {trial.number}: {reason or format(value, '.4g')}",
                    )


def run_name(number: int) -> str:
    return f"trial-{number:04d}"


def objective_of(
    plan: Plan,
    params: Mapping[str, Scalar],
    run: Path,
    *,
    key: str,
    device: str,
    imports: Sequence[Path],
) -> tuple[TrialState, float | None, str]:
    """Trains the run of a trial, from where it was if it was interrupted.

    Returns:
        What became of it, its objective, and the reason why it has none: a combination that cannot be built has failed,
        one that diverges is pruned, which the sampler learns from. Any other error leaves the trial to the next call.
    """
    for file in imports:
        import_file(file)
    try:
        resolved = plan.resolved(params)
        built(resolved)
    except (UserError, TaskError, ValidationError) as error:
        return TrialState.FAIL, None, " ".join(str(error).split())
    try:
        train_resolved(resolved, run, device=device)
        return TrialState.COMPLETE, value_of(read_metrics(run), key), ""
    except Diverged as error:
        return TrialState.PRUNED, None, f"diverged: {error}"
    except TaskError as error:  # what only building the model tells
        return TrialState.FAIL, None, str(error)


def suggest(trial: Trial, key: str, values: Values) -> Scalar:
    if isinstance(values, list):
        chosen: Scalar = trial.suggest_categorical(key, values)
        return chosen
    whole = all(type(number) is int for name, number in values.items() if name != "log")
    draw: Any = trial.suggest_int if whole else trial.suggest_float
    drawn: Scalar = draw(key, **values)
    return drawn


def built(resolved: Resolved) -> tuple[Task, ModelSettings]:
    """Returns the task and the architecture of a configuration."""
    task = get(resolved.task_name, **resolved.task)
    return task, model_settings(task, resolved.model)


def resolve_objective(plan: Plan, task: Task) -> tuple[str, Direction]:
    """Returns the metric and its direction.

    Raises:
        UserError: for a metric that a run of the task does not log.
    """
    parts = task.parts()
    names = next(iter(parts.values()), task).metric_names
    logged = [*names, *(f"{name} ({part})" for part in parts for name in names)]
    drop = task.drop_metric
    key = plan.objective or ("loss" if "loss" in logged else drop.name)
    if key not in logged:
        raise UserError(f"no metric {key!r} is logged: --objective takes {', '.join(logged)}")
    upward = drop.direction == "up" if key == drop.name else key.startswith("accuracy")
    return key, plan.direction or ("maximize" if upward else "minimize")


def value_of(lines: Sequence[Mapping[str, Any]], key: str) -> float:
    """Returns the mean of a validation metric over the last evaluations of a log.

    Raises:
        Diverged: if one of them is not finite.
    """
    values = [line["validation"][key] for line in lines if "validation" in line][-LAST:]
    if not values or not all(value is not None and math.isfinite(value) for value in values):
        raise Diverged(f"{key} is not finite in the last evaluations")
    return math.fsum(values) / len(values)


# ---- What came of it


@dataclass(frozen=True)
class SearchResult:
    """The trials of a search.

    Attributes:
        identity: what was searched, as ``search.json`` has it.
        frame: a row per trial, the best first (of equal ones the earlier), then those without a value: ``trial``,
            ``value``, a column for each setting, ``state`` (complete, pruned, failed), ``run`` (one for all trials of a
            combination) and ``reason``.
        importances: setting -> share of the variance of the objective that fANOVA (Hutter et al. 2014) lays to it,
            largest first, their sum 1; empty where there is too little to tell from.
    """

    identity: Mapping[str, Any]
    frame: pandas.DataFrame
    importances: Mapping[str, float]

    @property
    def trials(self) -> list[dict[str, Any]]:
        """The rows as JSON values."""
        rows: list[dict[str, Any]] = json_value(self.frame.to_dict("records"))
        return rows

    @property
    def best(self) -> dict[str, Any] | None:
        return next((row for row in self.trials if row["value"] is not None), None)

    def summary(self) -> str:
        """Returns a text such as ``12 trials: 10 complete, 2 pruned``."""
        counts = self.frame["state"].value_counts(sort=False)
        states = ", ".join(f"{count} {state}" for state, count in counts.items())
        return f"{counted(len(self.frame), 'trial')}: {states}"

    def to_json(self) -> str:
        content = {name: getattr(self, name) for name in ("best", "importances", "trials")}
        content = {"search": self.identity, **content, "versions": made_by()}
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def result_of(study: optuna.Study, identity: Mapping[str, Any], out: Path) -> SearchResult:
    """Reads the trials of a study, and how much each setting mattered."""
    import pandas

    rows = [
        {
            "trial": trial.number,
            "value": trial.value if trial.state is TrialState.COMPLETE else None,
            **{key: trial.params.get(key) for key in identity["space"]},
            "state": "failed" if trial.state is TrialState.FAIL else trial.state.name.lower(),
            "run": str(out / trial.user_attrs.get("run", run_name(trial.number))),
            "reason": trial.user_attrs.get("reason"),
        }
        for trial in study.get_trials(deepcopy=False)
    ]
    frame = pandas.DataFrame(rows).astype({"value": "float64"})
    upward = identity["objective"]["direction"] == "maximize"
    frame = frame.sort_values("value", ascending=not upward, kind="stable", ignore_index=True)
    shares: dict[str, float] = {}
    if frame["value"].count() >= MIN_TRIALS and frame["value"].nunique() > 1:
        # Values that differ by rounding alone tell nothing: fANOVA finds no variance to share out.
        with suppress(RuntimeError):
            shares = optuna.importance.get_param_importances(study, evaluator=fanova(identity))
    return SearchResult(identity, frame, {key: float(share) for key, share in shares.items()})


def made_by() -> dict[str, str]:
    return {**versions(), **{name: version(name) for name in ("optuna", "scikit-learn")}}


def fanova(identity: Mapping[str, Any]) -> optuna.importance.FanovaImportanceEvaluator:
    return optuna.importance.FanovaImportanceEvaluator(seed=identity["sampler"]["seed"] % 2**32)


def write(result: SearchResult, study: optuna.Study, folder: Path) -> list[Path]:
    """Writes ``trials.csv``, ``trials.json`` and ``search.html`` with Optuna's pictures, together or not at all."""
    from optuna.visualization import plot_optimization_history, plot_param_importances, plot_slice

    sections: list[Any] = [Text(f"{result.summary()}. The mean of the last {LAST} evaluations counts.")]
    if result.importances:
        picture = plot_param_importances(study, evaluator=fanova(result.identity))
        sections.append(Figure(picture, "Importance", "Few trials tell little."))
    if result.best is not None:
        sections.append(Figure(plot_optimization_history(study), "Course of the search"))
        sections.append(Figure(plot_slice(study), "The objective against every setting"))
    sections.append(Table(result.frame, "Trials", "The best first.", name="trials"))
    title = f"Search: {result.identity['task']}, {result.identity['preset']}"
    contents = {
        "trials.csv": result.frame.to_csv(index=False),
        "trials.json": result.to_json(),
        "search.html": Page(title, sections, result.identity, made_by()).html(),
    }
    return write_together({folder / name: content for name, content in contents.items()})
