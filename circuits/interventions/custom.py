"""Makes an intervention from any function, with the same checks as the named ones."""

from __future__ import annotations

from typing import Any

from circuits.errors import CircuitsError
from circuits.interventions.arguments import parse_query_positions, read_place
from circuits.interventions.edits import Edit
from circuits.interventions.replacements import Computed
from circuits.validate import answers_former_names, check_call


@answers_former_names
def edit(
    site: Any,
    fn: Any,
    heads: Any = None,
    positions: Any = None,
    *,
    neurons: Any = None,
    features: Any = None,
) -> Edit:
    """Replaces the activation at `site` by `fn(activation)`: steering, scaling, noise, anything.

    `fn` gets a copy of the whole activation (for z [batch pos head d_head]) and returns a tensor of the
    same shape; only the chosen heads, positions, neurons (at mlp_pre and mlp_post) and features (of a
    spliced SAE) of it are used. It must depend on nothing but its argument for results to be the same under every chunk
    size, and treat positions alike to be the same with and without a key-value cache.
    """
    if not callable(fn):
        raise CircuitsError(f"edit: fn must be a function of the activation, got {fn!r}")
    check_call(fn, "edit: fn is given the activation alone", None)
    place = read_place(site, heads, "edit", neurons, features)
    return Edit("edit", (place,), Computed(fn), parse_query_positions(positions, "edit"))
