"""One parameter update, and everything about it that a resumed run needs back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from interp_tasks.training.config import TrainConfig

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


class Updater:
    """Grokfast filter, clipping, learning rate and optimiser over a model's trainable parameters."""

    def __init__(self, model: torch.nn.Module, config: TrainConfig, *, captured: bool = False) -> None:
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


QUEUE = "queue"


class GradientFilter(ABC):
    """g ← g + λ · (a mean of past gradients), in place, before clipping and the optimiser's step."""

    @torch.no_grad()
    def __call__(self, parameters: Mapping[str, Tensor]) -> None:
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                self.add_slow_part(name, parameter.grad)

    @abstractmethod
    def add_slow_part(self, name: str, gradient: Tensor) -> None:
        """Remembers the gradient of one parameter, and amplifies it in place."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Returns all that is remembered, by keys that begin with the parameter's name."""

    @abstractmethod
    def load_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Puts back what :meth:`state` gave of one parameter; the keys are without its name."""


class GrokfastEMA(GradientFilter):
    """h ← α h + (1 − α) g;  g ← g + λ h.

    The gain is 1 + λ for a constant gradient and 1 + λ (1 − α) / (1 + α) for one that alternates in sign.
    The MIIII paper's equation 13 prints another recurrence; its code computes this one.
    """

    def __init__(self, alpha: float, lamb: float, start: Literal["first-gradient", "zero"]) -> None:
        self.alpha = alpha
        self.lamb = lamb
        self.start = start
        self.averages: dict[str, Tensor] = {}

    def add_slow_part(self, name: str, gradient: Tensor) -> None:
        if name not in self.averages:
            zero = self.start == "zero"
            self.averages[name] = torch.zeros_like(gradient) if zero else gradient.clone()
        average = self.averages[name].mul_(self.alpha).add_(gradient, alpha=1 - self.alpha)
        gradient.add_(average, alpha=self.lamb)

    def state(self) -> dict[str, Tensor]:
        return dict(self.averages)

    def load_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        self.averages[name] = state[""]


class GrokfastMA(GradientFilter):
    """g ← g + λ · (mean of the last w gradients, this one included), from the w-th gradient on.

    The gain is 1 + λ for a constant gradient, and 1 for one that repeats after a divisor of w with mean 0. It keeps w
    gradients of every parameter. Their sum follows them by one addition and one subtraction a step, in float64, and
    is taken anew whenever the queue has gone round, so that rounding cannot pile up.
    """

    def __init__(self, window: int, lamb: float) -> None:
        self.window = window
        self.lamb = lamb
        #: ``[w, *shape]`` by parameter: gradient number t stands in row t mod w.
        self.queues: dict[str, Tensor] = {}
        #: float64, by parameter.
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def add_slow_part(self, name: str, gradient: Tensor) -> None:
        if name not in self.queues:
            self.queues[name] = gradient.new_zeros(self.window, *gradient.shape)
            self.sums[name] = torch.zeros_like(gradient, dtype=torch.float64)
            self.counts[name] = 0
        queue, total, row = self.queues[name], self.sums[name], self.counts[name] % self.window
        total += gradient
        total -= queue[row]
        queue[row] = gradient
        if row == self.window - 1:
            torch.sum(queue, 0, dtype=torch.float64, out=total)
        self.counts[name] += 1
        if self.counts[name] >= self.window:
            gradient.add_(total, alpha=self.lamb / self.window)

    def state(self) -> dict[str, Tensor]:
        averages = {}
        for name, queue in self.queues.items():
            averages[f"{name}/{QUEUE}"] = queue
            averages[f"{name}/sum"] = self.sums[name]
            averages[f"{name}/count"] = torch.tensor(self.counts[name])
        return averages

    def load_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        self.queues[name], self.sums[name] = state[QUEUE], state["sum"]
        self.counts[name] = int(state["count"])
