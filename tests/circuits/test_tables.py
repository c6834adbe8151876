"""What `print` shows of a result's table, in the width of a terminal."""

import re

import numpy as np
import pandas as pd

from circuits import tables
from circuits.tables import short_table

NAMES = [
    "variant",
    "draw",
    "metric",
    "baseline",
    "value",
    "effect",
    "effect_ci_low",
    "effect_ci_high",
    "p_adjusted",
]


def frame_of(rows, **columns):
    drawn = np.random.default_rng(0).normal(size=(rows, len(NAMES))).round(3)
    frame = pd.DataFrame(drawn, columns=NAMES)
    named = {
        "variant": [f"{row // 8}.{row % 8}" for row in range(rows)],
        "draw": None,
        "metric": "logit_difference",
    }
    return frame.assign(**{**named, **columns})


def tables_of(frame):
    """The printed tables, each as its lines of names and its rows of texts."""
    *tables, last = short_table(frame, list(frame.columns)).split("\n\n")
    last, _, counted = last.rpartition("\n")
    metric = "" if frame["metric"].nunique() > 1 else " of logit_difference"
    assert counted == f"{len(frame)} rows{metric}; .frame has all {len(frame.columns)} columns"
    lines = [table.split("\n") for table in [*tables, last]]
    return [(each[: -len(frame)], [line.split() for line in each[-len(frame) :]]) for each in lines]


def expected(frame):
    """The texts of each row, its interval beside the effect; a metric that is that of all stands below."""
    rows = []
    shown = frame.dropna(axis=1, how="all")
    for row in (shown if frame["metric"].nunique() > 1 else shown.drop(columns="metric")).to_dict("records"):
        low, high = row.pop("effect_ci_low"), row.pop("effect_ci_high")
        texts = {name: text if isinstance(text, str) else f"{text:.4g}" for name, text in row.items()}
        texts["effect"] += f" [{low:.3g}, {high:.3g}]"
        rows.append(" ".join(texts.values()).split())
    return rows


def test_one_that_is_still_too_wide_stands_in_parts_that_tell_the_rows_apart(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    frame = frame_of(
        6, variant="all heads of the model", draw=["0", "1", "2"] * 2, metric=["loss"] * 3 + ["accuracy"] * 3
    )
    frame["variant"] = frame["variant"].str.replace(" ", "_")
    parts = tables_of(frame)
    assert len(parts) == 2
    assert max(len(line) for names, _ in parts for line in names) <= 80
    # The rows differ by their draw and metric: the first three columns stand in every part.
    assert [row[:3] for row in parts[0][1]] == [row[:3] for row in parts[1][1]]
    assert [row + more[3:] for row, more in zip(parts[0][1], parts[1][1], strict=True)] == expected(frame)


def test_an_interval_stands_beside_its_number():
    """That of `share_ci_low` is of `share`; without bounds there is none."""
    frame = pd.DataFrame(
        {
            "head": ["0.1", "1.0"],
            "score": [0.12346, 0.5],
            "score_ci_low": [0.1, np.nan],
            "score_ci_high": [0.2, np.nan],
            "share": [1.0, 0.25],
            "share_ci_low": [0.98765, 0.2],
            "share_ci_high": [1.0, 0.3],
        }
    )
    names, *rows, _ = short_table(frame, list(frame.columns)).split("\n")
    assert re.split(" {2,}", names) == ["head", "score [95% CI]", "share [95% CI]"]
    assert [row.split() for row in rows] == [
        ["0.1", "0.1235", "[0.1,", "0.2]", "1", "[0.988,", "1]"],
        ["1.0", "0.5", "0.25", "[0.2,", "0.3]"],
    ]


def test_of_many_rows_the_first_and_the_last_are_made_and_shown(monkeypatch):
    made = []
    monkeypatch.setattr(tables, "interval_text", lambda *row: made.append(row) or f"{row[0]:.0f}")
    frame = pd.DataFrame({"value": range(1000), "value_ci_low": 0.0, "value_ci_high": 1.0})
    shown = short_table(frame, list(frame)).splitlines()
    assert [line.strip() for line in shown[1:-1]] == [
        *map(str, range(20)),
        "...",
        *map(str, range(980, 1000)),
    ]
    assert len(made) == 41
