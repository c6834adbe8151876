"""Experiments by name, and their rows: the tidy table, the table that people read, files, figures and the page."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from interp_tasks.errors import UserError
from interp_tasks.file_io import write_files_together
from interp_tasks.measurement.option_parsing import unknown_name_error
from interp_tasks.pages import (
    Column,
    Figure,
    Page,
    Table,
    format_p_value,
    number,
    package_versions,
    with_interval,
)
from interp_tasks.text_formatting import pluralise

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
    from typing_extensions import Self

F = TypeVar("F", bound=Callable[..., Any])

#: Every experiment that was imported, by the name that its command and its rows have.
EXPERIMENTS: dict[str, Experiment] = {}


@dataclass(frozen=True)
class Experiment:
    """A function that measures, with its registered name, settings and default samples.

    Attributes:
        name: of its command, its rows and its files: ``prime-order`` for ``prime_order``.
        says: settings that the head of its table names -> the value that goes without saying (``None``: none does).
        samples: how many examples it takes where nothing is said, if not as many as the others.
        without: options of examples that it refuses, as they would change nothing or cannot be met.
        judged_by_task: whether the metrics of its rows are those of the task.
        side_by_side: columns of a row, and metrics -> their headers, where a table has one row for all metrics.
    """

    name: str
    function: Callable[..., Any]
    says: Mapping[str, Any] = field(default_factory=dict)
    samples: int | None = None
    without: tuple[str, ...] = ()
    judged_by_task: bool = False
    side_by_side: Mapping[str, str] = field(default_factory=dict)


def experiment(**more: Any) -> Callable[[F], F]:
    """Decorates a function, which it registers as an experiment; the arguments are those of :class:`Experiment`."""

    def register(function: F) -> F:
        name = function.__name__.replace("_", "-")

        @wraps(function)
        def called(*arguments: Any, **given: Any) -> Any:
            for option in made.without:
                if given.get(option) is not None:
                    raise UserError(f"{name} takes no {option}: leave it out")
            if made.samples is not None and given.get("samples") is None and given.get("tokens") is None:
                given["samples"] = made.samples
            return function(*arguments, **given)

        EXPERIMENTS[name] = made = Experiment(name, called, **more)
        return cast(F, called)

    return register


#: Columns of one row, as it is made.
Row = dict[str, Any]

COLUMNS = (
    *("experiment", "run", "ref", "step", "seed", "split", "draw", "variant", "intervention"),
    *("site", "layer", "head", "position", "metric", "value", "value_ci_low", "value_ci_high", "n", "n_runs"),
    *("baseline", "effect", "effect_ci_low", "effect_ci_high", "p_value", "p_adjusted"),
    *("engine", "null_effect"),
)
#: Columns by their names up to 0.2.
OLD_NAMES = {"ci_low": "value_ci_low", "ci_high": "value_ci_high"}
#: The sentence about p-values below a table; ``--top`` may show fewer rows.
HOLM = "p adj.: sign-flip test, Holm's adjustment over the {} tested."
#: Sign flips of a test, as in ``circuits.sweep``.
FLIPS = 9999
#: What the name of a ratio's metric ends with.
RATIO = " ratio"
#: Whole numbers that a row may lack; pandas' nullable type keeps 3 from turning into 3.0 beside a gap.
WHOLE = ("step", "seed", "draw", "layer", "head", "position", "n", "n_runs")


def tidy_frame(rows: pandas.DataFrame | Iterable[Row], **labels: Any) -> pandas.DataFrame:
    """Returns exactly ``COLUMNS``, in order, each with one type; a column that nobody filled is empty.

    Args:
        labels: cells of all rows that do not say otherwise.
    """
    import pandas

    frame = rows if isinstance(rows, pandas.DataFrame) else pandas.DataFrame(list(rows))
    own = {name: frame[name].where(frame[name].notna(), labels[name]) for name in labels if name in frame}
    frame = frame.assign(**{**labels, **own}).reindex(columns=list(COLUMNS))
    return frame.astype(dict.fromkeys(WHOLE, "Int64"))


def number_columns(
    value: float,
    interval: Iterable[float] | None = None,
    baseline: float | None = None,
    effect_interval: Iterable[float] | None = None,
) -> Row:
    """Returns the columns of a number, of what it is compared with, and of their difference, with intervals."""
    row: Row = {"value": float(value)}
    if interval is not None:
        row |= zip(("value_ci_low", "value_ci_high"), map(float, interval), strict=True)
    if baseline is not None:
        row |= {"baseline": float(baseline), "effect": float(value) - float(baseline)}
    if effect_interval is not None:
        row |= zip(("effect_ci_low", "effect_ci_high"), map(float, effect_interval), strict=True)
    return row


def merge_rows(
    frame: pandas.DataFrame, key: Callable[[Row], tuple[Any, ...]], cells: Callable[[Row], Mapping[str, Any]]
) -> pandas.DataFrame:
    """Returns one row for all that have the same key: the first of them, with the cells that each adds."""
    import pandas

    rows: dict[tuple[Any, ...], Row] = {}
    for row in frame.to_dict("records"):
        columns: Row = {str(name): value for name, value in row.items()}
        rows.setdefault(key(columns), dict(columns)).update(cells(columns))
    return pandas.DataFrame(list(rows.values()))


def value_text(row: Mapping[str, Any], key: str = "value") -> str:
    """Returns a value, or the ``"effect"`` with its sign, with its interval; or that not one example changed."""
    if key == "effect" and row["null_effect"] is True:
        return "0, no example changed"
    text = number(row[key], 3, sign=True) if key == "effect" else number(row[key])
    return with_interval(text, row[f"{key}_ci_low"], row[f"{key}_ci_high"])


def metrics_side_by_side(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns one row for all metrics of a checkpoint's variant and intervention, with their values and texts."""
    return merge_rows(
        frame,
        lambda row: (row["ref"], row["variant"], row["intervention"]),
        lambda row: {row["metric"]: row["value"], f"{row['metric']}, text": value_text(row)},
    )


