"""The runner of tests/breakages.py judges rightly, and every entry of tests/breakages.toml can be tried."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]
RUNNER = REPOSITORY / "tests" / "breakages.py"

_spec = importlib.util.spec_from_file_location("breakages_runner", RUNNER)
breakages = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = breakages
_spec.loader.exec_module(breakages)

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="each entry is a forked child")

CODE = """
def double(x):
    return 2 * x


def half(x):
    return x / 2
"""
TESTS = """
import pytest

import thing
from thing import code


def test_double():
    assert code.double(2) == 4


@pytest.mark.parametrize("x", [0, 4])
def test_half(x):
    assert code.half(x) * 2 == x


@pytest.mark.parametrize("x", [1])
def test_half_of_an_odd_number(x):
    assert code.half(x) == 0.5


def test_that_fails_anyway():
    assert False


@pytest.fixture
def doubled():
    assert code.double(1) == 2


def test_with_a_fixture(doubled):
    pass
"""


def entry(name: str, old: str, new: str, test: str = "test_double", **more: str) -> str:
    lines = {"name": name, "rule": "a rule", "file": "thing/code.py", "old": old, "new": new, **more}
    text = "\n".join(f"{key} = '''{value}'''" for key, value in lines.items())
    return f"\n[[breakage]]\n{text}\ntest = 'tests/test_code.py::{test}'\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A package of one file, and its tests."""
    for folder in ("thing", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "thing" / "__init__.py").touch()
    (tmp_path / "thing" / "code.py").write_text(CODE)
    (tmp_path / "tests" / "test_code.py").write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\naddopts = ['--import-mode=importlib']\n"
    )
    return tmp_path


