"""``import x.y.z as m`` gives the module x.y.z, whatever else has been imported or asked for; folders are small."""

import importlib
import pkgutil
import re
import sys
from collections import Counter
from pathlib import Path

from interp_tasks.file_io import tomllib

PACKAGES = ("circuits", "tasks", "interp_tasks")


def modules_under(name):
    """The names of a package and of all modules in it, but for programs."""
    package = importlib.import_module(name)
    found = [each.name for each in pkgutil.walk_packages(package.__path__, f"{name}.")]
    return [name, *(each for each in found if not each.endswith(".__main__"))]


def shadowed(names):
    """Those of some modules that ``import ... as m`` does not give, when all of them are imported.

    ``as`` goes along attributes: a function that has the name of its file hides the file, and all that is in a folder.
    """
    imported = [importlib.import_module(name) for name in names]
    for module in imported:
        # Public names that are found when they are first asked for.
        for name in getattr(module, "__all__", ()):
            getattr(module, name)
    found = []
    for name in names:
        space = {}
        try:
            exec(f"import {name} as m", space)
        except ImportError:
            found.append(name)
        else:
            found += [name] if space["m"] is not sys.modules[name] else []
    return found


def test_no_public_name_hides_a_module():
    names = [name for package in PACKAGES for name in modules_under(package)]
    assert "interp_tasks.experiments.probe_and_lens" in names
    assert shadowed(names) == []


def test_the_page_for_developers_lists_the_floors_that_are_held():
    root = Path(__file__).resolve().parents[1]
    contracts = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    held = {each["containers"][0]: each["layers"] for each in contracts if each["type"] == "layers"}
    page = (root / "docs" / "development.md").read_text(encoding="utf-8")
    for package in PACKAGES:
        row = re.search(rf"^\| `{package}` \| (.*) \|$", page, re.MULTILINE)
        shown = [sorted(re.findall(r"`(\w+)`", floor)) for floor in row[1].split(" · ")]
        floors = [sorted(floor.split(" | ")) for floor in held[package] if floor != "__main__"]
        assert shown == floors


def test_what_docstrings_point_to_is_defined():
    root = Path(__file__).resolve().parents[1]
    texts = [file.read_text(encoding="utf-8") for name in PACKAGES for file in (root / name).rglob("*.py")]
    defined = {name for text in texts for name in re.findall(r"^ *(?:def|class) (\w+)", text, re.MULTILINE)}
    targets = [name for text in texts for name in re.findall(r":(?:func|class|meth):`~?([^`]+)`", text)]
    assert len(targets) > 50
    assert [name for name in targets if name.rpartition(".")[2] not in defined] == []


def test_a_folder_has_at_most_20_files_of_code():
    root = Path(__file__).resolve().parents[1]
    folders = [root / name for name in (*PACKAGES, "tests", "benchmarks", "docs")]
    counted = Counter(path.parent for folder in folders for path in folder.rglob("*.py"))
    # What an installation has left behind is not ours.
    ours = {path: count for path, count in counted.items() if "build" not in path.relative_to(root).parts}
    assert ours[root / "circuits"] > 10
    assert {path.relative_to(root).as_posix(): count for path, count in ours.items() if count > 20} == {}
