"""One answer modulo p: addition (Nanda et al. 2023) and multiplication (Lee et al. 2024, Grokfast)."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tasks.base import Batch, GridAxis, Metric, ModularAnswer
from tasks.modular_arithmetic.modular_task_base import ModularTask, cross_entropy
from tasks.registry import built_in_presets, register


class OneModulus(ModularTask):
    """One class out of p, read at '='.

    Attributes:
        equals_class: give '=' (and an operator) an output too, as the published codes do (p + 1 or p + 2 outputs).
        operator_token: a token between the operands, [a, op, b, '='], op = p + 1 (Lee et al.'s code).
    """

    equals_class: bool = False
    operator_token: bool = False

    @property
    def operand_positions(self) -> tuple[int, int]:
        return (0, 2) if self.operator_token else (0, 1)

    @property
    def sequence_length(self) -> int:
        return 4 if self.operator_token else 3

    @property
    def d_vocab(self) -> int:
        return super().d_vocab + self.operator_token

    @property
    def d_vocab_out(self) -> int:
        return self.d_vocab if self.equals_class else self.p

    def attention_templates(self) -> dict[str, Tensor]:
        """Returns the templates of every modular task, and the operator where there is one."""
        templates = super().attention_templates()
        if self.operator_token:
            operator = torch.arange(self.sequence_length) == 1
            templates["operator"] = operator.expand(self.sequence_length, -1)
        return templates

    def loss(self, output: Float[Tensor, "batch _ classes"], batch: Batch) -> Float[Tensor, ""]:
        """Returns the mean cross-entropy, in float64."""
        return cross_entropy(self.read(output)[:, 0], batch.targets).mean()

    def metrics(self, output: Float[Tensor, "batch _ classes"], batch: Batch) -> dict[str, Metric]:
        """Returns ``loss`` (cross-entropy, nats) and ``accuracy`` (0 or 1), each ``[batch]``."""
        logits = self.read(output)[:, 0]
        return {
            "loss": cross_entropy(logits, batch.targets),
            "accuracy": (logits.argmax(-1) == batch.targets).double(),
        }


@register("modular-addition")
class ModularAddition(OneModulus):
    """(a + b) mod p from the tokens [a, b, '=']: T_nanda."""

    presets = built_in_presets("modular-addition")
    published_steps: ClassVar[tuple[int, ...]] = (1400, 9400, 14000, 40000)
    capturable: ClassVar[bool] = True

    def answers(self, operands: Int[Tensor, "inputs 2"]) -> Int[Tensor, " inputs"]:
        return operands.sum(-1) % self.p

    def modular_answers(self) -> dict[str, ModularAnswer]:
        return {"sum": ModularAnswer(self.p, (1, 1), tuple(range(self.p)))}


@register("modular-multiplication")
class ModularMultiplication(OneModulus):
    """(a · b) mod p from the tokens [a, b, '='], b ≠ 0: the inputs of the Grokfast benchmark (p = 97).

    The benchmark itself has ``operator_token`` on.
    """

    presets = built_in_presets("modular-multiplication")
    capturable: ClassVar[bool] = True

    @cached_property
    def _operands(self) -> Int[Tensor, "inputs 2"]:
        return torch.cartesian_prod(torch.arange(self.p), torch.arange(1, self.p))

    def answers(self, operands: Int[Tensor, "inputs 2"]) -> Int[Tensor, " inputs"]:
        return operands.prod(-1) % self.p

    def answers_by_name(self, batch: Batch) -> dict[str, Tensor]:
        return {"product": batch.targets}

    def grid_axes(self) -> tuple[GridAxis, ...]:
        """Returns the nonzero operands as powers of a generator: multiplication adds their exponents modulo p − 1."""
        cycle = primitive_root_powers(self.p)
        return tuple(replace(axis, values=cycle) for axis in super().grid_axes())

    def modular_answers(self) -> dict[str, ModularAnswer]:
        """Returns the product, as the sum of exponents modulo p − 1."""
        return {"product": ModularAnswer(self.p - 1, (1, 1), primitive_root_powers(self.p))}


def primitive_root_powers(p: int) -> tuple[int, ...]:
    """Returns g⁰, g¹, ..., g^(p−2) modulo a prime, g its smallest generator: every remainder but 0 once."""
    cycles = (tuple(pow(base, exponent, p) for exponent in range(p - 1)) for base in range(1, p))
    return next(cycle for cycle in cycles if len(set(cycle)) == p - 1)
