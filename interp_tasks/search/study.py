"""Runs a search: an Optuna study whose trials are runs, and what came of it."""

from __future__ import annotations

import json
import math
import sqlite3
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
import torch
from optuna.trial import Trial, TrialState
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from interp_tasks.checkpoints.run_config import differences, listed
from interp_tasks.checkpoints.run_files import check_free, read_json, read_metrics
from interp_tasks.devices import check_device
from interp_tasks.disk import atomic_write, lock_of, write_together
from interp_tasks.errors import Diverged, UserError
from interp_tasks.measurement.subjects import Progress
from interp_tasks.pages import Figure, Page, Table, Text, versions
from interp_tasks.search.plan import LAST, Direction, Plan, Scalar, Values, ends
from interp_tasks.texts import brief
from interp_tasks.training.config import Resolved
from interp_tasks.training.forward import HookedForward
from interp_tasks.training.trainer import check_memory, check_precision, model_settings, train
from tasks import get
from tasks.base import Task, pool_parts
from tasks.errors import TaskError
from tasks.seeds import derive_seed
from tasks.settings import ModelSettings

if TYPE_CHECKING:
    import pandas
    from filelock import BaseFileLock

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
    device: str = "cpu",
    progress: Progress | None = None,
) -> SearchResult:
    """Trains runs until the search has so many trials, those of earlier calls and of other processes counted.

    Trials that a killed process left are taken up where their runs stopped. Processes on one machine with the same
    ``out`` share the work. What trial number n tries depends on the seed, n and the trials told before, so a search
    that was killed goes on to the same end.

    Args:
        out: the folder of the search: a run folder per trial, ``trials.csv``, ``trials.json``, ``search.html``, and
            ``search.db``, which Optuna's own tools open.

    Raises:
        UserError: in one line, for settings that cannot be, for a folder that holds another search, and for what stops
            a run other than divergence; such a trial is taken up again by the next call.
    """
    if trials < 1:
        raise UserError(f"--trials {trials}: at least 1")
    check_device(device)
    out = Path(out)
    check_free(out, "search")
    key, direction = checked(plan, device)
    identity = json.loads(json.dumps(plan.identity(key, direction)))
    file = out / "search.json"
    if file.exists():
        check_same(out, read_json(file, "what is searched"), identity)
    with warnings.catch_warnings():
        # Of what Optuna says about its own future.
        warnings.filterwarnings("ignore", module="optuna")
        with ExitStack() as stack:
            with held(out, "search"):
                study = stack.enter_context(opened(out / "search.db", direction))
                check_same(out, study.user_attrs.get("search", identity), identity)
                study.set_user_attr("search", identity)
                atomic_write(file, json.dumps(identity, indent=1) + "\n")
            while (dealt := next_trial(study, plan, out, trials)) is not None:
                trial, lock = dealt
                with lock:
                    carry_out(plan, study, trial, out, key, device, trials, progress)
            with held(out, "search"):
                result = SearchResult.of(study, identity, out)
                result.write(out, study)
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
    return resolve_objective(plan, task, settings)


def held(out: Path, name: str) -> BaseFileLock:
    """Returns a lock by which processes share a search; kill its holder, and it is free."""
    return lock_of(out / ".locks" / name)


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

    check_tables(file)
    try:
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
    """Refuses a database with views or triggers, which run what somebody else wrote, perhaps without end.

    Raises:
        UserError: naming one.
    """
    if not file.exists():
        return
    try:
        with closing(sqlite3.connect(file, timeout=WAIT)) as database:
            foreign = database.execute(
                "SELECT type, name FROM sqlite_master WHERE type IN ('view', 'trigger')"
            )
            found = foreign.fetchone()
    except sqlite3.Error as error:
        raise UserError(f"{file} cannot be used: {error}") from None
    if found is not None:
        raise UserError(f"{file} cannot be used: Optuna made no {found[0]} {brief(found[1])!r}")


def check_trials(study: optuna.Study) -> None:
    """Refuses trials that no search has told.

    Raises:
        ValueError: for a value that is no finite number, or a setting outside what it was drawn from.
    """
    _ = study.user_attrs  # which are text in the database
    for trial in study.get_trials(deepcopy=False):
        if trial.state is TrialState.COMPLETE and not math.isfinite(trial.values[0]):
            raise ValueError(f"trial {trial.number} has the value {trial.values[0]}")
        for name, value in trial.params.items():
            distribution = trial.distributions[name]
            if not distribution._contains(distribution.to_internal_repr(value)):
                raise ValueError(f"trial {trial.number} has {name} = {brief(str(value))}")