def columns_from_headers(headers: Mapping[str, str], rows: pandas.DataFrame) -> list[Column]:
    """Returns the columns of that table, by header: of a row, or metrics."""
    return [
        Column(header, name, None if name in COLUMNS else cell_writer(f"{name}, text", str))
        for name, header in headers.items()
        if name in rows
    ]


def spread_over_draws(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns the spread of a variant's draws: ``draws, sd, smallest, largest`` of their values, by row of the table.

    Empty where nothing was drawn.
    """
    draws = frame[frame["draw"].notna()]
    values = draws.groupby(["ref", "intervention", "variant", "metric"], sort=False)["value"]
    return values.agg(draws="count", sd="std", smallest="min", largest="max").reset_index()


def find_view(of: pandas.DataFrame | str, name: str) -> Callable[..., Any] | None:
    """Returns a function that stands beside an experiment, ``NAME_view_rows`` or ``view_rows``, if any does.

    Args:
        of: the name of an experiment, or the rows of one; rows of several have no view of their own.
    """
    names = [of] if isinstance(of, str) else of["experiment"].unique()
    if len(names) != 1 or names[0] not in EXPERIMENTS:
        return None
    function, headers = EXPERIMENTS[names[0]].function, EXPERIMENTS[names[0]].side_by_side
    if headers and name.startswith("view_"):
        return metrics_side_by_side if name == "view_rows" else partial(columns_from_headers, headers)
    beside = vars(sys.modules[function.__module__])
    found: Callable[..., Any] | None = beside.get(f"{function.__name__}_{name}", beside.get(name))
    return found


def add_holm_adjustment(
    frame: pandas.DataFrame, notes: Sequence[str]
) -> tuple[pandas.DataFrame, tuple[str, ...]]:
    """Returns rows with Holm's adjustment over all their tests; a note about it, where there are any, comes second.

    The table is one family: whoever reads it may pick the best row of any checkpoint and metric.
    """
    from circuits.statistics import ALPHA, holm_adjusted, min_adjusted_p

    number_of = int(frame["p_value"].notna().sum())
    notes = [note for note in notes if not note.startswith(HOLM.partition("{")[0])]
    if not number_of:
        return frame, tuple(notes)
    frame = frame.assign(p_adjusted=holm_adjusted(frame["p_value"].to_numpy(dtype=float)))
    examples = int(frame.loc[frame["p_value"].notna(), "n"].max())
    least = min_adjusted_p(number_of, examples, FLIPS)
    limit = f" None can be below {least:.2g}: fewer rows or more examples would do." if least >= ALPHA else ""
    return frame, (*notes[:1], HOLM.format(pluralise(number_of, "row")) + limit, *notes[1:])


def strip_metric_suffixes(name: Any) -> str:
    """Returns the name of a metric without whose targets it is judged by, and not as a ratio."""
    return str(name).removesuffix(RATIO).partition(" (")[0]


def readable_table(frame: pandas.DataFrame) -> tuple[pandas.DataFrame, list[Column]]:
    """Returns the rows that people see, and their columns.

    Several draws become one row with their mean and spread; the intervention is shown only where it tells rows apart.
    """
    if (view := find_view(frame, "view_rows")) is not None:
        frame = view(frame)
    elif frame["draw"].notna().any():
        frame = frame[frame["draw"].isna()].merge(spread_over_draws(frame), how="left")
    if (view := find_view(frame, "view_columns")) is not None:
        return frame, view(frame)
    compared, several = frame["baseline"].notna().any(), "sd" in frame
    # Of draws of one variant what it is stands in the notes: the room goes to the spread.
    columns = [] if several and frame["variant"].nunique() == 1 else [Column("variant", "variant")]
    if frame.duplicated(["ref", "variant", "metric", "draw"]).any():
        columns.append(Column("intervention", "intervention"))
    columns.append(Column("metric", "metric"))
    if compared:
        columns.append(Column("baseline", "baseline"))
    columns.append(Column("value [95% CI]", "value", value_text))
    if several:
        columns.append(
            Column(
                "sd of draws [range]",
                "sd",
                lambda row: with_interval(number(row["sd"]), row["smallest"], row["largest"]),
            )
        )
    if compared:
        columns.append(Column("effect [95% CI]", "effect", partial(value_text, key="effect")))
    if frame["p_value"].notna().any():
        columns.append(Column("p adj.", "p_adjusted", lambda row: format_p_value(row["p_adjusted"])))
    return frame, columns


def cell_writer(key: str, text: str | Callable[[Any], str]) -> Callable[[Mapping[str, Any]], str]:
    """Returns a writer of a row's value by a format such as ``".1%"``, or a function; empty where it is missing."""

    def format_cell(row: Mapping[str, Any]) -> str:
        value = row.get(key)
        if value is None or value != value:
            return ""
        return format(value, text) if isinstance(text, str) else text(value)

    return format_cell


#: Endings of the files that hold a result, and of its page.
FILES = (".parquet", ".csv", ".json", ".config.json")
PAGE = ".html"
#: What ``print`` shows of a result.
SHOWN = ("ref", "variant", "draw", "metric")
SHOWN_ALONE = (*SHOWN, "value", "value_ci_low", "value_ci_high")
SHOWN_COMPARED = (*SHOWN, "baseline", "value", "effect", "effect_ci_low", "effect_ci_high", "p_adjusted")


def result_file_path(folder: str | Path, name: str, suffix: str) -> Path:
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
    versions: Mapping[str, str] = field(default_factory=package_versions)
    data: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        from circuits.table_printing import short_table_text

        # What has no unedited model beside it, such as a drop, has an interval of its own.
        is_compared = "effect" in self.frame and self.frame["effect"].notna().any()
        text = short_table_text(self.frame, SHOWN_COMPARED if is_compared else SHOWN_ALONE)
        return "\n".join([f"{self.experiment}:", text, *self.notes])

    def records(self) -> list[dict[str, Any]]:
        """Returns the rows as JSON values; a missing value is ``None``, never NaN."""
        return frame_records(self.frame)

    def to_json(self) -> str:
        """Returns a list of records."""
        return frame_to_json(self.frame)

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
        stamped = table.replace_schema_metadata({**(table.schema.metadata or {}), **stamp})
        pyarrow.parquet.write_table(stamped, buffer)
        return buffer.getvalue()

    def of_metric(self, metric: str | None) -> Self:
        """Returns the rows of one metric, for all its targets and as a ratio; ``"all"`` returns all rows.

        They are a family of tests of its own: Holm's adjustment is over them alone.

        Args:
            metric: ``None``: the one that the task calls its own, and all rows of a table that has none of it.

        Raises:
            UserError: for a metric of which there is no row.
        """
        names = self.frame["metric"].map(strip_metric_suffixes)
        parts = self.config.get("parts", [self.config])
        own = {name for part in parts for name in part.get("metrics of the tasks", ())}
        chosen = names.isin(own) if metric is None else (names == metric) | (self.frame["metric"] == metric)
        if metric not in (None, "all") and not chosen.any():
            raise unknown_name_error("no metric", metric, dict.fromkeys(names), "rows have all, or one of")
        if metric == "all" or not chosen.any():
            return self
        frame, now = add_holm_adjustment(self.frame[chosen], self.notes)
        return replace(self, frame=frame, notes=now)

    def stamp(self) -> dict[str, Any]:
        return {
            "experiment": self.experiment,
            "config": dict(self.config),
            "notes": list(self.notes),
            "versions": dict(self.versions),
        }

    def write(self, folder: str | Path | None, *, page: bool = False) -> list[Path]:
        """Writes ``NAME.parquet``, ``.csv``, ``.json``, ``NAME.config.json`` (the stamp), and ``NAME.html`` if asked.

        They replace those of an earlier call together, or none of them. Without a folder the page alone, here.

        Raises:
            UserError: if the file system refuses.
        """
        if folder is None:
            return [self.page().write(result_file_path("", self.experiment, PAGE))] if page else []
        contents: dict[str, str | bytes] = {
            ".parquet": self.parquet(),
            ".csv": self.to_csv(),
            ".json": self.to_json(),
            ".config.json": json.dumps(self.stamp(), indent=2) + "\n",
        }
        if page:
            contents[PAGE] = self.page().html()
        return write_files_together(
            {
                result_file_path(folder, self.experiment, suffix): content
                for suffix, content in contents.items()
            }
        )

    def plot(self, at: int = 0) -> plotly.graph_objects.Figure:
        """Returns one of :meth:`figures`, the first by default, with its title and caption in it."""
        from circuits.plots import titled

        shown = self.figures()[at]
        return titled(shown.figure, shown.title, shown.caption)

    def page(self, title: str | None = None) -> Page:
        """Returns the figures and the table on one self-contained page."""
        (rows, columns), notes = readable_table(self.frame), " ".join(self.notes)
        refs = rows["ref"].unique()
        if len(refs) == 1:
            notes = f"All rows: {refs[0]}. {notes}"
        else:
            columns = [Column("ref", "ref"), *columns]
        table = Table(rows, "Table", notes, columns, name=self.experiment, download=self.frame)
        return Page(title or self.experiment, [*self.figures(), table], self.config, self.versions)

    def figures(self) -> list[Figure]:
        """Returns the figures of the page: those of the experiment, or every value beside its baseline, by metric."""
        from interp_tasks.measurement.result_table_plots import table_figures

        own = find_view(self.experiment, "figures")
        drawn: list[Figure] = table_figures(self.frame, self.examples()) if own is None else own(self)
        return drawn

    def examples(self) -> str:
        """Returns on how many examples the rows were measured, in a sentence, where all were on the same number."""
        numbers = self.frame["n"].dropna().unique()
        return f"n = {int(numbers[0]):,} examples." if len(numbers) == 1 else ""


def join_results(results: Sequence[Result]) -> Result:
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


def frame_records(frame: pandas.DataFrame) -> list[dict[str, Any]]:
    """Returns the rows of a table as JSON values; a missing value is ``None``, never NaN."""
    rows = frame.to_dict("records")
    return [{str(name): json_value(value) for name, value in row.items()} for row in rows]


def frame_to_json(frame: pandas.DataFrame) -> str:
    """Returns a table as a JSON list of its rows, one a line."""
    rows = (json.dumps(record, allow_nan=False, ensure_ascii=False) for record in frame_records(frame))
    return "[\n" + ",\n".join(rows) + "\n]\n"


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
