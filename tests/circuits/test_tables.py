"""What `print` shows of a result's table, in the width of a terminal."""

import numpy as np
import pandas as pd
import pytest

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
    assert counted == f"{len(frame)} rows; .frame has all {len(frame.columns)} columns"
    lines = [table.split("\n") for table in [*tables, last]]
    return [(each[: -len(frame)], [line.split() for line in each[-len(frame) :]]) for each in lines]


def expected(frame):
    return [
        [text if isinstance(text, str) else f"{text:.4g}" for text in row]
        for row in frame.dropna(axis=1, how="all").itertuples(index=False)
    ]


@pytest.mark.parametrize("width", [None, 80, 100])
def test_a_table_that_is_too_wide_has_names_in_several_lines(monkeypatch, width):
    """Without a terminal of known width it has 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    frame = frame_of(3)
    [(names, rows)] = tables_of(frame)
    assert rows == expected(frame)
    assert max(map(len, names)) <= (width or 80)
    if width == 100:
        assert names[0].split() == list(frame.dropna(axis=1, how="all"))
    else:
        # Read from above, each name is whole.
        assert len(names) == 2
        ends = [names[1].index(word) + len(word) for word in ("ci_low", "ci_high")]
        assert [
            names[0][:end].split()[-1] + word for end, word in zip(ends, ("ci_low", "ci_high"), strict=True)
        ] == [
            "effect_ci_low",
            "effect_ci_high",
        ]


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


def test_what_fits_and_the_number_of_rows_are_as_before(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    frame = frame_of(100)
    shown = frame.dropna(axis=1, how="all")
    whole = shown.to_string(index=False, max_rows=40, float_format="{:.4g}".format)
    assert short_table(frame, NAMES) == f"{whole}\n100 rows; .frame has all 9 columns"
    monkeypatch.setenv("COLUMNS", "80")
    narrow = short_table(frame, NAMES).split("\n")
    assert len(narrow) == len(whole.split("\n")) + 2
    assert max(map(len, narrow)) <= 80
    assert short_table(frame[:0], NAMES).endswith("\n0 rows; .frame has all 9 columns")
