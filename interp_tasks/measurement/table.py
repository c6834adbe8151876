"""The one tidy table: its columns, in order, and which of them people see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement.experiment import EXPERIMENTS
from interp_tasks.pages import Column, number, p_value, signed, with_interval

if TYPE_CHECKING:
    import pandas

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
#: The sentence about p-values below a table; its family are the rows that the table shows.
HOLM = "p adj.: sign-flip test, Holm's adjustment over the {} tests of these rows."
#: Sign flips of a test, as in ``circuits.sweep``.
FLIPS = 9999
#: What the name of a ratio's metric ends with.
RATIO = " ratio"
#: Whole numbers that a row may lack; pandas' nullable type keeps 3 from turning into 3.0 beside a gap.
WHOLE = ("step", "seed", "draw", "layer", "head", "position", "n", "n_runs")


def tidy(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns exactly ``COLUMNS``, in order, each with one type; a column that nobody filled is empty."""
    frame = frame.reindex(columns=list(COLUMNS))
    return frame.astype(dict.fromkeys(WHOLE, "Int64"))


def numbers(
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


def side_by_side(
    frame: pandas.DataFrame,
    key: Callable[[Row], tuple[Any, ...]],
    cells: Callable[[Row], Mapping[str, Any]],
) -> pandas.DataFrame:
    """Returns one row for all that have the same key: the first of them, with the cells that each adds."""
    import pandas

    rows: dict[tuple[Any, ...], Row] = {}
    for row in frame.to_dict("records"):
        columns: Row = {str(name): value for name, value in row.items()}
        rows.setdefault(key(columns), dict(columns)).update(cells(columns))
    return pandas.DataFrame(list(rows.values()))


def value_text(row: Mapping[str, Any]) -> str:
    return with_interval(number(row["value"]), row["value_ci_low"], row["value_ci_high"])


def spread_text(row: Mapping[str, Any]) -> str:
    return with_interval(number(row["sd"]), row["smallest"], row["largest"])


def effect_text(row: Mapping[str, Any]) -> str:
    """Returns the effect with its interval, or that not one example changed."""
    if row["null_effect"] is True:
        return "0, no example changed"
    return with_interval(signed(row["effect"]), row["effect_ci_low"], row["effect_ci_high"])


def spread(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns the spread of a variant's draws: ``draws, sd, smallest, largest`` of their values, by row of the table.

    Empty where nothing was drawn.
    """
    draws = frame[frame["draw"].notna()]
    values = draws.groupby(["ref", "intervention", "variant", "metric"], sort=False)["value"]
    return values.agg(draws="count", sd="std", smallest="min", largest="max").reset_index()


def own_view(frame: pandas.DataFrame, name: str) -> Callable[..., Any] | None:
    """Returns how the experiment that all rows are of lays them out; ``None``: as all do."""
    names = frame["experiment"].unique()
    known = EXPERIMENTS.get(names[0]) if len(names) == 1 else None
    return None if known is None else known.defined(name)


def shown_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns the rows that people see; several draws become one row with their mean and spread."""
    if (view := own_view(frame, "view_rows")) is not None:
        rows: pandas.DataFrame = view(frame)
        return rows
    table = spread(frame)
    return frame if table.empty else frame[frame["draw"].isna()].merge(table, how="left")


def tests(frame: pandas.DataFrame) -> int:
    """Returns the number of tests among rows: those with a p-value."""
    return int(frame["p_value"].notna().sum())


def with_holm(frame: pandas.DataFrame) -> tuple[pandas.DataFrame, list[str]]:
    """Returns rows with Holm's adjustment over all their tests, and a note about it, where there are any.

    The table is one family: whoever reads it may pick the best row of any checkpoint and metric.
    """
    from circuits.statistics import ALPHA, holm, least_adjusted

    if not (number_of := tests(frame)):
        return frame, []
    frame = frame.assign(p_adjusted=holm(frame["p_value"].to_numpy(dtype=float)))
    examples = int(frame.loc[frame["p_value"].notna(), "n"].max())
    least = least_adjusted(number_of, examples, FLIPS)
    limit = f" None can be below {least:.2g}: fewer rows or more examples would do." if least >= ALPHA else ""
    return frame, [HOLM.format(number_of) + limit]


def plain_metric(name: Any) -> str:
    """Returns the name of a metric without whose targets it is judged by, and not as a ratio."""
    return str(name).removesuffix(RATIO).partition(" (")[0]


def shown_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns in which readers see ``shown_rows``; the intervention only where it tells rows apart."""
    if (view := own_view(frame, "view_columns")) is not None:
        columns: list[Column] = view(frame)
        return columns
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
        columns.append(Column("sd of draws [range]", "sd", spread_text))
    if compared:
        columns.append(Column("effect [95% CI]", "effect", effect_text))
    if frame["p_value"].notna().any():
        columns.append(Column("p adj.", "p_adjusted", lambda row: p_value(row["p_adjusted"])))
    return columns


def filled(key: str, text: str | Callable[[Any], str]) -> Callable[[Mapping[str, Any]], str]:
    """Returns a writer of a row's value by a format such as ``".1%"``, or a function; empty where it is missing."""

    def cell(row: Mapping[str, Any]) -> str:
        value = row.get(key)
        if value is None or value != value:
            return ""
        return format(value, text) if isinstance(text, str) else text(value)

    return cell


def compares_metrics(frame: pandas.DataFrame) -> bool:
    """Tells whether people see one metric of these rows if they do not ask for more."""
    names = frame["experiment"].unique()
    return len(names) > 1 or names[0] not in EXPERIMENTS or EXPERIMENTS[names[0]].compares_metrics
