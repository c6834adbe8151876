"""Reading the arguments that all edits share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.places import Place
from circuits.selection import looks_like_heads, parse_heads
from circuits.sites import Site
from circuits.snapshots import Positions, Snapshot, parse_positions


def read_what(what: Any, verb: str) -> tuple[tuple[Place, ...], bool]:
    """Heads (edited at z), a site, or a layer number; second, whether a place the model lacks is passed over.

    A layer is all it writes: its heads at z and its neurons at mlp_post, so that the output biases stay in
    both.
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
        raise CircuitsError(f"{verb}: {error}") from error


def read_heads(spec: Any, site: str, verb: str) -> tuple[Place, ...]:
    try:
        return (Place(Site(site), parse_heads(spec)),)
    except CircuitsError as error:
        raise CircuitsError(f"{verb}: {error}") from error


def read_place(site: Any, heads: Any, verb: str, neurons: Any = None) -> Place:
    """A site, and of it some heads or neurons where those are given."""
    chosen, d_mlp = (None, None) if neurons is None else read_neurons(neurons, verb)
    try:
        return Place(Site.parse(site), None if heads is None else parse_heads(heads), chosen, d_mlp)
    except CircuitsError as error:
        raise CircuitsError(f"{verb}: {error}") from error


def read_neurons(neurons: Any, verb: str) -> tuple[tuple[int, ...], int | None]:
    """Neuron indices, or where a boolean mask [d_mlp] is true; second, the length of the mask."""
    size = None
    if isinstance(neurons, np.ndarray):
        neurons = torch.from_numpy(neurons)
    if isinstance(neurons, Tensor) and neurons.dtype == torch.bool:
        if neurons.ndim != 1 or not bool(neurons.any()):
            raise CircuitsError(
                f"{verb}: a mask of neurons is [d_mlp] and selects some; got {list(neurons.shape)}"
            )
        size = len(neurons)
        neurons = neurons.nonzero().flatten()
    return read_indices(neurons, verb, "neurons") or (), size


def read_queries(queries: Any, positions: Any, verb: str) -> Positions | Snapshot | None:
    if queries is not None and positions is not None:
        raise CircuitsError(f"{verb}: queries= and positions= are the same; give one")
    return parse_positions(positions if queries is None else queries, verb)


def read_tokens(tokens: Any, verb: str, name: str) -> Snapshot:
    """A non-empty batch of model inputs: [batch pos], or [batch pos ...] for models that take vectors."""
    if isinstance(tokens, np.ndarray):
        tokens = torch.from_numpy(tokens)
    if not isinstance(tokens, Tensor) or tokens.ndim < 2 or tokens.numel() == 0:
        got = list(tokens.shape) if isinstance(tokens, Tensor | np.ndarray) else type(tokens).__name__
        raise CircuitsError(f"{verb}: {name} must be tokens [batch pos], got {got}")
    return Snapshot(tokens)


def read_run_tokens(tokens: Any, verb: str) -> Tensor:
    """The inputs of a run, as a tensor; unlike a reference they are not copied."""
    if isinstance(tokens, np.ndarray):
        tokens = torch.from_numpy(tokens)
    if not isinstance(tokens, Tensor) or tokens.ndim < 2 or tokens.numel() == 0:
        got = list(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise CircuitsError(f"{verb}: tokens must be a tensor [batch pos], got {got}")
    return tokens


def read_keys(keys: Any, verb: str) -> Positions | None:
    found = parse_positions(keys, f"{verb}, keys")
    if isinstance(found, Snapshot):
        raise CircuitsError(
            f"{verb}: keys are positions, the same for every example; got a mask {list(found.shape)}"
        )
    return found


def read_indices(given: Any, verb: str, name: str) -> tuple[int, ...] | None:
    """One or several indices from 0, without repeats; None stays None."""
    if given is None:
        return None
    if isinstance(given, Tensor | np.ndarray):
        given = given.tolist()
    given = given if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    given = tuple(given)
    if not given or any(isinstance(x, bool) or not isinstance(x, int | np.integer) or x < 0 for x in given):
        raise CircuitsError(f"{verb}: {name} are whole numbers from 0, at least one; got {given!r}")
    return tuple(dict.fromkeys(map(int, given)))


def read_choice(value: Any, choices: Iterable[str], verb: str, name: str) -> str:
    choices = list(choices)
    if value not in choices:
        raise CircuitsError(f"{verb}: {name}={value!r}; choose from {', '.join(map(repr, choices))}")
    return str(value)


def read_seed(seed: Any, verb: str) -> int:
    """A seed that both torch's and numpy's generators take."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**63:
        raise CircuitsError(f"{verb}: seed={seed!r}; a seed is an integer from 0 to 2**63 - 1")
    return int(seed)
