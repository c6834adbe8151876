"""What `print` shows of a result's table, in the width of a terminal."""

import pandas as pd

from circuits.table_printing import short_table_text


def test_one_that_is_too_wide_stands_in_parts_that_tell_the_rows_apart(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    numbers = {name: [0.12346, 1.0] for name in ("baseline", "value", "effect")}
    bounds = {"effect_ci_low": [0.1, 0.98765], "effect_ci_high": [0.2, 1.0], "p_adjusted": [0.01, 1.0]}
    named = {"variant": ["all_heads_of_the_model"] * 2, "draw": ["0", "1"], "metric": ["loss", "accuracy"]}
    frame = pd.DataFrame({**named, **numbers, **bounds})
    one, two = short_table_text(frame, list(frame)).split("\n\n")
    two, counted = two.rsplit("\n", 1)
    assert counted == "2 rows; .frame has all 9 columns"
    assert max(map(len, [*one.split("\n"), *two.split("\n")])) <= 80
    rows = [[line.split() for line in part.split("\n")[-2:]] for part in (one, two)]
    # The rows differ by their draw: the first two columns stand in every part.
    first = [["all_heads_of_the_model", "0"], ["all_heads_of_the_model", "1"]]
    assert [row[:2] for row in rows[0]] == [row[:2] for row in rows[1]] == first
    # An interval stands beside its number.
    texts = ["0.1235 0.1235 0.1235 [0.1, 0.2] 0.01", "1 1 1 [0.988, 1] 1"]
    assert [" ".join(a[3:] + b[2:]) for a, b in zip(*rows, strict=True)] == texts
    of_one_metric = short_table_text(frame[:1], ["draw", "metric"])
    assert of_one_metric.endswith("\n1 row of loss; .frame has all 9 columns")
