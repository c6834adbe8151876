"""The command line: ``interp-run``. Nothing here imports torch until the arguments have been found good."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from interp_tasks.errors import UserError, check_not_windows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    0; 2 for a mistake of the user's, or for results that could not be written; 130 when interrupted; 141 where
    whoever read stdout has gone, which is what a shell says of other programs then.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        # Before modules are imported that other systems lack.
        check_not_windows()
        from interp_tasks.cli.command_dispatch import run_command
        from interp_tasks.cli.streams_and_exit_codes import repair_streams, run_for_exit_code

        repair_streams()
        return run_for_exit_code(lambda: run_command(arguments), debug="--debug" in arguments)
    except UserError as error:
        sys.stderr.write(f"interp-run: {error}\n")
        return 2
    except KeyboardInterrupt:
        # Before the command line is there to say it, or when it has gone.
        sys.stderr.write("interp-run: interrupted\n")
        return 130


__all__ = ["main"]
