"""What open blocks share of one model: the thread that has it, whether a clean pass is under way, which rows run, the
original weights, the hooks that are on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import _GeneratorContextManager, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError

P = ParamSpec("P")


class BlockEnteredOnce(_GeneratorContextManager[nn.Module]):
    """A block of `intervene` or `splice`."""

    def __enter__(self) -> nn.Module:
        if not hasattr(self, "args"):  # contextlib deletes them on entry
            name = getattr(self.gen, "__name__", "intervene")
            raise CircuitsError(f"a block is entered once: write {name}(...) again")
        return super().__enter__()


def contextmanager_entered_once(
    function: Callable[P, Generator[nn.Module, None, None]],
) -> Callable[P, BlockEnteredOnce]:
    """Decorates as `contextmanager` does; a second entry of one block is an error that says what to write."""

    @wraps(function)
    def make_block(*args: P.args, **kwargs: P.kwargs) -> BlockEnteredOnce:
        return BlockEnteredOnce(function, args, kwargs)

    return make_block


@dataclass
class EditState:
    """The edits of one model, from the first block that opens to the last that ends.

    Nested blocks share it, so that a clean pass silences all of them.
    """

    # The thread that has the model, and the number of its blocks.
    owner: threading.Thread = field(default_factory=threading.current_thread)
    holders: int = 0
    suspended: bool = False
    rows: slice | Tensor | None = None
    total: int | None = None
    # The plans of those blocks that edit the model, by id.
    plans: dict[int, Sequence[Any]] = field(default_factory=dict)
    # Parameters that some block has replaced, with their values outside all blocks.
    originals: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    # Replaced values of each open block, in the order of entry.
    replacing: list[dict[nn.Parameter, Tensor]] = field(default_factory=list)
    # The stamp of each parameter after our last write to it.
    written: dict[nn.Parameter, tuple[int, int]] = field(default_factory=dict)
    # Autoencoders in the model, by the hook of their site.
    splices: dict[str, Any] = field(default_factory=dict)
    # What puts on hooks that act after all edits (`keep_hooks_last`), and their handles.
    last: list[Callable[[], Any]] = field(default_factory=list)
    last_handles: list[Any] = field(default_factory=list)
    # What takes off what is on the model, by its owner; an interrupted block may leave some.
    undo: dict[object, Callable[[], None]] = field(default_factory=dict)
    # True when no block is open any more: the hooks of this state do nothing.
    ended: bool = False

    def write_and_note_versions(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Copies values in place, so that tied and viewed parameters stay what they are, and so that torch refuses a
        backward pass through values that are no longer there.
        """
        with torch.no_grad():
            for parameter, value in values.items():
                parameter.copy_(value)
        # Of all: the q, k and v of GPT-2's bridge are columns of one matrix, whose version is that of each.
        self.written = {one: _version_and_address(one) for one in {**self.written, **values}}

    def replaced_values(self) -> dict[nn.Parameter, Tensor]:
        """Returns what the open blocks give parameters; a later block overrides an earlier."""
        return {parameter: value for block in self.replacing for parameter, value in block.items()}


def _version_and_address(parameter: nn.Parameter) -> tuple[int, int]:
    """Returns torch's version counter and the address of a parameter."""
    return 0 if parameter.is_inference() else parameter._version, parameter.data_ptr()


_states: WeakKeyDictionary[nn.Module, EditState] = WeakKeyDictionary()
# Of two threads that come at once the later one is refused.
_holding = threading.Lock()


def get_edit_state(model: nn.Module) -> EditState:
    return _states.setdefault(model, EditState())


def check_owner_thread(owner: threading.Thread) -> None:
    """Refuses the thread that runs now where it is not the owner of the model."""
    if owner is not threading.current_thread():
        raise CircuitsError(
            f"the model is in use by thread {owner.name!r}, and thread {threading.current_thread().name!r} runs it; "
            "leave the block there first, or take a copy"
        )


@contextmanager
def hold_model_exclusively(model: nn.Module) -> Iterator[None]:
    """Holds a model for this thread alone.

    When no block of ours is open any more, what an interrupted one has left on the model is taken off: hooks, modes and
    weights are those of before.
    """
    with _holding:
        state = get_edit_state(model)
        if state.holders:
            check_owner_thread(state.owner)
        state.owner = threading.current_thread()
        state.holders += 1
    gradients = torch.is_grad_enabled()
    try:
        yield
    except KeyboardInterrupt:
        # It may come inside `no_grad`, before that can be left.
        torch.set_grad_enabled(gradients)
        raise
    finally:
        state.holders -= 1
        if not state.holders:
            _states.pop(model, None)
            state.ended = True
            for undo in reversed([*state.undo.values()]):
                undo()
            if state.originals:
                state.write_and_note_versions(state.originals)


