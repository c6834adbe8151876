"""How printed tables are laid out: what is told once, what is shortened, and what each width leaves of a row."""

import re

import pytest

from circuits.figures.names import beginning_in_common, in_common
from interp_tasks.cli.layouts import GAP, Layout, arranged, in_lines, parted, squeezed
from interp_tasks.cli.sheets import folded, grouped, sheet_of, shortened, words_in_common
from interp_tasks.cli.tables import print_sheet

INTERVALS = ["0.6844 [0.683, 0.686]", "0.4766 [0.461, 0.49]", "0.3524 [0.311, 0.395]"]


def lines(sheet, width):
    """The rows as they are printed, without headers."""
    layouts = arranged(folded(sheet), width)
    return [
        line
        for layout in layouts
        for block in range(len(sheet.blocks))
        for line in layout.body(block, partly=len(layouts) > 1)
    ]


def table(names, rows):
    return sheet_of(names, rows, [False] * len(names))


def words(texts):
    return sorted(word for text in texts for word in text.split())


def test_what_every_row_says_is_told_once_and_empty_columns_are_left_out():
    sheet = folded(
        table(["head", "mode", "empty", "value"], [[f"0.{k}", "uniform", "–", f"{k}"] for k in range(3)])
    )
    assert sheet.headers == ("head", "value")
    assert sheet.shared == (("mode uniform",),)


def test_a_column_that_differs_between_blocks_alone_is_told_in_each_head():
    sheet = table(["head", "baseline"], [["0.0", "1"], ["0.1", "1"], ["0.0", "2"], ["0.1", "2"]])
    sheet = folded(type(sheet)(**{**vars(sheet), "blocks": ((0, 1), (2, 3)), "shared": ((), ())}))
    assert sheet.headers == ("head",)
    assert sheet.shared == (("baseline 1",), ("baseline 2",))


def test_intervals_and_the_numbers_of_a_single_row_stay():
    same = table(["head", "value"], [["0.0", "1 [0, 2]"], ["0.1", "1 [0, 2]"]])
    assert folded(same).headers == ("head", "value")
    one = table(["run", "steps", "variant", "p_adjusted"], [["a", "3", "all", "0.1"]])
    assert folded(one).headers == ("run", "steps")
    assert folded(one).shared == (("all", "p_adjusted 0.1"),)


def test_a_table_of_which_all_rows_are_equal_is_not_folded_away():
    assert folded(table(["a", "b"], [["1", "2"], ["1", "2"]])).headers == ("a", "b")


@pytest.mark.parametrize(
    ("names", "common"),
    [
        (["zoo:long-name-of-a-run@0", "zoo:long-name-of-a-run@40"], ("zoo:long-name-of-a-run", "")),
        (["zoo:matrix-completion-4x4", "zoo:matrix-completion-7x7"], ("zoo:matrix-completion-", "")),
        (["runs/a/seed-0@last", "runs/a/seed-1@last"], ("runs/a/", "@last")),
        (["a very long name of a folder", "another long name of a folder"], None),
        (["run", "run@4"], ("", "")),
        (["runs/a/b", "runs/a"], None),
    ],
)
def test_what_names_have_in_common(names, common):
    found = in_common(names)
    assert found == common or (common is None and found in (None, ("", ""), ("runs/", "")))


def test_names_are_shortened_only_where_there_is_no_room():
    names = [f"zoo:matrix-completion-7x7@{step}" for step in (0, 4000)]
    sheet = table(["checkpoint", "row", "column"], [[name, "1", str(k)] for k, name in enumerate(names)])
    (wide,), (narrow,) = arranged(sheet, 80), arranged(sheet, 30)
    assert wide.sheet.column(0) == names
    assert narrow.sheet.column(0) == ["@0", "@4000"]
    assert narrow.sheet.shared == (("checkpoint zoo:matrix-completion-7x7…",),)
    other = table(["text", "n"], [[name, "1"] for name in names])
    assert shortened(other) == other, "only names of runs and checkpoints"


