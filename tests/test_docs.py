"""Every python block and every `interp-run` line of README and docs runs, page by page, in an empty folder.

A block with ``title="NAME"`` in its first line is saved under that name before it runs; the files of
``docs/circuits/example-model.md`` are there for all pages of its folder and of ``docs/api``. A ``text`` block after a
python or bash block is what that prints: words and whole numbers must agree, and decimals to one unit of the last digit
shown. Under ``docs/circuits``, ``docs/tutorials`` and ``docs/api`` all that python prints must be shown, and all that
is shown must have been printed. ``console`` and ``toml`` blocks are for reading: installation, and what takes hours.
"""

import contextlib
import io
import os
import re
from itertools import takewhile
from types import FunctionType, ModuleType

import pytest

import circuits
import interp_tasks
import tasks
from circuits.model.sites import KINDS
from circuits.model.supported_models import FAMILIES, PROVED_VERSIONS
from interp_tasks.cli import main
from tests.pages import BLOCK, CIRCUITS, EXAMPLE_MODEL, REPOSITORY, blocks, files, folder, run_page

__all__ = ["folder"]

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
API = REPOSITORY / "docs" / "api"
#: A page on a model that is not shipped; see docs/development.md.
LANGUAGE_MODEL = "language-model.md"
STRICT = (CIRCUITS, REPOSITORY / "docs" / "tutorials", API)


@pytest.mark.filterwarnings("ignore:.*HookedTransformer.*:DeprecationWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_page_runs(page, folder):
    if page.name == LANGUAGE_MODEL:
        if "STORIES260K" not in os.environ:
            pytest.skip("STORIES260K names no folder with the model of this page")
        (folder / "stories260K").symlink_to(os.environ["STORIES260K"])
    if page.parent in (CIRCUITS, API):
        for name, text in files(EXAMPLE_MODEL).items():
            (folder / name).write_text(text, encoding="utf-8")
    run_page(page, folder, strict=page.parent in STRICT)


def anchors(page):
    """What may follow the page's name after "#": its headings, as mkdocs writes them."""
    headings = re.findall(r"^#{1,6} (.+)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    ascii_only = (heading.encode("ascii", "ignore").decode() for heading in headings)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", one).strip().lower()) for one in ascii_only}


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", prose):
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name} links to {target}"
            # The names that API pages list are anchors of the built site alone, whose build checks them.
            if anchor and linked.parent.name != "api":
                assert anchor in anchors(linked), f"{page.name} links to {target}#{anchor}"


def test_every_command_that_a_sentence_names_exists():
    named = set()
    for page in PAGES:
        for code in re.findall(r"`interp-run ([^`]+)`", BLOCK.sub("", page.read_text(encoding="utf-8"))):
            named.add(tuple(takewhile(re.compile(r"[a-z][a-z-]*").fullmatch, code.split())))
    assert len(named) > 20
    with contextlib.redirect_stdout(io.StringIO()):
        wrong = [words for words in sorted(named) if main([*words, "--help"])]
    assert wrong == []


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md", (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")))
    docs = REPOSITORY / "docs"
    assert listed == {str(page.relative_to(docs)) for page in docs.rglob("*.md")}


def test_the_api_pages_list_every_public_name():
    text = "".join(page.read_text(encoding="utf-8") for page in API.glob("*.md"))
    listed = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    public = {
        f"{package.__name__}.{name}"
        for package in (circuits, tasks, interp_tasks)
        for name in package.__all__
    }
    assert listed == public


def test_every_public_function_has_an_example():
    code = "".join(text for page in API.glob("*.md") for _, _, text in blocks(page))
    shown = set(re.findall(r"\w+(?:\.\w+)*", code))
    public = {
        name: getattr(package, name) for package in (circuits, interp_tasks) for name in package.__all__
    }
    public |= {f"tasks.{name}": getattr(tasks, name) for name in tasks.__all__}
    modules = {name: module for name, module in public.items() if isinstance(module, ModuleType)}
    names = {name for name, value in public.items() if isinstance(value, FunctionType)}
    for name, module in modules.items():
        names |= {f"{name}.{one}" for one in module.__all__ if isinstance(getattr(module, one), FunctionType)}
    assert len(names) > 90
    assert names - shown == set()


def test_the_site_has_a_row_for_every_family_of_models():
    page = (CIRCUITS / "index.md").read_text(encoding="utf-8")
    table = page.split("| family |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert len(rows) == len(FAMILIES)
    for family, (name, wrapped, lacking, paths) in zip(FAMILIES, rows, strict=True):
        assert (name, wrapped) == (family.name, f"`{family.wrapped}`")
        assert {*re.findall(r"`(\w+)`", lacking)} == {*KINDS} - family.sites
        assert (lacking == "none") == (family.sites == {*KINDS})
        assert paths == ("yes" if family.paths else "no")
    assert all(f"{package} {', '.join(releases)}" in page for package, releases in PROVED_VERSIONS.items())


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("print(1 / 3)", "0.335"),
        ("print(3)", "4"),
        ("print(-0.5)", "0.5"),
        ("print('L0H1 0.25')", "L0H2 0.25"),
        ("print('mlp_out.1')", "mlp_out.0"),
        ("print(1)\nprint(2)", "1"),
        ("print(1)", None),
        ("x = 1", "1"),
        ("assert False", None),
        ("import warnings\nwarnings.warn('old', FutureWarning)", None),
    ],
)
def test_a_page_that_is_wrong_fails(folder, code, shown):
    page = folder / "page.md"
    page.write_text(f"```python\n{code}\n```\n" + (f"```text\n{shown}\n```\n" if shown else ""))
    with pytest.raises((AssertionError, FutureWarning)):
        run_page(page, folder, strict=True)


def test_a_page_that_is_right_passes(folder):
    page = folder / "page.md"
    page.write_text(
        '```python title="held.py"\nx = [1 / 3, -2e-7]\n```\n'
        "```python\nimport held\n\nprint('L0H1', held.x[0], held.x[1])\nprint(7, 'of  8')\n```\n"
        "```text\nL0H1   0.334 -2.1e-07\n7 of 8\n```\n```python\ny = 1\n```\n"
    )
    run_page(page, folder, strict=True)


def test_the_gallery_shows_every_picture_and_is_small():
    pictures = {path.name: path.stat().st_size for path in (REPOSITORY / "docs/images/gallery").glob("*")}
    shown = re.findall(
        r"images/gallery/([\w.-]+)", (REPOSITORY / "docs/gallery.md").read_text(encoding="utf-8")
    )
    assert sorted(shown) == sorted(pictures)
    assert sum(pictures.values()) < 1_500_000
