"""``main``: from arguments to an exit code."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from interp_tasks.cli import commands
from interp_tasks.cli.failures import exit_code_of, quiet_libraries
from interp_tasks.cli.groups import CommandGroup, Entry, first_paragraph, group_of
from interp_tasks.cli.streams import usable_streams, write_data, write_line

if TYPE_CHECKING:
    from interp_tasks.cli.base import Command
    from interp_tasks.measurement.experiment import Experiment

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


@cache
def program() -> CommandGroup:
    """Returns ``interp-run`` with all its commands, none of them loaded."""
    placed: dict[str, list[Entry]] = {}
    for group, listed in commands.COMMANDS.items():
        placed[group] = [Entry(name, help, partial(load_command, group)) for name, help in listed.items()]
    for place, experiments in listed_experiments().items():
        placed.setdefault(place, []).extend(
            Entry(name, help, load_experiment) for name, help in experiments.items()
        )
    moved = {"schema": "interp-run --schema"}
    paths: dict[str, list[str]] = {}
    for group, listed_commands in placed.items():
        for entry in listed_commands:
            paths.setdefault(entry.name, []).append(f"interp-run {path_of(group, entry.name)}")
    for name, (panel, help, default) in GROUPS.items():
        default_commands = placed.pop(name)
        moved |= {entry.name: f"interp-run {name} {entry.name}" for entry in default_commands}
        command_group = group_of(name, help, default_commands, default=default)
        command_group.elsewhere = paths
        placed.setdefault(panel, []).append(Entry(name, help, partial(already, command_group)))
    panels = dict.fromkeys([*PANELS, *placed])
    entries = [
        Entry(entry.name, entry.help, entry.load, panel)
        for panel in panels
        for entry in placed.get(panel, [])
    ]
    return group_of("interp-run", HELP, entries, interp_run, moved=moved)


def already(group: CommandGroup, name: str) -> CommandGroup:
    """Returns the group itself, which needs no loading."""
    return group


def listed_experiments() -> Mapping[str, Mapping[str, str]]:
    """Returns place -> name -> help of all experiments; it imports them only where one is not listed yet."""
    places = Path(__file__).parents[1].joinpath("experiments").glob("_[!_]*")
    there = {each.stem.removeprefix("_").replace("_", "-") for each in places}
    if there <= {name for names in commands.EXPERIMENTS.values() for name in names}:
        return commands.EXPERIMENTS
    found: dict[str, dict[str, str]] = {}
    for each in imported_experiments().values():
        found.setdefault(each.place, {})[each.name] = first_paragraph(each.function)
    return found


def imported_experiments() -> Mapping[str, Experiment]:
    """Imports the experiments, and returns them by name."""
    import_module("interp_tasks.experiments")
    from interp_tasks.measurement.experiment import EXPERIMENTS

    return EXPERIMENTS


def load_command(group: str, name: str) -> object:
    """Returns the command in ``interp_tasks/cli/commands/NAME.py``."""
    from interp_tasks.cli.base import make_command

    return make_command(path_of(group, name), of_module(import_module(f"interp_tasks.cli.commands.{name}")))


def load_experiment(name: str) -> object:
    """Returns an experiment's command, made from its signature or defined in ``cli/commands``."""
    from interp_tasks.cli.base import make_command
    from interp_tasks.cli.from_function import command_of

    experiment = imported_experiments()[name]
    command_class = own_command(experiment)
    command = command_of(experiment) if command_class is None else of_module(command_class)
    return make_command(path_of(experiment.place, name), command, experiment.place)


def own_command(experiment: Experiment) -> ModuleType | None:
    """Returns the module that writes an experiment's command out, where there is one."""
    module = f"interp_tasks.cli.commands.{experiment.function.__name__}"
    return import_module(module) if find_spec(module) is not None else None


def of_module(module: ModuleType) -> type[Command]:
    """Returns the one command that a module defines."""
    from interp_tasks.cli.base import Command

    (command_class,) = (
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Command) and each.__module__ == module.__name__
    )
    return command_class


def path_of(group: str, name: str) -> str:
    return f"{group} {name}" if group in GROUPS else name


def say_version(is_wanted: bool) -> bool:
    """Print the version, and stop."""
    if is_wanted:
        from interp_tasks.pages import versions

        write_line(f"interp-run {versions()['interp-tasks']}")
        raise typer.Exit
    return is_wanted


def print_schema(is_wanted: bool) -> bool:
    """Print the schema, and stop."""
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
    """Run one command and return its exit code.

    0; 2 for a mistake of the user's, or for results that could not be written; 130 when interrupted; 141 where
    whoever read stdout has gone, which is what a shell says of other programs then.
    """
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    debug = "--debug" in arguments
    with usable_streams(), quiet_libraries(debug):
        return exit_code_of(
            lambda: program().main(args=arguments, prog_name="interp-run", standalone_mode=False),
            debug=debug,
            written=arguments,
        )
