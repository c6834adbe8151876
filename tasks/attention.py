"""Values by which a task describes its attention heads beyond templates: rules of classes, and what changes place."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from tasks.base import Batch


@dataclass(frozen=True)
class ClassRule:
    """When a template is a class of heads of its own; by template, in ``attention_rules()``.

    Attributes:
        unless: another template, which must not fit the head; it serves only this and is no class itself.
        static: a change of ``attention_moves`` that must leave the head's attention where it is.
    """

    unless: str | None = None
    static: str | None = None


@dataclass(frozen=True)
class Relocation:
    """Pairs of examples between which something moves from one group of positions to another.

    Attributes:
        before, after: the pairs, row by row; what moves is all that differs.
        groups: the group of each position, from 0.
        source, target: the group where it is before, and after; they differ in every pair.
    """

    before: Batch
    after: Batch
    groups: Int[Tensor, " pos"]
    source: Int[Tensor, " batch"]
    target: Int[Tensor, " batch"]
