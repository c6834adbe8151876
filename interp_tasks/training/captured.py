"""Captures an update as a CUDA graph, which is launched as one operation instead of some hundreds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from interp_tasks.training.dropout import DrawnMasks, Dropout
from tasks.base import Batch, Task

if TYPE_CHECKING:
    from interp_tasks.training.config import TrainConfig

#: An update on a batch, with this step's dropout.
Compute = Callable[[Batch, Dropout | None], None]
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
    """Makes updates by ``compute`` at first, then by replaying what it did, for every shape of batch by itself.

    Args:
        layers: of the model, and whether they are attention alone: where dropout masks are applied.
        capture: how; another in tests, where there is no CUDA device.
    """

    def __init__(
        self, compute: Compute, layers: int, attn_only: bool, d_model: int, capture: Capture = cuda_graph
    ) -> None:
        self.compute, self.capture = compute, capture
        self.layers, self.attn_only, self.d_model = layers, attn_only, d_model
        self.captured: dict[tuple[object, ...], Captured] = {}
        self.seen: dict[tuple[object, ...], int] = {}

    def __call__(self, batch: Batch, dropout: Dropout | None) -> None:
        inputs = self._inputs(batch, dropout)
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())
        if shapes not in self.captured:
            self.seen[shapes] = self.seen.get(shapes, 0) + 1
            if self.seen[shapes] <= WARM_UP:
                self.compute(batch, dropout)
                return
            self.captured[shapes] = self._capture(batch, dropout, inputs)
        self.captured[shapes](inputs)

    def _inputs(self, batch: Batch, dropout: Dropout | None) -> dict[str, Tensor]:
        """Returns all tensors that differ between updates, by name."""
        inputs = {"tokens": batch.tokens, "targets": batch.targets}
        inputs |= {f"extras/{name}": tensor for name, tensor in batch.extras.items()}
        if dropout is not None:
            drawn = dropout.drawn_for(len(batch), self.layers, self.attn_only, self.d_model)
            inputs |= {f"masks/{place}": mask for place, mask in drawn.items()}
        return inputs

    def _capture(self, batch: Batch, dropout: Dropout | None, inputs: Mapping[str, Tensor]) -> Captured:
        kept = {name: tensor.to(batch.tokens.device, copy=True) for name, tensor in inputs.items()}

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): each for name, each in kept.items() if name.startswith(prefix)}

        same_batch = Batch(kept["tokens"], kept["targets"], part("extras/"))
        same_dropout = dropout and DrawnMasks(**vars(dropout), drawn=part("masks/"))
        return Captured(kept, self.capture(lambda: self.compute(same_batch, same_dropout)))


@dataclass
class Captured:
    """One captured update, and the memory that it reads its inputs from."""

    inputs: Mapping[str, Tensor]
    replay: Callable[[], None]

    def __call__(self, inputs: Mapping[str, Tensor]) -> None:
        for name, tensor in inputs.items():
            source = tensor.pin_memory() if self._crosses(name, tensor) else tensor
            self.inputs[name].copy_(source, non_blocking=True)
        self.replay()

    def _crosses(self, name: str, tensor: Tensor) -> bool:
        return self.inputs[name].is_cuda and not tensor.is_cuda
