"""The runs that a paper's studies read, shipped, the user's or yet to be trained, and the records measured on them."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from interp_tasks.checkpoints.checkpoint_refs import ZOO, ZOO_FOLDER, find_run_folder
from interp_tasks.checkpoints.run_reader import (
    METRICS_FILE,
    RUN_FILE,
    is_run_folder,
    log_file,
    read_metrics,
    read_run,
    stored_steps,
)
from interp_tasks.checkpoints.steps_around_drop import task_of_run
from interp_tasks.errors import UserError
from interp_tasks.file_io import atomic_write
from interp_tasks.grid_spec import parse_seed_numbers
from interp_tasks.measurement.result import COLUMNS
from interp_tasks.published import Claim, Paper, Study, TrainingRun, read_paper
from interp_tasks.published.paper_schema import format_setting
from interp_tasks.reproduction.claim_verdicts import Rows
from interp_tasks.training.config import SECTIONS, ResolvedConfig, resolve_config

#: Study, run (or role, where a study looks at its runs together), control.
Key = tuple[str, str, str]
#: Variance of an entry of the run's task, which rules divide by; beside the columns of every table.
VARIANCE = "variance"
#: Numbers of a row that rules read; its other columns tell rows apart.
NUMBERS = ("value", "value_ci_low", "value_ci_high", "baseline", "effect", "effect_ci_low", "effect_ci_high")
#: Columns that a record keeps.
KEPT = (
    *(
        name
        for name in COLUMNS
        if name not in ("experiment", "n", "engine", "p_value", "p_adjusted", "null_effect")
    ),
    VARIANCE,
)
EMPTY = dict.fromkeys(KEPT)
#: Records of a run measured again may differ by so much, relatively: float32 on other processors.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class RunIdentity:
    """A training run that a record is of.

    Attributes:
        name: as the paper's file calls it; of several seeds ``NAME/seed-0``.
        config: digest of every setting that its weights depend on, but the seed.
    """

    name: str
    seed: int
    steps: int
    config: str


@dataclass(frozen=True)
class StudyRecord:
    """What one study gave on one run, or on all runs of its role together.

    Attributes:
        on: the run's name, or the role with the scale.
        control: ``untrained``, ``memorised`` or ``shuffled``, where such a model was read in the runs' place.
        method: digest of the study: its experiment, checkpoints and settings.
        made: date, version of this package, torch, device and dtype.
        refused: why the study cannot be done on these runs; then there are no rows.
        columns, rows: the part of the study's table that claims read.
    """

    study: str
    on: str
    control: str
    runs: tuple[RunIdentity, ...]
    method: str
    made: Mapping[str, str]
    refused: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Any, ...], ...] = ()

    @property
    def key(self) -> Key:
        return self.study, self.on, self.control

    def row_dicts(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False, ensure_ascii=False)


def record_from_json(line: str) -> StudyRecord:
    content = json.loads(line)
    content["runs"] = tuple(RunIdentity(**run) for run in content["runs"])
    content["rows"] = tuple(map(tuple, content["rows"]))
    return StudyRecord(**content | {"columns": tuple(content["columns"])})


def role_record_name(role: str, preset: str) -> str:
    """Returns what a record of all runs of a role is on."""
    return f"{role} ({preset})"


def rows_of_records(records: Iterable[StudyRecord]) -> Rows:
    """Returns the rows of several records; what each of them has of one other model stands in it once.

    Beside the columns of every experiment's table a row has the run's ``condition`` (all settings but the seed) and
    ``trained_seed``; of runs that no record is of both are read from the name.
    """
    records = list(records)
    own = {run.name: (run.config, run.seed) for each in records for run in each.runs}
    rows = {tuple(row.items()): row for each in records for row in each.row_dicts()}
    table = []
    for row in rows.values():
        condition, seed = own.get(row["run"]) or split_seed(row["run"] or "")
        table.append({**EMPTY, **row, "condition": condition, "trained_seed": seed})
    return table


def split_seed(name: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(.*[/:])seed-(\d+)", name)
    return (match[1], int(match[2])) if match else (name, None)


def short_digest(value: Any) -> str:
    """Returns twelve hexadecimal digits that change with the value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def study_digest(study: Study) -> str:
    """Returns the digest of how a study measures."""
    return short_digest(
        [study.experiment, study.role, study.at, study.together, study.memorised, study.settings]
    )


def rule_digest(claim: Claim) -> str:
    """Returns the digest of the rule that decides a claim: a rule that is changed after its numbers were seen shows."""
    rule = claim.model_dump(include={"where", "reduce", "column", "per", "holds", "over", "log", "headline"})
    return short_digest([claim.study, rule])


def shipped_records_file(paper: str) -> Path:
    """Returns the file of the records that come with the package."""
    folder = Path(str(resources.files("interp_tasks.published")))
    return folder / "measurements" / f"{paper.replace('-', '_')}.jsonl"


