"""Locates the runs that a paper's studies read: shipped, in the user's folder, or nowhere yet; trains the last."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
class StoredRun:
    """A training run of a paper that is at hand.

    Attributes:
        name: as the paper's file calls it, wherever it is; of several seeds ``NAME/seed-0``.
        base: what REFs of it begin with.
        config: digest of every setting that its weights depend on, but the seed.
    """

    run: TrainingRun
    name: str
    seed: int
    base: str
    path: Path
    config: str


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


def locate(run: TrainingRun, folder: Path) -> list[StoredRun]:
    """Finds where a run of a paper is stored: the user's own comes before a shipped one of the same name.

    Of several seeds those that are trained, if each that has been begun is.

    Raises:
        UserError: if the run of that name was trained with other settings than the paper's file says.
    """
    for prefix, candidate in ((folder.as_posix() + "/", folder / run.name), (ZOO, zoo_folder() / run.name)):
        paths, parent = [candidate], ""
        if run.seeds is not None:
            paths, parent = (
                sorted(candidate.glob("seed-*"), key=lambda path: natural_key(path.name)),
                f"{run.name}/",
            )
        paths = list(filter(is_run, paths))
        for path in paths:
            check_settings(run, path)
        # What was interrupted is not there yet: it is trained on, and nothing is decided on it.
        if paths and all(map(is_finished, paths)):
            digest = config_digest(run)
            names = {path: f"{parent}{path.name}" if parent else run.name for path in paths}
            return [
                StoredRun(
                    run, name, config_there(path)["train"].get("seed", 0), f"{prefix}{name}", path, digest
                )
                for path, name in names.items()
            ]
    return []


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


def locate_all(paper: Paper, preset: str, folder: Path) -> list[StoredRun]:
    """Returns every run of a scale that is at hand, in the paper's order."""
    return [each for run in paper.run if run.preset == preset for each in locate(run, folder)]


@cache
def entry_variance(run_label: str) -> float:
    """Returns the variance of an entry of the matrices that a run learned, given as in a table's column ``run``; NaN
    where its task says none.
    """
    from tasks import get

    try:
        task = dict(read_run(find_run(run_label))["config"]["task"])
    except UserError:
        return math.nan
    return float(getattr(get(task.pop("name"), **task), "entry_variance", None) or math.nan)


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
    for run in paper.run:
        if run.preset != preset or run.role not in roles:
            continue
        there = {each.seed for each in locate(run, Path(runs))}
        for seed, name in names_of(run).items():
            if seed not in there:
                out = Path(runs) / name
                line = None if progress is None else progress(out.as_posix())
                trained.append(
                    train_resolved(config_of_run(run), out, seed=seed, device=device, progress=line)
                )
    return trained
