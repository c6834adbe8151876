"""Fills in the hidden entries of a low-rank matrix, given as a sequence of value tokens (Gopalani, Lubana, Hu 2024)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field, model_validator
from torch import Tensor

from tasks.base import (
    Batch,
    ClassRule,
    DropMetric,
    Influences,
    Metric,
    ProbeTarget,
    ProbeTargets,
    Relocation,
    Split,
    Task,
)
from tasks.matrix_completion.attention import (
    ATTENTION_RULES,
    attention_templates,
    move_longest_column,
    parse_mask,
)
from tasks.matrix_completion.completion import (
    Solver,
    candidate_methods,
    convex_baselines,
    kinds_of_hidden_entries,
    nuclear_norms,
)
from tasks.matrix_completion.matrices import MASK_ID, Matrices, pairs_by_mask
from tasks.matrix_completion.rank_one import pairs_of_entries
from tasks.matrix_completion.variations import copying_inputs, variations
from tasks.registry import built_in_presets, register
from tasks.seeds import derive_seed, generator
from tasks.settings import ModelSettings

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer


class MatrixModelSettings(ModelSettings):
    """Defaults are the 4-layer, 8-head model of the paper, but pre-LN with a final LayerNorm.

    The preset ``paper`` has ``norm="post"``, as published.

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
class MatrixCompletion(Matrices):
    """Predicts every entry of a matrix from its observed ones; the position of entry (i, j) is m·i + j."""

    Model: ClassVar[type[ModelSettings]] = MatrixModelSettings
    presets = built_in_presets("matrix-completion")
    published_steps: ClassVar[tuple[int, ...]] = (1000, 4000, 10000, 14000, 16000, 20000, 50000)
    drop_metric: ClassVar[DropMetric] = DropMetric("mse_masked", "down")
    published_marks: ClassVar[Mapping[str, int]] = {"pre": 4000}
    capturable: ClassVar[bool] = True

    @property
    def sequence_length(self) -> int:
        return self.n * self.columns

    @property
    def d_vocab(self) -> int:
        return 2 * self.grid_half + 2  # the grid, and MASK

    @property
    def d_vocab_out(self) -> int:
        return 1

    def batch(self, values: Float[Tensor, "batch pos"], hidden: Bool[Tensor, "batch pos"]) -> Batch:
        """Makes a batch from matrices of your own (row-major) and a mask: values are rounded to the grid first."""
        ids = self.encode(values)
        return Batch(ids.masked_fill(hidden, MASK_ID), self.decode(ids), {"hidden": hidden})

    def loss(self, output: Float[Tensor, "batch pos 1"], batch: Batch) -> Float[Tensor, ""]:
        """Returns the mean squared error over all entries, hidden and observed."""
        return (output.squeeze(-1) - batch.targets).square().mean()

    def metrics(self, output: Float[Tensor, "batch pos 1"], batch: Batch) -> dict[str, Metric]:
        """Returns ``mse_all [batch]``; ``mse_masked``, ``mse_observed`` as (sum, count) pairs over entries."""
        # The targets are float32: a bfloat16 output is widened, a float64 one keeps its precision.
        error = (output.squeeze(-1) - batch.targets).square()
        masked, observed = pairs_by_mask(error, batch.extras["hidden"])
        return {"mse_all": error.mean(1), "mse_masked": masked, "mse_observed": observed}

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ("mse_all", "mse_masked", "mse_observed")

    @property
    def property_names(self) -> tuple[str, ...]:
        """Names of what ``properties`` returns."""
        return ("nuclear_norm",)

    def accuracies(self, output: Float[Tensor, "batch pos 1"], batch: Batch) -> dict[str, Metric]:
        """Returns ``accuracy_masked``, ``accuracy_observed``: whether an entry's output rounds to its grid value, as
        pairs.
        """
        # Half to even, as the values themselves were rounded.
        nearest = (output.squeeze(-1).double() / self.grid_step).round()
        right = nearest == (batch.targets.double() / self.grid_step).round()
        masked, observed = pairs_by_mask(right, batch.extras["hidden"])
        return {"accuracy_masked": masked, "accuracy_observed": observed}

    def plateau_levels(self) -> dict[str, float]:
        """Returns the metrics where observed entries are copied and hidden ones guessed at their mean, 0
        (section 3.1).
        """
        hidden = self.loss_shares()["mse_masked"]
        return {
            "mse_all": hidden * self.entry_variance,
            "mse_masked": self.entry_variance,
            "mse_observed": 0.0,
        }

    def loss_shares(self) -> dict[str, float]:
        """Returns the shares of hidden and of observed entries."""
        hidden = self.p_mask
        if self.mask is not None:
            hidden = "".join(self.mask).count("#") / (self.n * self.columns)
        return {"mse_masked": hidden, "mse_observed": 1 - hidden}

    def build_model(self, seed: int = 0, settings: ModelSettings | None = None) -> HookedTransformer:
        """Builds a fresh model; with ``mask_embedding = "zero"`` (the default) see :func:`freeze_mask_embedding`."""
        settings = settings or self.Model()
        model = super().build_model(seed, settings)
        if isinstance(settings, MatrixModelSettings) and settings.mask_embedding == "zero":
            freeze_mask_embedding(model)
        return model

    def constrain(self, model: HookedTransformer, settings: ModelSettings) -> None:
        """Sets the MASK row to zero again where ``mask_embedding = "zero"``."""
        if isinstance(settings, MatrixModelSettings) and settings.mask_embedding == "zero":
            with torch.no_grad():
                model.embed.W_E[MASK_ID] = 0.0

    def probe_targets(self, batch: Batch) -> ProbeTargets:
        """Returns entries, rows and singular vectors; see :func:`matrix_targets`."""
        values, hidden = (
            x.unflatten(1, (self.n, self.columns)) for x in (batch.targets, batch.extras["hidden"])
        )
        return matrix_targets(values, hidden)

    def patch_sources(self, batch: Batch) -> dict[str, Batch]:
        """Returns named examples to patch from, row by row: ``negated`` is −X under the same mask.

        Gopalani, Lubana, Hu 2024, section 3.2.2 and appendix F.
        """
        return {"negated": self.batch(-batch.targets, batch.extras["hidden"])}

    def baselines(self, solver: Solver = "batched") -> dict[str, Callable[[Batch], Tensor]]:
        """Returns completions of least nuclear norm, by name: from a batch to an output ``[batch pos 1]``."""
        return convex_baselines(self.n, self.columns, solver)

    def methods(self) -> dict[str, Callable[[Batch], Tensor]]:
        """Returns methods of filling in hidden entries that a model may have learnt, in the form of
        :meth:`baselines`.
        """
        return candidate_methods(self.n, self.columns, self.rank)

    def entry_groups(self, batch: Batch) -> dict[str, Tensor]:
        """Returns kinds of hidden entries, by name: boolean ``[batch pos]``."""
        return kinds_of_hidden_entries(batch, self.n, self.columns, self.rank)

    def properties(self, output: Float[Tensor, "batch pos 1"]) -> dict[str, Metric]:
        """Returns properties of an output whether it is right or not: its ``nuclear_norm`` as a matrix."""
        return {"nuclear_norm": nuclear_norms(output, self.n, self.columns)}

    def variations(self) -> dict[str, dict[str, Task]]:
        """Returns tasks with other data to test a model on, by the setting that varies, then by name; see
        :func:`variations`.
        """
        return variations(self, MatrixCompletion)

    def copying_inputs(self, n: int, seed: int, split: Split) -> dict[str, tuple[Batch, Batch]]:
        """Returns inputs with another token at hidden entries; see :func:`copying_inputs`."""
        return copying_inputs(self, MatrixCompletion, n, seed, split)

    def influences(self, batch: Batch, shift: float | None, seed: int) -> Influences:
        """Returns changes of observed entries to another value; for kinds and the reference see
        :func:`pairs_of_entries`.
        """
        values = batch.targets
        if shift is None:
            changed = self.sample(len(batch), derive_seed(seed, self.name, "new values")).targets.to(
                values.device
            )
        else:
            offset = max(1, round(shift / self.grid_step)) * self.grid_step
            up = torch.rand(values.shape, generator=generator(seed, self.name, "shift")) < 0.5
            changed = self.decode(self.encode(values + offset * (2 * up.to(values.device) - 1)))
        hidden = batch.extras["hidden"]
        cells = (x.unflatten(1, (self.n, self.columns)) for x in (values, hidden))
        kinds, derivative = pairs_of_entries(*cells)
        references = {}
        if self.law == "factors" and self.rank == 1:
            references["rank-1 ratio"] = derivative * (changed - values)[:, :, None]
        return Influences(self.encode(changed), ~hidden, hidden, kinds, references)

    def attention_templates(self) -> dict[str, Tensor | Callable[[Batch], Tensor]]:
        """Returns templates of what a head may attend to: keys ``[query key]``, or a function of a batch: ``[batch
        query key]``.
        """
        return attention_templates(self.n, self.columns)

    def attention_rules(self) -> dict[str, ClassRule]:
        """Returns the conditions under which a template counts as a class of heads."""
        return ATTENTION_RULES

    def attention_relocations(self, batch: Batch, seed: int) -> dict[str, Relocation]:
        """Returns ``longest_column``: examples whose longest run of observed entries moves to another column."""
        stream = generator(seed, self.name, "another longest column")
        relocation = move_longest_column(self.n, self.columns, batch, self.batch, stream)
        return {} if relocation is None else {"longest_column": relocation}

    def with_mask(self, batch: Batch, mask: str) -> Batch:
        """Returns the examples under one mask: ``rows``, ``columns`` (see :func:`named_masks`), or ``..#,..#,...``."""
        hidden = parse_mask(mask, self.n, self.columns).to(batch.targets.device)
        return self.batch(batch.targets, hidden.expand(len(batch), -1))


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