def read_own_and_shipped_records(paper: Paper, file: Path | None = None) -> dict[Key, StudyRecord]:
    """Returns a paper's records by key: shipped ones, and those of a file of yours in place of the same ones.

    A record of a study that has changed since is left out.
    """
    methods = {study.id: study_digest(study) for study in paper.study}
    stored = read_records_file(shipped_records_file(paper.name)) | (
        {} if file is None else read_records_file(file)
    )
    return {key: record for key, record in stored.items() if methods.get(record.study) == record.method}


def read_records_file(file: Path) -> dict[Key, StudyRecord]:
    """Returns the records of a file by key; none where there is no file."""
    records = {}
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for count, line in enumerate(lines, 1):
        try:
            record = record_from_json(line)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UserError(f"{file}, line {count}: no record of a measurement") from None
        records[record.key] = record
    return records


def write_records(file: Path, records: Iterable[StudyRecord]) -> Path:
    """Writes records, one a line, sorted by study, run and control."""
    lines = [record.to_json() for record in sorted(records, key=lambda record: record.key)]
    return atomic_write(file, "".join(f"{line}\n" for line in lines))


def record_differences(stored: StudyRecord, again: StudyRecord) -> list[str]:
    """Returns what differs between a record and the same measured again by more than rounding, a line each."""
    where = f"{again.study} on {again.on}" + (f" ({again.control})" if again.control else "")
    if stored.refused != again.refused:
        return [f"{where}: {stored.refused or 'measured'}, and now: {again.refused or 'measured'}"]
    before, now = ({identify_table_row(row): row for row in record.row_dicts()} for record in (stored, again))
    lines = [f"{where}: {label} is in one of them alone" for label in sorted(before.keys() ^ now.keys())]
    for label in before.keys() & now.keys():
        for column in NUMBERS:
            old, new = (
                float("nan" if (cell := row[label].get(column)) is None else cell) for row in (before, now)
            )
            if not (math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=1e-6) or (old != old and new != new)):
                lines.append(f"{where}: {label}: {column} was {old:.6g}, is {new:.6g}")
    return lines


def identify_table_row(row: Mapping[str, Any]) -> str:
    """Returns what tells a row of a table from the others."""
    told = (row.get(name) for name in COLUMNS if name not in (*NUMBERS, "n_runs"))
    return " ".join(str(value) for value in told if value is not None)


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
        return ZOO_FOLDER / self.name if self.base.startswith(ZOO) else Path(self.base)


def planned_runs(paper: Paper, preset: str) -> list[PaperRun]:
    """Returns every training run of a scale, in the paper's order."""
    planned = []
    for run in paper.run:
        if run.preset != preset:
            continue
        names = {int(run.settings.get("train.seed", 0)): run.name}
        if run.seeds is not None:
            names = {seed: f"{run.name}/seed-{seed}" for seed in parse_seed_numbers(run.seeds)}
        config = config_digest_without_seed(run)
        planned += [PaperRun(run, name, seed, config) for seed, name in names.items()]
    return planned


def config_of_run(run: TrainingRun) -> ResolvedConfig:
    """Returns the configuration that a paper's file gives a run."""
    settings = {key: format_setting(value) for key, value in run.settings.items()}
    return resolve_config(run.task, run.train_preset, settings)


def config_digest_without_seed(run: TrainingRun) -> str:
    """Returns a digest of every setting that a run's weights depend on, but the seed.

    A longer run at a constant rate begins as a shorter one, and both are read where they have learnt.
    """
    resolved = config_of_run(run)
    train = resolved.train.model_dump(mode="json", exclude=ONLY_RECORDED | {"seed"})
    if train.get("schedule", "constant") == "constant":
        del train["steps"]
    return short_digest([resolved.task_name, resolved.task, resolved.model, train])


def stored_runs(paper: Paper, preset: str, runs_folder: Path) -> list[PaperRun]:
    """Returns every run of a scale that is at hand; the user's own comes before a shipped one of the same name."""
    found = []
    for planned in planned_runs(paper, preset):
        for path, base in (
            (runs_folder / planned.name, (runs_folder / planned.name).as_posix()),
            (ZOO_FOLDER / planned.name, f"{ZOO}{planned.name}"),
        ):
            if is_run_folder(path):
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
    return steps[-1:] == [read_run_config(path)["train"].get("steps")]


def read_run_config(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the sections of the config that made a run."""
    config = read_run(path).get("config")
    if not isinstance(config, dict) or not all(isinstance(config.get(name), dict) for name in SECTIONS):
        raise UserError(f"{path / RUN_FILE} is mangled: it has no config of {', '.join(SECTIONS)}")
    return config


def check_settings(planned: PaperRun, path: Path) -> None:
    """Refuses a folder that holds another run: a claim would be decided on the wrong model."""
    run = planned.run
    stored_config, resolved = read_run_config(path), config_of_run(run)
    task = resolved.make_task()
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
def matrix_entry_variance(run_label: str) -> float:
    """Returns the variance of an entry of the matrices that a run learned, given as in a table's column ``run``; NaN
    where its task says none.
    """
    try:
        task = task_of_run(read_run(find_run_folder(run_label)))
    except UserError:
        return math.nan
    return float(getattr(task, "entry_variance", None) or math.nan)


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
    from interp_tasks.training.train import train_resolved

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
