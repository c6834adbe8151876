"""The capture of a run's updates as CUDA graphs: whether it is possible, the capture, the replay."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from interp_tasks.training.config import TrainConfig
from tasks.base import Batch, Task
from tasks.seeds_and_device_tensors import move_to_device

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
            if self.failed or self.seen[shapes] <= WARM_UP or not self._try_to_capture(shapes, inputs):
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

    def _try_to_capture(self, shapes: tuple[object, ...], inputs: Mapping[str, Tensor]) -> bool:
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
    """Returns the tensors of a batch and the masks of dropout by names that :func:`unflatten_inputs` undoes."""
    inputs = {"tokens": batch.tokens, "targets": batch.targets}
    inputs |= {f"extras/{name}": tensor for name, tensor in batch.extras.items()}
    return inputs | {f"masks/{place}": mask for place, mask in masks.items()}


def unflatten_inputs(inputs: Mapping[str, Tensor]) -> tuple[Batch, dict[str, Tensor]]:
    """Returns the batch and the masks that :func:`flatten_inputs` was given."""

    def under_prefix(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): each for name, each in inputs.items() if name.startswith(prefix)}

    return Batch(inputs["tokens"], inputs["targets"], under_prefix("extras/")), under_prefix("masks/")
