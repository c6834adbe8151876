"""``main``: from arguments to an exit code. A command's module is loaded when it is called, or its help asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from interp_tasks.cli.command import CONTEXT, PlainFlags, command_of
from interp_tasks.cli.commands import COMMANDS, FUNCTIONS
from interp_tasks.cli.terminal import exit_code_of, open_streams, quiet_libraries, write_data, write_line
from interp_tasks.errors import UserError

HELP = "Train small transformers that learn abruptly, intervene on them, and measure what changes."
#: Panels of the help, in order.
PANELS = ("Train", "Look", "Intervene", "Of one task", "Papers")
#: Name -> panel, help, and the command that is meant where none is named.
GROUPS = {
    "tasks": ("Train", "Tasks before any training: a list, their data, what training takes.", "list"),
    "runs": (
        "Look",
        "Whole runs: checkpoints, curves, drops, a page of each, searches, those that ship.",
        None,
    ),
    "matrix": (
        "Of one task",
        "Experiments on models of matrix completion; interp-run matrix lists them.",
        None,
    ),
    "modular": (
        "Of one task",
        "Experiments on models of modular arithmetic; interp-run modular lists them.",
        None,
    ),
}
#: Command -> the group that it is in.
GROUP_OF = {name: group for group in GROUPS for name in COMMANDS[group]}


class LazyGroup(PlainFlags, TyperGroup):
    """A group that makes a command when it is called, and lists all of them without."""

    #: Heading -> name -> the first line of the help.
    panels: Mapping[str, Mapping[str, str]] = {}
    #: What names this group: empty for ``interp-run`` itself.
    word: str = ""
    #: The command that is meant where none is named.
    default: str | None = None

    @property
    def lines(self) -> dict[str, str]:
        """Returns the first line of the help of each command."""
        return {name: line for listed in self.panels.values() for name, line in listed.items()}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.lines)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.lines:
            return None
        is_group = not self.word and cmd_name in GROUPS
        return program(cmd_name) if is_group else load(cmd_name, self.lines[cmd_name])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (self.default and args[0].startswith("-") and args[0] not in ("-h", "--help")):
            # Options alone are the default command's; another word is a mistake, said below.
            args = [self.default or "--help", *args]
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in self.lines and name == "schema":
            raise UserError("schema is now interp-run --schema")
        if name not in self.lines and (group := GROUP_OF.get(name)):
            now = f"interp-run {group} {name}"
            raise UserError(f"{name} is now {now}; see {now} --help")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Lists the commands without loading them, each panel under its heading."""
        for panel, listed in self.panels.items():
            with formatter.section(panel):
                formatter.write_dl(list(listed.items()))


@cache
def program(word: str = "") -> LazyGroup:
    """Returns ``interp-run``, or a group within, with all its commands, none of them loaded."""
    _, help, default = GROUPS.get(word, ("", HELP, None))
    app = typer.Typer(
        name=word or "interp-run",
        cls=LazyGroup,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings=CONTEXT,
    )
    # A group within has no options of its own.
    app.callback(help=help)((lambda: None) if word else interp_run)
    made = typer.main.get_group(app)
    assert isinstance(made, LazyGroup)
    made.word, made.default = word, default
    groups = {
        panel: {name: help for name, (of, help, _) in GROUPS.items() if of == panel} for panel in PANELS
    }
    listed = {panel: {**COMMANDS.get(panel, {}), **groups[panel]} for panel in PANELS}
    made.panels = {"Commands": COMMANDS[word]} if word else listed
    # The names of all, for one that is close to a wrong one.
    names: dict[str, Any] = dict.fromkeys(made.lines)
    made.commands = names
    return made


@cache
def load(name: str, line: str) -> TyperCommand:
    """Returns the command of an experiment, or of a function in ``interp_tasks/cli/commands``, with its help's line."""
    if name not in FUNCTIONS:
        from interp_tasks.cli.options import experiment_command
        from interp_tasks.experiments import experiment_named

        return experiment_command(line, experiment_named(name))
    module, _, function = FUNCTIONS[name].partition(":")
    return command_of(name, line, getattr(import_module(f"interp_tasks.cli.commands.{module}"), function))


def iterate_commands(group: LazyGroup, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields every command of a group and of the groups in it, with its words: ``("modular", "progress")``."""
    for name in group.lines:
        command = group.get_command(None, name)
        if isinstance(command, LazyGroup):
            yield from iterate_commands(command, (*before, name))
        else:
            yield (*before, name), command


def say_version(is_wanted: bool) -> None:
    if is_wanted:
        from interp_tasks.pages import versions

        write_line(f"interp-run {versions()['interp-tasks']}")
        raise typer.Exit


def print_schema(is_wanted: bool) -> None:
    if is_wanted:
        write_data(files("interp_tasks.cli").joinpath("output.schema.json").read_text("utf-8"))
        raise typer.Exit


VERSION = typer.Option("--version", is_eager=True, callback=say_version, help="Say which version this is.")
SCHEMA = typer.Option(
    "--schema", is_eager=True, callback=print_schema, help="Print the JSON schema of --format json."
)


def interp_run(version: Annotated[bool, VERSION] = False, schema: Annotated[bool, SCHEMA] = False) -> None:
    """Holds the options of ``interp-run`` itself; the help is ``HELP``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    0; 2 for a mistake of the user's, or for results that could not be written; 130 when interrupted; 141 where
    whoever read stdout has gone, which is what a shell says of other programs then.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    open_streams()
    with quiet_libraries(debug):
        return exit_code_of(
            lambda: program().main(args=arguments, prog_name="interp-run", standalone_mode=False),
            debug=debug,
        )
