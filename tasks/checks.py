"""Checks a task of anyone's own on its first batch: what is wrong is one line that names the method."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tasks.base import Batch, Split, Task
from tasks.errors import TaskError


def checked_sample(task: Task, n: int | None, seed: int, split: Split) -> Batch:
    """Returns examples of a task, checked.

    Raises:
        TaskError: for a batch that is none, tokens outside the vocabulary, positions outside the sequence, another
            number of examples, or draws from torch's global generator.
    """
    with method_of(task, "read_positions"):
        outside = [at for at in task.read_positions if not 0 <= at < task.sequence_length]
        if outside:
            raise TaskError(f"no position {outside[0]}: sequence_length is {task.sequence_length}")
    before = torch.get_rng_state()
    with method_of(task, "sample"):
        batch: Any = task.sample(n, seed=seed, split=split)
        if not isinstance(batch, Batch) or batch.tokens.dtype != torch.long or batch.tokens.ndim != 2:
            raise TaskError("give a tasks.Batch whose tokens are whole numbers [batch pos]")
        if not torch.equal(before, torch.get_rng_state()):
            raise TaskError("it draws from torch's global generator: draw from tasks.generator(seed, label)")
        lengths = {"targets": len(batch.targets), **{name: len(each) for name, each in batch.extras.items()}}
        for name, length in lengths.items():
            if length != len(batch):
                raise TaskError(f"{len(batch)} rows of tokens and {length} of {name}")
        if not 1 <= len(batch) <= (n or len(batch)):
            raise TaskError(f"asked for {n} examples, it gives {len(batch)}")
        if batch.tokens.shape[1] > task.sequence_length:
            raise TaskError(
                f"inputs of {batch.tokens.shape[1]} positions, sequence_length is {task.sequence_length}"
            )
        if batch.tokens.min() < 0 or batch.tokens.max() >= task.d_vocab:
            low, high = int(batch.tokens.min()), int(batch.tokens.max())
            raise TaskError(f"token ids from {low} to {high}, d_vocab is {task.d_vocab}")
    return batch


def check_outputs(task: Task, output: Tensor, batch: Batch) -> None:
    """Refuses a loss that is no scalar, and metrics that are not one value for each example.

    Args:
        output: a model's, of the batch, at the positions that are read.

    Raises:
        TaskError: in one line.
    """
    with method_of(task, "loss"):
        loss: Any = task.loss(output, batch)
        if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            raise TaskError(f"give a scalar, not {shape(loss)}")
    with method_of(task, "metrics"):
        metrics: Any = task.metrics(output, batch)
        if not isinstance(metrics, dict) or not metrics:
            raise TaskError("give a dict of values by name")
        for name, metric in metrics.items():
            parts = metric if isinstance(metric, tuple) and len(metric) == 2 else (metric,)
            for part in parts:
                if not isinstance(part, Tensor) or part.shape != (len(batch),):
                    raise TaskError(
                        f"{name} is one value for each of {len(batch)} examples, not {shape(part)}"
                    )


def shape(value: Any) -> str:
    return f"of shape {list(value.shape)}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"


@contextlib.contextmanager
def method_of(task: Task, name: str) -> Iterator[None]:
    """Names the method in whatever goes wrong in it."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, TaskError) else f"{type(error).__name__}: "
        reason = next(iter(str(error).splitlines()), "")
        raise TaskError(f"task {task.name!r}: {name}: {kind}{reason}") from error
