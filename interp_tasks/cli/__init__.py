"""The command line: ``interp-run``. Nothing here imports torch until the arguments have been found good."""

from interp_tasks.cli.app import main

__all__ = ["main"]
