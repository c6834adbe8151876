"""A grid as units of work, each with a key: the same configuration has the same key, whoever asks and when."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from interp_tasks.checkpoints.atomic import digest
from interp_tasks.checkpoints.marks import MARKS
from interp_tasks.checkpoints.meta import read_meta
from interp_tasks.checkpoints.refs import ZOO, check_selector, resolve, select_steps
from interp_tasks.checkpoints.run_files import CLOCK_FILE, METRICS_FILE, is_checkpoint, log_file, read_log
from interp_tasks.devices import check_written_device
from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import EXPERIMENTS
from interp_tasks.measurement.run_logs import find_runs
from interp_tasks.recipes.recipe import Ordered, orders_of
from interp_tasks.recipes.spec import MAX_UNITS, ExperimentSpec, Spec, Training, places_of_one, selectors_of
from interp_tasks.settings import check_task_name
from interp_tasks.texts import did_you_mean
from interp_tasks.training.config import SCHEDULE, Resolved, list_keys, resolve_config

KEY_LENGTH = 16
#: Train settings under which a run goes on in the folder that it has, see :class:`~interp_tasks.checkpoints.RunFolder`.
GOES_ON = ("steps", *SCHEDULE)
#: A run that is not there.
PLACEHOLDER_RUN = "runs/\N{EM DASH}"


@dataclass(frozen=True)
class TrainUnit:
    """One run to train.

    Attributes:
        key: of the whole configuration, seed and threads included.
        folder: of the run, under the grid's.
        varied: the settings that differ within a block that asks for its configuration, by key.
        given: all settings of its block.
    """

    key: str
    folder: str
    resolved: Resolved
    varied: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def what(self) -> str:
        return f"train {self.folder}"


@dataclass(frozen=True)
class MeasureUnit:
    """One call of an experiment.

    Attributes:
        runs: what it is called on; those of this grid by their folders under it.
        needs: keys of the units that train them.
    """

    key: str
    asked: ExperimentSpec
    runs: tuple[str, ...]
    needs: tuple[str, ...]
    threads: int

    @property
    def what(self) -> str:
        on = self.runs[0] if len(self.runs) == 1 else f"{self.runs[0]} and {len(self.runs) - 1} more"
        return f"{self.asked.name} of {on}"

    @property
    def marks(self) -> tuple[str, ...]:
        """Returns the marks and steps that it looks at in each run; none where it takes runs as a whole."""
        if takes_whole_runs(self.asked):
            return ()
        return tuple(map(str, self.asked.at)) or ("last",)

    def refs(self, path_of: Callable[[str], str]) -> list[str]:
        """Returns the REFs of the unit; ``path_of`` gives the path of a run."""
        paths = [path_of(run) for run in self.runs]
        return [f"{run}@{mark}" for run in paths for mark in self.asked.at] or paths


Unit: TypeAlias = TrainUnit | MeasureUnit


@dataclass(frozen=True)
class Plan:
    """Every unit in order: runs to train, then experiments."""

    train: tuple[TrainUnit, ...]
    measure: tuple[MeasureUnit, ...]

    @property
    def units(self) -> tuple[Unit, ...]:
        return (*self.train, *self.measure)

    def __len__(self) -> int:
        return len(self.train) + len(self.measure)


def check(spec: Spec) -> None:
    """Refuses what can be refused without torch: settings, presets, experiments and their arguments.

    Raises:
        UserError: in one line.
    """
    orders_of(spec)
    count = 0
    for block in spec.train:
        count += len(block.seeds) * block.size(list_keys(block.task))
        if count > MAX_UNITS:
            raise UserError(f"more than {MAX_UNITS:,} runs are asked for: give fewer values, or fewer seeds")
    for block in spec.train:
        for values in combinations(block):
            start = resolved_of(block, values).train.start_from
            if start is not None:
                resolve(start)
    for experiment_spec in spec.experiment:
        check_experiment(experiment_spec)
        where = f"experiment {experiment_spec.name}, at"
        for selector in selectors_of(experiment_spec.at, where):
            check_selector(selector, where)
    check_once(spec)
    for run in spec.runs:
        check_given(run, spec.experiment)


def check_once(spec: Spec) -> None:
    """Refuses experiments and runs that are given twice: each is measured once, and one was meant otherwise."""
    asked = [
        (each.name, each.over, tuple(sorted(map(str, each.at))), json.dumps(each.settings, sort_keys=True))
        for each in spec.experiment
    ]
    if places := places_of_one(asked):
        first, second = places
        raise UserError(
            f"experiments {first} and {second} are the same, {asked[first - 1][0]}: leave one out"
        )
    if places := places_of_one(run if run.startswith(ZOO) else os.path.normpath(run) for run in spec.runs):
        first, second = places
        raise UserError(f"runs {first} and {second} are both {spec.runs[first - 1]}: leave one out")


def check_given(run: str, experiment_specs: Sequence[ExperimentSpec]) -> None:
    """Refuses a run that is not there, and marks or steps that it does not have."""
    if not Path(run).is_dir():
        name, at, _ = run.rpartition("@")
        if at:
            raise UserError(f"runs {run!r}: name the run alone, {name}, and the step in at of an experiment")
        if all(map(reads_logs_alone, experiment_specs)):
            find_runs(run)
        else:
            resolve(run)
    for mark in dict.fromkeys(mark for each in experiment_specs for mark in each.at):
        resolve(f"{run}@{mark}")


def check_experiment(experiment_spec: ExperimentSpec) -> None:
    """Refuses an experiment of a grid that does not exist, or settings that it does not take.

    Raises:
        UserError: in one line.
    """
    from interp_tasks import experiments

    names = sorted(
        each.function.__name__
        for each in EXPERIMENTS.values()
        if next(iter(inspect.signature(each.function).parameters)) in ("refs", "runs")
    )
    if experiment_spec.name not in names:
        hint = did_you_mean(experiment_spec.name, names)
        raise UserError(f"no experiment {experiment_spec.name!r}: {hint}experiments are {', '.join(names)}")
    parameters = list(inspect.signature(getattr(experiments, experiment_spec.name)).parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        parameters += option_parameters()
    known = [
        parameter.name
        for parameter in parameters[1:]
        if parameter.kind is not parameter.VAR_KEYWORD and parameter.name != "progress"
    ]
    for name in experiment_spec.settings:
        if name not in known:
            raise UserError(
                f"experiment {experiment_spec.name} has no setting {name!r}: it has {', '.join(known)}"
            )
    if experiment_spec.at and takes_whole_runs(experiment_spec):
        raise UserError(
            f"experiment {experiment_spec.name} takes whole runs: leave out at = {list(experiment_spec.at)}"
        )
    rehearse(experiment_spec, getattr(experiments, experiment_spec.name))


def rehearse(experiment_spec: ExperimentSpec, experiment: Callable[..., Any]) -> None:
    """Refuses arguments before the runs are trained that they are for.

    Experiments look at their arguments before they look for their runs: of one that is not there, they say so last.
    """
    with naming_experiment(experiment_spec):
        try:
            experiment([PLACEHOLDER_RUN], **experiment_spec.settings)
        except UserError as error:
            if PLACEHOLDER_RUN not in str(error):
                raise
        # Where to run, and on what, is looked at once the run is there.
        if "device" in experiment_spec.settings:
            check_written_device(experiment_spec.settings["device"])
        if experiment_spec.settings.get("task") is not None:
            check_task_name(experiment_spec.settings["task"])


@contextlib.contextmanager
def naming_experiment(experiment_spec: ExperimentSpec) -> Iterator[None]:
    """Names the experiment, once, in an error about its arguments."""
    try:
        yield
    except (UserError, TypeError) as error:
        message = str(error).removeprefix(f"{experiment_spec.name}: ")
        raise UserError(f"experiment {experiment_spec.name}: {message}") from None


def takes_whole_runs(experiment_spec: ExperimentSpec) -> bool:
    """Returns whether an experiment is of runs, and not of checkpoints."""
    return next(iter(parameters_of(experiment_spec))) == "runs"


def reads_logs_alone(experiment_spec: ExperimentSpec) -> bool:
    """Returns whether an experiment reads what runs have logged, and no checkpoint."""
    looks_further = "stored" in parameters_of(experiment_spec) and experiment_spec.settings.get(
        "stored", True
    )
    return takes_whole_runs(experiment_spec) and not looks_further


def parameters_of(experiment_spec: ExperimentSpec) -> Mapping[str, inspect.Parameter]:
    from interp_tasks import experiments

    return inspect.signature(getattr(experiments, experiment_spec.name)).parameters


def option_parameters() -> list[inspect.Parameter]:
    """Returns the parameters that experiments share as ``**options``."""
    from interp_tasks.experiments import Options

    return [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in Options.__annotations__]


def plan(spec: Spec) -> Plan:
    """Returns every unit of a grid, each once: sweeps of two ``[[train]]`` may cross in a run.

    Raises:
        UserError: for settings that cannot be.
    """
    trained: dict[str, TrainUnit] = {}
    names: dict[str, Any] = {}
    labelled: dict[str, str] = {}
    varied: dict[Path, dict[str, Any]] = {}
    of_block: dict[int, list[TrainUnit]] = {}
    for number, block in enumerate(spec.train, start=1):
        units = of_block[id(block)] = units_of(block, spec.threads, names, labelled)
        if places := places_of_one(unit.key for unit in units):
            raise asked_twice(units[places[0] - 1], number)
        for unit in units:
            # Shared by all runs of a configuration: the blocks that come may vary more of it.
            varied.setdefault(Path(unit.folder).parent, {}).update(unit.varied)
            trained.setdefault(unit.key, replace(unit, varied=varied[Path(unit.folder).parent]))
    for ordered in orders_of(spec):
        check_shipped_steps(ordered, of_block[id(ordered.block)][ordered.index])
    keys = {unit.folder: unit.key for unit in trained.values()}
    measured: dict[str, MeasureUnit] = {}
    for experiment_spec in spec.experiment:
        for runs in groups(experiment_spec, list(trained.values()), spec.runs):
            needs = tuple(keys[run] for run in runs if run in keys)
            others = [content_of(run, experiment_spec) for run in runs if run not in keys]
            content = [experiment_spec.model_dump(mode="json"), needs, others, spec.threads]
            measured[key_of(content)] = MeasureUnit(
                key_of(content), experiment_spec, runs, needs, spec.threads
            )
    return Plan(tuple(trained.values()), tuple(measured.values()))


def asked_twice(unit: TrainUnit, number: int) -> UserError:
    """Returns what to say of a run for which one ``[[train]]`` asks with two values that mean the same."""
    words = [f"{key}={json.dumps(value)}" for key, value in unit.given.items()]
    run = ", ".join([unit.resolved.task_name, *words, f"seed {unit.resolved.train.seed}"])
    return UserError(f"train {number} has two values that mean the same, of {run}: leave one out")


def check_shipped_steps(ordered: Ordered, unit: TrainUnit) -> None:
    """Refuses to ship steps that the run is not going to store; where its marks lie is known once it is trained.

    Raises:
        UserError: naming the nearest that it stores.
    """
    from tasks import get

    published = get(unit.resolved.task_name, **unit.resolved.task).published_steps
    stored = unit.resolved.train.checkpoint_steps(published)
    for mark in ordered.shipment.at:
        for selector in map(str.strip, str(mark).split(",")):
            if selector not in MARKS:
                select_steps(selector, f"ship {ordered.name}: the run", stored)


def content_of(run: str, experiment_spec: ExperimentSpec) -> dict[str, Any]:
    """Returns the identity of the part of a run that an experiment reads: trained further, it is another."""
    if reads_logs_alone(experiment_spec):
        files = [
            log_file(path, name) for path in find_runs(run).values() for name in (METRICS_FILE, CLOCK_FILE)
        ]
        logs = [read_log(file, "what the run has logged") for file in files if file.is_file()]
        return {"run": run, "logs": [digest(log)["sha256"] for log in logs]}
    all_checkpoints = run if is_checkpoint(Path(run)) else f"{run}@all"
    refs = [f"{run}@{mark}" for mark in experiment_spec.at] or [all_checkpoints]
    folders = [checkpoint.path for ref in refs for checkpoint in resolve(ref)]
    return {"run": run, "checkpoints": [read_meta(folder)["sha256"] for folder in folders]}


def groups(
    experiment_spec: ExperimentSpec, trained: Sequence[TrainUnit], given: Sequence[str]
) -> list[tuple[str, ...]]:
    """Returns the runs of each call."""
    if experiment_spec.over == "all":
        return [(*(unit.folder for unit in trained), *given)]
    families: dict[str, list[str]] = {}
    for unit in trained:
        same = unit.folder if experiment_spec.over == "run" else str(Path(unit.folder).parent)
        families.setdefault(same, []).append(unit.folder)
    return [*map(tuple, families.values()), *((run,) for run in given)]


def combinations(block: Training) -> list[dict[str, Any]]:
    return list(block.combinations(list_keys(block.task)))


def resolved_of(block: Training, values: Mapping[str, Any]) -> Resolved:
    for key, instead in (("train.seed", "seeds"), ("train.threads", "threads, at the top")):
        if key in values:
            raise UserError(f"set {key}: write {instead}")
    typed = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return resolve_config(block.task, block.preset, typed)


def units_of(
    block: Training, threads: int, names: dict[str, Any], labelled: dict[str, str]
) -> list[TrainUnit]:
    """Returns a block's runs. Knows torch: a task fills in its defaults.

    Args:
        names: of folders -> the steps and schedule of the runs in them; filled in, block after block.
        labelled: configurations -> their folders, which are those of the first block that asks; filled in likewise.
    """
    from interp_tasks.training.trainer import model_settings
    from tasks import get

    axes = block.axes(list_keys(block.task))
    units = []
    for values in combinations(block):
        resolved = resolved_of(block, values)
        task = get(resolved.task_name, **resolved.task)
        model = model_settings(task, resolved.model).model_dump(mode="json")
        train = resolved.train.model_copy(update={"threads": threads})
        content = {
            "task": {"name": task.name, **task.model_dump(mode="json")},
            "model": model,
            "train": train.model_dump(mode="json"),
        }
        # More steps and a later schedule go on in the same folder, unless the grid compares them: in one block as
        # axes, in several by the first of them, which keeps the name that it would have alone.
        lasting = {
            **content,
            "train": {key: value for key, value in content["train"].items() if key not in ("seed", *GOES_ON)},
        }
        varied = {key: values[key] for key in axes}
        extensible = {f"train.{key}": content["train"][key] for key in GOES_ON}
        compared = {key: value for key, value in extensible.items() if key in axes}
        name = f"{label(block.task, varied)}-{key_of([lasting, compared])[:8]}"
        configuration = key_of([lasting, extensible])
        if configuration in labelled:
            name = labelled[configuration]
        elif names.setdefault(name, extensible) != extensible:
            name = f"{label(block.task, varied)}-{configuration[:8]}"
        labelled[configuration] = name
        for seed in block.seeds:
            config = train.model_copy(update={"seed": seed})
            key = key_of({**content, "train": config.model_dump(mode="json")})
            settled = Resolved(resolved.task_name, resolved.preset, resolved.task, resolved.model, config)
            units.append(TrainUnit(key, f"runs/{name}/seed-{seed}", settled, varied, values))
    return units


def label(task: str, varied: Mapping[str, Any]) -> str:
    """Returns a name for a folder such as ``miiii,d_model-64``, safe for file systems and REFs."""
    parts = [task, *(f"{key.partition('.')[2]}-{value}" for key, value in varied.items())]
    return re.sub(r"[^A-Za-z0-9_,+-]+", "_", ",".join(parts)).strip("_")[:80]


def key_of(content: Any) -> str:
    """Returns a hexadecimal digest of JSON."""
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]
