"""Mutate source files with mutmut, and see which changes no test notices.

    pip install -e '.[mutants]'
    python tests/mutants.py circuits/statistics.py [MORE.py ...] --tests tests/circuits/test_statistics.py [...]
    python tests/mutants.py --tests tests/circuits          # the files that differ from main

mutmut works in a copy of the repository, whose folder is printed at the end; there `mutmut show NAME` prints a mutant
and `mutmut browse` leads through all of them. A survivor is a question, not a fault: is there a rule that no test
holds, or is the changed program the same (another text of an error, a default that nobody can tell apart)?
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ["circuits", "tasks", "interp_tasks"]
OTHERS = ["tests", "docs", "mkdocs.yml", "README.md", "pyproject.toml"]


def changed_files(base: str) -> list[str]:
    """Return the packages' Python files that differ from `base`."""
    command = ["git", "diff", "--name-only", "--diff-filter=d", base, "--", *PACKAGES]
    names = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split()
    return [name for name in names if name.endswith(".py")]


def settings(files: list[str], tests: list[str]) -> str:
    """Return mutmut's table of pyproject.toml."""
    values = {
        "source_paths": PACKAGES,
        "only_mutate": files,
        "pytest_add_cli_args_test_selection": tests,
        # The profile does not look for the smallest reason of a failure.
        "pytest_add_cli_args": ["-p", "no:cacheprovider", "--hypothesis-profile=breakages"],
        "also_copy": OTHERS,
    }
    return "\n[tool.mutmut]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Mutate source files, and see which changes no test notices."
    )
    parser.add_argument("files", nargs="*", help="Python files (default: those that differ from --base)")
    parser.add_argument("--tests", nargs="+", required=True, help="test files or folders that should notice")
    parser.add_argument("--base", default="main", help="what changed files differ from (default: main)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    given = parser.parse_args()
    files = given.files or changed_files(given.base)
    if not files:
        raise SystemExit(f"no Python file of {', '.join(PACKAGES)} differs from {given.base}")
    if missing := [name for name in (*files, *given.tests) if not (REPOSITORY / name).exists()]:
        raise SystemExit(f"no file {missing[0]} in {REPOSITORY}")
    copy = Path(tempfile.mkdtemp(prefix="mutants-"))
    for name in (*PACKAGES, *OTHERS):
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(REPOSITORY / name, copy / name)
    with (copy / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write(settings(files, given.tests))
    mutmut = Path(sys.executable).parent / "mutmut"
    if not mutmut.exists():
        raise SystemExit("there is no mutmut; pip install -e '.[mutants]'")
    # One thread each: children run beside each other, and a fork of a process with threads can hang.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)  # the copy's packages, not the repository's
    code = subprocess.run(
        [mutmut, "run", "--max-children", str(given.jobs)], cwd=copy, env=environment
    ).returncode
    subprocess.run([mutmut, "results"], cwd=copy, env=environment, check=False)
    print(f"in {copy}: mutmut show NAME")
    return code


if __name__ == "__main__":
    sys.exit(main())
