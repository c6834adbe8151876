"""Estimates what training will cost before its first step: parameters, FLOP, memory, disk and time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from interp_tasks.checkpoints.run_folder import KEPT_STATES
from interp_tasks.devices import check_device
from interp_tasks.training.captured import WARM_UP
from interp_tasks.training.config import TrainConfig
from interp_tasks.training.forward import FusedForward, HookedForward, why_not_fused
from interp_tasks.training.loop import Loop, whole_split
from interp_tasks.training.records import check_observed
from interp_tasks.training.trainer import model_settings, prepare_model, reproducible
from tasks.base import Batch, Split, Task
from tasks.settings import ModelSettings

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer

#: Bytes of a logged line, about: two metrics of two samples.
LOG_LINE = 250
#: Bytes of a checkpoint beside its tensors, about: meta.json, the header of the weights.
CHECKPOINT_EXTRA = 6000
#: Real steps behind a measured rate, after one that is not counted.
MEASURED_STEPS = 3


@dataclass(frozen=True)
class Cost:
    """The cost of one run.

    Attributes:
        parameters, trained: numbers in the model, and those of them that change.
        examples: in a step.
        forward: ``"fused"`` or ``"hooked"``: which of the trainer's two this is the cost of.
        step_flop: of the matrix products of an update, 2 per multiply-add, forward and backward. Element-wise work is
            left out: the optimiser, softmax, loss.
        run_flop: of all updates and of the metrics logged between them.
        weights_bytes, gradients_bytes, optimiser_bytes, filter_bytes: in memory.
        activations_bytes: what the forward pass keeps for the backward one, loss included.
        checkpoints: how many are stored.
        disk_bytes: of the finished run folder, about.
        gflop_per_second: the rate behind ``seconds``.
        measured: whether the rate was measured here, or given.
        seconds: of the run at that rate; writing is left out.
    """

    parameters: int
    trained: int
    examples: int
    steps: int
    forward: str
    step_flop: int
    run_flop: int
    weights_bytes: int
    gradients_bytes: int
    optimiser_bytes: int
    filter_bytes: int
    activations_bytes: int
    checkpoints: int
    disk_bytes: int
    gflop_per_second: float
    measured: bool
    seconds: float

    @property
    def memory_bytes(self) -> int:
        """Returns the bytes of all tensors that live at once, at the end of a forward pass."""
        state = self.weights_bytes + self.gradients_bytes + self.optimiser_bytes + self.filter_bytes
        return state + self.activations_bytes

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "memory_bytes": self.memory_bytes}


def cost(
    task: Task,
    *,
    settings: ModelSettings | Mapping[str, Any] | None = None,
    config: TrainConfig | None = None,
    gflop_per_second: float | None = None,
    device: str = "cpu",
) -> Cost:
    """Estimates what ``train(task, settings=settings, config=config)`` would take; nothing is written.

    FLOP and activations are counted on tensors that have shapes and no values, so this takes a moment however large
    the run.

    Args:
        gflop_per_second: a rate to reckon with. ``None``: that of four updates made here, on ``device``.

    Raises:
        UserError: for settings that cannot be, a source, activations or a device that are not there.
        TaskError: as ``train`` does.
    """
    if not isinstance(settings, ModelSettings):
        settings = model_settings(task, settings or {})
    config = config or TrainConfig()
    if gflop_per_second is None:
        check_device(device)
    model, _ = prepare_model(task, settings, config, "cpu")
    check_observed(config.observe, model)
    n = config.batch_size or len(whole_split(task))
    forward, step, kept = counted(model, task, without_values(task, config, "train", n))
    stored = config.checkpoint_steps(task.published_steps)
    logged = config.steps // config.log_every + 1 + sum(each % config.log_every > 0 for each in stored)
    run_flop = config.steps * step + logged * (forward + evaluation_flop(model, task, config))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = sum(parameter.nbytes for parameter in trained)
    moments, remembered = (copies * gradients for copies in config.state_copies)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    disk = len(stored) * (weights + CHECKPOINT_EXTRA) + logged * LOG_LINE
    rate = gflop_per_second or measured_rate(model, task, config, step, device)
    return Cost(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained=sum(parameter.numel() for parameter in trained),
        examples=n,
        steps=config.steps,
        forward=forward_of(model, task).kind,
        step_flop=step,
        run_flop=run_flop,
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimiser_bytes=moments,
        filter_bytes=remembered,
        activations_bytes=kept,
        checkpoints=len(stored),
        disk_bytes=disk + min(len(stored), KEPT_STATES) * (moments + remembered),
        gflop_per_second=rate,
        measured=gflop_per_second is None,
        seconds=run_flop / (1e9 * rate),
    )


def evaluation_flop(model: HookedTransformer, task: Task, config: TrainConfig) -> int:
    """Returns the FLOP of evaluating the validation sample; for a mixture of each of its parts."""
    total = 0
    for part in (task.parts() or {"": task}).values():
        n = len(part.sample(config.eval_samples, seed=0, split="validation"))
        total += counted(model, part, without_values(part, config, "validation", n))[0]
    return total


def forward_of(model: HookedTransformer, task: Task) -> FusedForward | HookedForward:
    """Returns the forward that the trainer will take, unless its check at the start finds the fused one wrong."""
    if why_not_fused(model):
        return HookedForward(model, task.read_positions)
    return FusedForward(model, task.read_positions)


def without_values(task: Task, config: TrainConfig, split: Split, n: int) -> Batch:
    """Returns a batch of ``n`` on the device ``meta``."""
    sample = task.sample(min(n, 2), seed=config.seed, split=split)

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty((n, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    extras = {name: empty(tensor) for name, tensor in sample.extras.items()}
    return Batch(empty(sample.tokens), empty(sample.targets), extras)


def counted(model: HookedTransformer, task: Task, batch: Batch) -> tuple[int, int, int]:
    """Returns the FLOP of a forward pass over a batch on the device ``meta``, of that and the backward pass, and the
    bytes that the first keeps for the second, parameters and inputs left out.
    """
    parameters = {
        name: nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }

    def storage(tensor: Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    known = {storage(tensor) for tensor in (*parameters.values(), batch.tokens, batch.targets)}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if storage(tensor) not in known:
            kept[storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    forward = forward_of(model, task)
    saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with FlopCounterMode(display=False) as counter, torch.device("meta"), saved:
        if isinstance(forward, FusedForward):
            forward.parameters = dict(parameters)
            output = forward(batch.tokens)
        else:
            tensors = {**{name: each.to("meta") for name, each in model.named_buffers()}, **parameters}
            whole: Tensor = torch.func.functional_call(model, tensors, (batch.tokens,))
            output = whole[:, list(task.read_positions)]
        passed = int(counter.get_total_flops())
        task.loss(output, batch).backward()
        return passed, int(counter.get_total_flops()), sum(kept.values())


def measured_rate(
    model: HookedTransformer, task: Task, config: TrainConfig, step_flop: int, device: str
) -> float:
    """Measures GFLOP per second of a few real updates of the model, in place; returns their median."""
    model.to(device, print_details=False)
    seconds = []
    with reproducible(config):
        loop = Loop(task, model, config, device, (), None)
        # Until it is captured, an update on a GPU takes longer.
        first = 1 if loop.captured is None else WARM_UP + 2
        for step in range(first + MEASURED_STEPS):
            start = time.perf_counter()
            loop.update(step)
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    return step_flop / 1e9 / sorted(seconds[first:])[MEASURED_STEPS // 2]
