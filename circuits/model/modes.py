"""Evaluation mode for the length of a block, module by module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from circuits.model.locks import exclusive


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode, and each back into the mode it had, mixed modes included.

    Modes are the model's and not a thread's: others that want it wait.
    """
    with exclusive(model), _evaluating(model):
        yield


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    try:
        # Only where it changes something: to set an attribute of a module takes long.
        for module, training in before:
            if training:
                module.training = False
        yield
    finally:
        for module, training in before:
            if module.training != training:
                module.training = training
