"""Locates the runs that a paper's studies read: shipped, in the user's folder, or nowhere yet; trains the last."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from interp_tasks.checkpoints.refs import ZOO, find_run, zoo_folder
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
from interp_tasks.recipes import seed_numbers
from interp_tasks.reproduction.records import digest
from interp_tasks.training.config import SECTIONS, Resolved, resolve_config

#: Settings of training that leave the weights as they are.
ONLY_RECORDED = {
    *("log_every", "eval_samples", "checkpoint_every", "checkpoint_at", "gradient_norms_every"),
    *("observe", "observe_every", "observe_samples", "threads", "deterministic"),
}


@dataclass(frozen=True)
class PaperRun:
    """A training run that the paper's file plans.

    Attributes:
        name: as the paper's file calls it; of several seeds ``NAME/seed-0``.
        config: digest of every setting that its weights depend on, but the seed: runs that share it are one condition.
        base: what REFs of it begin with; empty where it is not at hand.
    """

    run: TrainingRun
    name: str
    seed: int
    config: str
    base: str = ""

    @property
    def path(self) -> Path:
        return zoo_folder() / self.name if self.base.startswith(ZOO) else Path(self.base)


def planned_runs(paper: Paper, preset: str) -> list[PaperRun]:
    """Returns every training run of a scale, in the paper's order."""
    planned = []
    for run in paper.run:
        if run.preset != preset:
            continue
        names = {int(run.settings.get("train.seed", 0)): run.name}
        if run.seeds is not None:
            names = {seed: f"{run.name}/seed-{seed}" for seed in seed_numbers(run.seeds)}
        config = config_digest(run)
        planned += [PaperRun(run, name, seed, config) for seed, name in names.items()]
    return planned


def config_of_run(run: TrainingRun) -> Resolved:
    """Returns the configuration that a paper's file gives a run."""
    settings = {key: as_typed(value) for key, value in run.settings.items()}
    return resolve_config(run.task, run.train_preset, settings)


def config_digest(run: TrainingRun) -> str:
    """Returns a digest of every setting that a run's weights depend on, but the seed.

    A longer run at a constant rate begins as a shorter one, and both are read where they have learnt.
    """
    resolved = config_of_run(run)
    train = resolved.train.model_dump(mode="json", exclude=ONLY_RECORDED | {"seed"})
    if train.get("schedule", "constant") == "constant":
        del train["steps"]
    return digest([resolved.task_name, resolved.task, resolved.model, train])


def stored_runs(paper: Paper, preset: str, folder: Path) -> list[PaperRun]:
    """Returns every run of a scale that is at hand; the user's own comes before a shipped one of the same name.

    Raises:
        UserError: if the run of that name was trained with other settings than the paper's file says.
    """
    found = []
    for planned in planned_runs(paper, preset):
        for path, base in (
            (folder / planned.name, (folder / planned.name).as_posix()),
            (zoo_folder() / planned.name, f"{ZOO}{planned.name}"),
        ):
            if is_run(path):
                check_settings(planned, path)
                # What was interrupted is trained on, and nothing is decided on it.
                if is_finished(path):
                    found.append(replace(planned, base=base))
                    break
    return found


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


def check_settings(planned: PaperRun, path: Path) -> None:
    """Refuses a folder that holds another run: a claim would be decided on the wrong model."""
    from tasks import get  # imports torch

    run = planned.run
    stored_config, resolved = config_there(path), config_of_run(run)
    task = get(run.task, **resolved.task)
    pairs: list[tuple[str, Any, Any]] = [("task.name", run.task, stored_config["task"].pop("name", None))]
    for section, wanted in (
        ("task", task),
        ("model", task.Model(**resolved.model)),
        ("train", resolved.train),
    ):
        # A run that was stored before a setting was invented has its default; a model of one's own has none of them.
        fields = {} if "own" in stored_config[section] else type(wanted).model_fields
        defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
        stored = {**defaults, **stored_config[section]}
        ignored = ONLY_RECORDED | {"seed"} if section == "train" else set()
        pairs += [
            (f"{section}.{key}", value, stored.get(key))
            for key, value in wanted.model_dump(mode="json").items()
            if key not in ignored
        ]
    # Runs are told apart and paired by their seeds: that of the name is the one it was trained with.
    pairs.append(("train.seed", planned.seed, stored_config["train"].get("seed", 0)))
    for key, *values in pairs:
        asked, there = (list(value) if isinstance(value, tuple) else value for value in values)
        if asked != there:
            raise UserError(
                f"{path} is not the run {run.name!r} of the paper: its {key} is {there}, not {asked}; "
                "give another folder with --runs"
            )


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
    roles = {role for study in paper.studies(rows) for role in (study.role, study.shuffled)}
    there = {each.name for each in stored_runs(paper, preset, Path(runs))}
    asked = {each.name: each for each in planned_runs(paper, preset) if each.run.role in roles}
    trained = []
    for name, planned in asked.items():
        if name not in there:
            out = Path(runs) / name
            line = None if progress is None else progress(out.as_posix())
            config = config_of_run(planned.run)
            trained.append(train_resolved(config, out, seed=planned.seed, device=device, progress=line))
    return trained
