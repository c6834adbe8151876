"""Locates the runs that a paper's studies read: shipped, in the user's folder, or nowhere yet; trains the last."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from interp_tasks.checkpoints.refs import ZOO, find_run, natural_key, zoo_folder
from interp_tasks.checkpoints.run_files import (
    METRICS_FILE,
    RUN_FILE,
    is_run,
    log_file,
    read_metrics,
    read_run,
    stored_steps,
)
from interp_tasks.errors import UserError
from interp_tasks.published import Paper, TrainingRun, read_paper
from interp_tasks.published.paper import as_typed
from interp_tasks.reproduction.evidence import names_of
from interp_tasks.reproduction.records import digest
from interp_tasks.training.config import SECTIONS, Resolved, resolve_config


@dataclass(frozen=True)
class Located:
    """A run of a paper and where it is.

    Attributes:
        base: what REFs of it begin with (of several seeds a glob); ``None`` where it has not been trained.
        bases: that of each training run, by its seed.
        paths: the folder of each training run, by its seed.
    """

    run: TrainingRun
    base: str | None
    bases: Mapping[int, str] = field(default_factory=dict)
    paths: Mapping[int, Path] = field(default_factory=dict)

    @property
    def names(self) -> dict[int, str]:
        """Returns the name of each training run, by its seed: that of the paper's file, wherever it is."""
        name, several = self.run.name, self.run.seeds is not None
        return {seed: f"{name}/{path.name}" if several else name for seed, path in self.paths.items()}

    @property
    def config(self) -> str:
        return config_digest(self.run)

    def alone(self, seed: int) -> Located:
        """Returns one of its seeds."""
        base = self.bases[seed]
        return Located(self.run, base, {seed: base}, {seed: self.paths[seed]})


def config_of_run(run: TrainingRun) -> Resolved:
    """Returns the configuration that a paper's file gives a run."""
    settings = {key: as_typed(value) for key, value in run.settings.items()}
    return resolve_config(run.task, run.train_preset, settings)


def config_digest(run: TrainingRun) -> str:
    """Returns a digest of every setting that a run's weights depend on, but the seed: runs that share it are one
    condition.

    A longer run at a constant rate begins as a shorter one, and both are read where they have learnt.
    """
    resolved = config_of_run(run)
    train = resolved.train.model_dump(mode="json", exclude=ONLY_RECORDED | {"seed"})
    if train.get("schedule", "constant") == "constant":
        del train["steps"]
    return digest([resolved.task_name, resolved.task, resolved.model, train])


def locate(run: TrainingRun, folder: Path) -> Located:
    """Finds where a run of a paper is stored: the user's own comes before a shipped one of the same name.

    Of several seeds those that are trained, if each that has been begun is.

    Raises:
        UserError: if the run of that name was trained with other settings than the paper's file says.
    """
    for prefix, candidate in ((folder.as_posix() + "/", folder / run.name), (ZOO, zoo_folder() / run.name)):
        run_folders = [candidate] if is_run(candidate) else []
        if run.seeds is not None:
            run_folders = sorted(
                filter(is_run, candidate.glob("seed-*")), key=lambda path: natural_key(path.name)
            )
        for each in run_folders:
            check_settings(run, each)
        # What was interrupted is not there yet: it is trained on, and nothing is decided on it.
        if run_folders and all(map(is_finished, run_folders)):
            base = f"{prefix}{run.name}"
            paths = {config_there(each)["train"].get("seed", 0): each for each in run_folders}
            if run.seeds is None:
                return Located(run, base, dict.fromkeys(paths, base), paths)
            bases = {seed: f"{base}/{path.name}" for seed, path in paths.items()}
            return Located(run, f"{base}/seed-*", bases, paths)
    return Located(run, None)


def is_finished(path: Path) -> bool:
    """Returns whether a run has stored its last step; of one that ships its log alone, whether it has logged it."""
    steps = stored_steps(path)
    if not steps and log_file(path, METRICS_FILE).is_file():
        steps = [line["step"] for line in read_metrics(path)]
    return steps[-1:] == [config_there(path)["train"].get("steps")]


