"""Records the activations of our own passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.model.edit_state import hold_model_exclusively, list_modules, mark_running_rows, undo_on_exit
from circuits.model.hooked_model import HookedModel
from circuits.model.hooks import Function
from circuits.model.prompts_with_mask import Prompts


@contextmanager
def hold_eval_mode(model: nn.Module) -> Iterator[None]:
    """Puts every module in eval mode, and each back into the mode it had on exit, mixed modes included.

    Modes belong to the model and not to a thread, so another is refused meanwhile.
    """
    with hold_model_exclusively(model):
        before = {module: module.training for module in list_modules(model)}
        with undo_on_exit(model, partial(_set_modes, before)):
            _set_modes(dict.fromkeys(before, False))
            yield


def _set_modes(modes: Mapping[nn.Module, bool]) -> None:
    for module, training in modes.items():
        # Setting an attribute of a module is slow.
        if module.training != training:
            module.training = training


@contextmanager
def attach_to_hooks(hooked: HookedModel, functions: Iterable[tuple[str, Function]]) -> Iterator[None]:
    """Calls each function with the activation at its hook, in the order given, as `HookedModel.on_forward` does."""
    with ExitStack() as stack:
        stack.callback(hooked.on_run().remove)
        for hook, function in functions:
            stack.callback(hooked.on_forward(hook, function).remove)
        yield


@contextmanager
def record_activations(hooked: HookedModel, hooks: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Yields a dict of the activations at `hooks` in the latest run inside the block; a hook that did not fire is
    missing.

    Copies are kept: an activation may be a view of a parameter, or of memory that the model reuses.
    """
    seen: dict[str, Tensor] = {}

    def store_activation(hook: str, activation: Tensor) -> None:
        seen[hook] = activation.clone()

    with attach_to_hooks(hooked, [(hook, partial(store_activation, hook)) for hook in hooks]):
        yield seen


def run_and_record(
    hooked: HookedModel, prompts: Prompts, rows: slice | Tensor, hooks: Iterable[str], caller: str
) -> dict[str, Tensor]:
    """Runs some of the prompts in eval mode, without gradients, and returns the activations at hooks.

    Edits of open blocks are in force; where one has a mask per example, its entries for these rows are used.
    """
    cut, hooks = mark_running_rows(hooked.model, rows, len(prompts)), list(hooks)
    with hold_eval_mode(hooked.model), torch.no_grad(), cut, record_activations(hooked, hooks) as seen:
        hooked.run_forward(prompts[rows])
    if missing := [hook for hook in hooks if hook not in seen]:
        raise CircuitsError(f"{caller}: {missing[0]} never fired; this model has it switched off")
    return seen
