"""From arguments to a command or the help; a command's module is loaded when it is called, or its help asked for."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.resources import files
from textwrap import wrap

import typer
from typer.core import TyperCommand

from interp_tasks.cli.command_building import CONTEXT, check_repeated_or_empty_options, command_of_function
from interp_tasks.cli.commands import COMMANDS, FUNCTIONS
from interp_tasks.cli.streams_and_exit_codes import write_data
from interp_tasks.errors import UserError
from tasks.errors import did_you_mean

HELP = "Train small transformers that learn abruptly, intervene on them, and measure what changes."
#: Panels of the help, in order.
PANELS = ("Train", "Look", "Intervene", "Of one task", "Papers")
#: Name -> panel, help, and the command that is meant where none is named.
GROUPS = {
    "tasks": ("Train", "Tasks before any training: a list, their data, what training takes.", "list"),
    "runs": (
        "Look",
        "Whole runs: checkpoints, curves, drops, a page of each, searches, those that ship.",
        "",
    ),
    "matrix": (
        "Of one task",
        "Experiments on models of matrix completion; interp-run matrix lists them.",
        "",
    ),
    "modular": (
        "Of one task",
        "Experiments on models of modular arithmetic; interp-run modular lists them.",
        "",
    ),
}
#: Of ``interp-run`` itself (by no name) and of each group: heading of the help -> command or group -> its line there.
LISTED = {
    "": {
        panel: COMMANDS.get(panel, {}) | {name: line for name, (of, line, _) in GROUPS.items() if of == panel}
        for panel in PANELS
    },
    **{group: {"Commands": COMMANDS[group]} for group in GROUPS},
}
#: Command -> the group that it is in.
GROUP_OF = {name: group for group in GROUPS for name in COMMANDS[group]}
HELP_OPTION = {"-h, --help": "Show this message and exit."}
OPTIONS = {
    "--version": "Say which version this is.",
    "--schema": "Print the JSON schema of --format json.",
    **HELP_OPTION,
}


def run_command(arguments: Sequence[str]) -> None:
    """Runs the command that the arguments name, or prints what they ask of ``interp-run`` itself or of a group."""
    group = arguments[0] if arguments and arguments[0] in GROUPS else ""
    words, path = list(arguments[bool(group) :]), f"interp-run {group}".strip()
    lines = {name: line for names in LISTED[group].values() for name, line in names.items()}
    default = GROUPS[group][2] if group else ""
    if default and (not words or (words[0].startswith("-") and words[0] not in ("-h", "--help"))):
        # Options alone are the default command's; another word is a mistake, said below.
        words.insert(0, default)
    name, *rest = words or ["--help"]
    if name in ("-h", "--help"):
        write_data(group_help(group))
    elif name == "--version" and not group:
        from interp_tasks.pages import package_versions

        write_data(f"interp-run {package_versions()['interp-tasks']}\n")
    elif name == "--schema" and not group:
        write_data(files("interp_tasks.cli").joinpath("output.schema.json").read_text("utf-8"))
    elif name in lines:
        command = load_command(name, lines[name])
        context = typer.Context(command, info_name=f"{path} {name}", **CONTEXT)
        with context:
            check_repeated_or_empty_options(context, rest)
            command.parse_args(context, rest)
            command.invoke(context)
    elif name in GROUP_OF:
        now = f"interp-run {GROUP_OF[name]} {name}"
        raise UserError(f"{name} is now {now}; see {now} --help")
    elif name.startswith("-"):
        raise UserError(f"no such option: {name}; see {path} --help")
    else:
        close = did_you_mean(name, lines)
        raise UserError(f"no such command {name!r}: {close}{path} --help lists all {len(lines)} commands")


def group_help(group: str) -> str:
    """Returns the help of a group, or of ``interp-run`` itself, by panels; no command is loaded for it."""
    width = max(min(shutil.get_terminal_size().columns, 80) - 2, 50)
    about, options = (GROUPS[group][1], HELP_OPTION) if group else (HELP, OPTIONS)
    usage = " ".join(filter(None, ("interp-run", group, "[OPTIONS] COMMAND [ARGS]...")))
    lines = [f"Usage: {usage}", "", *(f"  {line}" for line in wrap(about, width - 2))]
    for heading, entries in {"Options": options, **LISTED[group]}.items():
        lines += ["", f"{heading}:"]
        column = max(map(len, entries)) + 4
        for name, line in entries.items():
            first, blank = f"  {name}".ljust(column), " " * column
            lines += wrap(line, width, initial_indent=first, subsequent_indent=blank)
    return "\n".join([*lines, ""])


@cache
def load_command(name: str, line: str) -> TyperCommand:
    """Returns the command of an experiment, or of a function in ``interp_tasks/cli/commands``, with its help's line."""
    if name not in FUNCTIONS:
        from interp_tasks.cli.options import experiment_command
        from interp_tasks.experiments import experiment_named

        return experiment_command(line, experiment_named(name))
    module, _, function = FUNCTIONS[name].partition(":")
    return command_of_function(
        name, line, getattr(import_module(f"interp_tasks.cli.commands.{module}"), function)
    )


def iterate_commands() -> Iterator[tuple[tuple[str, ...], TyperCommand]]:
    """Yields every command with its words: ``("modular", "progress")``."""
    for group, panels in LISTED.items():
        for names in panels.values():
            for name, line in names.items():
                if group or name not in GROUPS:
                    yield tuple(filter(None, (group, name))), load_command(name, line)
