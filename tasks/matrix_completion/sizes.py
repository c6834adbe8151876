"""Matrices of several sizes in one training run, each batch of one size (Gopalani, Lubana, Hu 2024, appendix I)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field, model_validator

from tasks.base import Batch, Split, Task
from tasks.catalog import built_in_presets
from tasks.matrix_completion.task import MatrixCompletion
from tasks.registry import register
from tasks.seeds import generator


@register("matrix-completion-sizes")
class MatrixCompletionSizes(MatrixCompletion):
    """Square matrices whose size is drawn anew for every batch.

    A matrix is flattened row by row, so size n uses rows 0 to n² - 1 of the position table: entry (i, j) has row
    n·i + j, which differs between sizes, and the rows of a small size are all used by the larger ones too.

    Attributes:
        sizes: the sides to draw from, all equally likely; ``n`` is the largest of them.
    """

    presets = built_in_presets("matrix-completion-sizes")
    published_marks: ClassVar[Mapping[str, int]] = {}
    capturable: ClassVar[bool] = True

    n: int = Field(9, ge=1)
    rank: int = Field(1, ge=1)
    sizes: tuple[int, ...] = Field((5, 7, 9), min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _n_is_the_largest(cls, values: Any) -> Any:
        sizes = values.get("sizes") if isinstance(values, dict) else None
        if sizes and "n" not in values and all(isinstance(size, int) for size in sizes):
            return {**values, "n": max(sizes)}
        return values

    @model_validator(mode="after")
    def _sizes_are_all_there_is(self) -> MatrixCompletionSizes:
        if len(set(self.sizes)) < len(self.sizes):
            raise ValueError(f"sizes {', '.join(map(str, self.sizes))} name one twice")
        if self.n != max(self.sizes):
            raise ValueError(f"n = {self.n} is not the largest of the sizes: leave it out")
        if self.m is not None or self.mask is not None:
            raise ValueError("a mixture of sizes has neither m nor mask")
        if self.rank > min(self.sizes):
            raise ValueError(
                f"rank {self.rank} exceeds the sides of a {min(self.sizes)}×{min(self.sizes)} matrix"
            )
        return self

    def parts(self) -> dict[str, Task]:
        """Returns a task for each size: ``n=5``, ..."""
        shared = self.model_dump(exclude={"n", "m", "mask", "sizes"})
        return {f"n={size}": MatrixCompletion(n=size, **shared) for size in self.sizes}

    def sample(self, n: int | None, seed: int = 0, split: Split = "test") -> Batch:
        """Samples ``n`` fresh matrices of one size, which depends on the seed."""
        index = torch.randint(len(self.sizes), (), generator=generator(seed, self.name, split, "size"))
        return list(self.parts().values())[int(index)].sample(n, seed, split)
