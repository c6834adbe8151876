"""Random low-rank matrices with hidden entries, rounded to a grid of values with a token each.

Source of every default: Gopalani, Lubana, Hu 2024 (arXiv 2410.22244) and its workshop form; the core model's
data is 7×7, rank 2, 30% hidden, value grid [-10, 10] in steps of 0.01 (section 2 and appendix).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import Tensor

from tasks.base import Batch, GridAxis, Split, Task, check_sample_size
from tasks.errors import TaskError
from tasks.seeds_and_device_tensors import derive_seed, generator

MASK_ID = 0


def sum_count_by_mask(
    values: Tensor, hidden: Bool[Tensor, "batch entry"]
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns the (sum, count) pairs of a number of each entry, over the hidden and over the observed entries.

    The papers pool entries over the batch, and a mask may hide nothing (0.33% at 4×4) or everything.
    """
    observed = ~hidden
    return (
        (values.masked_fill(observed, 0).sum(1), hidden.sum(1)),
        (values.masked_fill(hidden, 0).sum(1), observed.sum(1)),
    )


class MatrixTask(Task):
    """The base of tasks about matrices: their distribution, the mask, and the tokens of their values.

    Attributes:
        n, m: rows and columns (``m = None``: square).
        rank: r. With ``law = "factors"`` X = U Vᵀ, and the entries of U (n×r) and V (m×r) are drawn;
            with ``"entries"`` those of X are (almost surely of full rank; ``rank`` is then unused).
        distribution, scale: uniform on [-scale, scale], Gaussian of s.d. scale, Laplace of diversity scale.
        p_mask: probability that an entry is hidden, independently of the others.
        mask: rows of ``.`` (observed) and ``#`` (hidden) for one fixed mask instead of random ones.
        grid_max, grid_step: values are rounded (half to even) to multiples of grid_step, up to ±grid_max
            (itself such a multiple); the rounded matrix is both the source of the tokens and the target, so
            copying can be exact.
        off_grid: what to do with values beyond ±grid_max: ``"clamp"`` them or ``"refuse"`` the sample.
    """

    n: int = Field(7, ge=1)
    m: int | None = Field(None, ge=1)
    rank: int = Field(2, ge=1)
    law: Literal["factors", "entries"] = "factors"
    distribution: Literal["uniform", "gaussian", "laplace"] = "uniform"
    # Products of larger ones are beyond float32.
    scale: float = Field(1.0, gt=0, le=1e15)
    p_mask: float = Field(0.3, ge=0, le=1)
    mask: tuple[str, ...] | None = None
    grid_max: float = Field(10.0, gt=0)
    grid_step: float = Field(0.01, gt=0)
    off_grid: Literal["clamp", "refuse"] = "clamp"

    @model_validator(mode="after")
    def _check_rank_grid_and_mask(self) -> MatrixTask:
        """Refuses a rank, a grid of values or a mask that the matrix cannot have."""
        if self.rank > min(self.n, self.columns):
            raise ValueError(f"rank {self.rank} exceeds the sides of a {self.n}×{self.columns} matrix")
        if self.grid_step > self.grid_max:
            raise ValueError(f"grid_step {self.grid_step} is larger than grid_max {self.grid_max}")
        if abs(self.grid_max / self.grid_step - self.n_positive_values) > 1e-6:
            nearest = self.n_positive_values * self.grid_step
            raise ValueError(
                f"grid_max {self.grid_max:g} is not a multiple of grid_step {self.grid_step:g}; "
                f"{nearest:g} is the nearest"
            )
        if self.mask is not None:
            sizes_fit = len(self.mask) == self.n and {len(row) for row in self.mask} == {self.columns}
            if not sizes_fit or set("".join(self.mask)) - set(".#"):
                raise ValueError(f"mask must be {self.n} rows of {self.columns} characters, each '.' or '#'")
        return self

    @property
    def columns(self) -> int:
        return self.n if self.m is None else self.m

    @property
    def n_positive_values(self) -> int:
        """Number of grid values above zero."""
        return round(self.grid_max / self.grid_step)

    @property
    def entry_variance(self) -> float:
        """Var X_ij, whose mean is 0: r·s⁴ for factors of variance s², s² for entries; before rounding and clamping.

        For uniform factors r·scale⁴/9.
        """
        unit = {"uniform": 1 / 3, "gaussian": 1.0, "laplace": 2.0}[self.distribution]
        variance = unit * self.scale**2
        return self.rank * variance**2 if self.law == "factors" else variance

    def sample(self, n: int | None, seed: int = 0, split: Split = "test") -> Batch:
        """Samples ``n`` fresh matrices. Extras: ``hidden [batch entry]``."""
        if n is None:
            raise TaskError(f"task {self.name!r} draws fresh matrices: say how many (it has no whole split)")
        check_sample_size(n)
        random_stream = generator(seed, self.name, split)
        if self.law == "factors":
            left = self._draw((n, self.n, self.rank), random_stream)
            right = self._draw((n, self.columns, self.rank), random_stream)
            matrices = left @ right.mT
        else:
            matrices = self._draw((n, self.n, self.columns), random_stream)
        if self.mask is None:
            hidden = torch.rand(n, self.n * self.columns, generator=random_stream) < self.p_mask
        else:
            fixed_mask = torch.tensor([character == "#" for row in self.mask for character in row])
            hidden = fixed_mask.expand(n, -1)
        return self.batch(matrices.flatten(1), hidden)

    @abstractmethod
    def batch(self, values: Float[Tensor, "batch entry"], hidden: Bool[Tensor, "batch entry"]) -> Batch:
        """Makes a batch from matrices of your own (row-major) and a mask: values are rounded to the grid first."""

    def _flattened_full_matrices(self, batch: Batch) -> Float[Tensor, "batch entry"]:
        """Returns the full matrices of a batch, row-major."""
        return batch.targets

    def patch_sources(self, batch: Batch) -> dict[str, Batch]:
        """Returns named examples to patch from, row by row: ``negated`` is −X under the same mask.

        Gopalani, Lubana, Hu 2024, section 3.2.2 and appendix F.
        """
        return {"negated": self.batch(-self._flattened_full_matrices(batch), batch.extras["hidden"])}

    def attention_moves(self, batch: Batch, seed: int) -> dict[str, Batch]:
        """Returns the examples, row by row, under another ``mask``, and with other ``values`` under the same."""
        hidden = batch.extras["hidden"]
        random_stream = generator(seed, self.name, "another mask")
        mask = torch.rand(hidden.shape, generator=random_stream).to(hidden.device) < self.p_mask
        others = self.sample(len(batch), derive_seed(seed, self.name, "other matrices")).to(hidden.device)
        return {
            "mask": self.batch(self._flattened_full_matrices(batch), mask),
            "values": self.batch(self._flattened_full_matrices(others), hidden),
        }

    def encode(self, values: Float[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Returns the token ids of values: 1 + round(v / step) + round(max / step), in integers.

        Raises:
            TaskError: for values that round to beyond the grid, if ``off_grid`` is ``"refuse"``; for NaN.
        """
        if values.isnan().any():
            raise TaskError("matrix values must be numbers, got NaN")
        half = self.n_positive_values
        index = (values.double() / self.grid_step).round().clamp(-half - 1, half + 1).long()
        if self.off_grid == "refuse" and (index.abs() > half).any():
            worst = values.flatten()[values.abs().argmax()].item()
            raise TaskError(
                f"value {worst:.4g} lies off the grid ±{self.grid_max:g}: "
                "widen task.grid_max, lower task.scale, or set task.off_grid=clamp"
            )
        return index.clamp(-half, half) + half + 1

    def decode(self, ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Returns the values of token ids (float32); MASK has none and gives NaN."""
        values = ((ids - self.n_positive_values - 1).double() * self.grid_step).float()
        return values.masked_fill(ids == MASK_ID, float("nan"))

    def token_values(self) -> dict[int, float]:
        """Returns the grid values that an entry can have: |X| ≤ r·scale² for uniform factors, scale for uniform
        entries.

        Other ids never occur, so that without weight decay their embeddings stay as they were drawn.
        """
        largest = self.grid_max
        if self.distribution == "uniform":
            largest = self.rank * self.scale**2 if self.law == "factors" else self.scale
        half = self.n_positive_values
        most = min(half, round(largest / self.grid_step))
        ids = torch.arange(half + 1 - most, half + most + 2)
        return dict(zip(ids.tolist(), self.decode(ids).tolist(), strict=True))

    def grid_axes(self) -> tuple[GridAxis, ...]:
        """Returns rows and columns as axes: position m·i + j is entry (i, j)."""
        return GridAxis("row", tuple(range(self.n))), GridAxis("column", tuple(range(self.columns)))

    def _draw(self, shape: tuple[int, ...], random_stream: torch.Generator) -> Tensor:
        if self.distribution == "gaussian":
            return self.scale * torch.randn(shape, generator=random_stream)
        uniform = 2 * torch.rand(shape, generator=random_stream) - 1
        if self.distribution == "uniform":
            return self.scale * uniform
        # Laplace by the inverse of its distribution function. The draw can be exactly -1 (once in 2²⁴), where
        # that is infinite; the number next to it is not.
        return -self.scale * uniform.sign() * torch.log1p(-uniform.abs().clamp(max=1 - 2**-24))
