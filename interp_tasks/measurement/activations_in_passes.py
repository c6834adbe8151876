"""Activations over examples, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

#: Examples of one pass hold at most this many tokens.
TOKENS_PER_PASS = 16384


def split_into_passes(tokens: Any, tokens_per_pass: int | None = None) -> Sequence[Any]:
    """Returns tokens ``[batch pos]`` in parts of at most so many tokens (``TOKENS_PER_PASS``), one example at least."""
    size = max(1, (tokens_per_pass or TOKENS_PER_PASS) // tokens.shape[1])
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]


def record_in_passes(
    model: Any, tokens: Tensor, sites: Sequence[str], read: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Returns by site what ``read`` makes of its activations, joined over all examples."""
    import torch

    from circuits import cache

    parts: dict[str, list[Tensor]] = {site: [] for site in sites}
    for part in split_into_passes(tokens) if parts else ():
        seen = cache(model, part, list(sites))
        for site, kept in parts.items():
            kept.append(read(seen[site]))
    return {site: torch.cat(kept) for site, kept in parts.items()}