def config_there(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the sections of the config that made a run.

    Raises:
        UserError: if ``run.json`` has none, or they are no objects.
    """
    config = read_run(path).get("config")
    if not isinstance(config, dict) or not all(isinstance(config.get(name), dict) for name in SECTIONS):
        raise UserError(f"{path / RUN_FILE} is mangled: it has no config of {', '.join(SECTIONS)}")
    return config


#: Settings of training that leave the weights as they are.
ONLY_RECORDED = {
    *("log_every", "eval_samples", "checkpoint_every", "checkpoint_at", "gradient_norms_every"),
    *("observe", "observe_every", "observe_samples", "threads", "deterministic"),
}


def check_settings(run: TrainingRun, path: Path) -> None:
    """Refuses a folder that holds another run: a claim would be decided on the wrong model."""
    from tasks import get  # imports torch

    stored_config = config_there(path)
    resolved = config_of_run(run)
    compare(run, path, "task.name", run.task, stored_config["task"].pop("name", None))
    task = get(run.task, **resolved.task)
    for section, wanted in (
        ("task", task),
        ("model", task.Model(**resolved.model)),
        ("train", resolved.train),
    ):
        # A run that was stored before a setting was invented has its default; a model of one's own has none of them.
        fields = {} if "own" in stored_config[section] else type(wanted).model_fields
        defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
        stored = {**defaults, **stored_config[section]}
        for key, value in wanted.model_dump(mode="json").items():
            if section == "train" and (key in ONLY_RECORDED or (key == "seed" and run.seeds is not None)):
                continue
            compare(run, path, f"{section}.{key}", value, stored.get(key))


def compare(run: TrainingRun, path: Path, key: str, wanted: Any, stored: Any) -> None:
    listed = [list(value) if isinstance(value, tuple) else value for value in (wanted, stored)]
    if listed[0] != listed[1]:
        raise UserError(
            f"{path} is not the run {run.name!r} of the paper: its {key} is {stored}, not {wanted}; "
            "give another folder with --runs"
        )


def locate_all(paper: Paper, preset: str, folder: Path) -> list[Located]:
    """Returns every run of a scale, in the paper's order."""
    return [locate(run, folder) for run in paper.run if run.preset == preset]


@cache
def entry_variance(run: str) -> float:
    """Returns the variance of an entry of the matrices that a run learned, given as in a table's column ``run``; NaN
    where its task says none.
    """
    from tasks import get

    try:
        name, config = config_of(run)
    except UserError:
        return math.nan
    return float(getattr(get(name, **config), "entry_variance", None) or math.nan)


def config_of(run_label: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and settings of the task of a run, given as in a table's column ``run``."""
    described = dict(read_run(find_run(run_label))["config"]["task"])
    return described.pop("name"), described


def train_missing(
    paper: str | Paper,
    preset: str = "cpu",
    *,
    runs: str | Path = "runs",
    rows: Sequence[int] = (),
    device: str = "cpu",
    progress: Callable[[str], Any] | None = None,
) -> list[Path]:
    """Trains what neither ships nor stands under ``runs``, in the paper's order; what was interrupted goes on.

    Args:
        progress: called with each run's name; returns what ``train`` calls as progress(step, steps, line), or ``None``.

    Returns:
        The run folders.
    """
    from interp_tasks.training.trainer import train_resolved

    paper = read_paper(paper) if isinstance(paper, str) else paper
    roles = {
        role
        for study in paper.study
        if not rows or set(rows) & set(study.rows)
        for role in (study.role, study.shuffled)
    }
    trained = []
    for each in locate_all(paper, preset, Path(runs)):
        run = each.run
        if run.role not in roles:
            continue
        resolved = config_of_run(run)
        for seed, name in names_of(run).items():
            if seed not in each.bases:
                out = Path(runs) / name
                line = None if progress is None else progress(out.as_posix())
                trained.append(train_resolved(resolved, out, seed=seed, device=device, progress=line))
    return trained
