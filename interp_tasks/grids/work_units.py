"""A grid as units of work, each with a key: the same configuration has the same key, whoever asks and when."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from interp_tasks.checkpoints.checkpoint_refs import resolve
from interp_tasks.checkpoints.run_reader import (
    CLOCK_FILE,
    METRICS_FILE,
    is_checkpoint_folder,
    log_file,
    read_checkpoint_meta,
    read_decompressed_log,
    size_and_sha256,
)
from interp_tasks.errors import UserError
from interp_tasks.experiments import every_experiment
from interp_tasks.grid_spec import ExperimentSpec, Spec, TrainBlock, check_step_selectors, shipped_runs
from interp_tasks.measurement.logged_runs import run_folders_by_name
from interp_tasks.setting_and_seed_parsing import MANY_RUNS
from interp_tasks.training.config import SCHEDULE, ResolvedConfig, resolve_config
from tasks.errors import did_you_mean

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
    """

    key: str
    folder: str
    resolved: ResolvedConfig
    varied: Mapping[str, Any] = field(default_factory=dict)

    @property
    def description(self) -> str:
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
    def description(self) -> str:
        on = self.runs[0] if len(self.runs) == 1 else f"{self.runs[0]} and {len(self.runs) - 1} more"
        return f"{self.asked.name} of {on}"

    def refs(self, root: Path) -> list[str]:
        """Returns the REFs of the unit: the grid's own runs lie in its folder, others keep their path."""
        own = [run.startswith("runs/") and (root / run).is_dir() for run in self.runs]
        paths = [str(root / run) if here else run for run, here in zip(self.runs, own, strict=True)]
        return [f"{run}@{mark}" for run in paths for mark in self.asked.at] or paths


Unit: TypeAlias = TrainUnit | MeasureUnit


@dataclass(frozen=True)
class GridPlan:
    """Every unit in order: runs to train, then experiments."""

    train: tuple[TrainUnit, ...]
    measure: tuple[MeasureUnit, ...]

    @property
    def units(self) -> tuple[Unit, ...]:
        return (*self.train, *self.measure)


def check_grid_spec(spec: Spec, *, yes: bool = False) -> None:
    """Refuses settings, experiments, arguments and runs that cannot be, without torch and before any work.

    Args:
        yes: more than ``MANY_RUNS`` runs are meant.
    """
    if (runs := sum(block.count_runs() for block in spec.train)) > MANY_RUNS and not yes:
        raise UserError(f"{runs:,} runs to train: --yes if that is meant, else vary less")
    shipped_runs(spec)
    for block in spec.train:
        for values in block.combinations():
            if (start := resolve_block_config(block, values).train.start_from) is not None:
                resolve(start)
    for asked in spec.experiment:
        check_experiment_call(asked)
    logs_alone = all(map(reads_logs_alone, spec.experiment))
    for run in spec.runs:
        if logs_alone:
            run_folders_by_name(run)
        for ref in [f"{run}@{mark}" for asked in spec.experiment for mark in asked.at] or [run]:
            if not logs_alone:
                resolve(ref)


def check_experiment_call(spec: ExperimentSpec) -> None:
    """Refuses an experiment that does not exist, and arguments that it does not take, by calling it on no run."""
    from interp_tasks import experiments

    functions = [each.function for each in every_experiment().values()]
    names = sorted(
        each.__name__ for each in functions if {"refs", "runs"} & {*inspect.signature(each).parameters}
    )
    if spec.name not in names:
        hint = did_you_mean(spec.name, names)
        raise UserError(f"no experiment {spec.name!r}: {hint}experiments are {', '.join(names)}")
    check_step_selectors(spec.at, f"experiment {spec.name}")
    if spec.at and "runs" in experiment_signature_parameters(spec):
        raise UserError(f"experiment {spec.name} takes whole runs: leave out at = {list(spec.at)}")
    try:
        # Experiments look at their arguments before they look for their runs.
        getattr(experiments, spec.name)([PLACEHOLDER_RUN], **spec.settings)
    except (UserError, TypeError) as error:
        if PLACEHOLDER_RUN not in str(error):
            message = str(error).removeprefix(f"{spec.name}: ")
            raise UserError(f"experiment {spec.name}: {message}") from None


def experiment_signature_parameters(spec: ExperimentSpec) -> Mapping[str, inspect.Parameter]:
    from interp_tasks import experiments

    return inspect.signature(getattr(experiments, spec.name)).parameters


def reads_logs_alone(spec: ExperimentSpec) -> bool:
    """Returns whether an experiment reads what runs have logged, and no checkpoint."""
    parameters = experiment_signature_parameters(spec)
    return "runs" in parameters and not ("stored" in parameters and spec.settings.get("stored", True))