def next_trial(study: optuna.Study, plan: Plan, out: Path, trials: int) -> tuple[Trial, BaseFileLock] | None:
    """Returns an abandoned trial or, while there are too few, a new one; ``None`` when there is neither."""
    from filelock import Timeout

    with held(out, "search"):
        earlier = study.get_trials(deepcopy=False)
        for left in (each for each in earlier if each.state is TrialState.RUNNING):
            lock = held(out, run_name(left.number))
            try:
                lock.acquire(blocking=False)
            except Timeout:
                continue
            # It may have been finished, and let go, since it was looked at.
            if study.get_trials(deepcopy=False)[left.number].state is TrialState.RUNNING:
                study.sampler = sampler(plan, left.number)
                return Trial(study, left._trial_id), lock
            lock.release()
        if len(earlier) >= trials:
            return None
        lock = held(out, run_name(len(earlier)))
        lock.acquire()
        study.sampler = sampler(plan, len(earlier))
        return study.ask(), lock


def sampler(plan: Plan, number: int) -> optuna.samplers.BaseSampler:
    """Returns a sampler for each trial: one for all would begin again with its first draws after an interruption."""
    return optuna.samplers.TPESampler(seed=derive_seed(plan.seed, "trial", number) % 2**32)


def run_name(number: int) -> str:
    return f"trial-{number:04d}"


# ---- One trial


def carry_out(
    plan: Plan,
    study: optuna.Study,
    trial: Trial,
    out: Path,
    key: str,
    device: str,
    trials: int,
    progress: Progress | None,
) -> None:
    """Trains the run of a trial, from where it was if it was interrupted, and tells the study.

    A combination that was tried before is not trained again: training is deterministic, so its value is taken. One
    that cannot be built is told as failed, and one that diverges as pruned, which the sampler learns from. Any other
    error leaves the trial to the next call.
    """
    params = {name: suggest(trial, name, values) for name, values in plan.vary.items()}
    told = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    twins = (other for other in told if other.params == params and "same_as" not in other.user_attrs)
    if (twin := next(twins, None)) is not None:
        trial.set_user_attr("same_as", twin.number)
        study.tell(trial, twin.value)
        return
    run = out / run_name(trial.number)

    def logged(step: int, steps: int, line: Mapping[str, Any]) -> None:
        value = line.get("validation", {}).get(key)
        if progress is not None and value is not None:
            progress(step, steps, f"trial {trial.number + 1} of {trials}  {key} {value:.4g}  {run}")

    def end(state: TrialState, reason: str) -> None:
        trial.set_user_attr("reason", " ".join(reason.split()))
        study.tell(trial, state=state)

    try:
        resolved = plan.resolved(params)
        task, settings = built(resolved)
        # What only building the model tells.
        task.check_model(task.build_model(resolved.train.seed, settings))
    except (UserError, TaskError, ValidationError) as error:
        end(TrialState.FAIL, str(error))
        return
    try:
        how: dict[str, Any] = {"preset": resolved.preset, "settings": settings, "config": resolved.train}
        train(task, out=run, **how, device=device, progress=logged)
        value = value_of(read_metrics(run), key)
    except Diverged as error:
        end(TrialState.PRUNED, f"diverged: {error}")
    else:
        study.tell(trial, value)


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


def resolve_objective(plan: Plan, task: Task, settings: ModelSettings) -> tuple[str, Direction]:
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


def fanova(identity: Mapping[str, Any]) -> optuna.importance.FanovaImportanceEvaluator:
    return optuna.importance.FanovaImportanceEvaluator(seed=identity["sampler"]["seed"] % 2**32)


