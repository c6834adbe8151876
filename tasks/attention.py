"""Values by which a task describes attention heads beyond templates: rules for classes, and relocations."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from tasks.base import Batch


@dataclass(frozen=True)
class ClassRule:
    """The conditions under which a template counts as a class of heads; by template, in ``attention_rules()``.

    Attributes:
        unless: another template, which must not fit the head; it serves only this and is no class itself.
        static: a change of ``attention_moves`` that must leave the head's attention where it is.
    """

    unless: str | None = None
    static: str | None = None


@dataclass(frozen=True)
class Relocation:
    """Pairs of examples between which a feature of the input, such as the longest column, changes its group of
    positions.

    Attributes:
        before, after: the pairs, row by row; they differ in nothing else.
        groups: the group of each position, from 0.
        source, target: the feature's group before, and after; they differ in every pair.
    """

    before: Batch
    after: Batch
    groups: Int[Tensor, " pos"]
    source: Int[Tensor, " batch"]
    target: Int[Tensor, " batch"]
