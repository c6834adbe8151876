"""Runs a search: an Optuna study whose trials are runs, and what came of it."""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial
from pydantic import ValidationError

from interp_tasks.checkpoints.run_reader import check_folder_kind, read_json, read_metrics
from interp_tasks.checkpoints.run_writer import config_differences, format_differences
from interp_tasks.devices import check_device
from interp_tasks.errors import Diverged, UserError
from interp_tasks.file_io import acquire_folder_lock, atomic_write, write_files_together
from interp_tasks.measurement.options_and_examples import Progress
from interp_tasks.pages import Figure, Page, Table, Text, package_versions
from interp_tasks.search.search_plan import LAST, Direction, Scalar, SearchPlan, representative_values
from interp_tasks.setting_and_seed_parsing import import_file
from interp_tasks.text_formatting import one_line, pluralise
from interp_tasks.training.train import check_precision, parse_model_settings, train_resolved
from interp_tasks.worker_pool import executor_for_jobs
from tasks.base import Task
from tasks.errors import TaskError
from tasks.seeds_and_device_tensors import derive_seed

if TYPE_CHECKING:
    import pandas

#: Trials with a value that fANOVA needs at least to say anything.
MIN_TRIALS = 4
#: What becomes of a trial, beside ``running``: a combination that cannot be built has failed, one that diverges is
#: pruned, which the sampler learns from.
STATES = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
#: Of a trial: ``trial``, ``value``, its settings by key, ``state``, ``run`` and ``reason``.
Row: TypeAlias = dict[str, Any]


