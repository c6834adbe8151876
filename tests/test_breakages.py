"""The runner of tests/breakages.py judges rightly, and every entry of tests/breakages.toml can be tried."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

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
    assert code.half(2) == 5


@pytest.fixture
def doubled():
    assert code.double(1) == 2


def test_with_a_fixture(doubled):
    pass


def test_that_imports_nothing():
    assert True


@pytest.mark.skip
def test_that_is_skipped():
    pass
"""


def entry(name: str, old: str, new: str, test: str = "test_double") -> str:
    lines = {"name": name, "rule": "a rule", "file": "thing/code.py", "old": old, "new": new}
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


def run(repository: Path, *entries: str, arguments: tuple[str, ...] = ()) -> tuple[int, dict[str, str], str]:
    """The exit status, the printed verdicts by the entry's name, and all that was printed."""
    (repository / "tests" / "breakages.toml").write_text("".join(entries))
    done = subprocess.run(
        [sys.executable, RUNNER, "--root", repository, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    lines = {}
    for line in done.stdout.splitlines():
        if match := re.match(r"(\w+) +[\d.]+ s  ([^:]+): (.*)", line):
            # What is not broken is tested in two lots; the bad one counts.
            lines[match[2]] = max(f"{match[1]}: {match[3]}", lines.get(match[2], ""), key=str.swapcase)
    return done.returncode, lines, done.stdout


@needs_fork
def test_what_is_broken_and_noticed_is_red(repository):
    code, lines, text = run(
        repository,
        entry("noticed", "2 * x", "3 * x"),
        entry("same size", "x / 2", "x / 3", test="test_half"),
        entry("one of the parameters", "x / 2", "x // 2", test="test_half_of_an_odd_number[1]"),
    )
    assert code == 0
    assert lines.pop("nothing broken").startswith("green")
    assert lines == dict.fromkeys(["noticed", "same size", "one of the parameters"], "red: a rule")
    assert text.splitlines()[-1].startswith("3 entries; 0 verdicts are not good")
    assert (repository / "thing" / "code.py").read_text() == CODE


@needs_fork
def test_what_is_not_noticed_or_not_for_its_reason_is_a_failure(repository):
    code, lines, text = run(
        repository,
        entry("nothing", "2 * x", "2 * x"),
        entry("not noticed", "x / 2", "x / 3"),
        entry("absent", "3 * x", "2 * x"),
        entry("doubled", "return", "yield"),
        entry("no python", "2 * x", "2 * * x"),
        entry("no import", "\ndef double", "import nothing_of_this_name\n\n\ndef double"),
        entry("wrong name", "2 * x", "2 * y"),
        entry("no such test", "2 * x", "3 * x", test="test_nothing"),
        entry("skipped", "2 * x", "3 * x", test="test_that_is_skipped"),
        entry("in a fixture", "2 * x", "3 * x", test="test_with_a_fixture"),
        entry("dies", "return 2 * x", "import os; os._exit(0)"),
    )
    test = "tests/test_code.py::test_double"
    assert code == 1
    assert lines.pop("nothing broken").startswith("ERROR")
    assert lines == {
        "nothing": f"GREEN: {test} does not notice",
        "not noticed": f"GREEN: {test} does not notice",
        "absent": "ERROR: the old text occurs 0 times in thing/code.py, not once",
        "doubled": "ERROR: the old text occurs 2 times in thing/code.py, not once",
        "no python": "ERROR: with the new text thing/code.py is no Python: invalid syntax",
        "no import": "ERROR: tests/test_code.py: cannot be collected",
        "wrong name": f"ERROR: {test} failed with NameError, not with AssertionError or Failed",
        "no such test": "ERROR: tests/test_code.py::test_nothing did not run",
        "skipped": "ERROR: tests/test_code.py::test_that_is_skipped did not run",
        "in a fixture": "ERROR: tests/test_code.py::test_with_a_fixture: setup failed",
        "dies": "ERROR: the child died without a word",
    }
    # At the end stands the output of what was not good.
    assert "    | E       NameError: name 'y' is not defined" in text.splitlines()


@needs_fork
def test_a_test_that_fails_anyway_proves_nothing(repository):
    code, lines, _ = run(repository, entry("any", "2 * x", "3 * x", test="test_that_fails_anyway"))
    assert code == 1
    assert lines["any"] == "red: a rule"
    assert lines["nothing broken"].startswith("RED: tests/test_code.py::test_that_fails_anyway")


@needs_fork
def test_a_package_from_elsewhere_is_found_out(repository, tmp_path_factory, monkeypatch):
    """The repository's own is not imported, as another one of its name comes first."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (repository / "thing").rename(elsewhere / "thing")
    (repository / "thing").mkdir()
    (repository / "thing" / "code.py").write_text(CODE)
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    code, lines, _ = run(repository, entry("elsewhere", "2 * x", "3 * x"))
    assert code == 1
    assert lines["elsewhere"] == "ERROR: nothing imported thing/code.py of this repository"


@needs_fork
def test_entries_are_listed_and_chosen_by_name(repository):
    entries = [entry("first", "2 * x", "3 * x"), entry("second", "x / 2", "x / 3", test="test_half")]
    code, lines, _ = run(repository, *entries, arguments=("--only", "sec", "--jobs", "1"))
    assert (code, sorted(lines)) == (0, ["nothing broken", "second"])
    code, lines, _ = run(repository, *entries, arguments=("--passed",))
    assert (code, sorted(lines)) == (0, ["first", "second"])
    code, lines, text = run(repository, *entries, arguments=("--list",))
    assert (code, lines, len(text.splitlines())) == (0, {}, 2)


@needs_fork
def test_a_child_that_hangs_is_killed(repository):
    code, lines, _ = run(
        # It does not keep busy a core that another worker is using.
        repository,
        entry("hangs", "return 2 * x", "import time; time.sleep(1000)"),
        arguments=("--limit", "5"),
    )
    assert (code, lines["hangs"]) == (1, "ERROR: no end after 5 s")


def test_names_are_given_once(repository):
    path = repository / "tests" / "breakages.toml"
    path.write_text(2 * entry("first", "2 * x", "3 * x"))
    with pytest.raises(SystemExit, match="two entries are called 'first'"):
        breakages.read_file(path)


ENTRIES = breakages.read_file(REPOSITORY / "tests" / "breakages.toml")[2]


@pytest.mark.parametrize("one", ENTRIES, ids=lambda one: one.name)
def test_every_entry_can_be_tried(one):
    assert one.broken(REPOSITORY)
    assert one.old != one.new
    file, function = one.test.split("::")
    assert f"\ndef {function.split('[')[0]}(" in (REPOSITORY / file).read_text(encoding="utf-8")
