"""A command is a dataclass: its fields are the options, its docstring the help, a base class shares both."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer


@dataclass(kw_only=True)
class Command(ABC):
    """What every command has."""

    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and warnings.")] = False

    @abstractmethod
    def check(self) -> None:
        """Refuse wrong options in one line, before anything slow is imported.

        Raises:
            UserError: in one line.
        """

    @abstractmethod
    def execute(self) -> None:
        """Do the work; results go to stdout, everything else to stderr."""


CommandClass = TypeVar("CommandClass", bound=type[Command])


def add_command(app: typer.Typer, name: str) -> Callable[[CommandClass], CommandClass]:
    """Class decorator: make a :class:`Command` available as ``interp-run NAME``."""

    def add(command_class: CommandClass) -> CommandClass:
        hints = get_type_hints(command_class, include_extras=True)
        # In the help, a command's own options come first, and those it shares with most others last.
        depth = {name: place for place, base in enumerate(command_class.__mro__) for name in own_fields(base)}
        parameters: list[inspect.Parameter] = []
        for item in sorted(fields(command_class), key=lambda item: depth[item.name]):
            default: Any = inspect.Parameter.empty
            if item.default is not MISSING:
                default = item.default
            elif item.default_factory is not MISSING:
                default = item.default_factory()
            parameters.append(
                inspect.Parameter(
                    item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[item.name]
                )
            )

        def call(**options: Any) -> None:
            command = command_class(**options)
            command.check()
            command.execute()

        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions may carry one
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(name, help=help_text(command_class))(call)
        return command_class

    return add


def own_fields(base: type) -> list[str]:
    """The options a class declares itself."""
    return list(inspect.get_annotations(base))


def help_text(command_class: type) -> str:
    """The docstring with its paragraphs unwrapped, for the terminal to wrap."""
    paragraphs = (inspect.getdoc(command_class) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
