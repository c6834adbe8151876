"""Patches activations by those that the model computes on another input: at a site, or along one path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from circuits.arguments import check_renamed_args, parse_choice
from circuits.circuit._circuit_edit import parse_stored_activation
from circuits.circuit._graph_and_names import Input, Node, input_from_name, node_from_name
from circuits.errors import CircuitsError, prefix_circuits_errors
from circuits.frozen_tensors_and_positions import Positions, Snapshot, Span, parse_positions_or_span
from circuits.interventions.base import Replacement
from circuits.interventions.intervene_run_cache import Activations
from circuits.interventions.paths import Path, check_writes_and_reads_stream
from circuits.interventions.places_and_edits import (
    Edit,
    Place,
    parse_place,
    parse_places,
    parse_source_positions,
)
from circuits.interventions.replacements import FromTensors, FromTokens
from circuits.model.heads import Head, HeadSpec, KeyValueGroup, is_heads_like, looks_like_heads, parse_heads
from circuits.model.prompt_parsing import is_tokenizer_output, parse_tokens_or_texts
from circuits.model.sites import Site
from circuits.model.types import HeadsLike, IndicesLike, PlacesLike, PositionsLike, SiteLike, TokensLike


@check_renamed_args
def activations(
    site: SiteLike,
    source: TokensLike,
    heads: HeadsLike = None,
    positions: PositionsLike = None,
    *,
    neurons: IndicesLike = None,
    features: IndicesLike = None,
    source_positions: PositionsLike = None,
) -> Edit:
    """Replaces the activation at `site` by that of `source`, at some heads and positions or at all.

    `source` is tokens [batch pos], run on the model without the edits of open blocks, or a mapping from
    hook names to tensors (what `cache` or `run_with_cache` gives), of which only the tensors named by
    `site` are copied. It has a batch of 1, which then serves every example, or the run's batch; anything
    else is an error. Heads can be chosen at z, q, k, v, scores and pattern (under grouped-query attention
    key-value groups, "0.k1", at k and v), neurons at mlp_pre and mlp_post, features where an
    autoencoder is spliced in. The direction is source -> run: the run's own input stays as it is.

    `source` may also be texts or whatever else `circuits.prompts` takes, in any layout: the third token of a prompt
    goes to the third token of its partner, which must have as many. Where it has not, `positions` and
    `source_positions` say which go together, in their order: integers, which count in each prompt's own tokens.
    """
    caller = "patch.activations"
    place = parse_place(site, heads, caller, neurons, features)
    chosen = parse_positions_or_span(positions, caller)
    return Edit(
        caller, (place,), _parse_patch_source(place, source, caller, chosen, source_positions), chosen
    )


@check_renamed_args
def path(
    sender: PlacesLike,
    receiver: PlacesLike | Sequence[PlacesLike | tuple[SiteLike, HeadsLike]],
    source: TokensLike,
    through: str | None = None,
    *,
    positions: PositionsLike = None,
    source_positions: PositionsLike = None,
) -> Path:
    """Patches the direct path between two components (Wang et al. 2022, arXiv:2211.00593, section 3.1).

    The receiver gets the activation that it has when the sender is replaced by its value on `source` while
    everything else that writes to the residual stream, every head's z and every MLP's output, is frozen at the clean
    value on the run's own tokens; the receiver's LayerNorm sees the changed stream. One clean pass, on the source,
    comes first.

    Args:
        sender: heads ("0.1"), or a site that writes to the residual stream: "z", "attn_out.0", "mlp_out.1",
            "mlp_post.1", "embed", "pos_embed". Circuits' names are read as well: "mlp1".
        receiver: heads (their q, k and v), a key-value group "2.k1" (its k and v), a site "q.2", "k.2", "v.2",
            "mlp_pre.1", a pair of such a site and heads or groups ("q", "2.3"), "output": the last residual stream; or
            a list or tuple of these, which receive at once: [("q", "2.3"), "mlp_pre.1", "output"]. Circuits' names are
            read as well: "2.3.q", "2.k1.v", "mlp1".
        source: tokens [batch pos] or texts, or a mapping from hook names to tensors, as `cache` gives.
        through: "mlps": those between recompute; None: they are frozen.
        positions: those at which the sender is replaced. The direction is source -> run.
        source_positions: those of the source that go with `positions`, in their order; default: the same.
    """
    caller = "patch.path"
    node = node_from_name(sender.strip()) if isinstance(sender, str) else None
    if node is not None:
        place = place_of_node(node)
    else:
        place, *others = parse_places(sender, caller)
        if others:
            raise CircuitsError(f'{caller}: sender {sender!r} is a layer; name heads or a site: "mlp_out.1"')
    targets = _parse_receivers(receiver, caller)
    check_writes_and_reads_stream(place.site, [target.site for target in targets if target is not None])
    if through is not None:
        parse_choice(through, ("mlps",), caller, "through")
    chosen = parse_positions_or_span(positions, caller)
    replacement = _parse_patch_source(place, source, caller, chosen, source_positions)
    sender_edit = Edit(caller, (place,), replacement, chosen)
    return Path(sender_edit, targets, through)


def _parse_receivers(given: Any, caller: str) -> tuple[Place | None, ...]:
    """Reads a receiver, a pair of a site and heads, or a list or tuple of several; None is the output."""
    if isinstance(given, str) and (found := input_from_name(given.strip())) is not None:
        return (place_of_input(found),)
    if _is_site_and_heads(given):
        return (parse_place(given[0], given[1], caller),)
    if isinstance(given, list | tuple):
        inputs = any(isinstance(one, str) and input_from_name(one.strip()) for one in given)
        if inputs or not is_heads_like(given):
            if not given:
                raise CircuitsError(f'{caller}: no receivers; name some, or "output"')
            return tuple(dict.fromkeys(place for one in given for place in _parse_receivers(one, caller)))
    if isinstance(given, Site) or (isinstance(given, str) and not looks_like_heads(given)):
        return (parse_place(given, None, caller),)
    with prefix_circuits_errors(caller):
        chosen = parse_heads(given)
    # What heads read (q, k and v), and groups (k and v).
    groups = tuple(one for one in chosen.heads or () if isinstance(one, KeyValueGroup))
    if not groups:
        return tuple(Place(Site(name), chosen) for name in ("q", "k", "v"))
    alone = tuple(one for one in chosen.heads or () if isinstance(one, Head))
    places = [Place(Site(name), HeadSpec(chosen.text, alone)) for name in ("q", "k", "v") if alone]
    return (*places, *(Place(Site(name), HeadSpec(chosen.text, groups)) for name in ("k", "v")))


def place_of_node(node: Node) -> Place:
    """Returns the activation that a node of a circuit writes."""
    if node.site == "z":
        return Place(Site("z"), parse_heads(str(node)))
    return Place(Site(node.site, node.layer))


def place_of_input(receiver: Input) -> Place | None:
    """Returns what an input of a circuit reads; None for the output."""
    if receiver.layer is None:
        return None
    if receiver.head is None:
        return Place(Site(receiver.site, receiver.layer))
    return Place(Site(receiver.site), parse_heads(receiver.node_name))


def _is_site_and_heads(given: Any) -> bool:
    """Returns whether this is a site that has heads, and heads."""
    if type(given) is not tuple or len(given) != 2 or not is_heads_like(given[1]):
        return False
    site = given[0]
    if isinstance(site, str) and not looks_like_heads(site):
        site = Site.parse(site)
    return isinstance(site, Site) and site.kind.head_axis is not None


def _parse_patch_source(
    place: Place,
    source: Any,
    caller: str,
    positions: Positions | Span | Snapshot | None,
    source_positions: Any,
) -> Replacement:
    """Returns the replacement that a source stands for: tokens to run, or activations that the user has."""
    at = parse_source_positions(source_positions, positions, caller)
    if at is not None and "key" in place.site.kind.axes:
        raise CircuitsError(
            f"{caller}: source_positions= cannot say which keys go together at {place.site}; patch q, k, v or z"
        )
    if hasattr(source, "keys") and not is_tokenizer_output(source):
        return _make_replacement_from_cache(place, source, caller, at)
    return FromTokens(parse_tokens_or_texts(source, caller, "source"), at)


def _make_replacement_from_cache(place: Place, source: Any, caller: str, at: Positions | None) -> FromTensors:
    """Returns a replacement by activations that the user has, taken from a cache by hook name."""
    # TransformerLens' ActivationCache has full hook names as its keys, as our own cache does.
    names = list(map(str, source.keys()))
    if place.site.layer is not None or not place.site.kind.per_layer:
        hooks = [place.site.hook()]
    elif place.heads is not None and place.heads.heads is not None:
        hooks = [place.site.hook(layer) for layer in dict.fromkeys(head.layer for head in place.heads.heads)]
    else:
        hooks = [name for name in names if "hook_" in name and Site(name).name == place.site.name]
    missing = [name for name in hooks if name not in names] or ([] if hooks else [f"site {place.site}"])
    if missing:
        raise CircuitsError(f"{caller}: the source has no {missing[0]}; it has {', '.join(names)}")
    values = {name: parse_stored_activation(source[name], name, caller) for name in hooks}
    if place.site.name == "scores" and any(map(_is_pattern, values.values())):
        raise CircuitsError(
            f"{caller}: the source holds patterns where scores should be, as a TransformerBridge's own cache does; "
            'take it from circuits.cache(model, tokens, ["scores"])'
        )
    mask = source.mask if isinstance(source, Activations) else None
    stored = tuple((name, Snapshot(value)) for name, value in values.items())
    return FromTensors(stored, None if mask is None else Snapshot(mask), at)


def _is_pattern(values: Tensor) -> bool:
    """Returns whether all rows are non-negative and sum to 1, or to 0 where no key is visible, as patterns do."""
    total = values.sum(-1)
    return bool((values >= 0).all() and ((total - 1).abs().lt(0.05) | total.eq(0)).all())
