"""Makes a command of a function: its parameters are the options, its docstring the help.

A parameter is annotated as Typer has it, ``Annotated[TYPE, typer.Option("--site", help=...)]``. One whose annotation is
a dataclass stands for the options that are the fields of it, and is given such a value: options that commands share.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from interp_tasks.cli.failures import NOT_TEXT, not_text

#: ``-h`` too.
CONTEXT = {"help_option_names": ["-h", "--help"]}
#: Options by their names up to 0.2, and by those of now.
RENAMED = {"--queries": "--positions"}
#: Metavar -> an example of its value.
EXAMPLES = {
    "REF": "zoo:matrix-completion-4x4@post or RUN@last",
    "RUN": "zoo:matrix-completion-4x4 or runs/mine",
}


class PlainFlags:
    """Gives flags that are not given a value, so that Typer does not import pydantic to find one."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of the command it is mixed into
        for each in params:
            # A flag with an opposite (``--curve/--no-curve``) may mean something else where neither is given.
            if getattr(each, "is_flag", False) and each.default is None and not each.secondary_opts:
                each.default = False
        return params


class StrictCommand(PlainFlags, TyperCommand):
    """Refuses what would otherwise be ignored in silence: all but the last of several values, and empty ones."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the arguments once what would be ignored in silence is refused."""
        known = {name for parameter in self.params for name in parameter.opts}
        for before, now in RENAMED.items():
            if now in known - {before} and any(word.partition("=")[0] == before for word in args):
                ctx.fail(f"{before} is now {now}")
        given, extra, order = self.make_parser(ctx).parse_args(args=list(args))
        if not any("--help" in parameter.opts for parameter in order):
            self.check_given(ctx, given, order)
            self.check_extra(ctx, extra)
            for parameter in self.params:
                if parameter.required and parameter not in order and parameter.param_type_name == "option":
                    ctx.fail(f"{spelled(parameter)} is missing: give {example(parameter)}")
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

    def check_extra(self, ctx: Any, extra: Sequence[str]) -> None:
        """Refuses words that belong to no option, where they look like checkpoints."""
        taken = sum(parameter.param_type_name == "argument" for parameter in self.params)
        if len(extra) > taken and any("--ckpt" in parameter.opts for parameter in self.params):
            ctx.fail(
                f"{extra[taken]!r}: runs and checkpoints are named by --ckpt, each with one of its own, as in "
                f"--ckpt {extra[taken]} (quote a glob)"
            )


def spelled(parameter: Any) -> str:
    """Returns an option with its other names, or the name of an argument."""
    if parameter.param_type_name != "option":
        return f"the argument {parameter.metavar or parameter.name}"
    first, *others = parameter.opts
    return f"{first} (also called {', '.join(others)})" if others else str(first)


def example(parameter: Any) -> str:
    """Returns an example of how an option is written: ``--ckpt REF, such as RUN@last``."""
    value = EXAMPLES.get(parameter.metavar)
    return f"{parameter.opts[0]} {parameter.metavar}" + (
        f", such as {value}" if value else f": {parameter.help}"
    )


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """The options of every command."""

    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and warnings.")] = False


def command_of(path: str, function: Callable[..., None]) -> TyperCommand:
    """Makes the command ``interp-run PATH`` of a function, whose docstring is its help."""
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    groups: dict[str, Any] = {
        each.name: each.annotation for each in parameters if is_dataclass(each.annotation)
    }
    options = [each for each in parameters if each.name not in groups]
    for kind in groups.values():
        options += options_of(kind)
    options.sort(key=lambda each: each.default is not each.empty)

    def call(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{each.name: given.pop(each.name) for each in fields(kind)})
        function(**given)

    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # functions may carry one
        [each.replace(kind=each.KEYWORD_ONLY) for each in options]
    )
    call.__annotations__ = {each.name: each.annotation for each in options}
    # Rich takes longer to import than a page of help may take.
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    help = help_text(function)
    app.command(path.rpartition(" ")[2], cls=StrictCommand, help=help, context_settings=CONTEXT)(call)
    made = typer.main.get_command(app)
    assert isinstance(made, TyperCommand)
    return made


def options_of(kind: type) -> list[inspect.Parameter]:
    """Returns the fields of a dataclass as parameters, those that it inherits after its own."""
    hints = get_type_hints(kind, include_extras=True)
    bases = [[*inspect.get_annotations(base)] for base in kind.__mro__]
    options = []
    for item in fields(kind):
        default: Any = item.default
        if item.default_factory is not MISSING:
            default = item.default_factory()
        options.append(
            inspect.Parameter(
                item.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if default is MISSING else default,
                annotation=hints[item.name],
            )
        )
    return sorted(options, key=lambda each: next(rank for rank, own in enumerate(bases) if each.name in own))


def help_text(function: Callable[..., None]) -> str:
    """Returns the first paragraph of a docstring, and the second where that is not of its arguments, unwrapped."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    shown = paragraphs[:1] + [each for each in paragraphs[1:2] if not each.startswith(("Args:", "Returns:"))]
    return "\n\n".join(" ".join(each.split()) for each in shown).replace("``", "")
