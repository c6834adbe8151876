"""What is taken of clean passes: runs of the model without any of our edits, with the user's own hooks on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from circuits.model.generation import WHOLE
from circuits.model.prompts import Prompts, broadcast_mask
from circuits.model.sites import SiteKind
from circuits.tensors import Positions, Span


class Reduction(ABC):
    """A sum over examples that is kept of a clean pass instead of every example's activation."""

    @abstractmethod
    def piece(self, activation: Tensor, prompts: Prompts, kind: SiteKind) -> Tensor:
        """Returns the sum over the examples of one piece, in float64."""

    @abstractmethod
    def finish(self, total: Tensor, prompts: Prompts, kind: SiteKind) -> Tensor:
        """Returns the result from the sum over all pieces."""


@dataclass(frozen=True)
class MeanOver(Reduction):
    """The mean over examples, for each position of their own tokens over those that have it; or (`pooled`) over the
    tokens at `positions` (None: all) of all examples. Both axes keep extent 1.
    """

    pooled: bool = False
    positions: Positions | Span | None = None

    def chosen(self, prompts: Prompts) -> Tensor:
        """Returns which of its own positions of each example are in the mean, bool [batch pos], tokens first."""
        return replace(WHOLE, real=prompts.reached).selected(self.positions, prompts.shape[1], "a mean")

    def piece(self, activation: Tensor, prompts: Prompts, kind: SiteKind) -> Tensor:
        activation, axis = activation.double(), kind.query_axis
        if prompts.padded:
            activation = prompts.in_order(activation, kind.position_axes, lowest=True)
        if prompts.padded or self.positions is not None:
            chosen = broadcast_mask(self.chosen(prompts).to(activation.device), axis, activation.ndim)
            # Not multiplied by the mask, as there may be anything at padding.
            activation = torch.where(chosen, activation, torch.zeros_like(activation))
        if self.pooled:
            activation = activation.sum(axis, keepdim=True)
        # In some models position embeddings have a batch of 1, shared by all examples.
        return activation.sum(0, keepdim=True) * (len(prompts) / len(activation))

    def finish(self, total: Tensor, prompts: Prompts, kind: SiteKind) -> Tensor:
        if self.pooled:
            return total / int(self.chosen(prompts).sum())
        if not prompts.padded:
            return total / len(prompts)
        counts = prompts.reached.sum(0, keepdim=True).clamp(min=1).to(total.device)
        return total / broadcast_mask(counts, kind.query_axis, total.ndim)


@dataclass(frozen=True)
class Reference:
    """The activation at one hook in a pass on `prompts`, or only a reduction of it.

    Attributes:
        before: an edit and a layer, where the pass runs under that edit in all earlier layers; None, nearly always: no
            edits of ours.
    """

    prompts: Prompts
    hook: str
    kind: SiteKind
    reduction: Reduction | None = None
    before: tuple[Any, int] | None = None
