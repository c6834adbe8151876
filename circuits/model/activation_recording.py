"""Records the activations of our own passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.model.decode_steps import WHOLE
from circuits.model.edit_state import (
    EditState,
    get_edit_state,
    hold_model_exclusively,
    mark_running_rows,
    modules_of,
    undo_on_exit,
)
from circuits.model.hooked_model import HookedModel
from circuits.model.hooks import Function, Handle
from circuits.model.prompts import Prompts
from circuits.snapshots_and_positions import dense_if_array, parse_positions, parse_span


@contextmanager
def hold_eval_mode(model: nn.Module) -> Iterator[None]:
    """Puts every module in eval mode, and each back into the mode it had on exit, mixed modes included.

    Modes belong to the model and not to a thread, so another is refused meanwhile.
    """
    with hold_model_exclusively(model):
        before = [(module, module.training) for module in modules_of(model)]

        def restore_modes() -> None:
            for module, training in before:
                if module.training != training:
                    module.training = training

        with undo_on_exit(model, restore_modes):
            # Set only where it changes, as setting an attribute of a module is slow.
            for module, training in before:
                if training:
                    module.training = False
            yield


@contextmanager
def listen_at_hooks(surface: HookedModel, functions: Iterable[tuple[str, Function]]) -> Iterator[None]:
    """Calls each function with the activation at its hook, in the order given, as `HookedModel.on_forward` does."""
    with ExitStack() as stack:
        stack.callback(surface.on_run().remove)
        for hook, function in functions:
            stack.callback(surface.on_forward(hook, function).remove)
        yield


@contextmanager
def record_activations(surface: HookedModel, hooks: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Yields a dict of the activations at `hooks` in the latest run inside the block; a hook that did not fire is
    missing.

    Copies are kept: an activation may be a view of a parameter, or of memory that the model reuses.
    """
    seen: dict[str, Tensor] = {}

    def store_activation(hook: str, activation: Tensor) -> None:
        seen[hook] = activation.clone()

    with listen_at_hooks(surface, [(hook, partial(store_activation, hook)) for hook in hooks]):
        yield seen


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


def record_rows(
    surface: HookedModel, prompts: Prompts, rows: slice | Tensor, hooks: Iterable[str], caller: str
) -> dict[str, Tensor]:
    """Runs some of the prompts in eval mode, without gradients, and returns the activations at hooks.

    Edits of open blocks are in force; where one has a mask per example, its entries for these rows are used.
    """
    cut, hooks = mark_running_rows(surface.model, rows, len(prompts)), list(hooks)
    with hold_eval_mode(surface.model), torch.no_grad(), cut, record_activations(surface, hooks) as seen:
        surface.run_forward(prompts[rows])
    if missing := [hook for hook in hooks if hook not in seen]:
        raise CircuitsError(f"{caller}: {missing[0]} never fired; this model has it switched off")
    return seen


def parse_position_mask(positions: Any, prompts: Prompts, label: str) -> Tensor:
    """Returns the entries at some positions, bool [batch pos] in the layout of the prompts.

    Args:
        positions: numbers or a slice, which count in each prompt's own tokens; or a mask, [batch pos], [batch 1] or
            [pos]; None: all.
    """
    given, (batch, length) = dense_if_array(positions, label), prompts.shape[:2]
    if isinstance(given, Tensor) and given.dtype == torch.bool:
        if tuple(given.shape) not in ((length,), (batch, length), (batch, 1)):
            raise CircuitsError(
                f"{label}: a mask is boolean, [batch pos] = {[batch, length]}, [batch 1] or [pos]; got "
                f"{list(given.shape)}"
            )
        return given.detach().cpu().expand(batch, length)
    chosen = parse_span(given, label) or parse_positions(given, label)
    run = replace(WHOLE, real=prompts.real if prompts.padded else None)
    return run.position_mask(chosen, length, label).expand(batch, length)
