"""Commands by panel and group: listed by name and first line, each one's module loaded when it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from interp_tasks.errors import UserError

#: ``-h`` too.
CONTEXT = {"help_option_names": ["-h", "--help"]}


@dataclass(frozen=True)
class Entry:
    """One line of a help page, and what makes its command.

    Attributes:
        help: the first paragraph of the command's help.
        panel: the heading that it stands under; empty within a group.
        load: called with the name under which it was called.
    """

    name: str
    help: str
    load: Callable[[str], Any]
    panel: str = ""


class BareFlags:
    """Help pages that give flags no type: ``--plot`` takes no ``<bool>``."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of the command it is mixed into
        for each in params:
            if getattr(each, "is_flag", False) and each.metavar is None:
                each.metavar = ""
            # Typer imports pydantic for a value that is no bool, so for every ``--help`` that is not given. A flag
            # with an opposite (``--curve/--no-curve``) may mean something else where neither is given.
            if getattr(each, "is_flag", False) and each.default is None and not each.secondary_opts:
                each.default = False
        return params


class Listing(BareFlags, TyperGroup):
    """The help page of a group."""


class CommandGroup(BareFlags, TyperGroup):
    """A group that makes a command when it is called, and lists all of them without."""

    entries: Mapping[str, Entry] = {}
    #: Those that were called; ``commands`` holds stubs of all, for lists and for names that are close.
    made: dict[str, Any]
    #: What was called ``KEY`` at this place, and is called otherwise now.
    moved: Mapping[str, str] = {}
    #: What is called ``KEY`` at other places.
    elsewhere: Mapping[str, Sequence[str]]
    #: The command that is meant where none is named.
    default: str | None = None

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.entries)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.entries and cmd_name not in self.made:
            self.made[cmd_name] = self.entries[cmd_name].load(cmd_name)
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
            raise UserError(moved_to(name, self.moved[name]))
        if name not in self.entries and name in self.elsewhere:
            raise UserError(
                f"no command {name!r} of {ctx.command_path}; there is {' and '.join(self.elsewhere[name])}"
            )
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        listed = Listing(
            name=self.name,
            help=self.help,
            params=self.params,
            commands=dict(self.commands),
            rich_markup_mode=self.rich_markup_mode,
        )
        listed.format_help(ctx, formatter)


def moved_to(before: str, now: str) -> str:
    """Returns the message for a command that is now called by another name."""
    message = f"{before} is now {now}"
    return message if now.rpartition(" ")[2].startswith("-") else f"{message}; see {now} --help"


def stub(entry: Entry) -> TyperCommand:
    """Returns a command's line on a help page."""
    return TyperCommand(name=entry.name, help=entry.help, rich_help_panel=entry.panel or None)


def group_of(
    name: str,
    help: str,
    entries: Sequence[Entry],
    callback: Callable[..., None] | None = None,
    *,
    moved: Mapping[str, str] | None = None,
    default: str | None = None,
) -> CommandGroup:
    """Returns a group of commands, with the options of ``callback``."""
    app = typer.Typer(
        name=name,
        help=help,
        cls=CommandGroup,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings=CONTEXT,
    )

    def nothing() -> None:
        """Does nothing: a group has no options of its own."""

    app.callback(help=help)(callback or nothing)
    group = typer.main.get_group(app)
    assert isinstance(group, CommandGroup)
    group.entries, group.made = {each.name: each for each in entries}, {}
    group.commands = {each.name: stub(each) for each in entries}
    group.moved, group.elsewhere, group.default = moved or {}, {}, default
    return group


def first_paragraph(documented: Any) -> str:
    """Returns the first paragraph of a docstring, in one line."""
    return " ".join((inspect.getdoc(documented) or "").partition("\n\n")[0].split())


def every_command(group: CommandGroup, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command of a group and of the groups in it, with its words: ``("modular", "progress")``."""
    for name in group.entries:
        command = group.get_command(None, name)
        if isinstance(command, CommandGroup):
            yield from every_command(command, (*before, name))
        else:
            yield (*before, name), command
