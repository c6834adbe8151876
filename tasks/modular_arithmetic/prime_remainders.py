"""The remainders of a two-digit number modulo many primes at once (Syrkis & Søgaard 2024, MIIII)."""

from __future__ import annotations

import math
from functools import cached_property
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field, model_validator
from torch import Tensor

from tasks.base import Batch, DropMetric, GridAxis, Metric, ModularAnswer
from tasks.model_settings import ModelSettings
from tasks.modular_arithmetic.modular_task_base import (
    ArithmeticModelSettings,
    ModularTask,
    cross_entropy,
    primes_below,
)
from tasks.registry import built_in_presets, register
from tasks.seeds_and_device_tensors import constant, generator


class MiiiiModelSettings(ArithmeticModelSettings):
    """Defaults of the MIIII model: d 256, no causal mask, no biases, He initialisation."""

    d_model: int = Field(256, ge=1)
    attention: Literal["bidirectional", "causal"] = "bidirectional"
    init: Literal["normal", "gpt2", "nanda", "he", "torch"] = "he"


@register("miiii")
class Miiii(ModularTask):
    """n mod q for every prime q of a list, n = x0 + x1·p, from the tokens [x0, x1, '='].

    The logits of the primes are concatenated on the output axis, sum(q) columns in all.

    Attributes:
        primes: the moduli, ascending; ``None`` means every prime below p (29 of them for p = 113).
        digits: order of the digits: ``"low-first"`` as the paper prints, ``"high-first"`` as its code.
        variant: ``"shuffled"`` (T_basis) permutes the rows of answers over all inputs before the split;
            ``"masked"`` (T_masked) gives the primes below 11 (2, 3, 5, 7) weight 0 in the loss.
    """

    Model: ClassVar[type[ModelSettings]] = MiiiiModelSettings
    presets = built_in_presets("miiii")
    published_steps: ClassVar[tuple[int, ...]] = (256, 1024, 4096, 16384, 65536)
    # Primes generalise in groups. The mean accuracy rises by the group's share, too little for a threshold on accuracy;
    # the mean loss falls by a large part of what remains.
    drop_metric: ClassVar[DropMetric] = DropMetric("loss", "down")
    capturable: ClassVar[bool] = True

    primes: tuple[int, ...] | None = None
    digits: Literal["low-first", "high-first"] = "low-first"
    variant: Literal["plain", "shuffled", "masked"] = "plain"

    @model_validator(mode="after")
    def _moduli_are_primes_below_p(self) -> Miiii:
        allowed = primes_below(self.p)
        wrong = [q for q in self.moduli if q not in allowed]
        if wrong or not self.moduli:
            raise ValueError(f"primes must be primes below p = {self.p}, not {wrong or 'an empty list'}")
        if list(self.moduli) != sorted(set(self.moduli)):
            raise ValueError("primes must be ascending, each once")
        if self.variant == "masked" and not any(self.loss_weights):
            raise ValueError("variant 'masked' leaves nothing to train: add a prime of 11 or more")
        return self

    @property
    def moduli(self) -> tuple[int, ...]:
        """The primes q, ascending."""
        return primes_below(self.p) if self.primes is None else self.primes

    @property
    def loss_weights(self) -> tuple[float, ...]:
        """Weight of each prime's cross-entropy: 1 / ln q, so that chance is 1 for each."""
        silent = self.variant == "masked"
        return tuple(0.0 if silent and q < 11 else 1 / math.log(q) for q in self.moduli)

    @property
    def d_vocab_out(self) -> int:
        return sum(self.moduli)

    @property
    def n_read_outs(self) -> int:
        return len(self.moduli)

    def answers(self, operands: Int[Tensor, "inputs 2"]) -> Int[Tensor, "inputs tasks"]:
        """Returns n mod q for every prime, whatever the variant: only the table of a shuffled task is shuffled."""
        return self.numbers(operands)[:, None] % torch.tensor(self.moduli)

    def answers_by_name(self, batch: Batch) -> dict[str, Tensor]:
        return {f"mod_{q}": batch.targets[:, column] for column, q in enumerate(self.moduli)}

    def numbers(self, operands: Int[Tensor, "inputs 2"]) -> Int[Tensor, " inputs"]:
        """Returns n of every input, the number whose remainders are the answers."""
        low, high = (operands if self.digits == "low-first" else operands.flip(-1)).unbind(-1)
        return low + high * self.p

    def grid_axes(self) -> tuple[GridAxis, ...]:
        """Returns the two digits as axes, as they stand in the tokens."""
        names = ("x0", "x1") if self.digits == "low-first" else ("x1", "x0")
        return tuple(GridAxis(name, tuple(range(self.p)), position) for position, name in enumerate(names))

    def modular_answers(self) -> dict[str, ModularAnswer]:
        """Returns n mod q as the sum of x0 and (p mod q)·x1 modulo q, for every prime."""
        answers = {}
        for q, first in zip(self.moduli, self._first_columns, strict=True):
            weights = (1, self.p % q) if self.digits == "low-first" else (self.p % q, 1)
            answers[f"mod_{q}"] = ModularAnswer(q, weights, tuple(range(first, first + q)))
        return answers

    @cached_property
    def _answers(self) -> Int[Tensor, "inputs tasks"]:
        table = self.answers(self._operands)
        if self.variant == "shuffled":
            stream = generator(self.split_seed, self.name, "shuffle")
            table = table[torch.randperm(len(table), generator=stream)]
        return table

    def loss(self, output: Float[Tensor, "batch _ classes"], batch: Batch) -> Float[Tensor, ""]:
        """Returns the mean over all primes (masked ones count in the denominator) of CE_q / ln q; float64."""
        losses = self._cross_entropies(output, batch).mean(0)
        return losses @ constant(self.loss_weights, losses.dtype, losses.device) / len(self.moduli)

    def metrics(self, output: Float[Tensor, "batch _ classes"], batch: Batch) -> dict[str, Metric]:
        """Returns, per example, ``loss_q`` (CE_q / ln q), ``accuracy_q`` by prime and their means ``loss``,
        ``accuracy``.

        The means are over all primes, also in the masked variant, whose training loss leaves some out.
        """
        losses = self._cross_entropies(output, batch)
        losses = losses / torch.tensor(self.moduli, device=losses.device).double().log()
        answers = torch.stack([own.argmax(-1) for own in self._logits_by_prime(output)], 1)
        correct = (answers == batch.targets).double()
        metrics: dict[str, Metric] = {"loss": losses.mean(1), "accuracy": correct.mean(1)}
        for column, q in enumerate(self.moduli):
            metrics[f"loss_{q}"] = losses[:, column]
            metrics[f"accuracy_{q}"] = correct[:, column]
        return metrics

    def _cross_entropies(
        self, output: Float[Tensor, "batch _ classes"], batch: Batch
    ) -> Float[Tensor, "batch tasks"]:
        if output.is_cuda:
            return self._cross_entropies_at_once(output, batch)
        own = self._logits_by_prime(output)
        return torch.stack([cross_entropy(part, batch.targets[:, i]) for i, part in enumerate(own)], 1)

    def _logits_by_prime(self, output: Float[Tensor, "batch _ classes"]) -> tuple[Tensor, ...]:
        """Returns the logits of each prime."""
        return self.read(output)[:, 0].split(self.moduli, dim=-1)

    def _cross_entropies_at_once(
        self, output: Float[Tensor, "batch _ classes"], batch: Batch
    ) -> Float[Tensor, "batch tasks"]:
        """Returns the same by operations on all primes: a GPU takes longer to launch some for each than to compute."""
        packed = self.read(output)[:, 0].double()
        with torch.no_grad():
            largest = torch.stack([own.amax(-1) for own in self._logits_by_prime(output)], 1).double()
        owner = constant(self._prime_of_each_column, torch.long, packed.device)
        primes = torch.arange(len(self.moduli), device=packed.device)
        columns = (owner[:, None] == primes).double()  # [class prime]
        sums = (packed - largest[:, owner]).exp() @ columns
        first = constant(self._first_columns, torch.long, packed.device)
        return largest + sums.log() - packed.gather(1, first + batch.targets)

    @cached_property
    def _first_columns(self) -> tuple[int, ...]:
        return tuple(sum(self.moduli[:i]) for i in range(len(self.moduli)))

    @cached_property
    def _prime_of_each_column(self) -> tuple[int, ...]:
        """The number of the prime that each column of the output belongs to."""
        return tuple(i for i, q in enumerate(self.moduli) for _ in range(q))
