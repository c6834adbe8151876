"""Reads the arguments that all edits share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.edits import Place
from circuits.model.heads import looks_like_heads, parse_heads
from circuits.model.sites import Site
from circuits.tensors import (
    Positions,
    Snapshot,
    Span,
    as_dense_tensor,
    parse_positions,
    parse_span,
    refuse_numbers_as_mask,
)
from circuits.validate import read_indices


def read_what(what: Any, caller: str) -> tuple[tuple[Place, ...], bool]:
    """Reads heads (edited at z), a site, or a layer number; second, whether a place the model lacks is passed over.

    A layer stands for its heads at z and its neurons at mlp_post, so that both output biases stay.
    """
    try:
        if isinstance(what, bool):
            raise CircuitsError(f"expected heads, a site or a layer, got {what!r}")
        if isinstance(what, Site):
            return (Place(what),), False
        if isinstance(what, int | np.integer):
            return (Place(Site("z", int(what))), Place(Site("mlp_post", int(what)))), True
        if isinstance(what, str) and not looks_like_heads(what):
            return (Place(Site.parse(what)),), False
        return (Place(Site("z"), parse_heads(what)),), False
    except CircuitsError as error:
        raise CircuitsError(f"{caller}: {error}") from error


def read_heads(spec: Any, site: str, caller: str) -> tuple[Place, ...]:
    try:
        return (Place(Site(site), parse_heads(spec)),)
    except CircuitsError as error:
        raise CircuitsError(f"{caller}: {error}") from error


def read_place(site: Any, heads: Any, caller: str, neurons: Any = None) -> Place:
    """Reads a site, and heads or neurons of it where those are given."""
    chosen, d_mlp = (None, None) if neurons is None else read_neurons(neurons, caller)
    try:
        return Place(Site.parse(site), None if heads is None else parse_heads(heads), chosen, d_mlp)
    except CircuitsError as error:
        raise CircuitsError(f"{caller}: {error}") from error


def read_neurons(neurons: Any, caller: str) -> tuple[tuple[int, ...], int | None]:
    """Reads neuron indices, or a boolean mask [d_mlp] of them; second, the length of the mask."""
    size = None
    neurons = as_dense_tensor(neurons, f"{caller}: neurons")
    if isinstance(neurons, Tensor) and neurons.dtype == torch.bool:
        if neurons.ndim != 1 or not bool(neurons.any()):
            raise CircuitsError(
                f"{caller}: a mask of neurons is [d_mlp] and selects some; got {list(neurons.shape)}"
            )
        size = len(neurons)
        neurons = neurons.nonzero().flatten()
    else:
        refuse_numbers_as_mask(neurons, f"{caller}: neurons", "[d_mlp]")
    return read_indices(neurons, caller, "neurons") or (), size


def read_queries(queries: Any, positions: Any, caller: str) -> Positions | Span | Snapshot | None:
    if queries is not None and positions is not None:
        raise CircuitsError(f"{caller}: queries= and positions= are the same; give one")
    given = positions if queries is None else queries
    return parse_span(given, caller) or parse_positions(given, caller)


def read_keys(keys: Any, caller: str) -> Positions | None:
    positions = parse_positions(keys, f"{caller}, keys")
    if isinstance(positions, Snapshot):
        raise CircuitsError(
            f"{caller}: keys are positions, the same for every example; got a mask {list(positions.shape)}"
        )
    return positions
