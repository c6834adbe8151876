"""Runs the blocks of a page of README and docs, and compares what they print with what the page shows."""

from __future__ import annotations

import contextlib
import io
import random
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

REPOSITORY = Path(__file__).parents[1]
CIRCUITS = REPOSITORY / "docs" / "circuits"
EXAMPLE_MODEL = CIRCUITS / "example-model.md"
BLOCK = re.compile(r"^```(\w*)[ ]?([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Not what is a part of a word: "0.1.q", "mlp_out.1".
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\w)")


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """(language, rest of the first line, text) of every fenced block."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def files(page: Path) -> dict[str, str]:
    """The files that a page tells its reader to save."""
    titled = ((re.fullmatch(r'title="([^"]+)"', info), text) for _, info, text in blocks(page))
    return {match[1]: text for match, text in titled if match}


def disagreement(shown: str, printed: str) -> str | None:
    """What is wrong with a shown output, None where nothing is. Runs of blanks count as one."""
    left, right = (
        [" ".join(line.split()) for line in text.strip("\n").split("\n")] for text in (shown, printed)
    )
    if len(left) != len(right):
        return f"{len(left)} lines are shown, {len(right)} printed:\n{printed}"
    for one, other in zip(left, right, strict=True):
        same = NUMBER.sub("0", one) == NUMBER.sub("0", other)
        pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=False)
        if not same or not all(_agree(*pair) for pair in pairs):
            return f"shown is {one!r}, printed {other!r}; all that is printed:\n{printed}"
    return None


def _agree(shown: str, printed: str) -> bool:
    mantissa, _, exponent = shown.partition("e")
    digits = len(mantissa.partition(".")[2])
    if not digits and not exponent:
        return shown == printed
    unit = 10.0 ** (int(exponent or 0) - digits)
    # One decimal may be a head, "1.0", or a column of pandas that rounding has left no more digits.
    allowed = 0.4 * unit if digits == 1 and not exponent else 1.01 * unit
    return abs(float(shown) - float(printed)) <= allowed


def run_page(page: Path, folder: Path, strict: bool) -> None:
    """Run a page's blocks in `folder`, the current one; `strict`: output and what is shown of it go together."""
    names = {"__name__": page.stem}
    printed: str | None = None
    owed = False  # a strict page has still to show what was printed
    for language, info, text in blocks(page):
        if language == "text":
            if printed is not None:
                wrong = disagreement(text, printed)
                assert wrong is None, f"{page.name}: {wrong}"
            else:
                assert not strict, f"{page.name} shows what nothing printed: {text}"
            printed, owed = None, False
            continue
        assert not owed, f"{page.name} prints what it does not show: {printed}"
        printed = None
        if info.startswith("title="):
            (name,) = (name for name, held in files(page).items() if held == text)
            (folder / name).write_text(text, encoding="utf-8")
        elif language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(text, f"{page.name}", "exec"), names)
            printed = output.getvalue() or None
            owed = strict and printed is not None
        elif language == "bash":
            from interp_tasks.cli import main

            for line in text.replace("\\\n", " ").splitlines():
                command, *arguments = shlex.split(line, comments=True) or [""]
                assert command in ("", "interp-run"), (
                    f"{page.name} shows {command!r}: mark the block as console"
                )
                if command:
                    with contextlib.redirect_stdout(io.StringIO()) as output:
                        assert not main(arguments), f"{page.name}: {line}"
                    printed = (printed or "") + output.getvalue()
        else:
            assert language in ("console", "toml"), f"{page.name} has a block of {language!r}"
    assert not owed, f"{page.name} prints what it does not show: {printed}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, the current one; what is imported from it and what it does to global state is forgotten."""
    monkeypatch.chdir(tmp_path)
    # pytest-xdist tells its workers how wide the terminal is, which would break lines of tables.
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    known, seeds = set(sys.modules), (random.getstate(), np.random.get_state())
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(True):
        # No page may lean on the state that a fresh interpreter starts with.
        random.seed(598)
        np.random.seed(598)
        torch.manual_seed(598)
        yield tmp_path
    random.setstate(seeds[0])
    np.random.set_state(seeds[1])
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
