"""Progress on stderr: one line that goes away, and only where someone is looking."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_line(quiet: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """A callback (done, total, text) that draws a bar, or ``None`` where nothing should be drawn."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(bar_width=20),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task("", total=0)

        def show(done: int, total: int, text: str) -> None:
            bar.update(line, completed=done, total=total, description=text)

        yield show


def note(text: str, quiet: bool) -> None:
    """A line for the person at the keyboard; never part of the result."""
    if not quiet:
        print(text, file=sys.stderr)