@dataclass(frozen=True)
class SearchResult:
    """The trials of a search.

    Attributes:
        identity: what was searched, as ``search.json`` has it.
        trials: by number: ``trial``, ``state`` (complete, pruned, failed, running), ``value``, ``params``, ``run``,
            ``same_as`` (a trial whose value it took) and ``reason``.
        importances: setting -> share of the variance of the objective that fANOVA (Hutter et al. 2014) lays to it,
            largest first, their sum 1; empty where there is too little to tell from.
    """

    identity: Mapping[str, Any]
    trials: Sequence[Mapping[str, Any]]
    importances: Mapping[str, float]
    versions: Mapping[str, str] = field(default_factory=versions, repr=False)

    @classmethod
    def of(cls, study: optuna.Study, identity: Mapping[str, Any], out: Path) -> SearchResult:
        """Reads the trials of a study, and how much each setting mattered."""
        trials = []
        for trial in study.get_trials(deepcopy=False):
            same_as = trial.user_attrs.get("same_as")
            row = {
                "trial": trial.number,
                "state": {TrialState.FAIL: "failed"}.get(trial.state, trial.state.name.lower()),
                "value": trial.value if trial.state is TrialState.COMPLETE else None,
                "params": {key: trial.params[key] for key in identity["space"] if key in trial.params},
                "run": str(out / run_name(trial.number if same_as is None else same_as)),
                "same_as": same_as,
                "reason": trial.user_attrs.get("reason"),
            }
            trials.append(row)
        values = [trial["value"] for trial in trials if trial["value"] is not None]
        shares: dict[str, float] = {}
        if len(values) >= MIN_TRIALS and len({*values}) > 1:
            # Values that differ by rounding alone tell nothing: fANOVA finds no variance to share out.
            with suppress(RuntimeError):
                shares = optuna.importance.get_param_importances(study, evaluator=fanova(identity))
        made_by = {**versions(), **{name: version(name) for name in ("optuna", "scikit-learn")}}
        return cls(identity, trials, {key: float(share) for key, share in shares.items()}, made_by)

    @property
    def ranked(self) -> list[Mapping[str, Any]]:
        """Complete trials, the best first; of equal ones the earlier."""
        complete = [trial for trial in self.trials if trial["value"] is not None]
        sign = -1 if self.identity["objective"]["direction"] == "maximize" else 1
        return sorted(complete, key=lambda trial: sign * trial["value"])

    @property
    def best(self) -> Mapping[str, Any] | None:
        return next(iter(self.ranked), None)

    def frame(self) -> pandas.DataFrame:
        """Returns a row per trial, the best first, then those without a value; a column per setting."""
        import pandas

        rest = [trial for trial in self.trials if trial["value"] is None]
        columns = ["trial", "value", *self.identity["space"], "state", "run", "same_as", "reason"]
        rows = [{**trial, **trial["params"]} for trial in [*self.ranked, *rest]]
        return pandas.DataFrame(rows, columns=columns).astype({"value": "float64", "same_as": "Int64"})

    def to_json(self) -> str:
        content = {
            "search": self.identity,
            "best": self.best,
            "importances": self.importances,
            "trials": self.trials,
            "versions": self.versions,
        }
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"

    def to_csv(self) -> str:
        text: str = self.frame().to_csv(index=False)
        return text

    def summary(self) -> str:
        """Returns a text such as ``12 trials: 10 complete, 2 pruned``."""
        states = [trial["state"] for trial in self.trials]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        return f"{len(states)} trial{'s' * (len(states) != 1)}: {counts}"

    def page(self, study: optuna.Study) -> Page:
        """Returns Optuna's own pictures, and all trials."""
        from optuna.visualization import plot_optimization_history, plot_param_importances, plot_slice

        sections: list[Any] = [Text(f"{self.summary()}. The mean of the last {LAST} evaluations counts.")]
        if self.importances:
            picture = plot_param_importances(study, evaluator=fanova(self.identity))
            sections.append(Figure(picture, "Importance", "Few trials tell little."))
        if self.ranked:
            sections.append(Figure(plot_optimization_history(study), "Course of the search"))
            sections.append(Figure(plot_slice(study), "The objective against every setting"))
        sections.append(Table(self.frame(), "Trials", "The best first.", name="trials"))
        title = f"Search: {self.identity['task']}, {self.identity['preset']}"
        return Page(title, sections, self.identity, self.versions)

    def write(self, folder: Path, study: optuna.Study) -> list[Path]:
        """Writes ``trials.csv``, ``trials.json`` and ``search.html``, together or not at all."""
        page = self.page(study).html()
        contents = {"trials.csv": self.to_csv(), "trials.json": self.to_json(), "search.html": page}
        return write_together({folder / name: content for name, content in contents.items()})
