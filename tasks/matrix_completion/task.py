"""Fills in the hidden entries of a low-rank matrix, given as a sequence of value tokens (Gopalani, Lubana, Hu 2024)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field, model_validator
from torch import Tensor

from tasks.base import (
    Batch,
    DropMetric,
    FeatureRelocation,
    HeadClassRule,
    InputPerturbations,
    Metric,
    ProbeTarget,
    ProbeTargets,
    Split,
    Task,
)
from tasks.matrix_completion.attention_templates import attention_templates, longest_column_run, parse_mask
from tasks.matrix_completion.low_rank_fill_methods import (
    alternating_least_squares,
    fill_by_rank1_ratio,
    gradient_descent,
    has_anchor,
    unrecoverable_entries,
)
from tasks.matrix_completion.matrix_task_base import MASK_ID, MatrixTask, sum_count_by_mask
from tasks.matrix_completion.nuclear_norm import least_nuclear_norm, solve_by_cvxpy
from tasks.model_settings import ModelSettings
from tasks.registry import built_in_presets, register
from tasks.seeds_and_device_tensors import generator

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer


#: Shares of hidden entries (Gopalani, Lubana, Hu 2024, section 3.2 and figure 3).
SHARES = tuple(round(0.10 + 0.05 * k, 2) for k in range(11))
#: Values at hidden entries in place of MASK (section 3.1.1, table 1).
REPLACEMENTS = (0.44, -0.24)
#: Largest change of the number of rows or columns from that of training.
REACH = 2
#: The regularised problems of the paper (appendix B), and the two λ that only its code lists.
PENALTIES = (0.0005, 0.001, 0.0015, 0.00175, 0.002, 0.005, 0.01)
NUCLEAR_NORM = "nuclear norm"
#: What solves for the least nuclear norm.
Solver = Literal["batched", "cvxpy"]
#: A function from a batch to an output in the shape of a model's: [batch pos 1].
Method = Callable[[Batch], Tensor]


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
class MatrixCompletion(MatrixTask):
    """Predicts every entry of a matrix from its observed ones; the position of entry (i, j) is m·i + j."""

    Model: ClassVar[type[ModelSettings]] = MatrixModelSettings
    presets = built_in_presets("matrix-completion")
    published_steps: ClassVar[tuple[int, ...]] = (1000, 4000, 10000, 14000, 16000, 20000, 50000)
    drop_metric: ClassVar[DropMetric] = DropMetric("mse_masked", "down")
    published_marks: ClassVar[Mapping[str, int]] = {"pre": 4000}
    capturable: ClassVar[bool] = True
    #: Names of what ``properties`` returns.
    property_names: ClassVar[tuple[str, ...]] = ("nuclear_norm",)

    @property
    def sequence_length(self) -> int:
        return self.n * self.columns

    @property
    def d_vocab(self) -> int:
        return 2 * self.n_positive_values + 2  # the grid, and MASK

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
        masked, observed = sum_count_by_mask(error, batch.extras["hidden"])
        return {"mse_all": error.mean(1), "mse_masked": masked, "mse_observed": observed}

    def accuracies(self, output: Float[Tensor, "batch pos 1"], batch: Batch) -> dict[str, Metric]:
        """Returns ``accuracy_masked``, ``accuracy_observed``: shares of outputs that round to the value, as pairs."""
        # Half to even, as the values themselves were rounded.
        nearest = (output.squeeze(-1).double() / self.grid_step).round()
        right = nearest == (batch.targets.double() / self.grid_step).round()
        masked, observed = sum_count_by_mask(right, batch.extras["hidden"])
        return {"accuracy_masked": masked, "accuracy_observed": observed}

    def plateau_levels(self) -> dict[str, float]:
        """Returns the metrics of copying observed entries and guessing 0, the mean, at hidden ones (section 3.1)."""
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
        """Returns entries, rows and singular vectors; see :func:`entry_and_singular_vector_targets`."""
        return entry_and_singular_vector_targets(
            self._as_matrices(batch.targets), self._as_matrices(batch.extras["hidden"])
        )

    def baselines(self, solver: Solver = "batched") -> dict[str, Method]:
        """Returns completions of least nuclear norm, with equality and with each published penalty, by name.

        Args:
            solver: all matrices at once with a certificate, or one at a time by CVXPY.
        """
        solve = least_nuclear_norm if solver == "batched" else solve_by_cvxpy

        def with_penalty(penalty: float | None) -> Method:
            return self._method_of_fill(lambda values, hidden: solve(values, hidden, penalty).matrices)

        penalised = {f"{NUCLEAR_NORM}, lambda {penalty:g}": with_penalty(penalty) for penalty in PENALTIES}
        return {NUCLEAR_NORM: with_penalty(None), **penalised}

    def methods(self) -> dict[str, Method]:
        """Returns methods that a model may have learnt, in the form of :meth:`baselines`."""
        als = partial(alternating_least_squares, rank=self.rank, steps=100)
        fillings: dict[str, Any] = {
            "zero": lambda values, hidden: values.masked_fill(hidden, 0),
            NUCLEAR_NORM: lambda values, hidden: least_nuclear_norm(values, hidden).matrices,
            "rank-1 ratio": fill_by_rank1_ratio,
            "ALS, 100 steps": als,
            "ALS, 100 steps, ridge 0.01": partial(als, ridge=0.01),
            "gradient descent, 100 steps": partial(gradient_descent, rank=self.rank, steps=100),
        }
        return {name: self._method_of_fill(fill) for name, fill in fillings.items()}

    def _method_of_fill(self, fill: Callable[[Tensor, Tensor], Tensor]) -> Method:
        return lambda batch: fill(*self._matrices_and_hidden(batch)).flatten(1)[..., None]

    def _matrices_and_hidden(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns (values, hidden), float64 ``[batch row column]``; hidden values are NaN: no method may read them."""
        hidden = self._as_matrices(batch.extras["hidden"])
        return self._as_matrices(batch.targets.double()).masked_fill(hidden, float("nan")), hidden

    def entry_groups(self, batch: Batch) -> dict[str, Tensor]:
        """Returns kinds of hidden entries, by name: boolean ``[batch pos]``.

        At rank 1 those that the observed ones determine, and the others. Among the determined ones, ``one anchor`` are
        those that three observed entries give (x_il · x_kj / x_kl), and ``longer path`` those that need more.
        """
        hidden = batch.extras["hidden"]
        if self.rank > 1:
            return {"hidden": hidden}
        values, cells = self._matrices_and_hidden(batch)
        lost = unrecoverable_entries(cells).flatten(1)
        recoverable, near = hidden & ~lost, has_anchor(values.nan_to_num(), cells).flatten(1)
        return {
            "recoverable": recoverable,
            "one anchor": recoverable & near,
            "longer path": recoverable & ~near,
            "unrecoverable": lost,
        }

    def properties(self, output: Float[Tensor, "batch pos 1"]) -> dict[str, Metric]:
        """Returns properties of an output whether it is right or not: its ``nuclear_norm`` as a matrix."""
        matrices = self._as_matrices(output.squeeze(-1))
        matrices = matrices.float() if matrices.dtype.itemsize < 4 else matrices
        return {"nuclear_norm": torch.linalg.svdvals(matrices).sum(1)}

    def _as_matrices(self, entries: Tensor) -> Tensor:
        """Returns numbers of entries ``[batch pos]`` as matrices ``[batch row column]``."""
        return entries.unflatten(1, (self.n, self.columns))

    def _with_settings(self, **settings: Any) -> MatrixCompletion:
        """Returns this task with other settings; of several sizes that of the largest."""
        names = MatrixCompletion.model_fields
        return MatrixCompletion(**{**{name: getattr(self, name) for name in names}, **settings})

    def variations(self) -> dict[str, dict[str, Task]]:
        """Returns tasks to test a model on, by the property in which each differs, then by name.

        ``p_mask``: section 3.2. ``entries``: the law of the factors, as in appendix J.2 (Gaussian of s.d. 0.5, Laplace
        of diversity 0.25). ``rank``, ``rows``, ``columns``: figure 19.
        """
        rows, columns, like = self.n, self.columns, self._with_settings

        def nearby_sizes(size: int) -> list[int]:
            return [other for other in range(size - REACH, size + REACH + 1) if other >= max(self.rank, 1)]

        ranks = range(1, min(rows, columns) + 1)
        return {
            "p_mask": {f"p_mask {share:.2f}": like(p_mask=share, mask=None) for share in SHARES},
            "entries": {
                "as trained": self,
                "gaussian 0.5": like(law="factors", distribution="gaussian", scale=0.5),
                "laplace 0.25": like(law="factors", distribution="laplace", scale=0.25),
            },
            "rank": {f"rank {rank}": like(law="factors", rank=rank) for rank in ranks},
            "rows": {f"{n}x{columns}": like(n=n, m=columns, mask=None) for n in nearby_sizes(rows)},
            "columns": {f"{rows}x{m}": like(n=rows, m=m, mask=None) for m in nearby_sizes(columns)},
        }

    def copying_inputs(self, n: int, seed: int, split: Split) -> dict[str, tuple[Batch, Batch]]:
        """Returns inputs with another token at hidden entries, by name, twice: with copies of the inputs as targets,
        and with the matrix as targets.

        Section 3.1.1, table 1: hidden entries hold MASK (its "copy" is 0), or the value of the grid nearest to 0.44 or
        −0.24. Matrices are the task's own, or have independent entries, uniform on [-1, 1].
        """
        full = self._with_settings(law="entries", distribution="uniform", scale=1.0)
        inputs: dict[str, tuple[Batch, Batch]] = {}
        own = f"rank {self.rank}" if self.law == "factors" else "own"
        for kind, source in ((own, self), ("full rank", full)):
            batch = source.sample(n, seed=seed, split=split)
            hidden = batch.extras["hidden"]
            inputs[f"{kind}, MASK"] = replace(batch, targets=batch.targets.masked_fill(hidden, 0)), batch
            for value in REPLACEMENTS:
                token = int(self.encode(batch.targets.new_tensor(value)))
                nearest = float(self.decode(batch.tokens.new_tensor(token)))
                replaced = replace(batch, tokens=batch.tokens.masked_fill(hidden, token))
                copied = replace(replaced, targets=batch.targets.masked_fill(hidden, nearest))
                inputs[f"{kind}, {nearest:g}"] = copied, replaced
        return inputs

    def influences(self, batch: Batch, shift: float, seed: int) -> InputPerturbations:
        """Returns changes of observed entries; pairs are in the same row, in the same column, or neither."""
        values, hidden = batch.targets, batch.extras["hidden"]
        offset = max(1, round(shift / self.grid_step)) * self.grid_step
        up = torch.rand(values.shape, generator=generator(seed, self.name, "shift")) < 0.5
        changed = self.decode(self.encode(values + offset * (2 * up.to(values.device) - 1)))
        entries = torch.arange(self.n * self.columns, device=values.device)
        row, column = (each[:, None] == each for each in (entries // self.columns, entries % self.columns))
        kinds = {"same row": row & ~column, "same column": column & ~row, "neither": ~row & ~column}
        return InputPerturbations(self.encode(changed), ~hidden, hidden, kinds)

    def attention_templates(self) -> dict[str, Tensor | Callable[[Batch], Tensor]]:
        """Returns templates of what a head may attend to; see :func:`attention_templates`."""
        return attention_templates(self.n, self.columns)

    def attention_rules(self) -> dict[str, HeadClassRule]:
        """Returns the conditions under which a template counts as a class of heads.

        Masked-row heads must not do the same in rows with more observed entries; observed-copy heads must not attend
        to themselves in hidden rows; input-processing heads must attend alike under every mask.
        """
        return {
            "masked_row": HeadClassRule(unless="row_observed_elsewhere"),
            "observed_copy": HeadClassRule(unless="identity_in_hidden_rows"),
            "input_processing": HeadClassRule(static="mask"),
        }

    def attention_relocations(self, batch: Batch, seed: int) -> dict[str, FeatureRelocation]:
        """Returns ``longest_column``: examples whose longest run of observed entries moves to another column."""
        hidden, m = batch.extras["hidden"].cpu(), self.columns
        longest = self._as_matrices(longest_column_run(~hidden, self.n, m)).any(1)
        # Where one column alone has it; then the masks of this column and of another one are exchanged.
        unique = longest.sum(1) == 1
        if m < 2 or int(unique.sum()) < 2:
            return {}
        source = longest[unique].long().argmax(1)
        stream = generator(seed, self.name, "another longest column")
        target = (source + torch.randint(1, m, source.shape, generator=stream)) % m
        examples, order = torch.arange(len(source)), torch.arange(m).repeat(len(source), 1)
        order[examples, source], order[examples, target] = target, source
        cells = self._as_matrices(hidden[unique])
        exchanged = cells.gather(2, order[:, None].expand_as(cells)).flatten(1)
        values = batch.targets[unique.to(batch.targets.device)]
        before, after = (self.batch(values, mask.to(values.device)) for mask in (hidden[unique], exchanged))
        groups = torch.arange(self.n * m) % m
        return {"longest_column": FeatureRelocation(before, after, groups, source, target)}

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
    def _check_sizes(self) -> MatrixCompletionSizes:
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
    model.embed.W_E.register_hook(_zero_mask_row)


def _zero_mask_row(gradient: Tensor) -> Tensor:
    changed = gradient.clone()
    changed[MASK_ID].zero_()
    return changed


# Does the same in every update.
_zero_mask_row.capturable = True  # type: ignore[attr-defined]


def entry_and_singular_vector_targets(
    values: Float[Tensor, "batch n m"], hidden: Bool[Tensor, "batch n m"]
) -> ProbeTargets:
    """Returns the targets of Gopalani, Lubana, Hu 2024, figure 6 and appendix K, with splits ``hidden`` and
    ``observed``.

    ``true_element``: the entry itself. ``masked_row``: the entry's row of X with hidden entries 0. ``left_vector``,
    ``right_vector``: the first singular vectors of X, with the sign that the solver gives them, as published.
    ``left_vector_fixed``, ``right_vector_fixed``: with the sign that makes the sum of their entries positive.
    ``left_projector``, ``right_projector``: u uᵀ and v vᵀ, which do not depend on the sign.
    """
    left, _, right = torch.linalg.svd(values.double(), full_matrices=False)
    rows = values.masked_fill(hidden, 0).repeat_interleave(values.shape[2], 1)
    targets = {"true_element": values.flatten(1), "masked_row": rows}
    vectors = {"left": left[:, :, 0], "right": right[:, 0]}
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "vector": lambda x: x,
        "vector_fixed": lambda x: torch.where(x.sum(1, keepdim=True) < 0, -x, x),
        "projector": lambda x: (x[:, :, None] * x[:, None]).flatten(1),
    }
    for kind, of in kinds.items():
        targets |= {f"{side}_{kind}": of(x)[:, None] for side, x in vectors.items()}
    flat = hidden.flatten(1)
    return ProbeTargets(
        {name: ProbeTarget(target, "regression") for name, target in targets.items()},
        {"hidden": flat, "observed": ~flat},
    )
