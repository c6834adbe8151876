"""Reading the arguments that all edits share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions import Place
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


def read_keys(keys: Any, verb: str) -> Positions | None:
    found = parse_positions(keys, f"{verb}, keys")
    if isinstance(found, Snapshot):
        raise CircuitsError(
            f"{verb}: keys are positions, the same for every example; got a mask {list(found.shape)}"
        )
    return found


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
