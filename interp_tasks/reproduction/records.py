"""Measurements that claims are judged from: one record for each study and run, in a file a paper.

A record holds the rows of a study's table that some claim reads, with what made them. Judging reads records alone, so
that a verdict needs no weights: a run counts that was measured elsewhere, or whose weights are no longer there.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.disk import atomic_write
from interp_tasks.errors import UserError
from interp_tasks.measurement.table import COLUMNS
from interp_tasks.published import Claim, Paper, Study
from interp_tasks.reproduction.numbers import Row, Rows, number, rows_where

if TYPE_CHECKING:
    import pandas

#: Study, run (or role, where a study looks at its runs together), control.
Key = tuple[str, str, str]
#: Variance of an entry of the run's task, which rules divide by; beside the columns of every table.
VARIANCE = "variance"
#: Columns that no rule reads.
UNREAD = frozenset({"experiment", "n", "engine", "p_value", "p_adjusted", "null_effect"})
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

    @cached_property
    def table(self) -> Rows:
        """Returns the rows with the columns of every experiment's table, and the variance of an entry."""
        empty = dict.fromkeys((*COLUMNS, VARIANCE))
        return [{**empty, **dict(zip(self.columns, row, strict=True))} for row in self.rows]

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


def table_rows(frame: pandas.DataFrame) -> Rows:
    """Returns the rows of an experiment's table; ``None`` stands for what a row does not have."""
    found = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return [{str(name): value for name, value in row.items()} for row in found]


def read_by_claims(table: Rows, claims: Iterable[Claim], stand_in: bool = False) -> Rows:
    """Returns the rows of a study's table that claims read: theirs, their divisors', and a row of every run.

    Args:
        stand_in: these runs stand for others, whose names claims ask for.
    """
    wanted = {id(row) for row in {row["run"]: row for row in reversed(table) if row["draw"] is None}.values()}
    for claim in claims:
        for where in (claim.where, *([claim.divisor()[1]] if isinstance(claim.per, dict) else [])):
            asked = {key: value for key, value in where.items() if key != "run" or not stand_in}
            wanted |= set(map(id, rows_where(table, asked)))
    return [row for row in table if id(row) in wanted]


def columns_and_rows(table: Rows) -> tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]:
    """Returns rows as a record holds them: columns that rules may read and that are not empty, ten digits a number."""
    from interp_tasks.measurement.result import json_value

    kept = [name for name in (*COLUMNS, VARIANCE) if name not in UNREAD]
    rows = [{name: ten_digits(json_value(row.get(name))) for name in kept} for row in table]
    filled = tuple(name for name in kept if any(row[name] is not None for row in rows))
    return filled, tuple(tuple(row[name] for name in filled) for row in rows)


def ten_digits(value: Any) -> Any:
    return float(f"{value:.10g}") if isinstance(value, float) else value


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
    before, now = ({label_of(row): row for row in record.table} for record in (stored, again))
    lines = [f"{where}: {label} is in one of them alone" for label in sorted(before.keys() ^ now.keys())]
    for label in before.keys() & now.keys():
        for column in NUMBERS:
            old, new = number(before[label], column), number(now[label], column)
            if not (math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=1e-6) or (old != old and new != new)):
                lines.append(f"{where}: {label}: {column} was {old:.6g}, is {new:.6g}")
    return lines


#: Numbers of a row that rules read; its other columns tell rows apart.
NUMBERS = ("value", "value_ci_low", "value_ci_high", "baseline", "effect", "effect_ci_low", "effect_ci_high")


def label_of(row: Row) -> str:
    """Returns what tells a row of a table from the others."""
    return " ".join(
        str(row[name]) for name in COLUMNS if name not in (*NUMBERS, "n_runs") and row[name] is not None
    )


def tables_of(records: Iterable[Record]) -> Rows:
    """Returns the rows of several records; what each of them has of one other model stands in it once."""
    rows = {tuple(row.items()): row for record in records for row in record.table}
    return list(rows.values())