def freeze_mask_embedding(model: HookedTransformer) -> None:
    """Sets the MASK row of ``W_E`` to zero and gives it no gradient, as in the published model.

    Adam and AdamW then leave it at zero, weight decay included. The gradient hook belongs to this parameter
    tensor: it survives loading weights and moving the model, not a ``copy.deepcopy``.
    """
    with torch.no_grad():
        model.embed.W_E[MASK_ID] = 0.0
    model.embed.W_E.register_hook(_without_mask_row)


def _without_mask_row(gradient: Tensor) -> Tensor:
    changed = gradient.clone()
    changed[MASK_ID].zero_()
    return changed


# Does the same in every update.
_without_mask_row.capturable = True  # type: ignore[attr-defined]


def matrix_targets(values: Float[Tensor, "batch n m"], hidden: Bool[Tensor, "batch n m"]) -> ProbeTargets:
    """Returns the targets of Gopalani, Lubana, Hu 2024, figure 6 and appendix K, with splits ``hidden`` and
    ``observed``.

    ``true_element``: the entry itself. ``masked_row``: the entry's row of X with hidden entries 0. ``left_vector``,
    ``right_vector``: the first singular vectors of X, with the sign that the solver gives them, as published.
    ``left_vector_fixed``, ``right_vector_fixed``: with the sign that makes the sum of their entries positive.
    ``left_projector``, ``right_projector``: u uᵀ and v vᵀ, which do not depend on the sign.
    """
    left, _, right = torch.linalg.svd(values.double(), full_matrices=False)
    u, v = left[:, :, 0], right[:, 0]
    rows = values.masked_fill(hidden, 0).repeat_interleave(values.shape[2], 1)
    targets = {
        "true_element": values.flatten(1),
        "masked_row": rows,
        "left_vector": u[:, None],
        "right_vector": v[:, None],
        "left_vector_fixed": sign_fixed(u)[:, None],
        "right_vector_fixed": sign_fixed(v)[:, None],
        "left_projector": (u[:, :, None] * u[:, None]).flatten(1)[:, None],
        "right_projector": (v[:, :, None] * v[:, None]).flatten(1)[:, None],
    }
    flat = hidden.flatten(1)
    return ProbeTargets(
        {name: ProbeTarget(target, "regression") for name, target in targets.items()},
        {"hidden": flat, "observed": ~flat},
    )


def sign_fixed(vectors: Float[Tensor, "batch entry"]) -> Float[Tensor, "batch entry"]:
    """Returns each vector, or its negative: the one whose entries have a positive sum."""
    return torch.where(vectors.sum(1, keepdim=True) < 0, -vectors, vectors)
