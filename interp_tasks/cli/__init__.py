"""The command line: ``interp-run``. Nothing here imports torch until the arguments have been found good."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from interp_tasks.errors import UserError, check_system

#: 128 + SIGINT, as in ``boundary``.
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, see :func:`interp_tasks.cli.app.main`."""
    try:
        # Before modules are imported that other systems lack.
        check_system()
    except UserError as error:
        sys.stderr.write(f"interp-run: {error}\n")
        return 2
    try:
        from interp_tasks.cli.app import main as run

        return run(argv)
    except KeyboardInterrupt:
        # Before the command line is there to say it, or when it has gone.
        sys.stderr.write("interp-run: interrupted\n")
        return INTERRUPTED


__all__ = ["main"]
