"""Captures an update as a CUDA graph, which is launched as one operation instead of some hundreds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tasks.base import Batch, Task
from tasks.devices import moved

if TYPE_CHECKING:
    from interp_tasks.training.config import TrainConfig

#: From an update without arguments to one that repeats its operations on the same memory.
Capture = Callable[[Callable[[], None]], Callable[[], None]]
#: Updates before the capture: the optimiser's state and the libraries' workspaces are made in them.
WARM_UP = 3


def why_not_captured(device: str, task: Task, config: TrainConfig, forward: str) -> str | None:
    """Returns the reason for which updates are not captured, or ``None``.

    Args:
        forward: the kind of the forward pass.
    """
    checks = {
        "not on a CUDA device": torch.device(device).type != "cuda",
        f"task {task.name!r} does not declare its loss capturable": not is_capturable(task),
        "several processes": forward == "shared",
        "the model's own forward": forward != "fused",
        "a window of gradients": config.grokfast == "ma",
        "optimizer sgd": config.optimizer == "sgd",
    }
    return next((reason for reason, present in checks.items() if present), None)


def is_capturable(task: Task) -> bool:
    """Returns whether the class that defines a task's loss, and no class above it, declares the loss capturable."""
    owner = next(each for each in type(task).__mro__ if "loss" in vars(each))
    return bool(vars(owner).get("capturable", False))


def cuda_graph(update: Callable[[], None]) -> Callable[[], None]:
    """Returns the replay of an update, whose operations are recorded and not run."""
    graph = torch.cuda.CUDAGraph()
    # Another thread may use the device meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        update()
    return graph.replay


class CapturedUpdate:
    """Makes updates by ``compute`` at first, then by replaying what it did, for every shape of inputs by itself.

    Args:
        compute: an update from all tensors that differ between updates, by name.
        capture: how; another in tests, where there is no CUDA device.
    """

    def __init__(
        self, compute: Callable[[Mapping[str, Tensor]], None], capture: Capture = cuda_graph
    ) -> None:
        self.compute, self.capture = compute, capture
        self.captured: dict[tuple[object, ...], Captured] = {}
        self.seen: dict[tuple[object, ...], int] = {}

    def __call__(self, inputs: Mapping[str, Tensor], device: torch.device) -> None:
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())
        if shapes not in self.captured:
            self.seen[shapes] = self.seen.get(shapes, 0) + 1
            if self.seen[shapes] <= WARM_UP:
                self.compute(inputs)
                return
            kept = {name: tensor.to(device, copy=True) for name, tensor in inputs.items()}
            self.captured[shapes] = Captured(kept, self.capture(lambda: self.compute(kept)))
        self.captured[shapes](inputs)


@dataclass
class Captured:
    """One captured update, and the memory that it reads its inputs from."""

    inputs: Mapping[str, Tensor]
    replay: Callable[[], None]

    def __call__(self, inputs: Mapping[str, Tensor]) -> None:
        for name, tensor in inputs.items():
            self.inputs[name].copy_(moved(tensor, self.inputs[name].device))
        self.replay()


def packed(batch: Batch, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a batch and the masks of dropout by names that :func:`unpacked` undoes."""
    inputs = {"tokens": batch.tokens, "targets": batch.targets}
    inputs |= {f"extras/{name}": tensor for name, tensor in batch.extras.items()}
    return inputs | {f"masks/{place}": mask for place, mask in masks.items()}


def unpacked(inputs: Mapping[str, Tensor]) -> tuple[Batch, dict[str, Tensor]]:
    """Returns the batch and the masks that :func:`packed` was given."""

    def part(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): each for name, each in inputs.items() if name.startswith(prefix)}

    return Batch(inputs["tokens"], inputs["targets"], part("extras/")), part("masks/")
