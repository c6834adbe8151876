"""Ablations: uniform attention; heads, sites or layers replaced by zero, a mean or another example's activation.

Every function here returns an intervention: a frozen value that is independent of any model. Pass it to `intervene`,
`run` or `sweep`. `heads` is a spec such as "all", "0.1, 2.3-5" or "L0H1", or a tuple of heads; 0-based
throughout. `what` is heads (edited at z, so the attention output bias b_O stays), a site such as
"mlp_out.1" or "z", or a layer number, for the layer's heads (z) and neurons (mlp_post)
together, where output biases stay. `positions` limits an edit to some query positions: integers (negative ones
count from the end) or a boolean mask [batch pos] with a row for every example of the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

import numpy as np

from circuits.arguments import (
    check_renamed_args,
    is_whole,
    parse_choice,
    parse_frequencies,
    parse_seed,
    parse_unpadded_tokens,
)
from circuits.errors import CircuitsError
from circuits.frozen_tensors_and_positions import Snapshot, parse_numbers, parse_positions_or_span
from circuits.interventions import variant_grids_and_draws
from circuits.interventions.base import Intervention, Replacement
from circuits.interventions.fitted_removal import DIRECTIONS, RemoveFitted, class_functions, fourier_functions
from circuits.interventions.places_and_edits import (
    Edit,
    parse_heads_at,
    parse_place,
    parse_places,
    parse_positions_without_mask,
)
from circuits.interventions.replacements import Mean, MeanUnderOwnEdit, Noise, Resample, Uniform, Zero
from circuits.model.heads import KeyValueGroup
from circuits.model.prompt_parsing import parse_tokens_or_texts
from circuits.model.sites import Site
from circuits.model.types import HeadsLike, IndicesLike, PlacesLike, PositionsLike, SiteLike, TokensLike

__all__ = [
    "all_but",
    "classes",
    "each",
    "features",
    "frequencies",
    "mean",
    "mean_pattern",
    "neurons",
    "noise",
    "resample",
    "uniform",
    "zero",
]
__dir__ = __all__.copy


@check_renamed_args
def uniform(heads: HeadsLike, keys: PositionsLike = None, *, positions: PositionsLike = None) -> Edit:
    """Makes attention uniform: pattern[batch, head, query, key] := 1 / (number of keys this query may see).

    The keys a query may see are read from the attention scores of the same pass (masked ones are minus
    infinity), so causal, bidirectional, local and padded attention are all respected. With `keys`
    (positions), attention is uniform over those of them that the query may see; a query that sees none of
    them is an error, unless `positions` leaves it out. A query that sees no key at all (padding) keeps its
    zero pattern.

    With every head of a bidirectional model on an n×n grid this is the uniform ablation of Gopalani et al.
    2024 (arXiv:2410.22244, section 3.1.2: all attention weights := 1/n²).
    """
    caller = "ablate.uniform"
    places = parse_heads_at(heads, "pattern", caller)
    return Edit(
        caller,
        places,
        Uniform(parse_positions_without_mask(keys, caller)),
        parse_positions_or_span(positions, caller),
    )


@check_renamed_args
def mean_pattern(
    heads: HeadsLike, reference: TokensLike, of: str = "unedited", *, positions: PositionsLike = None
) -> Edit:
    """Replaces each head's pattern by its mean over the `reference` examples [batch pos].

    Unlike `uniform` this keeps what a head does on average, position by position. With `of="edited"` and the
    run's own tokens it is the uniform ablation of the released code of Gopalani et al. 2024
    (arXiv:2410.22244).

    Args:
        of: the pass whose mean is taken: "unedited", the model without any edits; or "edited", a pass on the reference
            under this edit alone, so that a later layer's mean is over patterns that the means of earlier layers have
            changed. The mean is over the whole reference, whatever the chunks. With "edited" a mask of `positions` per
            example edits the reference, too, and needs as many rows as it has examples.
    """
    caller = "ablate.mean_pattern"
    places = parse_heads_at(heads, "pattern", caller)
    tokens = parse_tokens_or_texts(reference, caller, "reference")
    edited = parse_choice(of, ("unedited", "edited"), caller, "of") == "edited"
    replacement = MeanUnderOwnEdit(tokens) if edited else Mean(tokens)
    return Edit(caller, places, replacement, parse_positions_or_span(positions, caller))


@check_renamed_args
def zero(what: PlacesLike, *, positions: PositionsLike = None) -> Edit:
    """Sets activations to zero: z for heads, the activation itself for a site, z and mlp_post for a layer.

    At the site "scores" masked entries stay masked.
    """
    return _make_ablation_edit("ablate.zero", what, Zero(), positions)


@check_renamed_args
def mean(
    what: PlacesLike,
    reference: TokensLike,
    over: str = "batch",
    *,
    reference_positions: PositionsLike = None,
    positions: PositionsLike = None,
) -> Edit:
    """Replaces activations by their mean over the `reference` examples [batch pos], position by position.

    `over="batch,pos"` pools positions too, and then the reference may have another length than the run (not
    at pattern or scores, where queries see different keys). The mean is taken in float64, on the model without
    the edits of open blocks.

    Args:
        reference_positions: the positions of the reference that are pooled, whole numbers or a slice, in each example's
            own tokens; `slice(1, None)` leaves the first token out. Default: all.
    """
    caller = "ablate.mean"
    over = parse_choice(str(over).replace(" ", ""), ("batch", "batch,pos"), caller, "over")
    at = parse_positions_or_span(reference_positions, f"{caller}, reference_positions")
    if at is not None and (over == "batch" or isinstance(at, Snapshot)):
        raise CircuitsError(
            f'{caller}: reference_positions= are whole numbers or a slice, and go with over="batch,pos"'
        )
    replacement = Mean(parse_tokens_or_texts(reference, caller, "reference"), over, at)
    made = _make_ablation_edit(caller, what, replacement, positions)
    if over == "batch,pos" and any("query" in place.site.kind.axes for place in made.places):
        raise CircuitsError(
            f'{caller}: over="batch,pos" at {made.places[0].site} would mix queries that see different keys; '
            'use over="batch"'
        )
    return made


@check_renamed_args
def resample(what: PlacesLike, source: TokensLike, seed: int = 0, *, positions: PositionsLike = None) -> Edit:
    """Replaces activations by another example's: row i takes row d(i) of `source` [batch pos].

    `source` has one row for every example of the run, usually the same tokens. d is one derangement of the
    whole batch, drawn from `seed`: the same at every site, and whatever the chunks are, no example keeps
    its own. A batch of 1 is an error.
    """
    caller = "ablate.resample"
    return _make_ablation_edit(caller, what, _replacement("resample", None, source, seed, caller), positions)


@check_renamed_args
def noise(what: PlacesLike, scale: float, seed: int = 0, *, positions: PositionsLike = None) -> Edit:
    """Adds Gaussian noise of standard deviation `scale` to activations, at z to each head's output.

    Independent for every example, position and entry, drawn from `seed` for the whole batch: the same whatever the
    chunks are. Prompts have one length.
    """
    caller = "ablate.noise"
    if not isinstance(scale, int | float | np.number) or isinstance(scale, bool) or not 0 <= scale < np.inf:
        raise CircuitsError(f"{caller}: scale={scale!r}; give a standard deviation, at least 0")
    return _make_ablation_edit(caller, what, Noise(float(scale), parse_seed(seed, caller)), positions)


@check_renamed_args
def all_but(
    heads: HeadsLike,
    how: str = "mean",
    *,
    reference: TokensLike | None = None,
    source: TokensLike | None = None,
    seed: int = 0,
    positions: PositionsLike = None,
) -> Edit:
    """Ablates every head of the model but these, at z: what is left is what these heads do by themselves.

    MLPs and embeddings stay. The heads are those of the model that it is applied to, so one value serves many models.

    Args:
        heads: the heads to keep.
        how: "mean" (over `reference` [batch pos]), "zero" or "resample" (from `source` [batch pos], as `resample`
            does).
    """
    caller = "ablate.all_but"
    (place,) = parse_heads_at(heads, "z", caller)
    kept = place.heads
    if kept is None or kept.heads is None:
        raise CircuitsError(f"{caller}: heads {heads!r} are all there are; name those to keep")
    groups = [one for one in kept.heads if isinstance(one, KeyValueGroup)]
    if groups:
        raise CircuitsError(f"{caller}: z has no key-value group {groups[0]}; name heads")
    others = replace(place, heads=replace(kept, others=True))
    replacement = _replacement(how, reference, source, seed, caller)
    return Edit(caller, (others,), replacement, parse_positions_or_span(positions, caller))


@check_renamed_args
def neurons(
    layer: int,
    neurons: IndicesLike,
    how: str = "zero",
    *,
    reference: TokensLike | None = None,
    source: TokensLike | None = None,
    seed: int = 0,
    positions: PositionsLike = None,
) -> Edit:
    """Ablates neurons of one layer's MLP at mlp_post [batch pos d_mlp], after the activation function; b_out stays.

    Args:
        neurons: indices from 0.
        how: "zero", "mean" (over `reference` [batch pos]) or "resample" (from `source` [batch pos], as `resample`
            does).
    """
    caller = "ablate.neurons"
    if not is_whole(layer, 0):
        raise CircuitsError(f"{caller}: layer={layer!r}; give one layer, counting from 0")
    if neurons is None:
        raise CircuitsError(f"{caller}: no neurons given")
    place = parse_place(Site("mlp_post", int(layer)), None, caller, neurons)
    replacement = _replacement(how, reference, source, seed, caller)
    return Edit(caller, (place,), replacement, parse_positions_or_span(positions, caller))


@check_renamed_args
def features(
    site: SiteLike,
    features: IndicesLike,
    how: str = "zero",
    *,
    reference: TokensLike | None = None,
    source: TokensLike | None = None,
    seed: int = 0,
    positions: PositionsLike = None,
) -> Edit:
    """Ablates features of the autoencoder that is spliced in at a site (`circuits.splice`); its error stays.

    Args:
        site: "resid_post.1", or "features.resid_post.1".
        features: indices from 0.
        how: "zero", "mean" or "resample".
        reference: for "mean", the tokens [batch pos] it is over.
        source: for "resample", the tokens [batch pos] of which each example takes another's.
        seed: of the order in "resample".
    """
    caller = "ablate.features"
    if features is None:
        raise CircuitsError(f"{caller}: no features given")
    given = parse_place(site, None, caller).site
    named = given if given.kind.unit == "feature" else f"features.{given}"
    place = parse_place(named, None, caller, features=features)
    replacement = _replacement(how, reference, source, seed, caller)
    return Edit(caller, (place,), replacement, parse_positions_or_span(positions, caller))


@check_renamed_args
def frequencies(
    site: SiteLike,
    keys: IndicesLike,
    coords: PositionsLike,
    period: int,
    keep: bool = False,
    *,
    grid: TokensLike,
    directions: str = "all",
    heads: HeadsLike = None,
    positions: PositionsLike = None,
) -> Edit:
    """Removes an activation's Fourier components at some frequencies, or (`keep`) all others but the constant.

    The activation at `site` is treated as a function of coordinates x_1..x_m in 0..period-1, the token ids at the
    positions `coords`. `grid` [period^m pos] holds every combination once; on it the coefficients of the waves
    are fitted, in float64, on the model without the edits of open blocks, for each position and entry of the
    activation. A run may then hold any examples of the grid, in any order: each loses, or keeps, the waves' values at
    its own coordinates.

    Args:
        keys: frequencies k, 1 <= k <= period / 2; w = 2πk/period.
        directions: "all", the products of {1, cos(w x), sin(w x)} over the coordinates without the constant, never
            across frequencies (for two coordinates the 8 components of Nanda et al. 2023, arXiv:2301.05217, section
            4.4), or "sum", only cos and sin of w(x_1 + ... + x_m), the components of a function of the sum.
    """
    caller = "ablate.frequencies"
    place = parse_place(site, heads, caller)
    if not is_whole(period, 2):
        raise CircuitsError(f"{caller}: period={period!r}; give a whole number of at least 2")
    chosen = parse_frequencies(keys, int(period), caller)
    coordinate_positions = parse_positions_without_mask(coords, caller, "coords")
    if coordinate_positions is None:
        raise CircuitsError(f"{caller}: coords are the positions of the coordinates; got None")
    parse_choice(directions, DIRECTIONS, caller, "directions")
    functions = fourier_functions(
        parse_unpadded_tokens(grid, caller, "grid"),
        coordinate_positions,
        int(period),
        chosen,
        directions,
        caller,
    )
    return Edit(caller, (place,), RemoveFitted(functions, keep), parse_positions_or_span(positions, caller))


@check_renamed_args
def classes(
    site: SiteLike,
    classes: IndicesLike,
    examples: TokensLike,
    keep: bool = False,
    *,
    heads: HeadsLike = None,
    positions: PositionsLike = None,
) -> Edit:
    """Removes the part of an activation that the example's class explains, or (`keep`) all but that part and the mean.

    Args:
        classes: whole numbers from 0, [example], or [example kind] for several kinds at once, of the `examples`.
        examples: [example pos], all different. On them the activation at `site` is fitted, in float64, by its mean plus
            a term for every class (for several kinds by least squares), on the model without the edits of open blocks,
            for each position and entry of the activation. A run may then hold any of the examples, in any order: each
            loses its class's term, or keeps only the mean and that term.

    Where the classes are remainders r modulo q, this removes all waves cos(2πjr/q), sin(2πjr/q), whether or not q
    divides the period of the tokens; where it does, and r is a token's or a sum's, it is `ablate.frequencies`.
    """
    caller = "ablate.classes"
    place = parse_place(site, heads, caller)
    tokens = parse_unpadded_tokens(examples, caller, "examples")
    functions = class_functions(tokens, parse_numbers(classes, f"{caller}: classes"), caller)
    return Edit(caller, (place,), RemoveFitted(functions, keep), parse_positions_or_span(positions, caller))


def _make_ablation_edit(caller: str, what: Any, replacement: Replacement, positions: Any) -> Edit:
    """Returns an edit of heads, a site or a layer."""
    return Edit(caller, parse_places(what, caller), replacement, parse_positions_or_span(positions, caller))


def _replacement(how: Any, reference: Any, source: Any, seed: int, caller: str) -> Replacement:
    """Returns what takes the place of activations: zero, their mean over a reference, or another example's."""
    how = parse_choice(how, ("zero", "mean", "resample"), caller, "how")
    for name, value, needed in (("reference", reference, "mean"), ("source", source, "resample")):
        if value is None and how == needed:
            raise CircuitsError(f"{caller}: how={how!r} needs {name}=, tokens [batch pos]")
        if value is not None and how != needed:
            raise CircuitsError(f"{caller}: {name}= goes with how={needed!r}, here how={how!r}")
    if how == "mean":
        return Mean(parse_tokens_or_texts(reference, caller, "reference"))
    if how == "resample":
        return Resample(parse_tokens_or_texts(source, caller, "source"), parse_seed(seed, caller))
    return Zero()


def each(
    make: Callable[..., Intervention], items: Iterable[Any], /, **arguments: Any
) -> dict[str, Intervention]:
    """Returns one intervention for each item, by name, for `sweep`.

        ablate.each(ablate.uniform, heads("all", model))           # {"0.0": ..., "0.1": ..., ...}
        ablate.each(ablate.mean, ["mlp_out.0", "mlp_out.1"], reference=tokens, over="batch,pos")

    Other arguments go to `make`. Items are heads, sites or numbers; a name is "0.1" for a head, "layer 2" for a number
    where `make` takes layers, "seed 2" where its first argument is called seed, else the item.
    `circuits.grid` does the same over several arguments at once, by their names.
    """
    parameters = inspect.signature(make).parameters if callable(make) else ()
    argument = next(iter(parameters), "item")
    return cast(dict[str, Intervention], variant_grids_and_draws.grid(make, {argument: items}, **arguments))
