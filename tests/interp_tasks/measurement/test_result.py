"""What `print` shows of an experiment's result."""

import pandas as pd

from interp_tasks.measurement.result import Result, add_holm_adjustment


def test_a_note_says_where_no_adjusted_p_value_can_be_small():
    rows = pd.DataFrame({"p_value": [0.01, float("nan"), 0.5], "n": pd.array([4, 4, 4], dtype="Int64")})
    # Two of the 2 ** 4 flips are as extreme as can be, for each of two tests.
    limit = " None can be below 0.25: fewer rows or more examples would do."
    adjusted, (_, note, other) = add_holm_adjustment(rows, ("first", "last"))
    assert note.endswith(f"over the 2 rows tested.{limit}")
    assert other == "last"
    assert adjusted["p_adjusted"].fillna(-1).tolist() == [0.02, -1, 0.5]
    assert add_holm_adjustment(rows.assign(n=64), [note])[1][0].endswith("2 rows tested.")
    assert add_holm_adjustment(rows[:0], ["first"])[1] == ("first",)


def test_print_shows_the_table_and_its_notes(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    row = {"ref": "runs/x@1", "variant": "0.1", "metric": "loss", "value": 2.0}
    alone = row | {"value_ci_low": 1.0, "value_ci_high": 3.0}
    shown = repr(Result("drops", pd.DataFrame([alone]), {}, ("A note.",)))
    title, header, line, count, note = shown.splitlines()
    assert (title, note) == ("drops:", "A note.")
    assert header.split() == ["ref", "variant", "value", "[95%", "CI]"]
    assert line.split() == ["runs/x@1", "0.1", "2", "[1,", "3]"]
    assert count == "1 row of loss; .frame has all 6 columns"
    effect = {
        "baseline": 1.5,
        "effect": 0.5,
        "effect_ci_low": 0.25,
        "effect_ci_high": 0.75,
        "p_adjusted": 0.04,
    }
    # Beside a baseline, the paired interval of the effect tells whether there is one; that of the value does not.
    columns = repr(Result("ablation", pd.DataFrame([alone | effect]))).splitlines()[1].split()
    assert columns == ["ref", "variant", "baseline", "value", "effect", "[95%", "CI]", "p_adjusted"]