def test_of_names_that_stay_long_what_they_begin_with_goes():
    names = ["zoo:matrix-completion-autoregressive", "zoo:matrix-completion-sweeps/given-embed"]
    assert in_common(names) is None
    assert beginning_in_common(names) == "zoo:matrix-completion-"
    assert beginning_in_common(["runs/a/b", "runs/a/"]) == "runs/", "something of each is left"
    assert beginning_in_common(["miiii", "miiii-113"]) == ""
    sheet = table(["run", "metric", "onset"], [[name, "mse_masked", "1500"] for name in names])
    (layout,) = arranged(sheet, 50)
    assert layout.body(0, partly=False) == [
        "autoregressive      mse_masked  1500",
        "sweeps/given-embed  mse_masked  1500",
    ]
    assert layout.sheet.shared == (("run zoo:matrix-completion-…",),)


def test_repeated_first_cells_become_lines_above_their_rows():
    rows = [
        [of, name, "0.5"] for of in ("recoverable entries", "one anchor") for name in ("zero", "nuclear norm")
    ]
    found = grouped(table(["entries", "method", "r"], [*rows, ["truth", "alone", "1"]]))
    assert found.headers == ("method", "r")
    assert found.groups == ("recoverable entries",) * 2 + ("one anchor",) * 2 + ("",)
    assert found.column(0)[-1] == "truth: alone"
    (layout,) = arranged(table(["entries", "method", "r"], rows), 20)
    assert layout.body(0, partly=False) == [
        "recoverable entries",
        "  zero          0.5",
        "  nuclear norm  0.5",
        "one anchor",
        "  zero          0.5",
        "  nuclear norm  0.5",
    ]


def test_words_that_names_begin_with_become_a_line_above_them():
    names = ["read-out after embed", "read-out after layer 0", "all", "rank 1, MASK", "rank 1, 0.45"]
    found = grouped(table(["variant", "value"], [[name, str(k)] for k, name in enumerate(names)]))
    assert found.groups == ("read-out after", "read-out after", "", "rank 1", "rank 1")
    assert found.column(0) == ["  embed", "  layer 0", "all", "  MASK", "  0.45"]
    assert words_in_common(["layer 0", "layer 0"]) == ["layer"], "a name is never all of it"


@pytest.mark.parametrize("width", range(48, 121, 6))
def test_whatever_the_width_every_word_is_printed_and_no_line_is_longer(width):
    names = ["nuclear norm", "gradient descent, 100 steps", "the truth itself"]
    rows = [
        [of, name, number, number[::-1].replace("]", "(").replace("[", ")"), number, str(at)]
        for of in ("recoverable", "one anchor")
        for at, (name, number) in enumerate(zip(names, INTERVALS, strict=True))
    ]
    sheet = table(["entries", "method", "distance", "mirrored", "r", "k"], rows)
    found = lines(sheet, width)
    assert max(map(len, found)) <= width
    assert {*words(cell for row in rows for cell in row)} <= {*words(found)}


def test_a_row_is_one_line_where_columns_beside_it_make_another_table():
    """Four numbers with intervals: two tables of one line a row rather than one of three."""
    rows = [[f"0.{k}", *[INTERVALS[k % 3]] * 2, *[INTERVALS[(k + 1) % 3]] * 2] for k in range(12)]
    layouts = arranged(table(["head", "score", "mask", "values", "column"], rows), 80)
    assert [layout.sheet.headers for layout in layouts] == [
        ("head", "score", "mask"),
        ("head", "values", "column"),
    ]
    assert [len(layout.body(0, partly=True)) for layout in layouts] == [12, 12]


def test_columns_of_a_second_table_stand_beside_all_that_tells_rows_apart():
    """Two rows are equal throughout, and no column tells those apart."""
    rows = [[of, name, *[INTERVALS[of == "b"]] * 4] for of in "abb" for name in ("mse", "r")]
    sheet = table(["matrix", "metric", "one", "other", "third", "last"], rows)
    layouts = parted(sheet, 60, 24, GAP)
    assert len(layouts) > 1
    assert all(layout.sheet.headers[: layout.labels] == ("matrix", "metric") for layout in layouts)