def search(
    plan: SearchPlan,
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
        out: the folder of the search: a run folder per trial, ``trials.csv``, ``trials.json``, ``search.html``.
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
    check_folder_kind(out, "search")
    firsts = {key: representative_values(values)[0] for key, values in plan.vary.items()}
    first = plan.config_of_trial(firsts)
    for precision in plan.vary.get("train.precision", [first.train.precision]):
        check_precision(plan.config_of_trial({**firsts, "train.precision": precision}).train, device)
    key, direction = resolve_objective(plan, first.make_task())
    identity = json.loads(json.dumps(plan.identity(key, direction)))
    file = out / "search.json"
    if file.exists():
        check_same_search(out, read_json(file, "what is searched"), identity)
    with warnings.catch_warnings(), ExitStack() as stack:
        # Of what Optuna says about its own future.
        warnings.filterwarnings("ignore", module="optuna")
        stack.callback(acquire_folder_lock(out).release)
        atomic_write(file, json.dumps(identity, indent=1) + "\n")
        study, rows = restore_study_and_rows(plan, direction, out / "trials.json")
        result = SearchResult(identity, rows, out)
        how = {"key": key, "device": device, "imports": [Path(path).resolve() for path in imports]}
        run_trials(plan, study, result, trials, jobs, how, progress)
        write_search_files(result, study)
    return result


def check_same_search(out: Path, stored: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    # Up to 0.2 a search had a name.
    if found := config_differences({name: stored[name] for name in stored if name != "name"}, identity):
        raise UserError(f"{out} holds another search ({format_differences(found)}): choose another --out")


def restore_study_and_rows(
    plan: SearchPlan, direction: Direction, file: Path
) -> tuple[optuna.Study, list[Row]]:
    """Returns a study that knows the trials of earlier calls, and these as rows by their number."""
    study, rows = optuna.create_study(direction=direction), list[Row]()
    if not file.exists():
        return study, rows
    stored = read_json(file, "the trials of a search")
    try:
        for row in sorted(stored["trials"], key=lambda row: int(row["trial"])):
            rows.append({**row, "run": Path(row["run"]).name})
            if row["state"] != "running":
                add_trial_to_study(study, plan, row)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{file} cannot be used: {one_line(f'{type(error).__name__}: {error}')}") from None
    return study, rows


def add_trial_to_study(study: optuna.Study, plan: SearchPlan, row: Row) -> None:
    """Adds a trial to what a study knows; Optuna refuses settings outside what they were drawn from."""
    value = row["value"]
    if value is not None and not math.isfinite(value):
        raise ValueError(f"trial {row['trial']} has the value {value}")
    params = {key: row[key] for key in plan.vary}
    made = {"params": params, "distributions": optuna_distributions(plan), "value": value}
    study.add_trial(create_trial(state=STATES[row["state"]], **made))


def optuna_distributions(plan: SearchPlan) -> dict[str, BaseDistribution]:
    """Returns what each setting is drawn from, as Optuna has it."""
    drawn: dict[str, BaseDistribution] = {}
    for key, values in plan.vary.items():
        if isinstance(values, list):
            drawn[key] = CategoricalDistribution(values)
        else:
            whole = all(type(number) is int for name, number in values.items() if name != "log")
            drawn[key] = (IntDistribution if whole else FloatDistribution)(**values)
    return drawn


# ---- Trials


def run_trials(
    plan: SearchPlan,
    study: optuna.Study,
    result: SearchResult,
    trials: int,
    jobs: int,
    how: Mapping[str, Any],
    progress: Progress | None,
) -> None:
    """Takes up what a killed process left, then asks for new trials, so many at a time, and tells what came of them.

    A combination that was tried before goes on in the run that there is of it, which is at its end.
    """
    rows, file = result.rows, result.out / "trials.json"
    left = [row for row in rows if row["state"] == "running"]
    running: dict[Future[tuple[str, float | None, str | None]], Row] = {}
    with executor_for_jobs(jobs) as pool:
        while True:
            while len(running) < jobs and (left or len(rows) < trials):
                if not left:
                    left.append(add_next_trial(plan, study, rows))
                    atomic_write(file, result.to_json())
                row = left.pop(0)
                params = {key: row[key] for key in plan.vary}
                running[pool.submit(train_trial, plan, params, result.out / row["run"], **how)] = row
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                row = running.pop(future)
                row["state"], row["value"], row["reason"] = future.result()
                add_trial_to_study(study, plan, row)
                atomic_write(file, result.to_json())
                if progress is not None:
                    what = row["reason"] or format(row["value"], ".4g")
                    progress(len(rows) - len(running), trials, f"trial {row['trial']}: {what}")


def add_next_trial(plan: SearchPlan, study: optuna.Study, rows: list[Row]) -> Row:
    """Returns the next trial, which the rows have then."""
    number = len(rows)
    # One sampler for all trials would begin again with its first draws after an interruption.
    study.sampler = optuna.samplers.TPESampler(seed=derive_seed(plan.seed, "trial", number) % 2**32)
    params = study.ask(optuna_distributions(plan)).params
    same = (row["run"] for row in rows if row["state"] == "complete" and params.items() <= row.items())
    run = next(same, f"trial-{number:04d}")
    rows.append({"trial": number, "value": None, **params, "state": "running", "run": run, "reason": None})
    return rows[-1]


def train_trial(
    plan: SearchPlan,
    params: Mapping[str, Scalar],
    run: Path,
    *,
    key: str,
    device: str,
    imports: Sequence[Path],
) -> tuple[str, float | None, str | None]:
    """Trains the run of a trial, from where it was if it was interrupted.

    Returns:
        What became of it, its objective, and the reason why it has none. Any other error leaves the trial to the next
        call.
    """
    for file in imports:
        import_file(file)
    try:
        resolved = plan.config_of_trial(params)
        parse_model_settings(resolved.make_task(), resolved.model)
    except (UserError, TaskError, ValidationError) as error:
        return "failed", None, " ".join(str(error).split())
    try:
        train_resolved(resolved, run, device=device)
        return "complete", mean_of_last_evaluations(read_metrics(run), key), None
    except Diverged as error:
        return "pruned", None, f"diverged: {error}"
    except TaskError as error:  # what only building the model tells
        return "failed", None, str(error)


def resolve_objective(plan: SearchPlan, task: Task) -> tuple[str, Direction]:
    """Returns the metric and its direction."""
    parts = task.parts()
    names = next(iter(parts.values()), task).metric_names
    logged = [*names, *(f"{name} ({part})" for part in parts for name in names)]
    drop = task.drop_metric
    key = plan.objective or ("loss" if "loss" in logged else drop.name)
    if key not in logged:
        raise UserError(f"no metric {key!r} is logged: --objective takes {', '.join(logged)}")
    upward = drop.direction == "up" if key == drop.name else key.startswith("accuracy")
    return key, plan.direction or ("maximize" if upward else "minimize")


def mean_of_last_evaluations(lines: Sequence[Mapping[str, Any]], key: str) -> float:
    """Returns the mean of a validation metric over the last evaluations of a log."""
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
        rows: by number.
        out: the folder of the search.
    """

    identity: Mapping[str, Any]
    rows: list[Row] = field(repr=False)
    out: Path

    @property
    def trials(self) -> list[Row]:
        """The rows, the best first (of equal ones the earlier), then those without a value; ``run`` with its folder."""
        sign = -1 if self.identity["objective"]["direction"] == "maximize" else 1
        ranked = sorted(self.rows, key=lambda row: math.inf if row["value"] is None else sign * row["value"])
        return [{**row, "run": str(self.out / row["run"])} for row in ranked]

    @property
    def frame(self) -> pandas.DataFrame:
        """The trials as a table."""
        import pandas

        return pandas.DataFrame(self.trials).astype({"value": "float64"})

    @property
    def best(self) -> Row | None:
        return next((row for row in self.trials if row["value"] is not None), None)

    def summary(self) -> str:
        """Returns a text such as ``12 trials: 10 complete, 2 pruned``."""
        counts = Counter(row["state"] for row in self.trials)
        states = ", ".join(f"{count} {state}" for state, count in counts.items())
        return f"{pluralise(len(self.rows), 'trial')}: {states}"

    def to_json(self) -> str:
        versions = search_package_versions()
        content = {"search": self.identity, "best": self.best, "trials": self.trials, "versions": versions}
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def search_package_versions() -> dict[str, str]:
    return {**package_versions(), **{name: version(name) for name in ("optuna", "scikit-learn")}}


def write_search_files(result: SearchResult, study: optuna.Study) -> list[Path]:
    """Writes ``trials.csv``, ``trials.json`` and ``search.html`` with Optuna's pictures, together or not at all."""
    from optuna.visualization import plot_optimization_history, plot_param_importances, plot_slice

    sections: list[Any] = [Text(f"{result.summary()}. The mean of the last {LAST} evaluations counts.")]
    values = result.frame["value"]
    if values.count() >= MIN_TRIALS and values.nunique() > 1:
        seed = result.identity["sampler"]["seed"] % 2**32
        fanova = optuna.importance.FanovaImportanceEvaluator(seed=seed)
        # Values that differ by rounding alone tell nothing: fANOVA finds no variance to share out.
        with suppress(RuntimeError):
            picture = plot_param_importances(study, evaluator=fanova)
            sections.append(Figure(picture, "Importance", "Few trials tell little."))
    if result.best is not None:
        sections.append(Figure(plot_optimization_history(study), "Course of the search"))
        sections.append(Figure(plot_slice(study), "The objective against every setting"))
    sections.append(Table(result.frame, "Trials", "The best first.", name="trials"))
    title = f"Search: {result.identity['task']}, {result.identity['preset']}"
    contents = {
        "trials.csv": result.frame.to_csv(index=False),
        "trials.json": result.to_json(),
        "search.html": Page(title, sections, result.identity, search_package_versions()).html(),
    }
    return write_files_together({result.out / name: content for name, content in contents.items()})
