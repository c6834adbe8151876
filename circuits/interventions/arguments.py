"""Reads the arguments that all edits share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.edits import Place
from circuits.model.heads import looks_like_heads, parse_heads
from circuits.model.sites import UNITS, Site
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


def read_place(site: Any, heads: Any, caller: str, neurons: Any = None, features: Any = None) -> Place:
    """Reads a site, and heads, neurons or features of it where those are given."""
    unit, units = ("feature", features) if neurons is None else ("neuron", neurons)
    chosen, size = (None, None) if units is None else read_neurons(units, caller, f"{unit}s")
    try:
        parsed = Site.parse(site)
        if units is not None:
            _refuse_other_units(parsed, unit)
        return Place(parsed, None if heads is None else parse_heads(heads), chosen, size)
    except CircuitsError as error:
        raise CircuitsError(f"{caller}: {error}") from error


def refuse_other_units(site: Site, by: str, caller: str) -> None:
    """Refuses by="neuron" and by="feature" at a site that has others, or none."""
    if by in UNITS.values():
        try:
            _refuse_other_units(site, by)
        except CircuitsError as error:
            raise CircuitsError(f"{caller}: {error}") from error


def _refuse_other_units(site: Site, unit: str) -> None:
    if site.kind.unit != unit:
        where = (
            "at mlp_pre and mlp_post" if unit == "neuron" else 'of a spliced SAE, at "features.resid_post.1"'
        )
        raise CircuitsError(f"site {site} has no {unit}s; those are {where}")


def read_neurons(neurons: Any, caller: str, units: str = "neurons") -> tuple[tuple[int, ...], int | None]:
    """Reads indices of neurons or features, or a boolean mask of them all; second, the length of the mask."""
    axis = "[d_mlp]" if units == "neurons" else "[feature]"
    size = None
    neurons = as_dense_tensor(neurons, f"{caller}: {units}")
    if isinstance(neurons, Tensor) and neurons.dtype == torch.bool:
        if neurons.ndim != 1 or not bool(neurons.any()):
            raise CircuitsError(
                f"{caller}: a mask of {units} is {axis} and selects some; got {list(neurons.shape)}"
            )
        size = len(neurons)
        neurons = neurons.nonzero().flatten()
    else:
        refuse_numbers_as_mask(neurons, f"{caller}: {units}", axis)
    return read_indices(neurons, caller, units) or (), size


def parse_query_positions(positions: Any, caller: str) -> Positions | Span | Snapshot | None:
    """Returns the query positions of an edit: numbers, a slice or a mask [batch pos]; None for all."""
    return parse_span(positions, caller) or parse_positions(positions, caller)


def read_source_positions(
    source_positions: Any, positions: Positions | Span | Snapshot | None, caller: str
) -> Positions | Snapshot | None:
    """Returns the positions of a source that go, in order, to those of the run."""
    at = parse_positions(source_positions, f"{caller}, source_positions", repeats=True)
    if at is None:
        return None
    if positions is None:
        raise CircuitsError(f"{caller}: source_positions= needs positions=, as many positions of the run")
    if isinstance(positions, Span):
        raise CircuitsError(f"{caller}: source_positions= are paired with numbers, got positions={positions}")
    if isinstance(at, tuple) and isinstance(positions, tuple) and len(at) != len(positions):
        raise CircuitsError(
            f"{caller}: {len(positions)} positions= and {len(at)} source_positions= cannot be paired"
        )
    return at


def read_keys(keys: Any, caller: str) -> Positions | None:
    positions = parse_positions(keys, f"{caller}, keys")
    if isinstance(positions, Snapshot):
        raise CircuitsError(
            f"{caller}: keys are positions, the same for every example; got a mask {list(positions.shape)}"
        )
    return positions
