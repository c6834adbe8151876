"""What is hung onto a model, and how it comes off again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from circuits.model.locks import refuse_other_thread, this_user

# Sees an activation; what it returns, unless None, takes the activation's place.
Function = Callable[[Tensor], Tensor | None]


@runtime_checkable
class Handle(Protocol):
    def remove(self) -> None: ...


class Handles:
    """Several as one."""

    def __init__(self, *handles: Handle) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class Revocable:
    """A function until it is removed, nothing after; an error in any thread but the one that made it, or nothing there.

    A copy made of a model while our hooks are on it has them too, and nobody can take them off there.
    """

    def __init__(self, function: Callable[..., Any], silent: bool = False) -> None:
        """silent: called at the end of a run, which was refused before."""
        self._silent = silent
        self._function: Callable[..., Any] | None = function
        self._owner = this_user()

    def __call__(self, *given: Any) -> Any:
        if self._function is None or (self._silent and this_user() is not self._owner):
            return None
        refuse_other_thread(self._owner)
        return self._function(*given)

    def __deepcopy__(self, memo: dict[int, Any]) -> Revocable:
        return self

    def remove(self) -> None:
        self._function = None


def on_hook_point(hook: nn.Module, function: Function) -> Handle:
    """A hook point that stands in line: its output is what the model goes on with."""
    return hook.register_forward_hook(lambda module, inputs, output: function(output))


def before_module(module: nn.Module, function: Function) -> Handle:
    """What comes to a module of one input, before any other hook of it."""

    def replaced(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        new = function(inputs[0])
        return None if new is None else (new, *inputs[1:])

    return module.register_forward_pre_hook(replaced, prepend=True)


def passed(module: nn.Module, x: Tensor) -> Tensor:
    """What a module with hooks gives for an activation, which is not written to; `x` itself where nothing changes it.

    Equal values alone do not tell: a hook may leave them as they are here, and not where they are larger.
    """
    copy = x.clone()
    found: Tensor = module(copy)
    # Those of torch.inference_mode do not count what is written to them.
    untouched = found is copy and not copy.is_inference() and copy._version == 0
    return x if untouched and torch.equal(copy, x) else found


def bound(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, those too that were given by their place.

    Args:
        forward: the function that takes them, with `self` first.
    """
    signature = inspect.signature(forward)
    try:
        found = dict(signature.bind(None, *args, **kwargs).arguments)
    except TypeError:
        # The call itself is about to fail, in its own words.
        return dict(kwargs)
    found.pop(next(iter(signature.parameters)))
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found |= found.pop(name, {})
    return found
