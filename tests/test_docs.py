"""Every python block and every `interp-run` line of README and docs runs, page by page, in an empty folder.

A block with ``file=NAME`` in its first line is saved under that name before it runs. ``console`` and ``toml`` blocks
are for reading: installation, and what takes hours.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from interp_tasks.cli import main

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)[ ]?([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """(language, rest of the first line, text) of every fenced block."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.mark.filterwarnings("ignore:.*HookedTransformer.*:DeprecationWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem}
    for language, info, text in blocks(page):
        if info.startswith("file="):
            (tmp_path / info.removeprefix("file=")).write_text(text, encoding="utf-8")
        elif language == "python":
            exec(compile(text, f"{page.name}", "exec"), names)
        elif language == "bash":
            for line in text.replace("\\\n", " ").splitlines():
                command, *arguments = shlex.split(line, comments=True) or [""]
                assert command in ("", "interp-run"), (
                    f"{page.name} shows {command!r}: mark the block as console"
                )
                if command:
                    status = main(arguments)
                    assert not status, f"{line}: {capsys.readouterr().err}"
        else:
            assert language in ("console", "toml", "text"), f"{page.name} has a block of {language!r}"


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_block_finder_finds_blocks():
    assert [block[0] for block in blocks(REPOSITORY / "docs" / "your-own-task.md")] == [
        "python",
        "bash",
        "toml",
    ]
