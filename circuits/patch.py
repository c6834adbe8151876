"""Activation patching: put in place what the model computes on another input."""

from __future__ import annotations

from typing import Any

from circuits.arguments import read_queries, read_tokens
from circuits.errors import CircuitsError
from circuits.interventions import Edit, Place
from circuits.replacements import Clean, Stored
from circuits.selection import parse_heads
from circuits.sites import Site
from circuits.snapshots import Snapshot


def activations(
    site: Any, source: Any, heads: Any = None, positions: Any = None, *, queries: Any = None
) -> Edit:
    """Replace the activation at `site` by the one from `source`, for some heads and positions or for all.

    `source` is tokens [batch pos], run on the model as it is outside all of our blocks, or a mapping from
    hook names to tensors (what `cache` or `run_with_cache` gives), of which only the tensors named by
    `site` are copied. It has a batch of 1, which then serves every example, or the run's batch; anything
    else is an error. Heads can be chosen at z, q, k, v, scores and pattern. The direction is source -> run:
    the run's own input is untouched.
    """
    verb = "patch.activations"
    try:
        place = Place(Site.parse(site), None if heads is None else parse_heads(heads))
    except CircuitsError as error:
        raise CircuitsError(f"{verb}: {error}") from error
    replacement = (
        _stored(place, source) if hasattr(source, "keys") else Clean(read_tokens(source, verb, "source"))
    )
    return Edit(verb, (place,), replacement, read_queries(queries, positions, verb))


def _stored(place: Place, source: Any) -> Stored:
    # ActivationCache of TransformerLens lists full hook names, as our own does.
    names = list(source.keys())
    if place.site.layer is not None or not place.site.kind.per_layer:
        wanted = [place.site.hook()]
    elif place.heads is not None and place.heads.heads is not None:
        wanted = [place.site.hook(layer) for layer in dict.fromkeys(head.layer for head in place.heads.heads)]
    else:
        wanted = [name for name in names if _is_site(name, place.site)]
    missing = [name for name in wanted if name not in names]
    if missing or not wanted:
        lacks = missing[0] if missing else f"site {place.site}"
        raise CircuitsError(
            f"patch.activations: the source has no {lacks}; it has {', '.join(map(str, names))}"
        )
    return Stored(tuple((name, Snapshot(source[name])) for name in wanted))


def _is_site(name: str, site: Site) -> bool:
    return "hook_" in name and Site(name).name == site.name
