"""One parameter update: its optimiser, what a resumed run needs back of it, and its capture as a CUDA graph."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from interp_tasks.training.config import TrainConfig
from tasks.base import Batch, Task
from tasks.seeds_and_devices import move_to_device

RANDOM = "random/torch"
#: What :meth:`Updater.apply` calls with the stage ("raw", "filtered") and the gradients of that stage.
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

    def apply(self, watch: GradientWatcher | None = None) -> None:
        """Makes an update at the rate that is set, from the gradients in ``.grad``, and clears them."""
        if watch:
            watch("raw", self._gradients())
        if self.config.grokfast is not None:
            self.filter_gradients(self.config.grokfast)
            if watch:
                watch("filtered", self._gradients())
        if self.config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def filter_gradients(self, kind: str) -> None:
        for name, gradient in self._gradients().items():
            FILTERS[kind](self.memory[name], gradient, self.config)

    def state_tensors(self) -> dict[str, Tensor]:
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

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts back what :meth:`state_tensors` gave."""
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

    def _gradients(self) -> dict[str, Tensor]:
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


#: From an update without arguments to one that repeats its operations on the same memory.
Capture = Callable[[Callable[[], None]], Callable[[], None]]
#: Updates before the capture: the optimiser's state and the libraries' workspaces are made in them.
WARM_UP = 3
#: Torch captures one graph at a time in a process.
_CAPTURING = threading.Lock()


def why_not_captured(device: str, task: Task, model: Any, config: TrainConfig, forward: str) -> str | None:
    """Returns the reason for which updates are not captured, or ``None``.

    Args:
        forward: the kind of the forward pass.
    """
    checks = {
        "not on a CUDA device": torch.device(device).type != "cuda",
        f"task {task.name!r} does not declare its loss capturable": not is_capturable(task),
        "the model's own forward": forward == "hooked",
        "attention of another model": forward == "taught",
        "hooks on parameters": any(has_uncapturable_hooks(parameter) for parameter in model.parameters()),
        "a window of gradients": config.grokfast == "ma",
        "optimizer sgd": config.optimizer == "sgd",
    }
    return next((reason for reason, present in checks.items() if present), None)


def is_capturable(task: Task) -> bool:
    """Returns whether a task's own class says so: one that is derived from it may have changed what the loss does."""
    return bool(vars(type(task)).get("capturable", False))


def has_uncapturable_hooks(parameter: Tensor) -> bool:
    """Returns whether a parameter has hooks on its gradient that are not known to do the same in every update."""
    hooks = [
        *(parameter._backward_hooks or {}).values(),
        *(getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values(),
    ]
    return not all(getattr(hook, "capturable", False) for hook in hooks)


def capture_cuda_graph(update: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Returns the replay of an update on one device, whose operations are recorded and not run."""
    graph = torch.cuda.CUDAGraph()
    with _CAPTURING, torch.cuda.device(device):
        # Torch's own stream for captures is one of the first device that it was used on. Another thread may use
        # the device meanwhile.
        stream = torch.cuda.Stream(device)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            update()
    return graph.replay


class CapturedUpdate:
    """Makes updates by ``compute`` at first, then by replaying what it did, for every shape of inputs by itself.

    Args:
        compute: an update from all tensors that differ between updates, by name.
        parameters: that it changes. A replay writes to the memory that they had.
        capture: how; ``None``: as CUDA graphs.
    """

    def __init__(
        self,
        compute: Callable[[Mapping[str, Tensor]], None],
        parameters: Mapping[str, Tensor],
        device: str | torch.device,
        capture: Capture | None = None,
    ) -> None:
        self.compute, self.parameters, self.device = compute, parameters, torch.device(device)
        self.capture = capture or partial(capture_cuda_graph, device=self.device)
        #: By the shapes of the inputs: the memory that a replay reads them from, and the replay.
        self.captured: dict[tuple[object, ...], tuple[Mapping[str, Tensor], Callable[[], None]]] = {}
        self.seen: dict[tuple[object, ...], int] = {}
        self.places: list[tuple[int, bool]] = []
        self.failed = False

    def __call__(self, inputs: Mapping[str, Tensor]) -> None:
        places = [(each.data_ptr(), each.requires_grad) for each in self.parameters.values()]
        if places != self.places:
            self.forget()
            self.places = places
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())
        if shapes not in self.captured:
            self.seen[shapes] = self.seen.get(shapes, 0) + 1
            if self.failed or self.seen[shapes] <= WARM_UP or not self._record(shapes, inputs):
                self.compute(inputs)
                return
        kept, replay = self.captured[shapes]
        for name, tensor in inputs.items():
            kept[name].copy_(move_to_device(tensor, kept[name].device))
        replay()

    def forget(self) -> None:
        """Frees what was captured; it is captured anew where it is needed."""
        self.captured.clear()
        self.seen.clear()

    def _record(self, shapes: tuple[object, ...], inputs: Mapping[str, Tensor]) -> bool:
        """Captures an update, and returns whether that was possible."""
        kept = {name: tensor.to(self.device, copy=True) for name, tensor in inputs.items()}
        # Into a gradient that is there, the captured backward pass would add.
        self._drop_gradients()
        try:
            self.captured[shapes] = kept, self.capture(lambda: self.compute(kept))
        except RuntimeError as error:
            self._drop_gradients()
            self.failed = True
            said = " ".join(str(error).split())[:200]
            warnings.warn(f"updates are not recorded as a CUDA graph, and slower: {said}", stacklevel=2)
        return not self.failed

    def _drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None


def flatten_inputs(batch: Batch, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a batch and the masks of dropout by names that :func:`batch_and_masks` undoes."""
    inputs = {"tokens": batch.tokens, "targets": batch.targets}
    inputs |= {f"extras/{name}": tensor for name, tensor in batch.extras.items()}
    return inputs | {f"masks/{place}": mask for place, mask in masks.items()}


def batch_and_masks(inputs: Mapping[str, Tensor]) -> tuple[Batch, dict[str, Tensor]]:
    """Returns the batch and the masks that :func:`flatten_inputs` was given."""

    def part(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): each for name, each in inputs.items() if name.startswith(prefix)}

    return Batch(inputs["tokens"], inputs["targets"], part("extras/")), part("masks/")
