"""Progress on stderr: one line that goes away, and only where someone is looking."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from interp_tasks.cli.streams import to_stderr
from interp_tasks.texts import printable


@contextlib.contextmanager
def progress_line(quiet: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """Yields a callback (done, total, text) that draws a bar, or ``None`` where nothing should be drawn."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    # Where room is short, the text gives way; without it the numbers would.
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    columns = (
        BarColumn(bar_width=20),
        TextColumn("{task.fields[count]}"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False, table_column=rest),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as bar:
        line = bar.add_task("starting", total=None, count="")

        def show(done: int, total: int, text: str) -> None:
            bar.update(
                line, completed=done, total=total, description=printable(text), count=f"{done:,}/{total:,}"
            )

        yield show


def note(text: str, quiet: bool) -> None:
    """Writes a line for the person at the keyboard to stderr; it is never part of the result."""
    if not quiet:
        to_stderr(text)
