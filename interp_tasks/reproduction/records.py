"""Measurements that claims are judged from: one record for each study and run, in a file a paper.

A record holds the rows of a study's table that some claim reads, with what made them. Judging reads records alone, so
that a verdict needs no weights: a run counts that was measured elsewhere, or whose weights are no longer there.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from interp_tasks.disk import atomic_write
from interp_tasks.errors import UserError
from interp_tasks.measurement.table import COLUMNS
from interp_tasks.published import Claim, Paper, Study
from interp_tasks.reproduction.numbers import Rows

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
class MeasuredRun:
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
class Record:
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
    runs: tuple[MeasuredRun, ...]
    method: str
    made: Mapping[str, str]
    refused: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Any, ...], ...] = ()

    @property
    def key(self) -> Key:
        return self.study, self.on, self.control

    def table(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False, ensure_ascii=False)


def from_json(line: str) -> Record:
    content = json.loads(line)
    content["runs"] = tuple(MeasuredRun(**run) for run in content["runs"])
    content["rows"] = tuple(map(tuple, content["rows"]))
    return Record(**content | {"columns": tuple(content["columns"])})


def together_name(role: str, preset: str) -> str:
    """Returns what a record of all runs of a role is on."""
    return f"{role} ({preset})"


def table_of(records: Iterable[Record]) -> Rows:
    """Returns the rows of several records; what each of them has of one other model stands in it once.

    Beside the columns of every experiment's table a row has the run's ``condition`` (all settings but the seed) and
    ``trained_seed``; of runs that no record is of both are read from the name.
    """
    records = list(records)
    own = {run.name: (run.config, run.seed) for each in records for run in each.runs}
    rows = {tuple(row.items()): row for each in records for row in each.table()}
    table = []
    for row in rows.values():
        condition, seed = own.get(row["run"]) or condition_in(row["run"] or "")
        table.append({**EMPTY, **row, "condition": condition, "trained_seed": seed})
    return table


def condition_in(name: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(.*[/:])seed-(\d+)", name)
    return (match[1], int(match[2])) if match else (name, None)


def digest(value: Any) -> str:
    """Returns twelve hexadecimal digits that change with the value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def method_of(study: Study) -> str:
    """Returns the digest of how a study measures."""
    return digest([study.experiment, study.role, study.at, study.together, study.memorised, study.settings])


def rule_of(claim: Claim) -> str:
    """Returns the digest of the rule that decides a claim: a rule that is changed after its numbers were seen shows."""
    rule = claim.model_dump(include={"where", "reduce", "column", "per", "holds", "over", "log", "headline"})
    return digest([claim.study, rule])


def shipped_file(paper: str) -> Path:
    """Returns the file of the records that come with the package."""
    folder = Path(str(resources.files("interp_tasks.published")))
    return folder / "measurements" / f"{paper.replace('-', '_')}.jsonl"


def read_records(paper: Paper, file: Path | None = None) -> dict[Key, Record]:
    """Returns a paper's records by key: shipped ones, and those of a file of yours in place of the same ones.

    A record of a study that has changed since is left out.

    Raises:
        UserError: for a line that is no record.
    """
    methods = {study.id: method_of(study) for study in paper.study}
    stored = read_file(shipped_file(paper.name)) | ({} if file is None else read_file(file))
    return {key: record for key, record in stored.items() if methods.get(record.study) == record.method}


def read_file(file: Path) -> dict[Key, Record]:
    """Returns the records of a file by key; none where there is no file.

    Raises:
        UserError: for a line that is no record.
    """
    records = {}
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for count, line in enumerate(lines, 1):
        try:
            record = from_json(line)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UserError(f"{file}, line {count}: no record of a measurement") from None
        records[record.key] = record
    return records


def write_records(file: Path, records: Iterable[Record]) -> Path:
    """Writes records, one a line, sorted by study, run and control."""
    lines = [record.to_json() for record in sorted(records, key=lambda record: record.key)]
    return atomic_write(file, "".join(f"{line}\n" for line in lines))


def differences(stored: Record, again: Record) -> list[str]:
    """Returns what differs between a record and the same measured again by more than rounding, a line each."""
    where = f"{again.study} on {again.on}" + (f" ({again.control})" if again.control else "")
    if stored.refused != again.refused:
        return [f"{where}: {stored.refused or 'measured'}, and now: {again.refused or 'measured'}"]
    before, now = ({label_of(row): row for row in record.table()} for record in (stored, again))
    lines = [f"{where}: {label} is in one of them alone" for label in sorted(before.keys() ^ now.keys())]
    for label in before.keys() & now.keys():
        for column in NUMBERS:
            old, new = (
                float("nan" if (cell := row[label].get(column)) is None else cell) for row in (before, now)
            )
            if not (math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=1e-6) or (old != old and new != new)):
                lines.append(f"{where}: {label}: {column} was {old:.6g}, is {new:.6g}")
    return lines


def label_of(row: Mapping[str, Any]) -> str:
    """Returns what tells a row of a table from the others."""
    told = (row.get(name) for name in COLUMNS if name not in (*NUMBERS, "n_runs"))
    return " ".join(str(value) for value in told if value is not None)
