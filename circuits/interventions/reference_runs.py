"""Clean passes: runs of the model without any of our edits, with the user's own hooks on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.model.hooks import Function
from circuits.model.record import evaluating, listening, recording
from circuits.model.state import suspended
from circuits.model.surface import Surface
from circuits.tensors import Snapshot

# Large references are run in pieces of this many tokens, which bounds the memory of one forward.
TOKENS_PER_PASS = 65536


class Reduction(ABC):
    """A sum over examples that is kept of a clean pass instead of every example's activation."""

    @abstractmethod
    def piece(self, activation: Tensor, tokens: Tensor) -> Tensor:
        """Returns the sum over the examples of one piece, in float64."""

    @abstractmethod
    def finish(self, total: Tensor, examples: int) -> Tensor: ...


@dataclass(frozen=True)
class MeanOver(Reduction):
    """The mean over examples, and over the positions on axis `pooled` where that is given; both axes keep extent 1."""

    pooled: int | None = None

    def piece(self, activation: Tensor, tokens: Tensor) -> Tensor:
        activation = activation.double()
        if self.pooled is not None:
            activation = activation.mean(self.pooled, keepdim=True)
        return activation.sum(0, keepdim=True)

    def finish(self, total: Tensor, examples: int) -> Tensor:
        return total / examples


class Edits(ABC):
    """The edits of a clean pass; hashable, as they are part of a `Reference`."""

    @abstractmethod
    def needed(self, surface: Surface) -> Iterable[Reference]:
        """Returns the passes that must come first."""

    @abstractmethod
    def functions(
        self, surface: Surface, references: References, rows: slice, total: int
    ) -> list[tuple[str, Function]]:
        """Returns (hook, function) pairs for a run of `rows` out of `total` examples."""


@dataclass(frozen=True)
class Reference:
    """The activation at one hook in a pass on `tokens`, or only a reduction of it; the pass runs under `edits` (None,
    nearly always: no edits of ours).
    """

    tokens: Snapshot
    hook: str
    reduction: Reduction | None = None
    edits: Edits | None = None


class References:
    """Runs clean passes, each distinct reference once."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        self._results: dict[Reference, Tensor] = {}

    def __getitem__(self, reference: Reference) -> Tensor:
        return self._results[reference]

    def fetch(self, wanted: Iterable[Reference]) -> None:
        """Runs the passes that are missing, one per distinct pair of tokens and edits."""
        missing = [reference for reference in dict.fromkeys(wanted) if reference not in self._results]
        for tokens, edits in dict.fromkeys((reference.tokens, reference.edits) for reference in missing):
            if edits is not None:
                self.fetch(edits.needed(self._surface))
            self._run(
                tokens.tensor,
                edits,
                [each for each in missing if (each.tokens, each.edits) == (tokens, edits)],
            )

    def _run(self, tokens: Tensor, edits: Edits | None, wanted: list[Reference]) -> None:
        model = self._surface.model
        self._surface.check_inputs(tokens, "reference or source tokens")
        step = max(1, TOKENS_PER_PASS // max(1, tokens[0].numel()))
        pieces: dict[Reference, list[Tensor]] = {reference: [] for reference in wanted}
        hooks = list(dict.fromkeys(reference.hook for reference in wanted))
        with suspended(model), evaluating(model), torch.no_grad():
            for start in range(0, len(tokens), step):
                chunk = tokens[start : start + step].to(self._surface.device, copy=True)
                rows = slice(start, start + len(chunk))
                edited = [] if edits is None else edits.functions(self._surface, self, rows, len(tokens))
                with listening(self._surface, edited), recording(self._surface, hooks) as seen:
                    model(chunk)
                for reference, activations in pieces.items():
                    if reference.hook not in seen:
                        raise CircuitsError(
                            f"{reference.hook} never fired in a clean pass: nothing to take from it"
                        )
                    activation = seen[reference.hook].detach()
                    if reference.reduction is not None:
                        activation = reference.reduction.piece(activation, chunk)
                        # A reduction is kept as one running sum, as it is there to save memory.
                        activation = activations.pop() + activation if activations else activation
                    activations.append(activation)
        for reference, activations in pieces.items():
            if reference.reduction is None:
                self._results[reference] = torch.cat(activations)
            else:
                self._results[reference] = reference.reduction.finish(activations[0], len(tokens))
