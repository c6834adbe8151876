"""The base of modular tasks: a finite table of inputs [digit, digit, '='], its splits, float64 losses."""

from __future__ import annotations

from abc import abstractmethod
from functools import cache, cached_property
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from tasks.base import Batch, DropMetric, GridAxis, ProbeTarget, ProbeTargets, Split, Task, check_sample_size
from tasks.model_settings import ModelSettings
from tasks.seeds_and_device_tensors import generator


class ArithmeticModelSettings(ModelSettings):
    """Defaults: the one-layer, norm-free ReLU transformer of Nanda et al. 2023, without biases."""

    act_fn: Literal["relu", "gelu", "gelu_new", "silu"] = "relu"
    normalization: Literal["LN"] | None = None
    biases: Literal["trained", "mlp", "frozen"] = "frozen"
    init: Literal["normal", "gpt2", "nanda", "he", "torch"] = "nanda"


def is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


@cache
def primes_below(limit: int) -> tuple[int, ...]:
    return tuple(number for number in range(2, limit) if is_prime(number))


class ModularTask(Task):
    """A function of two digits in base p, over the complete table of inputs.

    Attributes:
        p: the modulus, and the base of the digits. Prime.
        train_fraction: share of the table that trains (0.3 as printed in both papers; 0.5 in the MIIII code).
        validation_size: examples of the rest that validate, at most half of them; the others are the test split.
        split_seed: seed of the split (and of the shuffle, where a task shuffles its answers).
    """

    Model: ClassVar[type[ModelSettings]] = ArithmeticModelSettings
    drop_metric: ClassVar[DropMetric] = DropMetric("accuracy", "up")

    # The whole table is built: at the largest p it has 4 million rows.
    p: int = Field(113, ge=3, le=2003)
    train_fraction: float = Field(0.3, gt=0, lt=1)
    validation_size: int = Field(1000, ge=1)
    split_seed: int = Field(0, ge=0)

    @field_validator("p")
    @classmethod
    def _check_p_is_prime(cls, p: int) -> int:
        if not is_prime(p):
            near = next(q for step in range(1, p) for q in (p - step, p + step) if is_prime(q))
            raise ValueError(f"p must be prime; {near} is the nearest")
        return p

    @model_validator(mode="after")
    def _every_split_has_examples(self) -> ModularTask:
        if self.n_train < 1 or self.n_inputs - self.n_train < 2:
            raise ValueError(
                f"train_fraction {self.train_fraction} of {self.n_inputs} inputs leaves a split empty"
            )
        return self

    @property
    def operand_positions(self) -> tuple[int, int]:
        """The positions of the two operands; the output is read at the last position."""
        return (0, 1)

    @property
    def sequence_length(self) -> int:
        return 3

    @property
    def d_vocab(self) -> int:
        return self.p + 1  # the digits, and '=' = p

    @property
    def read_positions(self) -> tuple[int, ...]:
        return (self.sequence_length - 1,)

    @property
    def n_inputs(self) -> int:
        return len(self._operands)

    @property
    def n_train(self) -> int:
        return int(self.train_fraction * self.n_inputs)

    @cached_property
    def _operands(self) -> Int[Tensor, "inputs 2"]:
        """Every pair of digits, in the order of the tokens."""
        digits = torch.arange(self.p)
        return torch.cartesian_prod(digits, digits)

    @cached_property
    def _answers(self) -> Int[Tensor, "inputs ..."]:
        return self.answers(self._operands)

    @cached_property
    def _splits(self) -> dict[Split, Int[Tensor, " rows"]]:
        order = torch.randperm(self.n_inputs, generator=generator(self.split_seed, self.name, "split"))
        train, rest = order[: self.n_train], order[self.n_train :]
        n_validation = min(self.validation_size, len(rest) // 2)
        return {"train": train, "validation": rest[:n_validation], "test": rest[n_validation:]}

    @abstractmethod
    def answers(self, operands: Int[Tensor, "inputs 2"]) -> Int[Tensor, "inputs ..."]:
        """Returns the answer classes of any operand pairs (as they stand in the tokens)."""

    def sample(self, n: int | None, seed: int = 0, split: Split = "test") -> Batch:
        """Samples inputs of a split without replacement; ``n = None`` or n ≥ its size is the whole split."""
        check_sample_size(n)
        rows = self._splits[split]
        if n is not None and n < len(rows):
            random_stream = generator(seed, self.name, split)
            rows = rows[torch.randperm(len(rows), generator=random_stream)[:n]]
        return self._batch(rows)

    def input_grid(self) -> Batch:
        """Returns all inputs in lexicographic order of the tokens, as Fourier analysis needs them."""
        return self._batch(torch.arange(self.n_inputs))

    def grid_axes(self) -> tuple[GridAxis, ...]:
        """Returns the two operands as axes, as they stand in the tokens, each a cycle of length p."""
        cycle = tuple(range(self.p))
        return tuple(
            GridAxis(name, cycle, position)
            for name, position in zip("ab", self.operand_positions, strict=True)
        )

    def token_values(self) -> dict[int, float]:
        """Returns the digits; '=' has no value."""
        return {digit: float(digit) for digit in range(self.p)}

    def probe_targets(self, batch: Batch) -> ProbeTargets:
        """Returns classes at '=': both operands by the names of ``grid_axes``, their ``sum`` mod p, and the answers."""
        operands = batch.extras["operands"]
        classes = {axis.name: operands[:, column] for column, axis in enumerate(self.grid_axes())}
        classes |= {"sum": operands.sum(1) % self.p, **self.answers_by_name(batch)}
        return ProbeTargets(
            {name: ProbeTarget(values, "classification") for name, values in classes.items()},
            positions=self.read_positions,
        )

    def patch_sources(self, batch: Batch) -> dict[str, Batch]:
        """Returns named inputs to patch from, row by row, that differ in one way; only ways possible for every row.

        ``"shifted"``: the first operand one higher (modulo p); ``"same_sum"``: that, and the second one lower, which
        leaves a + b as it is; ``"swapped"``: the operands exchanged, which leaves symmetric functions as they are.
        """
        operands = batch.extras["operands"].cpu()
        up, down = torch.tensor([1, 0]), torch.tensor([1, -1])
        operands_by_name = {
            "shifted": operands + up,
            "same_sum": operands + down,
            "swapped": operands.flip(1),
        }
        rows_by_name = {name: self._rows_of(other % self.p) for name, other in operands_by_name.items()}
        return {name: self._batch(rows) for name, rows in rows_by_name.items() if bool((rows >= 0).all())}

    def _rows_of(self, operands: Int[Tensor, "batch 2"]) -> Int[Tensor, " batch"]:
        """Returns the rows of the table that operands are in, -1 for none."""
        table = torch.full((self.p, self.p), -1)
        table[tuple(self._operands.T)] = torch.arange(self.n_inputs)
        return table[tuple(operands.T)]

    def answers_by_name(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the answers of a batch by name, ``[batch]`` each, where they are not the sum."""
        return {}

    def attention_templates(self) -> dict[str, Tensor]:
        """Returns templates of what a head may attend to, ``[query key]``: each operand, both, and '='."""
        first, second = self.operand_positions
        positions = {
            "operand_1": [first],
            "operand_2": [second],
            "operands": [first, second],
            "equals": list(self.read_positions),
        }
        keys = torch.arange(self.sequence_length)
        return {
            name: torch.isin(keys, torch.tensor(chosen)).expand(len(keys), -1)
            for name, chosen in positions.items()
        }

    def _batch(self, rows: Int[Tensor, " rows"]) -> Batch:
        operands = self._operands[rows]
        # Positions without an operand hold '=', or an operator between the operands.
        tokens = torch.full((len(rows), self.sequence_length), self.d_vocab - 1)
        tokens[:, list(self.read_positions)] = self.p
        tokens[:, list(self.operand_positions)] = operands
        return Batch(tokens, self._answers[rows], {"operands": operands})


def cross_entropy(
    logits: Float[Tensor, "batch classes"], answers: Int[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Returns the per-example cross-entropy through a float64 log-softmax.

    In float32 a log-probability below 1.2e-7 rounds to 0, and the loss of its gradient
    ends in loss spikes (Nanda et al. 2023, code; Syrkis & Søgaard 2024, "slingshot").
    """
    log_probabilities = logits.double().log_softmax(-1)
    return -log_probabilities.gather(-1, answers[:, None]).squeeze(-1)
