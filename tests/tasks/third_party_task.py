"""A task from outside the package: which token of a sequence was the largest? Nothing else is needed."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from tasks import Batch, DropMetric, Metric, Split, Task, generator, register


@register("largest-token")
class LargestToken(Task):
    """Say at the last position which token id of the sequence is the largest.

    Attributes:
        length: positions.
        values: token ids 0 to values - 1.
    """

    presets = {
        "cpu": {"task": {"length": 4}, "model": {"d_model": 16}, "train": {"steps": 500, "batch_size": 64}}
    }
    drop_metric: ClassVar[DropMetric] = DropMetric("accuracy", "up")

    length: int = Field(5, ge=2)
    values: int = Field(8, ge=2)

    @property
    def sequence_length(self) -> int:
        return self.length

    @property
    def d_vocab(self) -> int:
        return self.values

    @property
    def read_positions(self) -> tuple[int, ...]:
        return (self.length - 1,)

    def sample(self, n: int | None, seed: int = 0, split: Split = "test") -> Batch:
        tokens = torch.randint(
            0, self.values, (n or 64, self.length), generator=generator(seed, self.name, split)
        )
        return Batch(tokens, tokens.amax(1))

    def loss(self, output: Float[Tensor, "batch _ d_out"], batch: Batch) -> Float[Tensor, ""]:
        return torch.nn.functional.cross_entropy(self.read(output)[:, 0], batch.targets)

    def metrics(self, output: Float[Tensor, "batch _ d_out"], batch: Batch) -> dict[str, Metric]:
        return {"accuracy": (self.read(output)[:, 0].argmax(-1) == batch.targets).float()}