@contextmanager
def undo_on_exit(model: nn.Module, undo: Callable[[], None]) -> Iterator[None]:
    """Calls `undo` when the block ends, at the latest when no block has the model any more; perhaps twice."""
    kept, key = get_edit_state(model).undo, object()
    kept[key] = undo
    try:
        yield
    finally:
        undo()
        kept.pop(key, None)


@contextmanager
def edits_suspended(model: nn.Module) -> Iterator[None]:
    """Silences our hooks and restores the original weights inside the block; the user's own hooks stay active."""
    with hold_model_exclusively(model):
        state = get_edit_state(model)
        if state.suspended:
            yield
            return
        before = {parameter: parameter.detach().clone() for parameter in state.originals}
        try:
            state.write_and_note_versions(state.originals)
            state.suspended = True
            yield
        finally:
            state.suspended = False
            state.write_and_note_versions(before)


@contextmanager
def assert_weights_unchanged(model: nn.Module, who: str) -> Iterator[None]:
    """Refuses, at a normal exit, that a user's function has written to the parameters of a model.

    Blocks of ours may have replaced weights and put them back. Writes by way of `data`, which torch does not count, are
    not noticed.
    """
    before = {one: _version_and_address(one) for one in list_parameters(model)}
    # The memory of before is held, so that no other tensor can have its address.
    held = [parameter.detach() for parameter in before]
    yield
    after = {one: _version_and_address(one) for one in list_parameters(model)}
    del held
    ours = get_edit_state(model).written
    for parameter, version in after.items():
        if before.get(parameter) != version and ours.get(parameter) != version:
            names = (name for name, one in model.named_parameters(remove_duplicate=False) if one is parameter)
            raise CircuitsError(
                f"{who}: it has written to the model's weights ({next(names, 'of before')}), and what runs next has "
                "them"
            )


def list_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of a model, each once, and those of the model that a bridge is around, which the bridge does
    not register: no module of it holds the dropout of GPT-2's embeddings.

    `model.modules()` and `model.parameters()` go through a generator for each level and make names, which costs a small
    model's sweep more than its arithmetic.
    """
    wrapped: Any = model.__dict__.get("original_model")
    found = [model, wrapped] if isinstance(wrapped, nn.Module) else [model]
    seen = set(found)
    for module in found:
        for inner in module._modules.values():
            if inner is not None and inner not in seen:
                seen.add(inner)
                found.append(inner)
    return found


def list_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of a model, each once, with those of the model that a bridge is around."""
    held = (parameter for module in list_modules(model) for parameter in module._parameters.values())
    return list(dict.fromkeys(parameter for parameter in held if parameter is not None))


@contextmanager
def mark_running_rows(model: nn.Module, rows: slice | Tensor, total: int) -> Iterator[None]:
    """Tells hooks that the forward inside runs `rows` of a batch of `total` examples; per-example tensors are cut to
    match.
    """
    state = get_edit_state(model)
    before = state.rows, state.total
    state.rows, state.total = rows, total
    try:
        yield
    finally:
        state.rows, state.total = before


@contextmanager
def parameters_replaced(model: nn.Module, values: Iterable[tuple[nn.Parameter, Tensor]]) -> Iterator[None]:
    """Gives parameters other values inside the block, except in clean passes; a later value for one overrides an
    earlier.

    Blocks may end in any order: a parameter then holds what the latest block still open gives it, else its original
    value. One to which somebody else has written meanwhile (load_state_dict, an optimiser) stays as it is, and
    `CircuitsError` says so at a normal exit.
    """
    state, new = get_edit_state(model), dict(values)
    if not new:
        yield
        return
    had, others = new.keys() & set(model.parameters()), set[nn.Parameter]()
    try:
        for parameter in new:
            state.originals.setdefault(parameter, parameter.detach().clone())
        state.replacing.append(new)
        state.write_and_note_versions(new)
        yield
    finally:
        current = state.replaced_values()
        for one in new:
            now, ours = one.detach(), current[one].to(one)
            # Values of ours may be NaN, which equals nothing.
            if not (torch.equal(now, ours) or torch.equal(now.nan_to_num(), ours.nan_to_num())):
                others.add(one)
        # Compared by identity, as another block may hold equal values.
        state.replacing[:] = [block for block in state.replacing if block is not new]
        left = state.replaced_values()
        originals = {one: state.originals.pop(one) for one in new if one in state.originals.keys() - left}
        state.write_and_note_versions(
            {one: value for one, value in (left | originals).items() if one in new.keys() - others}
        )
    # load_state_dict(..., assign=True) makes new ones, on which the block does not act.
    own = {parameter: name for name, parameter in model.named_parameters()}
    if others := others | (had - own.keys()):
        name = next((name for one, name in own.items() if one in others), "of before")
        raise CircuitsError(
            f"inside a block that replaces weights, some of these parameters ({name}, ...) have been written to by "
            "something else, such as load_state_dict or an optimiser: they are left as they are now; load outside of "
            "the block"
        )
