"""Results of experiments: the tidy table, with the configuration and versions that made it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.disk import write_together
from interp_tasks.measurement.experiment import EXPERIMENTS
from interp_tasks.measurement.options import unknown
from interp_tasks.measurement.table import HOLM, plain_metric, shown_columns, shown_rows, with_holm
from interp_tasks.pages import Column, Figure, Page, Table, is_page, versions

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
    from typing_extensions import Self

#: Endings of the files that hold a result, and of its page.
FILES = (".parquet", ".csv", ".json", ".config.json")
PAGE = ".html"
#: What ``print`` shows of a result.
SHOWN = ("ref", "variant", "draw", "metric")
SHOWN_ALONE = (*SHOWN, "value", "value_ci_low", "value_ci_high")
SHOWN_COMPARED = (*SHOWN, "baseline", "value", "effect", "effect_ci_low", "effect_ci_high", "p_adjusted")


def target(folder: str | Path, name: str, suffix: str) -> Path:
    """Returns the path of a file of the experiment ``name``."""
    return Path(folder) / f"{name}{suffix}"


@dataclass(frozen=True)
class Result:
    """An experiment's rows.

    Attributes:
        frame: one row per checkpoint, variant and metric, with the columns of ``experiments.COLUMNS``.
        config: what was asked for, JSON.
        notes: sentences a reader of the numbers needs.
        data: what figures draw beside the table, by name.
    """

    experiment: str
    frame: pandas.DataFrame
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=versions)
    data: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        from circuits.tables import short_table

        # What has no unedited model beside it, such as a drop, has an interval of its own.
        is_compared = "effect" in self.frame and self.frame["effect"].notna().any()
        text = short_table(self.frame, SHOWN_COMPARED if is_compared else SHOWN_ALONE)
        return "\n".join([f"{self.experiment}:", text, *self.notes])

    def records(self) -> list[dict[str, Any]]:
        """Returns the rows as JSON values; a missing value is ``None``, never NaN."""
        return [
            {str(name): json_value(value) for name, value in row.items()}
            for row in self.frame.to_dict("records")
        ]

    def to_json(self) -> str:
        """Returns a list of records."""
        rows = (json.dumps(record, allow_nan=False, ensure_ascii=False) for record in self.records())
        return "[\n" + ",\n".join(rows) + "\n]\n"

    def to_csv(self) -> str:
        """Returns comma-separated values with a header."""
        text: str = self.frame.to_csv(index=False, lineterminator="\n")
        return text

    def parquet(self) -> bytes:
        """Returns parquet; the stamp is in the metadata under the key ``interp-tasks``."""
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.Table.from_pandas(self.frame, preserve_index=False)
        stamp = {b"interp-tasks": json.dumps(self.stamp()).encode()}
        buffer = BytesIO()
        pyarrow.parquet.write_table(
            table.replace_schema_metadata({**(table.schema.metadata or {}), **stamp}), buffer
        )
        return buffer.getvalue()

    def of_metric(self, metric: str | None) -> Self:
        """Returns the rows of one metric, for all its targets and as a ratio; ``"all"`` returns all rows.

        They are a family of tests of its own: Holm's adjustment is over them alone.

        Args:
            metric: ``None``: the one that the task calls its own, and all rows of a table that has none of it.

        Raises:
            UserError: for a metric of which there is no row.
        """
        names = self.frame["metric"].map(plain_metric)
        parts = self.config.get("parts", [self.config])
        own = {name for part in parts for name in part.get("metrics of the tasks", ())}
        chosen = names.isin(own) if metric is None else (names == metric) | (self.frame["metric"] == metric)
        if metric not in (None, "all") and not chosen.any():
            raise unknown("no metric", metric, list(dict.fromkeys(names)), "metrics of the rows")
        if metric == "all" or not chosen.any():
            return self
        frame, tested = with_holm(self.frame[chosen])
        notes = [note for note in self.notes if not note.startswith(HOLM.partition("{")[0])]
        at = 1 if len(notes) < len(self.notes) else len(notes)
        return replace(self, frame=frame, notes=(*notes[:at], *tested, *notes[at:]))

    def stamp(self) -> dict[str, Any]:
        return {
            "experiment": self.experiment,
            "config": dict(self.config),
            "notes": list(self.notes),
            "versions": dict(self.versions),
        }

    def write(self, folder: str | Path, *, page: bool = False) -> list[Path]:
        """Writes ``NAME.parquet``, ``.csv``, ``.json``, ``NAME.config.json`` (the stamp), and ``NAME.html`` if asked.

        They replace those of an earlier call together, or none of them. A page that an earlier call wrote there
        and this one does not is removed: the files of a folder are of one result.

        Raises:
            UserError: if the file system refuses.
        """
        contents: dict[str, str | bytes] = {
            ".parquet": self.parquet(),
            ".csv": self.to_csv(),
            ".json": self.to_json(),
            ".config.json": json.dumps(self.stamp(), indent=2) + "\n",
        }
        if page:
            contents[PAGE] = self.page().html()
        files = {target(folder, self.experiment, suffix): content for suffix, content in contents.items()}
        old = target(folder, self.experiment, PAGE)
        return write_together(files, stale=[old] if not page and is_page(old) else [])

    def plot(self, at: int = 0) -> plotly.graph_objects.Figure:
        """Returns one of :meth:`figures`, the first by default, with its title and caption in it."""
        from circuits.plots import titled

        shown = self.figures()[at]
        return titled(shown.figure, shown.title, shown.caption)

    def page(self, title: str | None = None) -> Page:
        """Returns the figures and the table on one self-contained page."""
        rows = shown_rows(self.frame)
        columns, notes = shown_columns(rows), " ".join(self.notes)
        refs = rows["ref"].unique()
        if len(refs) == 1:
            notes = f"All rows: {refs[0]}. {notes}"
        else:
            columns = [Column("ref", "ref"), *columns]
        table = Table(rows, "Table", notes, columns, name=self.experiment, download=self.frame)
        return Page(title or self.experiment, [*self.figures(), table], self.config, self.versions)

    def figures(self) -> list[Figure]:
        """Returns the figures of the page: those of the experiment, or every value beside its baseline, by metric."""
        from interp_tasks.measurement.figure import figures

        own = EXPERIMENTS[self.experiment].defined("figures") if self.experiment in EXPERIMENTS else None
        drawn: list[Figure] = figures(self.frame, self.examples()) if own is None else own(self)
        return drawn

    def examples(self) -> str:
        """Returns on how many examples the rows were measured, in a sentence, where all were on the same number."""
        numbers = self.frame["n"].dropna().unique()
        return f"n = {int(numbers[0]):,} examples." if len(numbers) == 1 else ""


def join(results: Sequence[Result]) -> Result:
    """Joins several results of one experiment, with rows grouped by checkpoint."""
    import pandas

    frame = pandas.concat([result.frame for result in results], ignore_index=True)
    order = {ref: index for index, ref in enumerate(dict.fromkeys(frame["ref"]))}
    frame = frame.sort_values("ref", key=lambda refs: refs.map(order), kind="stable", ignore_index=True)
    notes = tuple(dict.fromkeys(note for result in results for note in result.notes))
    return Result(
        results[0].experiment,
        frame,
        {"parts": [dict(result.config) for result in results]},
        notes,
        results[0].versions,
    )


def json_value(value: Any) -> Any:
    """Returns a value JSON can hold: numpy scalars become Python's, NaN, infinities and gaps become ``None``."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if isinstance(value, dict):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    # Anything else is a marker of pandas for a missing value.
    return value if isinstance(value, (str, int)) else None
