"""``main``: from arguments to an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from interp_tasks.cli.base import add_command
from interp_tasks.cli.commands import COMMANDS
from interp_tasks.cli.failures import exit_code_of, quiet_libraries
from interp_tasks.cli.streams import usable_streams

app = typer.Typer(
    name="interp-run",
    help="Train small transformers that learn abruptly, intervene on them, and measure what changes.",
    add_completion=False,
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def interp_run() -> None:
    """Train small transformers that learn abruptly, intervene on them, and measure what changes."""


for name, command in COMMANDS.items():
    add_command(app, name)(command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0; 2 for a mistake of the user's, or for results that could not be written; 130 when interrupted; 141 where
    whoever read stdout has gone, which is what a shell says of other programs then.
    """
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    debug = "--debug" in arguments
    with usable_streams(), quiet_libraries(debug):
        return exit_code_of(
            lambda: typer.main.get_command(app).main(
                args=arguments, prog_name="interp-run", standalone_mode=False
            ),
            debug=debug,
            written=arguments,
        )
