"""Reads what circuits and screenings patch with: a source's activations, means over a source, or zeros."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from circuits.errors import CircuitsError
from circuits.model.hooked_model import HookedModel
from circuits.model.inputs import parse_prompts
from circuits.model.prompts import Prompts, check_pair, own_positions, taken
from circuits.validate import parse_choice

#: What takes the place of an activation: that of a source prompt, the mean over a batch of them at each of the
#: prompt's own positions, or zero.
HOW = ("resample", "mean", "zero")


def parse_source(source: Any, base: Prompts, surface: HookedModel, how: Any, caller: str) -> Prompts | None:
    """Returns the prompts of a source, in the layout of base where each has a partner there; None for zeros.

    Raises `CircuitsError` for a source that does not fit: pairs of unequal length, or means that do not reach as far as
    a prompt of base.
    """
    parse_choice(how, HOW, caller, "how")
    if how == "zero":
        if source is not None:
            raise CircuitsError(f'{caller}: how="zero" has no source; give source=None')
        return None
    source = parse_prompts(surface, source, caller, "source")
    surface.check_prompts(source, f"{caller}: source tokens")
    if how == "resample":
        check_pair(base, source, caller)
        return source.like(base)
    padded = base.padded or source.padded
    if source.shape[1 + padded :] != base.shape[1 + padded :]:
        raise CircuitsError(
            f"{caller}: source is {list(source.shape)}, base {list(base.shape)}; the source must have base's shape, or "
            "another batch"
        )
    longest = int(source.lengths.max())
    if int(base.lengths.max()) > longest:
        raise CircuitsError(
            f"{caller}: base has a prompt of {int(base.lengths.max())} tokens, the longest source {longest}; there is "
            "no mean at its last positions"
        )
    return source


def align_mean(mean: Tensor, prompts: Prompts) -> Tensor:
    """Returns means [1 pos ...] of own positions at those of each prompt: [batch pos ...], or [1 pos ...]."""
    if not prompts.padded and mean.shape[1] == prompts.shape[1]:
        return mean
    return taken(mean, own_positions(prompts.real).clamp(0, mean.shape[1] - 1), 1)
