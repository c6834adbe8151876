"""Fill in the hidden entries of a low-rank matrix, given as a sequence of value tokens.

Source of every default: Gopalani, Lubana, Hu 2024 (arXiv 2410.22244) and its workshop form; the core model's
data is 7×7, rank 2, 30% hidden, value grid [-10, 10] in steps of 0.01 (section 2 and appendix).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import Tensor

from tasks.base import (
    Batch,
    DropMetric,
    GridAxis,
    Metric,
    ProbeTargets,
    Split,
    Task,
    TaskError,
    check_sample_size,
    derive_seed,
    generator,
)
from tasks.catalog import built_in_presets
from tasks.matrix_completion.probing import matrix_targets
from tasks.matrix_completion.templates import attention_templates
from tasks.registry import register
from tasks.settings import ModelSettings

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer

MASK_ID = 0


class MatrixModelSettings(ModelSettings):
    """Defaults are the 4-layer, 8-head model of the paper, but pre-LN with a final LayerNorm.

    Attributes:
        mask_embedding: ``"zero"`` keeps the MASK row of ``W_E`` at zero for all of training, as in the
            published model (its id is the padding id); ``"learned"`` trains it like any other.
    """

    n_layers: int = Field(4, ge=1)
    n_heads: int = Field(8, ge=1)
    d_model: int = Field(768, ge=1)
    attention: Literal["bidirectional", "causal"] = "bidirectional"
    mask_embedding: Literal["learned", "zero"] = "zero"


@register("matrix-completion")
class MatrixCompletion(Task):
    """Predict every entry of a matrix from its observed ones; position of entry (i, j) is m·i + j.

    Attributes:
        n, m: rows and columns (``m = None``: square).
        rank: r. With ``law = "factors"`` X = U Vᵀ, and the entries of U (n×r) and V (m×r) are drawn;
            with ``"entries"`` those of X are (almost surely of full rank; ``rank`` is then unused).
        distribution, scale: uniform on [-scale, scale], Gaussian of s.d. scale, Laplace of diversity scale.
        p_mask: probability that an entry is hidden, each on its own.
        mask: rows of ``.`` (observed) and ``#`` (hidden) for one fixed mask instead of random ones.
        grid_max, grid_step: values are rounded (half to even) to multiples of grid_step, up to ±grid_max
            (itself such a multiple); the rounded matrix is both the source of the tokens and the target, so
            copying can be exact.
        off_grid: what to do with values beyond ±grid_max: ``"clamp"`` them or ``"refuse"`` the sample.
    """

    Model: ClassVar[type[ModelSettings]] = MatrixModelSettings
    presets = built_in_presets("matrix-completion")
    published_steps: ClassVar[tuple[int, ...]] = (1000, 4000, 10000, 14000, 16000, 20000, 50000)
    drop_metric: ClassVar[DropMetric] = DropMetric("mse_masked", "down")
    published_marks: ClassVar[Mapping[str, int]] = {"pre": 4000}

    n: int = Field(7, ge=1)
    m: int | None = Field(None, ge=1)
    rank: int = Field(2, ge=1)
    law: Literal["factors", "entries"] = "factors"
    distribution: Literal["uniform", "gaussian", "laplace"] = "uniform"
    scale: float = Field(1.0, gt=0)
    p_mask: float = Field(0.3, ge=0, le=1)
    mask: tuple[str, ...] | None = None
    grid_max: float = Field(10.0, gt=0)
    grid_step: float = Field(0.01, gt=0)
    off_grid: Literal["clamp", "refuse"] = "clamp"

    @model_validator(mode="after")
    def _consistent(self) -> MatrixCompletion:
        if self.rank > min(self.n, self.columns):
            raise ValueError(f"rank {self.rank} exceeds the sides of a {self.n}×{self.columns} matrix")
        if self.grid_step > self.grid_max:
            raise ValueError(f"grid_step {self.grid_step} is larger than grid_max {self.grid_max}")
        if abs(self.grid_max / self.grid_step - self.grid_half) > 1e-6:
            nearest = self.grid_half * self.grid_step
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
    def grid_half(self) -> int:
        """Number of grid values above zero."""
        return round(self.grid_max / self.grid_step)

    @property
    def sequence_length(self) -> int:
        return self.n * self.columns

    @property
    def d_vocab(self) -> int:
        return 2 * self.grid_half + 2  # the grid, and MASK

    @property
    def d_vocab_out(self) -> int:
        return 1

    def sample(self, n: int | None, seed: int = 0, split: Split = "test") -> Batch:
        """``n`` fresh matrices. Extras: ``hidden [batch pos]``."""
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
            hidden = torch.rand(n, self.sequence_length, generator=random_stream) < self.p_mask
        else:
            picture = torch.tensor([character == "#" for row in self.mask for character in row])
            hidden = picture.expand(n, -1)
        return self.batch(matrices.flatten(1), hidden)

    def batch(self, values: Float[Tensor, "batch pos"], hidden: Bool[Tensor, "batch pos"]) -> Batch:
        """A batch from matrices of your own (row-major) and a mask: values are rounded to the grid first."""
        ids = self.encode(values)
        return Batch(ids.masked_fill(hidden, MASK_ID), self.decode(ids), {"hidden": hidden})

    def encode(self, values: Float[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Token ids of values: 1 + round(v / step) + round(max / step), in integers.

        Raises:
            TaskError: for values that round to beyond the grid, if ``off_grid`` is ``"refuse"``; for NaN.
        """
        if values.isnan().any():
            raise TaskError("matrix values must be numbers, got NaN")
        half = self.grid_half
        index = (values.double() / self.grid_step).round().clamp(-half - 1, half + 1).long()
        if self.off_grid == "refuse" and (index.abs() > half).any():
            worst = values.flatten()[values.abs().argmax()].item()
            raise TaskError(
                f"value {worst:.4g} lies off the grid ±{self.grid_max:g}: "
                "widen task.grid_max, lower task.scale, or set task.off_grid=clamp"
            )
        return index.clamp(-half, half) + half + 1

    def decode(self, ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Values of token ids (float32); MASK has none and gives NaN."""
        values = ((ids - self.grid_half - 1).double() * self.grid_step).float()
        return values.masked_fill(ids == MASK_ID, float("nan"))

    def loss(self, output: Float[Tensor, "batch pos 1"], batch: Batch) -> Float[Tensor, ""]:
        """Mean squared error over all entries, hidden and observed."""
        return (output.squeeze(-1) - batch.targets).square().mean()

    def metrics(self, output: Float[Tensor, "batch pos 1"], batch: Batch) -> dict[str, Metric]:
        """``mse_all [batch]``; ``mse_masked``, ``mse_observed`` as (sum, count) pairs over entries.

        The papers pool entries over the batch, and a mask may hide nothing (0.33% at 4×4) or everything.
        """
        # The targets are float32: a bfloat16 output is widened, a float64 one keeps its precision.
        error = (output.squeeze(-1) - batch.targets).square()
        hidden = batch.extras["hidden"]
        return {
            "mse_all": error.mean(1),
            "mse_masked": (error.masked_fill(~hidden, 0).sum(1), hidden.sum(1)),
            "mse_observed": (error.masked_fill(hidden, 0).sum(1), (~hidden).sum(1)),
        }

    def build_model(self, seed: int = 0, settings: ModelSettings | None = None) -> HookedTransformer:
        """A fresh model; with ``mask_embedding = "zero"`` (the default) see :func:`freeze_mask_embedding`."""
        settings = settings or self.Model()
        model = super().build_model(seed, settings)
        if isinstance(settings, MatrixModelSettings) and settings.mask_embedding == "zero":
            freeze_mask_embedding(model)
        return model

    def grid_axes(self) -> tuple[GridAxis, ...]:
        """Rows and columns: position m·i + j is entry (i, j)."""
        return GridAxis("row", tuple(range(self.n))), GridAxis("column", tuple(range(self.columns)))

    def probe_targets(self, batch: Batch) -> ProbeTargets:
        """Entries, rows and singular vectors; see :func:`matrix_targets`."""
        values, hidden = (
            x.unflatten(1, (self.n, self.columns)) for x in (batch.targets, batch.extras["hidden"])
        )
        return matrix_targets(values, hidden)

    def patch_sources(self, batch: Batch) -> dict[str, Batch]:
        """Named examples to patch from, row by row: ``negated`` is −X under the same mask.

        Gopalani, Lubana, Hu 2024, section 3.2.2 and appendix F.
        """
        return {"negated": self.batch(-batch.targets, batch.extras["hidden"])}

    def attention_templates(self) -> dict[str, Tensor | Callable[[Batch], Tensor]]:
        """What a head may attend to: keys ``[query key]``, or a function of a batch: ``[batch query key]``."""
        return attention_templates(self.n, self.columns)

    def attention_moves(self, batch: Batch, seed: int) -> dict[str, Batch]:
        """The examples with one thing changed, row by row: ``mask`` hides other entries, ``values`` has other
        matrices.
        """
        hidden = batch.extras["hidden"]
        random_stream = generator(seed, self.name, "another mask")
        mask = torch.rand(hidden.shape, generator=random_stream).to(hidden.device) < self.p_mask
        others = self.sample(len(batch), derive_seed(seed, self.name, "other matrices")).to(hidden.device)
        return {"mask": self.batch(batch.targets, mask), "values": self.batch(others.targets, hidden)}

    def _draw(self, shape: tuple[int, ...], random_stream: torch.Generator) -> Tensor:
        if self.distribution == "gaussian":
            return self.scale * torch.randn(shape, generator=random_stream)
        uniform = 2 * torch.rand(shape, generator=random_stream) - 1
        if self.distribution == "uniform":
            return self.scale * uniform
        # Laplace by the inverse of its distribution function. The draw can be exactly -1 (once in 2²⁴), where
        # that is infinite; the number next to it is not.
        return -self.scale * uniform.sign() * torch.log1p(-uniform.abs().clamp(max=1 - 2**-24))


def freeze_mask_embedding(model: HookedTransformer) -> None:
    """Set the MASK row of ``W_E`` to zero and give it no gradient, as in the published model.

    Adam and AdamW then leave it at zero, weight decay included. The gradient hook belongs to this parameter
    tensor: it survives loading weights and moving the model, not a ``copy.deepcopy``.
    """
    with torch.no_grad():
        model.embed.W_E[MASK_ID] = 0.0
    model.embed.W_E.register_hook(_without_mask_row)


def _without_mask_row(gradient: Tensor) -> Tensor:
    return gradient.index_fill(0, torch.tensor([MASK_ID], device=gradient.device), 0.0)


def hide_rows(n: int, m: int, kept: Mapping[int, int | None]) -> tuple[str, ...]:
    """A ``mask`` that hides whole rows but for one entry each: row -> column kept, or ``None``.

    ``hide_rows(7, 7, {3: 1, 6: 5})`` is the example of the authors' code (rows 4 and 7 of 7, counted from 1).
    """
    for i, j in kept.items():
        if not 0 <= i < n or (j is not None and not 0 <= j < m):
            raise TaskError(f"entry ({i}, {j}) lies outside a {n}×{m} matrix")
    return tuple("".join("." if i not in kept or kept[i] == j else "#" for j in range(m)) for i in range(n))


def hide_columns(n: int, m: int, kept: Mapping[int, int | None]) -> tuple[str, ...]:
    """A ``mask`` that hides whole columns but for one entry each: column -> row kept, or ``None``."""
    return tuple("".join(row) for row in zip(*hide_rows(m, n, kept), strict=True))
