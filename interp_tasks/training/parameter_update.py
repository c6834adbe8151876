"""One parameter update: filters of gradients, the optimiser, and what a resumed run needs back of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from interp_tasks.training.config import TrainConfig

RANDOM = "random/torch"
#: What :meth:`Updater.update_parameters` calls with the stage ("raw", "filtered") and the gradients of that stage.
GradientWatcher = Callable[[str, Mapping[str, Tensor]], None]


def make_optimizer(
    parameters: Sequence[Tensor], config: TrainConfig, *, captured: bool = False
) -> torch.optim.Optimizer:
    """Returns the optimiser that a config asks for; where its steps are captured, the learning rate is a tensor."""
    shared: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay, "fused": True}
    if captured:
        shared["lr"] = torch.tensor(config.learning_rate, device=parameters[0].device)
        shared["capturable"] = True
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=config.momentum, **shared)
    adam = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return adam(parameters, betas=config.betas, eps=config.eps, **shared)


class Updater:
    """Grokfast filter, clipping, learning rate and optimiser over a model's trainable parameters."""

    def __init__(self, model: torch.nn.Module, config: TrainConfig, *, captured: bool = False) -> None:
        """Makes the optimiser; ``captured``: updates will be recorded as a CUDA graph."""
        self.config = config
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(list(self.parameters.values()), config, captured=captured)
        #: What the filter remembers, by parameter and then by name.
        self.memory: dict[str, dict[str, Tensor]] = {name: {} for name in self.parameters}

    def set_learning_rate(self, step: int) -> None:
        """Sets the learning rate of update number ``step``."""
        rate = self.config.learning_rate_at(step)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def update_parameters(self, watch: GradientWatcher | None = None) -> None:
        """Makes an update at the rate that is set, from the gradients in ``.grad``, and clears them."""
        if watch:
            watch("raw", self._gradients_by_name())
        if self.config.grokfast is not None:
            self.filter_gradients(self.config.grokfast)
            if watch:
                watch("filtered", self._gradients_by_name())
        if self.config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def filter_gradients(self, kind: str) -> None:
        for name, gradient in self._gradients_by_name().items():
            FILTERS[kind](self.memory[name], gradient, self.config)

    def resume_tensors(self) -> dict[str, Tensor]:
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
        for name, memory in self.memory.items():
            tensors |= {f"grokfast/{name}/{key}".rstrip("/"): tensor for key, tensor in memory.items()}
        return tensors

    def load_resume_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts back what :meth:`resume_tensors` gave."""
        torch.set_rng_state(tensors[RANDOM])
        for name, parameter in self.parameters.items():
            moments = _tensors_under_prefix(f"optimizer/{name}", tensors, parameter.device)
            if moments:
                self.optimizer.state[parameter] = moments
            remembered = _tensors_under_prefix(f"grokfast/{name}", tensors, parameter.device)
            # What counts steps stays where it can be read without waiting for a GPU.
            self.memory[name] = {
                key: tensor if tensor.ndim or not key else tensor.cpu() for key, tensor in remembered.items()
            }

    def _gradients_by_name(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}


def _tensors_under_prefix(
    prefix: str, tensors: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Returns the tensors stored under ``prefix``, by what follows its slash: by nothing if it is the tensor itself."""
    return {
        key[len(prefix) + 1 :]: tensor.to(device)
        for key, tensor in tensors.items()
        if key == prefix or key.startswith(prefix + "/")
    }


def amplify_by_ema(memory: dict[str, Tensor], gradient: Tensor, config: TrainConfig) -> None:
    """Makes g ← g + λ h of a gradient, in place, with h ← α h + (1 − α) g in ``memory``.

    The gain is 1 + λ for a constant gradient and 1 + λ (1 − α) / (1 + α) for one that alternates in sign.
    The MIIII paper's equation 13 prints another recurrence; its code computes this one.
    """
    alpha = config.grokfast_alpha
    if not memory:
        memory[""] = torch.zeros_like(gradient) if config.grokfast_start == "zero" else gradient.clone()
    average = memory[""].mul_(alpha).add_(gradient, alpha=1 - alpha)
    gradient.add_(average, alpha=config.grokfast_lambda)


def amplify_by_ma(memory: dict[str, Tensor], gradient: Tensor, config: TrainConfig) -> None:
    """Makes g ← g + λ · (mean of the last w gradients, this one included) of a gradient, in place, from the w-th on.

    The gain is 1 + λ for a constant gradient, and 1 for one that repeats after a divisor of w with mean 0. ``memory``
    keeps w gradients, number t in row t mod w of ``queue [w, *shape]``. Their ``sum`` follows them by one addition and
    one subtraction a step, in float64, and is taken anew whenever the queue has gone round, so that rounding cannot
    pile up.
    """
    window = config.grokfast_window
    if not memory:
        memory["queue"] = gradient.new_zeros(window, *gradient.shape)
        memory["sum"] = torch.zeros_like(gradient, dtype=torch.float64)
        memory["count"] = torch.tensor(0)
    queue, total, count = (memory[key] for key in ("queue", "sum", "count"))
    row = int(count) % window
    total += gradient
    total -= queue[row]
    queue[row] = gradient
    if row == window - 1:
        torch.sum(queue, 0, dtype=torch.float64, out=total)
    count += 1
    if int(count) >= window:
        gradient.add_(total, alpha=config.grokfast_lambda / window)


#: What amplifies gradients before clipping and the optimiser's step, from what it remembers of a parameter.
FILTERS = {"ema": amplify_by_ema, "ma": amplify_by_ma}
