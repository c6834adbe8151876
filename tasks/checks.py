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
        check(not outside, f"no position {outside and outside[0]}: sequence_length is {task.sequence_length}")
    before = torch.get_rng_state()
    with method_of(task, "sample"):
        batch: Any = task.sample(n, seed=seed, split=split)
        is_batch = isinstance(batch, Batch) and batch.tokens.dtype == torch.long and batch.tokens.ndim == 2
        check(is_batch, "give a tasks.Batch whose tokens are whole numbers [batch pos]")
        is_own = torch.equal(before, torch.get_rng_state())
        check(is_own, "it draws from torch's global generator: draw from tasks.generator(seed, label)")
        for name, values in {"targets": batch.targets, **batch.extras}.items():
            same = len(values) == len(batch)
            check(same, f"{len(batch)} rows of tokens and {len(values)} of {name}")
        check(1 <= len(batch) <= (n or len(batch)), f"asked for {n} examples, it gives {len(batch)}")
        length, (low, high) = batch.tokens.shape[1], (int(batch.tokens.min()), int(batch.tokens.max()))
        fits = length <= task.sequence_length
        check(fits, f"inputs of {length} positions, sequence_length is {task.sequence_length}")
        check(low >= 0 and high < task.d_vocab, f"token ids from {low} to {high}, d_vocab is {task.d_vocab}")
    return batch


def check_outputs(task: Task, output: Tensor, batch: Batch) -> None:
    """Refuses a loss that is no scalar, and metrics that are not one value for each example.

    Args:
        output: a model's, of the batch, at the positions that are read.

    Raises:
        TaskError: in one line.
    """

    def shape(value: Any) -> str:
        return f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"

    with method_of(task, "loss"):
        loss: Any = task.loss(output, batch)
        is_scalar = isinstance(loss, Tensor) and not loss.ndim and loss.is_floating_point()
        check(is_scalar, f"give a scalar, not of {shape(loss)}")
    with method_of(task, "metrics"):
        metrics: Any = task.metrics(output, batch)
        check(isinstance(metrics, dict) and bool(metrics), "give a dict of values by name")
        for name, metric in metrics.items():
            for part in metric if isinstance(metric, tuple) and len(metric) == 2 else (metric,):
                fits = isinstance(part, Tensor) and part.shape == (len(batch),)
                check(fits, f"{name} is one value for each of {len(batch)} examples, not of {shape(part)}")


def check(holds: bool, complaint: str) -> None:
    if not holds:
        raise TaskError(complaint)


@contextlib.contextmanager
def method_of(task: Task, name: str) -> Iterator[None]:
    """Names the method in whatever goes wrong in it."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, TaskError) else f"{type(error).__name__}: "
        reason = next(iter(str(error).splitlines()), "")
        raise TaskError(f"task {task.name!r}: {name}: {kind}{reason}") from error
