"""Splices sparse autoencoders into a model, so that their features are sites: patched, ablated, edited, attributed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError, prefixed
from circuits.model.contexts import model_block
from circuits.model.edit_state import exclusive
from circuits.model.hooked_model import HookedModel
from circuits.model.sae_insertions import Autoencoder, SAEInsertion, reinstall, spliced
from circuits.model.sites import KINDS, Site

CALLER = "splice"


@model_block
def splice(model: nn.Module, autoencoders: Mapping[Any, Any]) -> Iterator[Any]:
    """Puts sparse autoencoders (SAEs) in line inside a block; their features are sites of the model there.

        with splice(model, {"resid_post.1": sae}):
            run(model, tokens, ablate.features("resid_post.1", [3, 17]))
            patch.screen(model, base, source, metric, "features.resid_post.1", by="feature")

    At a site with activation x the model goes on with decode(f) + (x − decode(f)), f = encode(x): with x itself as long
    as nothing is edited, bit for bit. `features.resid_post.1` [batch pos feature] and `error.resid_post.1`, the second
    term, in the shape of x, are sites of their own. Edits at the site itself act on x, before the SAE reads it; where
    features are edited the error stays that of the run, and what is cached at the site is what the model goes on
    with. Clean passes (`reference=`, `source=`) have the SAE in line too.

    Args:
        autoencoders: site -> an object with `encode` [... d_in] -> [... feature] and `decode` (an SAE of SAELens, or
            any module of your own), or a pair of two such functions. Heads are flattened: d_in of z is heads · d_head.
            A site without a layer ("mlp_out") takes a function of the layer that returns the SAE. An SAE with
            parameters computes in their dtype, whatever the model's.

    Raises `CircuitsError` for a site that has no position axis or an SAE already, and for an SAE of another width or on
    another device than the model.
    """
    surface = HookedModel.of(model)
    if not isinstance(autoencoders, Mapping) or not autoencoders:
        raise CircuitsError(
            f'{CALLER}: give a dict of sites and autoencoders, such as {{"resid_post.1": sae}}'
        )
    new: dict[str, SAEInsertion] = {}
    for given, sae in autoencoders.items():
        for hook, splice in _read(given, sae, surface).items():
            if hook in new:
                raise CircuitsError(f"{CALLER}: {splice.site} is named twice")
            new[hook] = splice
    with exclusive(surface.model), spliced(surface.model, new, lambda: reinstall_hooks(surface)):
        yield model


def reinstall_hooks(surface: HookedModel) -> None:
    reinstall(surface.model, surface.on_forward)


def _read(given: Any, sae: Any, surface: HookedModel) -> dict[str, SAEInsertion]:
    """Returns the splice of each hook that a site names, with its autoencoder, checked."""
    with prefixed(CALLER):
        site = Site.parse(given)
        if site.name not in KINDS or site.kind.axes[1] != "pos":
            raise CircuitsError(
                f"an autoencoder reads a site of the table that has a position axis, not {str(site)!r}"
            )
        places = surface.at(site)
    each_layer = site.layer is None and site.kind.per_layer
    if each_layer and (not callable(sae) or hasattr(sae, "encode")):
        raise CircuitsError(
            f'{CALLER}: {site} is a site of {len(places)} layers; name one ("{site}.0"), or give a function from the '
            "layer to its autoencoder"
        )
    return {
        hook: _checked(Site(site.name, layer), sae(layer) if each_layer else sae, surface)
        for layer, hook in places
    }


def _checked(site: Site, sae: Any, surface: HookedModel) -> SAEInsertion:
    """Returns the splice of an autoencoder that has been tried on one activation of zeros."""
    what = f"{CALLER}: {site}"
    pair = (
        sae if isinstance(sae, tuple | list) else (getattr(sae, "encode", None), getattr(sae, "decode", None))
    )
    if len(pair) != 2 or not all(map(callable, pair)):
        raise CircuitsError(
            f"{what}: give an object with encode and decode, or a pair of functions, got {type(sae).__name__}"
        )
    elsewhere = {weight.device for weight in _weights(sae)} - {surface.device}
    if elsewhere:
        raise CircuitsError(
            f"{what}: the SAE is on {elsewhere.pop()}, the model on {surface.device}; move it there first: "
            f'sae.to("{surface.device}")'
        )
    autoencoder = Autoencoder(pair[0], pair[1], _dtype(sae))
    size = 1
    for length in surface.shape(site.kind, 1, 1)[2:]:
        size *= length or 0
    weight = next(surface.model.parameters())
    zeros = torch.zeros(1, 1, size, device=surface.device, dtype=weight.dtype)
    try:
        with torch.no_grad():
            features = autoencoder.encode(autoencoder.like(zeros))
            back = autoencoder.decode(features)
    except Exception as error:
        raise CircuitsError(f"{what} fails on x {list(zeros.shape)}: {str(error).splitlines()[0]}") from error
    if features.ndim != 3 or features.shape[:2] != (1, 1) or back.shape != zeros.shape:
        raise CircuitsError(
            f"{what}: encode gives {list(features.shape)} and decode {list(back.shape)} for x {list(zeros.shape)}; "
            "they map [batch pos d_in] to [batch pos feature] and back"
        )
    return SAEInsertion(site, autoencoder, features.shape[2])


def _weights(sae: Any) -> Iterator[Tensor]:
    return iter(sae.parameters() if isinstance(sae, nn.Module) else ())


def _dtype(sae: Any) -> torch.dtype | None:
    return next((weight.dtype for weight in _weights(sae) if weight.is_floating_point()), None)
