"""A command is a dataclass: its fields are the options, its docstring the help, a base class shares both."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from interp_tasks.cli.failures import NOT_TEXT, not_text
from interp_tasks.cli.groups import CONTEXT, BareFlags
from interp_tasks.measurement.families import check_family


class Once(BareFlags, TyperCommand):
    """Refuses what would otherwise be ignored in silence: all but the last of several values, and empty ones."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the arguments once :meth:`check_given` has refused what would be ignored in silence."""
        given, extra, order = self.make_parser(ctx).parse_args(args=list(args))
        if not asks_for_help(order):
            self.check_given(ctx, given, order)
            self.check_extra(ctx, extra)
            self.check_required(ctx, order)
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def check_given(self, ctx: Any, given: Mapping[str, Any], order: Sequence[Any]) -> None:
        """Refuses empty values, values that are no text, and an option of one value that is given several times."""
        for parameter in dict.fromkeys(order):
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

    def check_required(self, ctx: Any, order: Sequence[Any]) -> None:
        """Refuses to run without an option that is required, with an example of it."""
        for parameter in self.params:
            if parameter.required and parameter not in order and parameter.param_type_name == "option":
                ctx.fail(f"{spelled(parameter)} is missing: give {example(parameter)}")

    def check_extra(self, ctx: Any, extra: Sequence[str]) -> None:
        """Refuse words that belong to no option, where they look like checkpoints."""
        taken = sum(parameter.param_type_name == "argument" for parameter in self.params)
        if len(extra) > taken and any("--ckpt" in parameter.opts for parameter in self.params):
            ctx.fail(
                f"{extra[taken]!r}: runs and checkpoints are named by --ckpt, each with one of its own, as in "
                f"--ckpt {extra[taken]} (quote a glob)"
            )


def asks_for_help(parameters: Sequence[Any]) -> bool:
    return any("--help" in parameter.opts for parameter in parameters)


def spelled(parameter: Any) -> str:
    """Returns an option with its other names, or the name of an argument."""
    if parameter.param_type_name != "option":
        return f"the argument {parameter.metavar or parameter.name}"
    first, *others = parameter.opts
    return f"{first} (also called {', '.join(others)})" if others else str(first)


@dataclass(kw_only=True)
class Command(ABC):
    """Defines the options and methods that every command has."""

    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and warnings.")] = False

    @property
    def tasks(self) -> Mapping[str, str]:
        """Returns the task's name of each REF or run that the command examines."""
        return {}

    @abstractmethod
    def check(self) -> None:
        """Refuse wrong options in one line, before anything slow is imported.

        Raises:
            UserError: in one line.
        """

    @abstractmethod
    def execute(self) -> None:
        """Do the work; results go to stdout, everything else to stderr."""


def make_command(path: str, command_class: type[Command], group: str = "") -> Any:
    """Makes the function behind ``interp-run PATH`` of a :class:`Command`: required options first, shared ones last.

    Args:
        group: of one task's experiments; checkpoints of another task are refused before they are loaded.
    """
    hints = get_type_hints(command_class, include_extras=True)
    depth = {name: rank for rank, base in enumerate(command_class.__mro__) for name in own_fields(base)}
    parameters: list[inspect.Parameter] = []
    for item in sorted(fields(command_class), key=lambda item: (is_given(item), depth[item.name])):
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
        check_family(group, path, command.tasks)
        command.execute()

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions may carry one
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    name = path.rpartition(" ")[2]
    app.command(name, cls=Once, help=help_text(command_class), context_settings=CONTEXT)(call)
    return typer.main.get_command(app)


def is_given(item: Field[Any]) -> bool:
    """Tells whether an option may be left out."""
    return item.default is not MISSING or item.default_factory is not MISSING


def example(parameter: Any) -> str:
    """Returns an example of how an option is written: ``--ckpt REF, such as RUN@last``."""
    given = {
        "REF": "zoo:matrix-completion-4x4@post or RUN@last",
        "RUN": "zoo:matrix-completion-4x4 or runs/mine",
    }
    value = given.get(parameter.metavar)
    return f"{parameter.opts[0]} {parameter.metavar}" + (
        f", such as {value}" if value else f": {parameter.help}"
    )


def own_fields(base: type) -> list[str]:
    """Returns the options a class declares itself."""
    return list(inspect.get_annotations(base))


def help_text(command_class: type) -> str:
    """Returns the docstring with its paragraphs unwrapped, for the terminal to wrap."""
    paragraphs = (inspect.getdoc(command_class) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
