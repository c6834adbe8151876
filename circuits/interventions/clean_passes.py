"""Clean passes: runs of the model without any of our edits, with the user's own hooks on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.model.edit_state import suspended
from circuits.model.hooked_model import HookedModel
from circuits.model.hooks import Function
from circuits.model.prompts import Prompts, broadcast_mask
from circuits.model.record import evaluating, listening, recording
from circuits.model.sites import SiteKind
from circuits.tensors import Positions, Span

# Large references are run in pieces of this many tokens, which bounds the memory of one forward.
TOKENS_PER_PASS = 65536


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
        own, lengths = torch.arange(prompts.shape[1]), prompts.lengths[:, None]
        if self.positions is None:
            return prompts.reached
        if isinstance(self.positions, Span):
            first, end = self.positions.bounds(lengths)
            return (own >= first) & (own < end) & prompts.reached
        wanted = torch.tensor(self.positions)
        wanted = torch.where(wanted < 0, wanted + lengths, wanted)
        return (own[:, None] == wanted[:, None]).any(-1) & prompts.reached

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


class Edits(ABC):
    """The edits of a clean pass; hashable, as they are part of a `Reference`."""

    @abstractmethod
    def needed(self, surface: HookedModel) -> Iterable[Reference]:
        """Returns the passes that must come first."""

    @abstractmethod
    def functions(
        self, surface: HookedModel, references: References, rows: slice, prompts: Prompts
    ) -> list[tuple[str, Function]]:
        """Returns (hook, function) pairs for a run of `rows` of the prompts."""


@dataclass(frozen=True)
class Reference:
    """The activation at one hook in a pass on `prompts`, or only a reduction of it; the pass runs under `edits` (None,
    nearly always: no edits of ours).
    """

    prompts: Prompts
    hook: str
    kind: SiteKind
    reduction: Reduction | None = None
    edits: Edits | None = None


class References:
    """Runs clean passes, each distinct reference once."""

    def __init__(self, surface: HookedModel, tokens_per_pass: int | None = None) -> None:
        self._surface = surface
        self._tokens_per_pass = TOKENS_PER_PASS if tokens_per_pass is None else tokens_per_pass
        self._results: dict[Reference, Tensor] = {}

    def __getitem__(self, reference: Reference) -> Tensor:
        return self._results[reference]

    def fetch(self, wanted: Iterable[Reference]) -> None:
        """Runs the passes that are missing, one per distinct pair of prompts and edits."""
        missing = [reference for reference in dict.fromkeys(wanted) if reference not in self._results]
        for prompts, edits in dict.fromkeys((each.prompts, each.edits) for each in missing):
            if edits is not None:
                self.fetch(edits.needed(self._surface))
            together = [each for each in missing if (each.prompts, each.edits) == (prompts, edits)]
            if left := [each for each in together if each not in self._results]:
                self._run(prompts, edits, left)

    def _run(self, prompts: Prompts, edits: Edits | None, wanted: list[Reference]) -> None:
        """Runs prompts, clean or under edits, a chunk at a time; keeps the activations or sums that are wanted."""
        surface = self._surface
        surface.check_prompts(prompts, "reference or source tokens")
        step = max(1, self._tokens_per_pass // max(1, prompts.tokens[0].numel()))
        pieces: dict[Reference, list[Tensor]] = {reference: [] for reference in wanted}
        hooks = list(dict.fromkeys(reference.hook for reference in wanted))
        with suspended(surface.model), evaluating(surface.model), torch.no_grad():
            for start in range(0, len(prompts), step):
                chunk = prompts[start : start + step]
                rows = slice(start, start + len(chunk))
                edited = [] if edits is None else edits.functions(surface, self, rows, prompts)
                with listening(surface, edited), recording(surface, hooks) as seen:
                    surface.call(chunk)
                for reference, activations in pieces.items():
                    if reference.hook not in seen:
                        raise CircuitsError(
                            f"{reference.hook} never fired in a clean pass: nothing to take from it"
                        )
                    activation = seen[reference.hook].detach()
                    if reference.reduction is not None:
                        activation = reference.reduction.piece(activation, chunk, reference.kind)
                        # A reduction is kept as one running sum, as it is there to save memory.
                        activation = activations.pop() + activation if activations else activation
                    activations.append(activation)
        for reference in list(pieces):
            if reference.reduction is None:
                self._results[reference] = torch.cat(pieces.pop(reference))
            else:
                total = pieces.pop(reference)[0]
                self._results[reference] = reference.reduction.finish(total, prompts, reference.kind)
