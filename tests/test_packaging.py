"""`circuits` is packaged twice: with the whole repository, and alone."""

import circuits
from interp_tasks.file_io import tomllib
from tests.wheels import REPOSITORY

ALONE = tomllib.loads((REPOSITORY / "circuits" / "pyproject.toml").read_text(encoding="utf-8"))
WHOLE = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


def test_its_packages_are_its_folders():
    folders = {path.parent.relative_to(REPOSITORY) for path in (REPOSITORY / "circuits").rglob("__init__.py")}
    names = sorted(".".join(folder.parts) for folder in folders if "build" not in folder.parts)
    assert ALONE["tool"]["setuptools"]["packages"] == names


def test_it_asks_for_what_the_whole_asks_for_and_for_no_transformer_lens():
    assert set(ALONE["project"]["dependencies"]) < set(WHOLE["project"]["dependencies"])
    assert not any("transformer-lens" in name for name in ALONE["project"]["dependencies"])
    assert "transformers<5.24" in ALONE["project"]["dependencies"]


def test_both_have_one_version():
    source = (REPOSITORY / "circuits" / "__init__.py").read_text(encoding="utf-8")
    # A literal, which setuptools reads without importing torch.
    assert f'__version__ = "{circuits.__version__}"' in source
    for project in (ALONE, WHOLE):
        assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "circuits.__version__"}
        assert project["project"]["dynamic"] == ["version"]


def test_the_changelog_begins_with_this_version():
    lines = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    heading = next(line for line in lines if line.startswith("## ") and line != "## Unreleased")
    assert heading.split()[1] == circuits.__version__


def test_what_an_extra_brings_is_no_dependency():
    """And developers, whose tests need it, get it."""
    extras = WHOLE["project"]["optional-dependencies"]
    for extra in ("cluster", "devinterp", "pictures"):
        assert not set(extras[extra]) & set(WHOLE["project"]["dependencies"])
        assert set(extras[extra]) <= set(extras["dev"])
