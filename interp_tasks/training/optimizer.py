"""One parameter update, and everything about it that a resumed run needs back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from interp_tasks.training.config import TrainConfig
from interp_tasks.training.grokfast import GradientFilter, GrokfastEMA, GrokfastMA

RANDOM = "random/torch"
#: What :meth:`Updater.update` calls with the stage ("raw", "filtered") and the gradients of that stage.
GradientWatcher = Callable[[str, Mapping[str, Tensor]], None]


def optimizer_of(
    parameters: Sequence[Tensor], config: TrainConfig, *, captured: bool = False
) -> torch.optim.Optimizer:
    """Returns the optimiser that a config asks for; where its steps are captured, the learning rate is a tensor."""
    shared: dict[str, Any] = {
        "lr": config.learning_rate,
        "weight_decay": config.weight_decay,
        "fused": True,
    }
    if captured:
        shared["lr"] = torch.tensor(config.learning_rate, device=parameters[0].device)
        shared["capturable"] = True
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=config.momentum, **shared)
    adam = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return adam(parameters, betas=config.betas, eps=config.eps, **shared)


def filter_of(config: TrainConfig) -> GradientFilter | None:
    """Returns the Grokfast filter that a config asks for."""
    if config.grokfast == "ma":
        return GrokfastMA(config.grokfast_window, config.grokfast_lambda)
    if config.grokfast == "ema":
        return GrokfastEMA(config.grokfast_alpha, config.grokfast_lambda, config.grokfast_start)
    return None


@runtime_checkable
class Parameters(Protocol):
    """A model, or any other object that holds parameters by name."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]: ...


class Updater:
    """Grokfast filter, clipping, learning rate and optimiser over a model's trainable parameters."""

    def __init__(self, model: Parameters, config: TrainConfig, *, captured: bool = False) -> None:
        """Makes the optimiser.

        Args:
            captured: updates will be recorded as a CUDA graph.
        """
        self.config = config
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = optimizer_of(list(self.parameters.values()), config, captured=captured)
        self.filter = filter_of(config)

    def update(self, step: int, watch: GradientWatcher | None = None) -> None:
        """Makes update number ``step`` from the gradients in ``.grad``, and clears them."""
        self.set_rate(step)
        self.apply(watch)

    def set_rate(self, step: int) -> None:
        """Sets the learning rate of update number ``step``."""
        rate = self.config.learning_rate_at(step)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def apply(self, watch: GradientWatcher | None = None) -> None:
        """Makes an update at the rate that is set, from the gradients in ``.grad``, and clears them."""
        if watch:
            watch("raw", self._gradients())
        if self.filter is not None:
            self.filter(self.parameters)
            if watch:
                watch("filtered", self._gradients())
        if self.config.clip_norm is not None:
            self._clip(self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Returns optimiser moments, the filter's memory and torch's random state as flat tensors.

        The learning rate is a function of the step and every random draw one of (seed, label), so there is no
        scheduler state; torch's own generator is kept for tasks that use it.
        """
        tensors = {RANDOM: torch.get_rng_state()}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                # SGD without momentum keeps an empty place for one.
                if value is not None:
                    tensors[f"optimizer/{name}/{key}"] = value
        if self.filter is not None:
            tensors |= {f"grokfast/{key}": tensor for key, tensor in self.filter.state().items()}
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts back what :meth:`state` gave."""
        torch.set_rng_state(tensors[RANDOM])
        for name, parameter in self.parameters.items():
            moments = _kept(f"optimizer/{name}", tensors, parameter.device)
            if moments:
                self.optimizer.state[parameter] = moments
            remembered = _kept(f"grokfast/{name}", tensors, parameter.device)
            if self.filter is not None and remembered:
                self.filter.load_state(name, remembered)

    def _clip(self, largest: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), largest)

    def _gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}


def _kept(prefix: str, tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Returns the tensors stored under ``prefix``, by what follows its slash: by nothing if it is the tensor itself."""
    return {
        key[len(prefix) + 1 :]: tensor.to(device)
        for key, tensor in tensors.items()
        if key == prefix or key.startswith(prefix + "/")
    }
