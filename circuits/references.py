"""Clean passes: activations of the model as it is without any of our edits, with the user's own hooks on."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions import Reference, Write
from circuits.modes import evaluating
from circuits.state import suspended
from circuits.surface import Surface

# Large references are run in pieces of this many tokens, which bounds the memory of one forward.
TOKENS_PER_PASS = 65536


class References:
    """Runs the clean passes that writes ask for, each (tokens, hook, reduction) once."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        self._found: dict[tuple[Reference, str], Tensor] = {}

    def fetch(self, writes: Iterable[Write]) -> None:
        """Run every clean pass that `writes` need: one pass per distinct tensor of tokens."""
        missing: dict[Reference, dict[str, int]] = {}  # hook -> the axis that "batch,pos" pools
        for write in writes:
            reference = write.replacement.reference
            if reference is not None and (reference, write.hook) not in self._found:
                missing.setdefault(reference, {})[write.hook] = write.kind.query_axis
        while missing:
            tokens = next(iter(missing)).tokens
            together = {
                reference: missing.pop(reference) for reference in list(missing) if reference.tokens == tokens
            }
            self._run(tokens.tensor, together)

    def of(self, write: Write) -> Tensor | None:
        reference = write.replacement.reference
        return None if reference is None else self._found[reference, write.hook]

    def _run(self, tokens: Tensor, wanted: dict[Reference, dict[str, int]]) -> None:
        model = self._surface.model
        step = max(1, TOKENS_PER_PASS // max(1, tokens[0].numel()))
        pieces: dict[tuple[Reference, str], list[Tensor]] = {}
        seen: dict[str, Tensor] = {}
        hooks = {hook for names in wanted.values() for hook in names}
        with suspended(model), evaluating(model), torch.no_grad():
            for start in range(0, len(tokens), step):
                seen.clear()
                handles = []
                try:
                    for hook in hooks:
                        handles.append(self._surface.on_forward(hook, keep_in(seen, hook)))
                    model(tokens[start : start + step].to(self._surface.device))
                finally:
                    for handle in handles:
                        handle.remove()
                for reference, names in wanted.items():
                    for hook, axis in names.items():
                        if hook not in seen:
                            raise CircuitsError(
                                f"{hook} never fired in a clean pass: nothing to take from it"
                            )
                        pieces.setdefault((reference, hook), []).append(
                            _reduced(seen[hook], reference.reduce, axis)
                        )
        for key, parts in pieces.items():
            if key[0].reduce is None:
                self._found[key] = torch.cat(parts)
            else:
                self._found[key] = torch.stack(parts).sum(0) / len(tokens)


def _reduced(activation: Tensor, reduce: str | None, pooled_axis: int) -> Tensor:
    """Kept whole, or summed over examples in float64, and first averaged over positions where those are
    pooled.
    """
    activation = activation.detach()
    if reduce is None:
        return activation
    activation = activation.double()
    if reduce == "batch,pos":
        activation = activation.mean(pooled_axis, keepdim=True)
    return activation.sum(0, keepdim=True)


def keep_in(seen: dict[str, Tensor], hook: str) -> Callable[[Tensor], None]:
    def keep(activation: Tensor) -> None:
        seen[hook] = activation

    return keep
