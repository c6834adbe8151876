"""``main``: from arguments to an exit code. A command's module is loaded when it is called, or its help asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.resources import files
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from interp_tasks.cli.command import CONTEXT, PlainFlags, command_of
from interp_tasks.cli.commands import COMMANDS, FUNCTIONS
from interp_tasks.cli.failures import exit_code_of, quiet_libraries
from interp_tasks.cli.terminal import usable_streams, write_data, write_line
from interp_tasks.errors import UserError

HELP = "Train small transformers that learn abruptly, intervene on them, and measure what changes."
#: Panels of the help, in order.
PANELS = ("Train", "Look", "Intervene", "Of one task", "Papers")
#: Name -> panel, help, and the command that is meant where none is named.
GROUPS = {
    "tasks": ("Train", "Tasks before any training: a list, their data, what training takes.", "list"),
    "runs": (
        "Look",
        "Whole runs: their checkpoints, curves and drops, a page of each, searches, those that ship.",
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


@dataclass(frozen=True)
class Entry:
    """One line of a help page, and what makes its command.

    Attributes:
        help: the first paragraph of the command's help.
        panel: the heading that it stands under; empty within a group.
    """

    name: str
    help: str
    load: Callable[[], Any]
    panel: str = ""


class LazyGroup(PlainFlags, TyperGroup):
    """A group that makes a command when it is called, and lists all of them without."""

    entries: Mapping[str, Entry] = {}
    #: Those that were called; ``commands`` has the names of all, for one that is close to a wrong one.
    made: dict[str, Any]
    #: What was called ``KEY`` at this place, and is called otherwise now.
    moved: Mapping[str, str] = {}
    #: What is called ``KEY`` at other places.
    elsewhere: Mapping[str, Sequence[str]] = {}
    #: The command that is meant where none is named.
    default: str | None = None

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.entries)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.entries and cmd_name not in self.made:
            self.made[cmd_name] = self.entries[cmd_name].load()
        return self.made.get(cmd_name)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if self.default is not None and not {*args[:1]} & {*self.entries, "-h", "--help"}:
            # Options alone are the default command's; another word is a mistake, said below.
            if not args or args[0].startswith("-"):
                args = [self.default, *args]
        elif self.default is None and not args:
            args = ["--help"]
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in self.entries and name in self.moved:
            now = self.moved[name]
            is_option = now.rpartition(" ")[2].startswith("-")
            raise UserError(f"{name} is now {now}" + ("" if is_option else f"; see {now} --help"))
        if name not in self.entries and name in self.elsewhere:
            raise UserError(
                f"no command {name!r} of {ctx.command_path}; there is {' and '.join(self.elsewhere[name])}"
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Lists the commands without loading them, each panel under its heading."""
        for panel in dict.fromkeys(entry.panel for entry in self.entries.values()):
            with formatter.section(panel or "Commands"):
                formatter.write_dl([(e.name, e.help) for e in self.entries.values() if e.panel == panel])


def group_of(
    name: str, help: str, entries: Sequence[Entry], callback: Callable[..., None], default: str | None = None
) -> LazyGroup:
    """Returns a group of commands, with the options of ``callback``."""
    app = typer.Typer(
        name=name,
        help=help,
        cls=LazyGroup,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings=CONTEXT,
    )
    app.callback(help=help)(callback)
    group = typer.main.get_group(app)
    assert isinstance(group, LazyGroup)
    group.entries, group.made = {each.name: each for each in entries}, {}
    names: dict[str, Any] = dict.fromkeys(group.entries)
    group.commands = names
    group.default = default
    return group


@cache
def program() -> LazyGroup:
    """Returns ``interp-run`` with all its commands, none of them loaded."""
    placed: dict[str, list[Entry]] = {}
    paths: dict[str, list[str]] = {}
    for group, listed in COMMANDS.items():
        for name, help in listed.items():
            path = f"{group} {name}" if group in GROUPS else name
            placed.setdefault(group, []).append(Entry(name, help, partial(load, path)))
            paths.setdefault(name, []).append(f"interp-run {path}")
    moved = {"schema": "interp-run --schema"}
    for name, (panel, help, default) in GROUPS.items():
        entries = placed.pop(name)
        moved |= {entry.name: f"interp-run {name} {entry.name}" for entry in entries}
        made = group_of(name, help, entries, no_options, default)
        made.elsewhere = paths
        placed.setdefault(panel, []).append(Entry(name, help, partial(already_loaded, made)))
    panels = dict.fromkeys([*PANELS, *placed])
    first = [
        Entry(each.name, each.help, each.load, panel) for panel in panels for each in placed.get(panel, [])
    ]
    whole = group_of("interp-run", HELP, first, interp_run)
    whole.moved = moved
    return whole


def already_loaded(group: LazyGroup) -> LazyGroup:
    """Returns the group itself, which needs no loading."""
    return group


def load(path: str) -> TyperCommand:
    """Returns the command of an experiment, or of a function in ``interp_tasks/cli/commands``."""
    name = path.rpartition(" ")[2]
    if name not in FUNCTIONS:
        from interp_tasks.cli.options import experiment_command
        from interp_tasks.experiments import experiment_named

        return experiment_command(path, experiment_named(name))
    module, _, function = FUNCTIONS[name].partition(":")
    return command_of(path, getattr(import_module(f"interp_tasks.cli.commands.{module}"), function))


def every_command(group: LazyGroup, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields every command of a group and of the groups in it, with its words: ``("modular", "progress")``."""
    for name in group.entries:
        command = group.get_command(None, name)
        if isinstance(command, LazyGroup):
            yield from every_command(command, (*before, name))
        else:
            yield (*before, name), command


def no_options() -> None:
    """Does nothing: a group within ``interp-run`` has no options of its own."""


def say_version(is_wanted: bool) -> bool:
    """Prints the version, and stops."""
    if is_wanted:
        from interp_tasks.pages import versions

        write_line(f"interp-run {versions()['interp-tasks']}")
        raise typer.Exit
    return is_wanted


def print_schema(is_wanted: bool) -> bool:
    """Prints the schema, and stops."""
    if is_wanted:
        write_data(files("interp_tasks.cli").joinpath("output.schema.json").read_text("utf-8"))
        raise typer.Exit
    return is_wanted


def interp_run(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=say_version, help="Say which version this is."),
    ] = False,
    schema: Annotated[
        bool,
        typer.Option(
            "--schema", is_eager=True, callback=print_schema, help="Print the JSON schema of --format json."
        ),
    ] = False,
) -> None:
    """Holds the options of ``interp-run`` itself; the help is ``HELP``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    0; 2 for a mistake of the user's, or for results that could not be written; 130 when interrupted; 141 where
    whoever read stdout has gone, which is what a shell says of other programs then.
    """
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    debug = "--debug" in arguments
    with usable_streams(), quiet_libraries(debug):
        return exit_code_of(
            lambda: program().main(args=arguments, prog_name="interp-run", standalone_mode=False),
            debug=debug,
        )
