"""Arguments of the wrong type are refused in one line, before anything else is done."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import PurePath
from typing import Any, ParamSpec, TypeVar

from interp_tasks.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")

#: What annotations of experiments are made of; a name that is not here is not checked.
NAMES: dict[str, Any] = {
    "Any": Any,
    "Sequence": Sequence,
    "Mapping": Mapping,
    "Callable": Callable,
    "Progress": Callable,
}
#: Options that are arrays, or more than values.
UNTOUCHED = frozenset({"task", "tokens", "progress"})


def checked(experiment: Callable[P, R]) -> Callable[P, R]:
    """Returns an experiment that looks at the types of its arguments first.

    Paths are taken for the texts, and arrays, sets, iterators for the lists that they stand for.
    """
    signature = inspect.signature(experiment)

    @functools.wraps(experiment)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                bound.arguments[name] = {
                    option: given if option in UNTOUCHED else listed(given) for option, given in value.items()
                }
            else:
                bound.arguments[name] = listed(value)
        check_types(experiment, bound.arguments)
        return experiment(*bound.args, **bound.kwargs)

    return call


def check_types(experiment: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuses values that are not of the types an experiment says.

    Raises:
        UserError: naming the argument, its types and the value.
    """
    for name, parameter in inspect.signature(experiment).parameters.items():
        if name not in given:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            hints = option_types()
            for option, value in given[name].items():
                # None is an option that is left out, but for the device.
                if option in hints and (value is not None or option == "device"):
                    check_type(experiment.__name__, option, hints[option], value)
        elif isinstance(parameter.annotation, str):
            check_type(experiment.__name__, name, parameter.annotation, given[name])


def option_types() -> Mapping[str, str]:
    """Returns the annotations of the options that experiments share as ``**options``."""
    from interp_tasks.measurement.subjects import Options

    return {name: hint.__forward_arg__ for name, hint in Options.__annotations__.items()}


def check_type(experiment: str, name: str, annotation: str, value: Any) -> None:
    annotation = bare(annotation)
    validate = validator_of(annotation)
    if validate is None:
        return
    from pydantic import ValidationError

    try:
        validate(as_json(value))
    except ValidationError:
        shown = " ".join(repr(value).split())
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        raise UserError(f"{experiment}: {name} is of type {annotation}, not {shown}") from None


@functools.cache
def bare(annotation: str) -> str:
    """Returns ``TYPE`` of ``Annotated[TYPE, typer.Option(...)]``, the form in which options are annotated."""
    if not annotation.startswith("Annotated["):
        return annotation
    read = ast.parse(annotation, mode="eval").body
    assert isinstance(read, ast.Subscript)
    assert isinstance(read.slice, ast.Tuple)
    return ast.unparse(read.slice.elts[0])


@functools.cache
def validator_of(annotation: str) -> Callable[[Any], Any] | None:
    """Returns a function that raises for a value not of a type; ``None`` where the type is not ours to check."""
    try:
        hint = eval(annotation, {}, NAMES)
    except NameError:
        return None
    # Here, since a list of all commands needs none of it.
    from pydantic import ConfigDict, TypeAdapter

    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    return TypeAdapter(hint, config=config).validate_python


def listed(value: Any) -> Any:
    """Lists of what can be gone through once, or has no order, and of arrays; texts of paths and devices."""
    if isinstance(value, AbstractSet):
        return sorted(value) if is_ordered(value) else list(value)
    if isinstance(value, (Iterator, deque)):
        return list(value)
    if isinstance(value, PurePath) or is_device(value):
        return str(value)
    return value.tolist() if hasattr(value, "tolist") else value


def is_ordered(values: AbstractSet[Any]) -> bool:
    """Returns whether a set can be sorted: its own order differs between processes, as hashes of texts do."""
    return any(
        all(isinstance(each, kind) for each in values) for kind in (str, int, tuple, PurePath)
    ) and isinstance(values, (set, frozenset))


def is_device(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.device)


def as_json(value: Any) -> Any:
    """Returns a value as JSON would have it: paths as text, arrays and numbers of arrays as Python's."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (list, tuple, range)):
        return [as_json(each) for each in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value