def test_a_row_with_intervals_among_rows_without_takes_one_line():
    """As the median of several runs below the runs themselves."""
    rows = [[f"seed-{k}", *[f"{k}{k}"] * 4] for k in range(1, 8)] + [["seed-*", *["1450 [1400, 1600]"] * 4]]
    layouts = arranged(table(["run", "onset", "crossing", "end", "sharpness"], rows), 60)
    for layout in layouts:
        assert [line.split()[0] for line in layout.body(0, partly=True)] == [row[0] for row in rows]
    assert [layout.sheet.headers[1:] for layout in layouts] == [("onset", "crossing"), ("end", "sharpness")]


def test_words_stand_in_one_line_where_another_table_has_room_for_them():
    rows = [[f"seed-{k}", *["95 of 100 pairs in order"] * 2, "0.5"] for k in range(3)]
    layouts = arranged(table(["run", "first answers", "last answers", "value"], rows), 50)
    assert [layout.sheet.headers[1:] for layout in layouts] == [("first answers",), ("last answers", "value")]
    assert not any(layout.is_broken() for layout in layouts)
    # Where a text has no room in any table, it takes several lines.
    (broken,) = arranged(table(["run", "about"], [["seed-0", "word " * 20]]), 50)
    assert broken.is_broken()


def test_what_is_called_as_its_column_is_said_once():
    rows = [["accuracy", "1"], ["accuracy", "2"]]
    assert folded(table(["accuracy", "value"], rows)).shared == (("accuracy",),)


def test_headers_take_lines_before_cells_do_and_get_the_room_that_is_left():
    sheet = table(["q", "validation when train is at 95%"], [["mod_2", "0.93"], ["mod_3", "0.94"]])
    (narrow,) = arranged(sheet, 20)
    assert narrow.header() == ["       validation", "       when train", "q      is at 95%"]
    assert narrow.body(0, partly=False) == ["mod_2  0.93", "mod_3  0.94"]
    (wide,) = arranged(sheet, 80)
    assert len(wide.header()) == 1


def test_words_are_broken_where_that_adds_the_fewest_lines():
    long = ["share at the best frequency of all", "gini", "keys", "rank"]
    rows = [[name, "0.5 [0.1, 0.2]", "0.25 [0.11, 0.22]"] for name in long]
    layout = squeezed(table(["metric", "value", "beside"], rows), 52, loose=0)
    body = layout.body(0, partly=False)
    assert len(body) == 5, "the one long name alone takes two lines"
    assert layout.width <= 52


def test_lines_of_a_text_keep_its_words_and_its_indent():
    assert in_lines("  share at the best", 10) == ("  share at", "  the best")
    assert in_lines("0.5 [0.1, 0.2]", 8) == ("0.5 [0.1, 0.2]",), "an interval is not broken"
    assert in_lines("0.5 [0.1, 0.2]", 11, 1) == ("0.5", "[0.1, 0.2]")
    assert in_lines("0.5 [0.1, 0.2]", 9, 2) == ("0.5 [0.1,", "0.2]")


def test_a_repeated_name_is_printed_once_and_again_in_the_next_block():
    sheet = table(["run", "k"], [["a", "1"], ["a", "2"], ["a", "3"], ["b", "4"]])
    sheet = type(sheet)(**{**vars(sheet), "blocks": ((0, 1), (2, 3)), "shared": ((), ())})
    layout = Layout(sheet, (3, 1), GAP)
    assert layout.body(0, partly=False) == ["a    1", "     2"]
    assert layout.body(1, partly=False) == ["a    3", "b    4"]


def test_the_head_tells_nothing_twice(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    sheet = table(["run", "components", "k"], [["zoo:x", "qkv", "1"], ["zoo:x", "qkv", "2"]])
    print_sheet(sheet, [[["zoo:x", "components qkv"]]])
    head, header, *rows = capsys.readouterr().out.splitlines()
    assert head == "zoo:x · components qkv"
    assert (header, rows) == ("k", ["1", "2"])
    assert not re.search(r"\x1b", head)
