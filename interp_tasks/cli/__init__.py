"""The command line: ``interp-run``. Nothing here imports torch until the arguments have been found good."""

from __future__ import annotations

import sys
from collections.abc import Sequence

#: 128 + SIGINT, as in ``boundary``.
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, see :func:`interp_tasks.cli.app.main`."""
    try:
        from interp_tasks.cli.app import main as run

        return run(argv)
    except KeyboardInterrupt:
        # Before the command line is there to say it, or when it has gone.
        sys.stderr.write("interp-run: interrupted\n")
        return INTERRUPTED


__all__ = ["main"]
