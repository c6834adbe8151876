"""Puts hooks onto modules, and removes them."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from circuits.model.edit_state import EditState, check_owner_thread, get_edit_state, undo_on_exit

# A hook function gets an activation; its return value, unless None, replaces the activation.
Function = Callable[[Tensor], Tensor | None]


@runtime_checkable
class Handle(Protocol):
    def remove(self) -> None: ...


class Handles:
    """Several handles that are removed together."""

    def __init__(self, *handles: Handle) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


@contextmanager
def keep_hooks_on(model: nn.Module, handles: Iterable[Handle]) -> Iterator[None]:
    """Keeps hooks on a model inside the block; `handles` puts each on when it is asked for the next."""
    with ExitStack() as put_on, undo_on_exit(model, put_on.close):
        for handle in handles:
            put_on.callback(handle.remove)
        yield


@contextmanager
def keep_hooks_last(model: nn.Module, put_on: Sequence[Callable[[], Handle]]) -> Iterator[None]:
    """Keeps hooks behind all others inside the block, those of inner blocks too; each of `put_on` puts one on.

    Blocks may end in any order. A block that adds hooks enters this one behind them, with nothing of its own too.
    """
    state = get_edit_state(model)
    state.last += put_on
    try:
        _move_hooks_last(state)
        yield
    finally:
        state.last = [one for one in state.last if all(one is not mine for mine in put_on)]
        _move_hooks_last(state)


def _move_hooks_last(state: EditState) -> None:
    for handle in state.last_handles:
        handle.remove()
    state.last_handles = [put_on() for put_on in state.last]


class RevocableFunction:
    """A function that can be switched off: after `remove`, or after the blocks in which it was made, it does nothing.

    In any thread but the one that made it a call is an error, or (`ignores_others`) does nothing: at the end of a run,
    which was refused at its start.

    A copy of a model made while our hooks are on it has them too, and nobody can remove them there.

    Attributes:
        handles: what is removed with it.
    """

    def __init__(self, function: Callable[..., Any], model: nn.Module, ignores_others: bool = False) -> None:
        self._ignores_others = ignores_others
        self._function: Callable[..., Any] | None = function
        state = get_edit_state(model)
        # A hook outside of blocks ends with nothing.
        self._state = state if state.holders else EditState()
        self._owner = threading.current_thread()
        self.handles: tuple[Handle, ...] = ()
        self._state.undo[self] = self.remove

    def __call__(self, *given: Any) -> Any:
        if self._function is None or self._state.ended:
            return None
        if self._ignores_others and self._owner is not threading.current_thread():
            return None
        check_owner_thread(self._owner)
        return self._function(*given)

    def __deepcopy__(self, memo: dict[int, Any]) -> RevocableFunction:
        return self

    def remove(self) -> None:
        self._function = None
        for handle in self.handles:
            handle.remove()
        self._state.undo.pop(self, None)


class MethodWrapper:
    """A method of a module that is called by way of `around(method, args, kwargs)` while this is on.

    Several may be on one method, and go in any order. A copy of the module, and a stored one, has the plain method.
    """

    def __init__(self, owner: nn.Module, name: str, around: Callable[..., Any]) -> None:
        self._owner, self._name, self._around = owner, name, around
        self._before = vars(owner).get(name)
        self._on = True
        functools.update_wrapper(self, getattr(type(owner), name), updated=())
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = self._before or getattr(type(self._owner), self._name).__get__(self._owner)
        return self._around(method, args, kwargs) if self._on else method(*args, **kwargs)

    def remove(self) -> None:
        self._on = False
        methods = vars(self._owner)
        while isinstance(last := methods.get(self._name), MethodWrapper) and not last._on:
            del methods[self._name]
            if last._before is not None:
                methods[self._name] = last._before

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)


def hook_module_output(hook: nn.Module, function: Function) -> Handle:
    """Hooks the output of a hook point that stands in line: the model goes on with the function's return value."""
    return hook.register_forward_hook(lambda module, inputs, output: function(output))


def hook_module_input(module: nn.Module, function: Function) -> Handle:
    """Hooks the input of a module of one input, before any other hook of it."""

    def replace_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        new = function(inputs[0])
        return None if new is None else (new, *inputs[1:])

    return module.register_forward_pre_hook(replace_input, prepend=True)


def run_hooked_module(module: nn.Module, x: Tensor) -> Tensor:
    """Returns the output of a module with its hooks for `x`, which is not written to; `x` itself where nothing changes
    it.

    Equal values alone do not show that: a hook that clips, for example, changes only larger ones.
    """
    copy = x.clone()
    output: Tensor = module(copy)
    # Tensors of torch.inference_mode do not count writes to them.
    untouched = output is copy and not copy.is_inference() and copy._version == 0
    return x if untouched and torch.equal(copy, x) else output


_signature = functools.lru_cache(maxsize=64)(inspect.signature)


def bind_arguments(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns all arguments of a call by name, those given by position too.

    Args:
        forward: the function that takes them, with `self` first.
    """
    signature = _signature(forward)
    try:
        arguments = dict(signature.bind(None, *args, **kwargs).arguments)
    except TypeError:
        # The call itself will fail, with Python's own message.
        return dict(kwargs)
    arguments.pop(next(iter(signature.parameters)))
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    return arguments
