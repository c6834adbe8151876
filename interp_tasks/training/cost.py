"""Estimates what training will take before its first step: parameters, FLOP, memory, disk and time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from interp_tasks.checkpoints.run_writer import KEPT_STATES
from interp_tasks.errors import UserError
from interp_tasks.training.config import TrainConfig
from interp_tasks.training.fused_forward import FusedForward
from interp_tasks.training.observers_and_clock import check_observed
from interp_tasks.training.train import parse_model_settings, prepare_model
from interp_tasks.training.training_loop import whole_train_split
from tasks.base import Batch, Split, Task
from tasks.model_settings import ModelSettings

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer

#: Bytes of a logged line, about: two metrics of two samples.
LOG_LINE = 250
#: Bytes of a checkpoint beside its tensors, about: meta.json, the header of the weights.
CHECKPOINT_EXTRA = 6000


@dataclass(frozen=True)
class Cost:
    """The cost of one run.

    Attributes:
        parameters, trained: numbers in the model, and those of them that change.
        examples: in a step.
        step_flop: of the matrix products of an update, 2 per multiply-add, forward and backward. Element-wise work is
            left out: the optimiser, softmax, loss.
        run_flop: of all updates and of the metrics logged between them.
        weights_bytes, gradients_bytes, state_bytes: in memory; the state is the optimiser's and the filter's.
        activations_bytes: what the forward pass keeps for the backward one, loss included.
        memory_bytes: all of these.
        checkpoints: how many are stored.
        disk_bytes: of the finished run folder, about.
        seconds: of the run at the rate given; writing is left out.
    """

    parameters: int
    trained: int
    examples: int
    steps: int
    step_flop: int
    run_flop: int
    weights_bytes: int
    gradients_bytes: int
    state_bytes: int
    activations_bytes: int
    memory_bytes: int
    checkpoints: int
    disk_bytes: int
    seconds: float | None


def cost(
    task: Task,
    *,
    settings: ModelSettings | Mapping[str, Any] | None = None,
    config: TrainConfig | None = None,
    gflop_per_second: float | None = None,
) -> Cost:
    """Estimates what ``train(task, settings=settings, config=config)`` would take; nothing is written.

    FLOP and activations are counted on tensors that have shapes and no values, so this takes a moment however large
    the run.

    Args:
        gflop_per_second: a rate to reckon with; ``None``: no time is given.

    Raises:
        UserError: for settings that cannot be, a source or activations that are not there, a model that has no fused
            forward.
        TaskError: as ``train`` does.
    """
    if not isinstance(settings, ModelSettings):
        settings = parse_model_settings(task, settings or {})
    config = config or TrainConfig()
    model, _ = prepare_model(task, settings, config, "cpu")
    check_observed(config.observe, model)
    n = config.batch_size or len(whole_train_split(task))
    forward, step, kept = flop_and_bytes(model, task, make_meta_batch(task, config, "train", n))
    stored = config.checkpoint_steps(task.published_steps)
    logged = config.steps // config.log_every + 1 + sum(each % config.log_every > 0 for each in stored)
    evaluation = 0
    for part in (task.parts() or {"": task}).values():
        examples = len(part.sample(config.eval_samples, seed=0, split="validation"))
        evaluation += flop_and_bytes(model, part, make_meta_batch(part, config, "validation", examples))[0]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = sum(parameter.nbytes for parameter in trained)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    state = config.state_copies * gradients
    disk = len(stored) * (weights + CHECKPOINT_EXTRA) + logged * LOG_LINE
    run_flop = config.steps * step + logged * (forward + evaluation)
    return Cost(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained=sum(parameter.numel() for parameter in trained),
        examples=n,
        steps=config.steps,
        step_flop=step,
        run_flop=run_flop,
        weights_bytes=weights,
        gradients_bytes=gradients,
        state_bytes=state,
        activations_bytes=kept,
        memory_bytes=weights + gradients + state + kept,
        checkpoints=len(stored),
        disk_bytes=disk + min(len(stored), KEPT_STATES) * state,
        seconds=run_flop / (1e9 * gflop_per_second) if gflop_per_second else None,
    )


def make_meta_batch(task: Task, config: TrainConfig, split: Split, n: int) -> Batch:
    """Returns a batch of ``n`` on the device ``meta``."""
    sample = task.sample(min(n, 2), seed=config.seed, split=split)

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty((n, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    extras = {name: empty(tensor) for name, tensor in sample.extras.items()}
    return Batch(empty(sample.tokens), empty(sample.targets), extras)


def flop_and_bytes(model: HookedTransformer, task: Task, batch: Batch) -> tuple[int, int, int]:
    """Returns the FLOP of a forward pass over a batch on the device ``meta``, of that and the backward pass, and the
    bytes that the first keeps for the second, parameters and inputs left out.
    """

    def storage_id(tensor: Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    kept: dict[int, int] = {}

    def note_saved_bytes(tensor: Tensor) -> Tensor:
        if storage_id(tensor) not in known:
            kept[storage_id(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    try:
        forward = FusedForward(model, task.read_positions)
    except ValueError as error:
        raise UserError(f"what this model takes cannot be counted: {error}") from None
    forward.parameters = {
        name: nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
    known = {storage_id(tensor) for tensor in (*forward.parameters.values(), batch.tokens, batch.targets)}
    saved = torch.autograd.graph.saved_tensors_hooks(note_saved_bytes, lambda tensor: tensor)
    with FlopCounterMode(display=False) as counter, torch.device("meta"), saved:
        output = forward(batch.tokens)
        passed = int(counter.get_total_flops())
        task.loss(output, batch).backward()
        return passed, int(counter.get_total_flops()), sum(kept.values())
