"""What tests/mutants.py tells mutmut, which is not installed with the tests."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).parents[1]

_spec = importlib.util.spec_from_file_location("mutants", REPOSITORY / "tests" / "mutants.py")
mutants = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mutants)


def test_the_table_goes_behind_that_of_the_project():
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    told = tomllib.loads(text + mutants.settings(["circuits/model/modes.py"], ["tests/circuits"]))["tool"][
        "mutmut"
    ]
    assert told["only_mutate"] == ["circuits/model/modes.py"]
    assert told["pytest_add_cli_args_test_selection"] == ["tests/circuits"]
    assert all((REPOSITORY / name).exists() for name in told["source_paths"] + told["also_copy"])


def test_changed_files_are_those_of_the_packages_that_are_still_there(tmp_path, monkeypatch):
    def git(*arguments: str) -> None:
        named = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *named, *arguments], cwd=tmp_path, check=True, capture_output=True)

    for name in (
        "circuits/same.py",
        "circuits/old.py",
        "circuits/gone.py",
        "tests/test_old.py",
        "tasks/notes.md",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1\n")
    git("init", "-b", "main")
    git("add", ".")
    git("commit", "-m", "first")
    for name in ("circuits/old.py", "tests/test_old.py", "tasks/notes.md"):
        (tmp_path / name).write_text("2\n")
    (tmp_path / "circuits/gone.py").unlink()
    monkeypatch.setattr(mutants, "REPOSITORY", tmp_path)
    (tmp_path / "interp_tasks").mkdir()
    assert mutants.changed_files("main") == ["circuits/old.py"]
