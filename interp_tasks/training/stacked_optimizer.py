"""One optimiser over the parameters of several models, each model's share of it readable by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from interp_tasks.training.config import TrainConfig
from interp_tasks.training.grokfast import QUEUE
from interp_tasks.training.optimizer import RANDOM, Updater

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer


class StackedParameters:
    """Every parameter of several models as one tensor ``[seed, *shape]``; the models' own become views of them.

    What the models' parameters do to their gradients (hooks) is done to those of the stack.
    """

    def __init__(self, models: Sequence[HookedTransformer]) -> None:
        self.tensors: dict[str, Tensor] = {}
        for name, parameter in models[0].named_parameters():
            owners = [model.get_parameter(name) for model in models]
            stacked = torch.stack([owner.detach() for owner in owners])
            for owner, share in zip(owners, stacked, strict=True):
                owner.data = share
            stacked.requires_grad_(parameter.requires_grad)
            if parameter.requires_grad and any(owner._backward_hooks for owner in owners):
                stacked.register_hook(lambda gradient, owners=owners: hooked(owners, gradient))
            self.tensors[name] = stacked

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())


def hooked(owners: Sequence[Tensor], gradients: Tensor) -> Tensor:
    """Returns the gradients ``[seed, *shape]`` after the hooks of the parameters they belong to."""
    after = []
    for owner, gradient in zip(owners, gradients, strict=True):
        for hook in (owner._backward_hooks or {}).values():
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        after.append(gradient)
    return torch.stack(after)


class StackedUpdater(Updater):
    """An updater of stacked models: optimiser and Grokfast element by element, clipping seed by seed."""

    def __init__(self, parameters: StackedParameters, config: TrainConfig, *, captured: bool = False) -> None:
        super().__init__(parameters, config, captured=captured)

    def _clip(self, largest: float) -> None:
        gradients = list(self._gradients().values())
        squares = [gradient.flatten(1).square().sum(1) for gradient in gradients]
        norms = torch.stack(squares).sum(0).sqrt()
        # As torch.nn.utils.clip_grad_norm_ does.
        factors = (largest / (norms + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factors.view(-1, *[1] * (gradient.ndim - 1)))

    def state_of(self, index: int) -> dict[str, Tensor]:
        """Returns the state of one seed, as :meth:`Updater.state` of that seed alone would be."""
        return {
            name: tensor if is_shared(name, tensor) else tensor.select(seed_axis(name), index)
            for name, tensor in self.state().items()
        }

    def load_states(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Puts back what :meth:`state_of` gave of every seed at one step."""
        self.load_state(
            {
                name: tensor
                if is_shared(name, tensor)
                else torch.stack([state[name] for state in states], seed_axis(name))
                for name, tensor in states[0].items()
            }
        )


def is_shared(name: str, tensor: Tensor) -> bool:
    """Counts of steps, and torch's random state."""
    return tensor.ndim == 0 or name == RANDOM


def seed_axis(name: str) -> int:
    """Returns the axis of seeds: 1 in the queue of the moving average, whose axis 0 is gradients, else 0."""
    return 1 if name.endswith(f"/{QUEUE}") else 0
