"""Makes a command of a function: its parameters are the options, its docstring the help.

A parameter is annotated as Typer has it, ``Annotated[TYPE, typer.Option("--site", help=...)]``. One whose annotation is
a dataclass stands for the options that are the fields of it, and is given such a value: options that commands share.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import GenericAlias, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

#: ``-h`` too.
CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"]}


def check_repeated_or_empty_options(context: typer.Context, words: Sequence[str]) -> None:
    """Refuses what would be ignored in silence: several values for one option, and empty ones."""
    command: Any = context.command
    given, _, order = command.make_parser(context).parse_args(args=list(words))
    for parameter in dict.fromkeys(order):
        name, values = " or ".join(parameter.opts), given.get(parameter.name)
        for value in values if isinstance(values, (list, tuple)) else [values]:
            if isinstance(value, str) and not value.strip():
                context.fail(f"{name} was given an empty value")
        is_flag = getattr(parameter, "is_flag", True)
        if not is_flag and not getattr(parameter, "multiple", False) and order.count(parameter) > 1:
            context.fail(f"{name} was given {order.count(parameter)} times, but takes one value")


#: Parameters of experiments that are no option: what they examine, and where they say how far they are.
EXAMINED = ("refs", "runs", "progress")
#: Names in their annotations that only a type checker knows.
TYPES_ALONE = {"Unpack": type}
#: Of the options that a function takes as keyword arguments, those that are not ``None`` where they are not given.
DEFAULTS: dict[str, Any] = {"seed": 0, "device": "cpu", "task_config": []}


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """The options of every command."""

    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and warnings.")] = False


def command_of_function(name: str, line: str, function: Callable[..., None]) -> TyperCommand:
    """Makes the command of a function; see :func:`make_command`."""
    parameters = list(inspect.signature(function, eval_str=True, locals=TYPES_ALONE).parameters.values())
    groups: dict[str, Any] = {
        each.name: each.annotation for each in parameters if is_dataclass(each.annotation)
    }
    options = [each for each in parameters if each.name not in groups and each.kind is not each.VAR_KEYWORD]
    for kind in groups.values():
        options += parameters_of_dataclass(kind)
    options += select_option_parameters(each for each in parameters if each.kind is each.VAR_KEYWORD)

    def call(**given: Any) -> None:
        for group, kind in groups.items():
            given[group] = kind(**{each.name: given.pop(each.name) for each in fields(kind)})
        function(**given)

    return make_command(name, line, function, options, call)


def make_command(
    name: str,
    line: str,
    described: Callable[..., Any],
    options: Sequence[inspect.Parameter],
    call: Callable[..., None],
) -> TyperCommand:
    """Makes a command that calls a function with its options by name, required ones first.

    Its help is a line, and what the docstring of the function ``described`` says after its first paragraph.
    """
    options = sorted(options, key=lambda each: each.default is not each.empty)
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # functions may carry one
        [each.replace(kind=each.KEYWORD_ONLY) for each in options]
    )
    call.__annotations__ = {each.name: each.annotation for each in options}
    more = (inspect.getdoc(described) or "").split("\n\n")[1:2]
    shown = [line, *(each for each in more if not each.startswith(("Args:", "Returns:")))]
    help = "\n\n".join(" ".join(each.split()) for each in shown).replace("``", "")
    # Rich takes longer to import than a page of help may take.
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(name, help=help, context_settings=CONTEXT)(call)
    made = typer.main.get_command(app)
    assert isinstance(made, TyperCommand)
    for each in made.get_params(typer.Context(made, **CONTEXT)):
        # Typer imports pydantic to find the value of a flag that is not given. One with an opposite
        # (``--curve/--no-curve``) may mean something else where neither is given.
        if getattr(each, "is_flag", False) and each.default is None and not each.secondary_opts:
            each.default = False
    return made


def parameters_of_dataclass(kind: type) -> list[inspect.Parameter]:
    """Returns the fields of a dataclass as parameters, those that it inherits after its own."""
    hints = get_type_hints(kind, include_extras=True)
    bases = [[*inspect.get_annotations(base)] for base in kind.__mro__]
    options = []
    for item in fields(kind):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        default = inspect.Parameter.empty if default is MISSING else default
        options.append(make_parameter(item.name, hints[item.name], default))
    return sorted(options, key=lambda each: next(rank for rank, own in enumerate(bases) if each.name in own))


def make_parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def select_option_parameters(parameters: Iterable[inspect.Parameter]) -> list[inspect.Parameter]:
    """Returns the options among a function's parameters, those of ``**options: Unpack[TYPED_DICT]`` with them.

    An annotation is ``Annotated[TYPE, typer.Option(...), CLI_TYPE]``; the last, which may be left out, is what the
    command line has where that is not ``TYPE`` (Typer takes no ``str | Sequence[str]``). A parameter without
    ``typer.Option`` in its annotation is for Python alone.
    """
    options = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            hints = get_type_hints(get_args(parameter.annotation)[0], include_extras=True)
            options += select_option_parameters(
                make_parameter(name, hint, DEFAULTS.get(name)) for name, hint in hints.items()
            )
        if parameter.name in EXAMINED or get_origin(parameter.annotation) is not Annotated:
            continue
        type_, *marks = get_args(parameter.annotation)
        shown = next(mark for mark in marks if isinstance(mark, OptionInfo))
        type_ = next((mark for mark in marks if isinstance(mark, (type, GenericAlias, UnionType))), type_)
        default = parameter.default
        # As the command line would write it.
        if get_origin(type_) is list and default is not parameter.empty:
            default = [default] if isinstance(default, str) else list(default or ())
        elif type_ is str and isinstance(default, (tuple, list)):
            default = ",".join(map(str, default))
        options.append(make_parameter(parameter.name, Annotated[type_, shown], default))
    return options