def list_work_units(spec: Spec) -> GridPlan:
    """Returns every unit of a grid, each once: sweeps of two ``[[train]]`` may cross in a run."""
    trained: dict[str, TrainUnit] = {}
    varied: dict[Path, dict[str, Any]] = {}
    for unit in (unit for units in train_units_of_each_block(spec) for unit in units):
        # Shared by all runs of a configuration: the blocks that come may vary more of it.
        family = varied.setdefault(Path(unit.folder).parent, {})
        family.update(unit.varied)
        trained.setdefault(unit.key, replace(unit, varied=family))
    keys = {unit.folder: unit.key for unit in trained.values()}
    measured: dict[str, MeasureUnit] = {}
    for asked in spec.experiment:
        for runs in runs_of_each_call(asked, list(keys), spec.runs):
            needs = tuple(keys[run] for run in runs if run in keys)
            others = [hash_files_experiment_reads(run, asked) for run in runs if run not in keys]
            key = compute_content_key([asked.model_dump(mode="json"), needs, others, spec.threads])
            measured[key] = MeasureUnit(key, asked, runs, needs, spec.threads)
    return GridPlan(tuple(trained.values()), tuple(measured.values()))


def hash_files_experiment_reads(run: str, spec: ExperimentSpec) -> dict[str, Any]:
    """Returns the identity of the part of a run that an experiment reads: trained further, it is another."""
    if reads_logs_alone(spec):
        files = [
            log_file(path, name)
            for path in run_folders_by_name(run).values()
            for name in (METRICS_FILE, CLOCK_FILE)
        ]
        logs = [read_decompressed_log(file) for file in files if file.is_file()]
        return {"run": run, "logs": [size_and_sha256(log)["sha256"] for log in logs]}
    refs = [f"{run}@{mark}" for mark in spec.at] or [run if is_checkpoint_folder(Path(run)) else f"{run}@all"]
    folders = [checkpoint.path for ref in refs for checkpoint in resolve(ref)]
    return {"run": run, "checkpoints": [read_checkpoint_meta(folder)["sha256"] for folder in folders]}


def runs_of_each_call(
    spec: ExperimentSpec, trained: Sequence[str], given: Sequence[str]
) -> list[tuple[str, ...]]:
    """Returns the runs of each call."""
    if spec.over == "all":
        return [(*trained, *given)]
    families: dict[str, list[str]] = {}
    for run in trained:
        families.setdefault(run if spec.over == "run" else str(Path(run).parent), []).append(run)
    return [*map(tuple, families.values()), *((run,) for run in given)]


def resolve_block_config(block: TrainBlock, values: Mapping[str, Any]) -> ResolvedConfig:
    for key, instead in (("train.seed", "seeds"), ("train.threads", "threads, at the top")):
        if key in values:
            raise UserError(f"set {key}: write {instead}")
    typed = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return resolve_config(block.task, block.preset, typed)


def train_units_of_each_block(spec: Spec) -> list[list[TrainUnit]]:
    """Returns the runs of each block. Knows torch: a task fills in its defaults.

    More steps and a later schedule go on in the same folder, unless the grid compares them: in one block as axes, in
    several by the first of them, which keeps the name that it would have alone.
    """
    from interp_tasks.training.train import parse_model_settings

    extensions: dict[str, Any] = {}
    names: dict[str, str] = {}
    blocks = []
    for block in spec.train:
        axes = [key for key, values in block.values_by_setting().items() if len(values) > 1]
        units: list[TrainUnit] = []
        for values in block.combinations():
            resolved = resolve_block_config(block, values)
            task = resolved.make_task()
            train = resolved.train.model_copy(update={"threads": spec.threads})
            settings = train.model_dump(mode="json")
            content = {
                "task": {"name": task.name, **task.model_dump(mode="json")},
                "model": parse_model_settings(task, resolved.model).model_dump(mode="json"),
            }
            varied = {key: values[key] for key in axes}
            kept = {key: value for key, value in settings.items() if key not in ("seed", *GOES_ON)}
            lasting = {**content, "train": kept}
            extension = {f"train.{key}": settings[key] for key in GOES_ON}
            compared = {key: value for key, value in extension.items() if key in axes}
            name = f"{folder_name_of(block.task, varied)}-{compute_content_key([lasting, compared])[:8]}"
            configuration = compute_content_key([lasting, extension])
            if configuration in names:
                name = names[configuration]
            elif extensions.setdefault(name, extension) != extension:
                name = f"{folder_name_of(block.task, varied)}-{configuration[:8]}"
            names[configuration] = name
            for seed in block.seeds:
                config = train.model_copy(update={"seed": seed})
                key = compute_content_key({**content, "train": config.model_dump(mode="json")})
                settled = replace(resolved, train=config)
                units.append(TrainUnit(key, f"runs/{name}/seed-{seed}", settled, varied))
        blocks.append(units)
    return blocks


def folder_name_of(task: str, varied: Mapping[str, Any]) -> str:
    """Returns a name for a folder such as ``miiii,d_model-64``, safe for file systems and REFs."""
    parts = [task, *(f"{key.partition('.')[2]}-{value}" for key, value in varied.items())]
    return re.sub(r"[^A-Za-z0-9_,+-]+", "_", ",".join(parts)).strip("_")[:80]


def compute_content_key(content: Any) -> str:
    """Returns a hexadecimal digest of JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()[:16]
