"""Builds both wheels and an sdist and checks what is in them: `python tests/wheels.py [FOLDER]`; prints their paths.

interp-tasks is the whole repository, interp-circuits the package `circuits` alone. Both bring the same `circuits`, so
either order of installing them leaves the same files; taking one away takes them from the other, which is why the
pages say: one of the two. interp-tasks is built from its sdist, which shows that the sdist lacks nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from zipfile import ZipFile

REPOSITORY = Path(__file__).resolve().parents[1]


def build(source: Path, into: Path) -> Path:
    """The wheel of a source tree."""
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", into, source)
    (wheel,) = into.iterdir()
    return wheel


def pip(python: str | Path, *arguments: str | Path) -> None:
    quiet = ("--quiet", "--disable-pip-version-check")
    subprocess.run(
        [str(python), "-m", "pip", *map(str, arguments[:1]), *quiet, *map(str, arguments[1:])], check=True
    )


def contents(wheel: Path) -> dict[str, bytes]:
    """Path -> bytes of what is installed, metadata left out."""
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        return {name: archive.read(name) for name in names}


def sources(folder: Path) -> dict[str, bytes]:
    """Path -> bytes of the modules and of the scripts that figures bring, in the repository."""
    files = [path for path in folder.rglob("*") if path.suffix in (".py", ".js") or path.name == "py.typed"]
    files = [path for path in files if "build" not in path.relative_to(folder).parts]
    return {path.relative_to(REPOSITORY).as_posix(): path.read_bytes() for path in files}


def check_contents(whole: Path, alone: Path) -> None:
    circuits = sources(REPOSITORY / "circuits")
    assert contents(alone) == circuits, "interp-circuits is the modules of circuits and py.typed"
    inside = contents(whole)
    assert {name: data for name, data in inside.items() if name.startswith("circuits/")} == circuits
    for package in ("tasks", "interp_tasks"):
        modules = sources(REPOSITORY / package)
        assert modules.items() <= inside.items(), f"interp-tasks lacks modules of {package}"
    zoo = REPOSITORY / "interp_tasks" / "zoo"
    shipped = [path for path in zoo.rglob("*") if path.suffix in (".safetensors", ".json", ".xz", ".toml")]
    assert {path.name for path in shipped} >= {"model.safetensors", "run.json", "metrics.jsonl.xz"}
    left_out = [path for path in shipped if path.relative_to(REPOSITORY).as_posix() not in inside]
    assert not left_out, f"{len(left_out)} files of shipped runs are left out, among them {left_out[0]}"
    assert {name.split("/")[0] for name in inside} == {"circuits", "tasks", "interp_tasks"}
    assert whole.stat().st_size < 100 * 2**20, "PyPI takes wheels of up to 100 MiB"


def build_sdist(into: Path, scratch: Path) -> Path:
    """The sdist of the whole repository, built in an environment that has setuptools and nothing else."""
    shutil.rmtree(scratch, ignore_errors=True)
    venv.create(scratch, with_pip=True)
    python = scratch / "bin" / "python"
    pip(python, "install", "setuptools>=77")
    into.mkdir()
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(into)!r})"
    subprocess.run([str(python), "-c", code], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    (sdist,) = into.iterdir()
    return sdist


def check_metadata(whole: Path, alone: Path) -> None:
    """What an index shows of both: licence, readme and types are there."""
    for wheel in (whole, alone):
        with ZipFile(wheel) as archive:
            (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
            told = archive.read(name).decode()
        for line in ("License-Expression: MIT", "Classifier: Typing :: Typed", "Requires-Python: >=3.10"):
            assert line in told, f"{wheel.name} does not say {line}"
        assert "Description-Content-Type: text/markdown" in told
        assert len(told.partition("\n\n")[2]) > 200


def main() -> None:
    into = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    if into.is_dir() and any(into.iterdir()):
        sys.exit(f"{into} is not empty: remove it, or name another folder")
    # What one build leaves behind must not get into the next.
    alone = build(REPOSITORY / "circuits", into / "alone")
    with tempfile.TemporaryDirectory() as scratch:
        sdist = build_sdist(into / "sdist", Path(scratch))
    whole = build(sdist, into / "whole")
    check_contents(whole, alone)
    check_metadata(whole, alone)
    print(alone, whole, sdist, sep="\n")


if __name__ == "__main__":
    main()
