"""A command is a dataclass: its fields are the options, its docstring the help, a base class shares both."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from interp_tasks.cli.failures import NOT_TEXT, not_text
from interp_tasks.errors import UserError
from interp_tasks.training.launch import launched


class Once(TyperCommand):
    """Refuses what would otherwise be ignored in silence: all but the last of several values, and empty ones."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, _, order = self.make_parser(ctx).parse_args(args=list(args))
        seen: list[Any] = [] if asks_for_help(order) else list(dict.fromkeys(order))
        for parameter in seen:
            values = given.get(parameter.name)
            for value in values if isinstance(values, (list, tuple)) else [values]:
                if isinstance(value, str) and not value.strip():
                    ctx.fail(f"{spelled(parameter)} was given an empty value")
                if isinstance(value, str) and not_text(value):
                    ctx.fail(f"{spelled(parameter)} {value!r}: {NOT_TEXT}")
            if parameter.param_type_name != "option" or parameter.multiple or parameter.is_flag:
                continue
            if order.count(parameter) > 1:
                ctx.fail(
                    f"{spelled(parameter)} was given {order.count(parameter)} times, but takes one value"
                )
        rest: list[str] = super().parse_args(ctx, args)
        return rest


def asks_for_help(parameters: Sequence[Any]) -> bool:
    return any("--help" in parameter.opts for parameter in parameters)


def spelled(parameter: Any) -> str:
    """``--queries`` with what else it is called, or the name of an argument."""
    if parameter.param_type_name != "option":
        return f"the argument {parameter.metavar or parameter.name}"
    first, *others = parameter.opts
    return f"{first} (also called {', '.join(others)})" if others else str(first)


@dataclass(kw_only=True)
class Command(ABC):
    """What every command has."""

    #: Whether torchrun may start several processes of it.
    takes_processes: ClassVar[bool] = False

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
            if not command.takes_processes and launched().count > 1:
                raise UserError(f"interp-run {name} is of one process: only train is started by torchrun")
            command.check()
            command.execute()

        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions may carry one
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(name, cls=Once, help=help_text(command_class))(call)
        return command_class

    return add


def own_fields(base: type) -> list[str]:
    """The options a class declares itself."""
    return list(inspect.get_annotations(base))


def help_text(command_class: type) -> str:
    """The docstring with its paragraphs unwrapped, for the terminal to wrap."""
    paragraphs = (inspect.getdoc(command_class) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
