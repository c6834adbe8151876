"""Makes the command of an experiment from its function: options stand in the signature, the help in the docstring.

A parameter's annotation is ``Annotated[TYPE, typer.Option("--site", help=...), CLI_TYPE, CONVERTER]``. ``CLI_TYPE`` is
what the command line has where that is not ``TYPE`` (Typer takes no ``str | Sequence[str]``); ``CONVERTER`` makes of it
what the function takes. Both may be left out. What the function refuses, it refuses before anything slow is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import field, make_dataclass
from types import GenericAlias, UnionType
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.models import OptionInfo

from interp_tasks.cli.base import Command
from interp_tasks.cli.checkpoint_command import ComparisonCommand, ExperimentCommand
from interp_tasks.cli.runs_command import RunsCommand
from interp_tasks.measurement.experiment import EXPERIMENTS, Experiment
from interp_tasks.measurement.subjects import Progress

#: Parameters that are no option of an experiment's own: what it examines, and where it says how far it is.
SHARED = ("refs", "runs", "progress")


def command_of(experiment: Experiment) -> type[Command]:
    """Returns the command class of an experiment; its fields are the function's parameters.

    Raises:
        TypeError: for a parameter that is no option.
    """
    signature = inspect.signature(experiment.function)
    options: list[Any] = []
    converters: dict[str, Callable[[Any], Any]] = {}
    for parameter in signature.parameters.values():
        if parameter.name in SHARED or parameter.kind is parameter.VAR_KEYWORD:
            continue
        type_, option, convert = read_annotation(experiment.function, parameter)
        options.append(field_of(parameter, type_, option))
        if convert is not None:
            converters[parameter.name] = convert
    names = [each[0] for each in options]
    if experiment.samples is not None:
        examples = typer.Option(
            "--samples", metavar="N", help="Examples.", show_default=str(experiment.samples)
        )
        options.append(("samples", Annotated[int | None, examples], field(default=None)))
    of_runs = "runs" in signature.parameters
    shared = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())

    def measure(self: Any, progress: Progress | None) -> Any:
        given = {name: getattr(self, name) for name in names}
        # A list that is not given is the function's own default.
        given = {name: value for name, value in given.items() if value != []}
        given |= {
            name: convert(given[name]) for name, convert in converters.items() if given.get(name) is not None
        }
        if shared:
            given |= self.common(progress)
        elif "progress" in signature.parameters:
            given["progress"] = progress
        return EXPERIMENTS[experiment.name].function(self.ckpt if of_runs else self.examined, **given)

    examining = ComparisonCommand if experiment.compares_metrics else ExperimentCommand
    base = RunsCommand if of_runs else examining
    doc = help_of(experiment.function)
    return make_dataclass(
        experiment.name,
        options,
        bases=(base,),
        kw_only=True,
        namespace={"name": experiment.name, "measure": measure, "__doc__": doc, "__module__": __name__},
    )


def read_annotation(
    function: Callable[..., Any], parameter: inspect.Parameter
) -> tuple[Any, OptionInfo, Callable[[Any], Any] | None]:
    """Returns a parameter's type on the command line, its option, and what converts its values."""
    hint = parameter.annotation
    if isinstance(hint, str):
        hint = eval(hint, inspect.unwrap(function).__globals__)
    type_, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    option = next((mark for mark in marks if isinstance(mark, OptionInfo)), None)
    if option is None:
        raise TypeError(f"{function.__name__}: {parameter.name} has no typer.Option in its annotation")
    types = [mark for mark in marks if isinstance(mark, (type, GenericAlias, UnionType))]
    convert = next(
        (mark for mark in marks if callable(mark) and mark not in types and mark is not option), None
    )
    return (types[0] if types else type_), option, convert


def field_of(parameter: inspect.Parameter, type_: Any, option: OptionInfo) -> tuple[Any, ...]:
    """Returns a field of the command, with the function's default as the command line would write it."""
    hint = Annotated[type_, option]
    default: Any = parameter.default
    if get_origin(type_) is list:
        if default is parameter.empty:
            return parameter.name, hint
        listed = [default] if isinstance(default, str) else list(default or ())
        return parameter.name, hint, field(default_factory=lambda: list(listed))
    if default is parameter.empty:
        return parameter.name, hint
    if type_ is str and isinstance(default, (tuple, list)):
        default = ",".join(map(str, default))
    return parameter.name, hint, field(default=default)


def help_of(function: Callable[..., Any]) -> str:
    """Returns the first paragraph of a docstring, and the second where that is not of its arguments."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    shown = paragraphs[:1] + [each for each in paragraphs[1:2] if not each.startswith(("Args:", "Returns:"))]
    return "\n\n".join(shown).replace("``", "")