def printed(
    repository: Path, *entries: str, limit: int = 60, arguments: tuple[str, ...] = ()
) -> tuple[int, str]:
    """The exit code, and what was printed."""
    head = f"copy = ['thing', 'tests', 'pyproject.toml']\npackages = ['thing']\npreload = ['pytest']\nlimit = {limit}\n"
    (repository / "tests" / "breakages.toml").write_text(head + "".join(entries))
    done = subprocess.run(
        [sys.executable, RUNNER, "--root", repository, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def run(repository: Path, *entries: str, **options: Any) -> tuple[int, dict[str, str]]:
    """The exit code, and the printed lines by the entry's name."""
    code, text = printed(repository, *entries, **options)
    lines = {}
    for line in text.splitlines():
        if match := re.match(r"(\w+) +[\d.]+ s  ([^:]+): (.*)", line):
            # What is not broken is tested in two lots; the bad one counts.
            lines[match[2]] = max(f"{match[1]}: {match[3]}", lines.get(match[2], ""), key=str.swapcase)
    return code, lines


@needs_fork
def test_what_is_broken_and_noticed_is_red(repository):
    before = (repository / "thing" / "code.py").read_text()
    code, lines = run(
        repository,
        entry("noticed", "2 * x", "3 * x"),
        entry("same size", "x / 2", "x / 3", test="test_half"),
        entry("one of the parameters", "x / 2", "x // 2", test="test_half_of_an_odd_number[1]"),
        entry("announced", "2 * x", "[][x]", raises="IndexError"),
    )
    assert lines == {
        **dict.fromkeys(["noticed", "same size", "one of the parameters", "announced"], "red: a rule"),
        "nothing broken": lines["nothing broken"],
    }
    assert lines["nothing broken"].startswith("green")
    assert code == 0
    assert (repository / "thing" / "code.py").read_text() == before


@needs_fork
def test_what_is_not_noticed_or_not_for_its_reason_is_a_failure(repository):
    code, lines = run(
        repository,
        entry("nothing", "2 * x", "2 * x"),
        entry("not noticed", "x / 2", "x / 3"),
        entry("noticed by some", "x / 2", "x // 2", test="test_half"),
        entry("absent", "3 * x", "2 * x"),
        entry("doubled", "return", "yield"),
        entry("no python", "2 * x", "2 * * x"),
        entry("no import", "\ndef double", "import nothing_of_this_name\n\n\ndef double"),
        entry("wrong name", "2 * x", "2 * y"),
        entry("not announced", "2 * x", "[][x]"),
        entry("not as announced", "2 * x", "3 * x", raises="IndexError"),
        entry("no such test", "2 * x", "3 * x", test="test_nothing"),
        entry("in a fixture", "2 * x", "3 * x", test="test_with_a_fixture"),
        entry("dies", "return 2 * x", "import os; os._exit(0)"),
    )
    test = "tests/test_code.py::test_double"
    assert lines == {
        "nothing": f"GREEN: {test} does not notice",
        "not noticed": f"GREEN: {test} does not notice",
        "noticed by some": "GREEN: tests/test_code.py::test_half does not notice",
        "absent": "ERROR: the old text occurs 0 times in thing/code.py, not once",
        "doubled": "ERROR: the old text occurs 2 times in thing/code.py, not once",
        "no python": "ERROR: with the new text thing/code.py is no Python: invalid syntax, line 3",
        "no import": "ERROR: tests/test_code.py: cannot be collected",
        "wrong name": f"ERROR: {test} failed with NameError, not with AssertionError or Failed",
        "not announced": f"ERROR: {test} failed with IndexError, not with AssertionError or Failed",
        "not as announced": f"ERROR: {test} failed with AssertionError, not with IndexError",
        "no such test": lines["no such test"],
        "in a fixture": "ERROR: tests/test_code.py::test_with_a_fixture: setup failed",
        "dies": "ERROR: the child died without a word",
        "nothing broken": lines["nothing broken"],
    }
    assert "no test ran" in lines["no such test"]
    assert lines["nothing broken"].startswith("ERROR")
    assert code == 1


@needs_fork
def test_a_test_that_fails_anyway_proves_nothing(repository):
    code, lines = run(repository, entry("any", "2 * x", "3 * x", test="test_that_fails_anyway"))
    assert lines["any"] == "red: a rule"
    assert (
        lines["nothing broken"]
        == "RED: tests/test_code.py::test_that_fails_anyway fails though nothing is broken"
    )
    assert code == 1


@needs_fork
def test_a_package_from_elsewhere_is_found_out(repository, tmp_path_factory, monkeypatch):
    """The copy lacks the package, and another one of its name is installed."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (repository / "thing").rename(elsewhere / "thing")
    (repository / "thing").mkdir()
    (repository / "thing" / "notes.txt").write_text("2 * x")
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    _, lines = run(repository, entry("elsewhere", "2 * x", "3 * x").replace("code.py", "notes.txt", 1))
    assert "not from the copy" in lines["elsewhere"]


@needs_fork
def test_entries_are_listed_and_chosen_by_name(repository):
    entries = [entry("first", "2 * x", "3 * x"), entry("second", "x / 2", "x / 3", test="test_half")]
    code, lines = run(repository, *entries, arguments=("--only", "sec", "--jobs", "1"))
    assert (code, sorted(lines)) == (0, ["nothing broken", "second"])
    code, lines = run(repository, *entries, arguments=("--list",))
    assert (code, lines) == (0, {})


@needs_fork
def test_a_child_that_hangs_is_killed(repository):
    code, lines = run(repository, entry("hangs", "return 2 * x", "while True:\n        pass"), limit=3)
    assert (code, lines["hangs"]) == (1, "ERROR: no end after 3 s (second try: the first took too long)")


def counted(path: Path, then: str) -> str:
    """Code for ``double`` that leaves a line in ``path``; ``then`` may ask ``first``, whether it is the only one."""
    return (
        f"open({str(path)!r}, 'a').write('x\\n')\n"
        f"    first = len(open({str(path)!r}).readlines()) == 1\n    {then}"
    )


@needs_fork
def test_only_what_took_too_long_is_tried_again(repository, tmp_path):
    slow, dead, red = (tmp_path / name for name in ("slow", "dead", "red"))
    wait = "\n    while first:\n        pass\n    return 3 * x"
    code, lines = run(
        repository,
        entry("late once", "return 2 * x", counted(slow, wait)),
        entry(
            "dies once", "return 2 * x", counted(dead, "import os; first and os._exit(0)\n    return 3 * x")
        ),
        entry("red", "return 2 * x", counted(red, "return 3 * x")),
        limit=15,  # on a busy machine a child that is not late may take several seconds
    )
    assert lines["late once"] == "red: a rule (second try: the first took too long)"
    assert lines["dies once"] == "ERROR: the child died without a word"
    assert lines["red"] == "red: a rule"
    assert [len(path.read_text().splitlines()) for path in (slow, dead, red)] == [2, 1, 1]
    assert code == 1


@needs_fork
def test_the_end_of_the_log_tells_what_was_not_good(repository):
    _, text = printed(
        repository,
        entry("wrong name", "2 * x", "2 * y"),
        entry("noticed", "2 * x", "3 * x"),
        entry("not noticed", "x / 2", "x / 3"),
        entry("hangs", "return 2 * x", "while True:\n        pass"),
        limit=15,  # on a busy machine a child that does not hang may take several seconds
    )
    end = re.split(r"^\d+ entries: .*\n", text, flags=re.MULTILINE)[1]
    bad, _, rest = end.strip().partition("\n\n")
    heads = [line.split(":")[0].split("  ")[-1] for line in end.splitlines() if line[:1].isupper()]
    assert heads == ["wrong name", "not noticed", "hangs"]
    assert "    | E       NameError: name 'y' is not defined" in bad.splitlines()
    assert all(line.startswith("    | ") for line in bad.splitlines()[1:])
    assert len(bad.splitlines()) <= 1 + breakages.TAIL
    assert rest.startswith("GREEN")
    # Where it hung.
    assert re.search(r"^    \|   File .*code.py\", line \d+ in double$", rest, flags=re.MULTILINE)

    _, text = printed(repository, entry("noticed", "2 * x", "3 * x"))
    assert text.splitlines()[-1].startswith("1 entries: 1 red")


def test_names_are_given_once(repository):
    path = repository / "tests" / "breakages.toml"
    path.write_text("copy = []\npackages = []\n" + 2 * entry("first", "2 * x", "3 * x"))
    with pytest.raises(SystemExit, match="two entries are called 'first'"):
        breakages.read_file(path)


def test_parts_have_every_entry_once(repository, capsys):
    names = [f"entry {number}" for number in range(7)]
    path = repository / "tests" / "breakages.toml"
    path.write_text("copy = []\npackages = []\n" + "".join(entry(name, "2 * x", "3 * x") for name in names))
    listed = []
    for turn in (1, 2, 3):
        assert breakages.main(["--root", str(repository), "--list", "--part", f"{turn}/3"]) == 0
        listed.append([line.split(":")[0] for line in capsys.readouterr().out.splitlines()])
    assert [len(each) for each in listed] == [3, 2, 2]
    assert sorted(name for each in listed for name in each) == names


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "-1/3"])
def test_a_part_that_is_none(text):
    with pytest.raises(argparse.ArgumentTypeError, match="write K/N"):
        breakages.part(text)


ENTRIES = breakages.read_file(REPOSITORY / "tests" / "breakages.toml")[1]


@pytest.mark.parametrize("one", ENTRIES, ids=lambda one: one.name)
def test_every_entry_can_be_tried(one):
    assert one.fault(REPOSITORY) is None
    assert one.old != one.new
    for test in one.tests:
        file, function = test.split("::")
        assert f"\ndef {function.split('[')[0]}(" in (REPOSITORY / file).read_text(encoding="utf-8")
