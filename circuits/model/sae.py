"""Splices sparse autoencoders into a model, so that their features are sites: patched, ablated, edited, attributed.

Where x is what the edits of a site leave, f = encode(x) passes the hook point of the features and x − decode(f) that
of the error; what they leave, f' and e', goes on as decode(f') + e'. It is computed as x + (decode(f') − decode(f)) +
(e' − e), so that the model goes on with x itself, bit for bit, where nothing is edited. No gradient is cut: that at x
is then what it is without an autoencoder, and that at f' goes through the decoder alone, with the error held, as in
Marks et al. 2024 (arXiv:2403.19647), where the error is a node too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError, prefix_circuits_errors
from circuits.model.edit_state import contextmanager_entered_once, get_edit_state, hold_model_exclusively
from circuits.model.hooked_model import HookedModel
from circuits.model.hooks import keep_hooks_last
from circuits.model.sites import ERROR, FEATURES, KINDS, Site, SiteLike, sae_part_kind

CALLER = "splice"
Function = Callable[[Tensor], Tensor]


class SAEInsertion:
    """An autoencoder in line at one site: it maps the site's activation to what the model goes on with.

    Attributes:
        features: the hook point of the features [batch pos feature].
        error: the hook point of the error, in the shape of the site.
        width: the number of features.
        dtype: what encode, [... d_in] to [... feature], and decode, back, compute in; None: the model's.
    """

    def __init__(self, site: Site, encode: Function, decode: Function, dtype: torch.dtype | None) -> None:
        self.site, self.width, self.dtype = site, 0, dtype
        self.encode, self.decode = encode, decode
        self.features, self.error = nn.Identity(), nn.Identity()

    def to_sae_dtype(self, x: Tensor) -> Tensor:
        return x if self.dtype is None else x.to(self.dtype)

    @property
    def hook_points(self) -> dict[str, nn.Module]:
        """Its hook points by full name."""
        points = {FEATURES: self.features, ERROR: self.error}
        return {
            sae_part_kind(part, self.site.kind).hook.format(self.site.layer): point
            for part, point in points.items()
        }

    def edited_activation(self, x: Tensor) -> Tensor | None:
        """Returns what takes the place of x; None where neither features nor error are changed."""
        # Copies, as the functions may write to what they are given, and give one buffer again and again.
        flat = x.flatten(2)
        features = self.encode(self.to_sae_dtype(flat).clone()).clone()
        reconstruction = self.decode(features.clone()).clone()
        error = (flat - reconstruction.to(x.dtype)).reshape(x.shape)
        new_features, new_error = self.features(features), self.error(error)
        changes: list[Tensor] = []
        if new_features is not features:
            changes.append((self.decode(new_features.clone()) - reconstruction).to(x.dtype).reshape(x.shape))
        if new_error is not error:
            changes.append(new_error - error)
        return sum(changes, x) if changes else None


@contextmanager_entered_once
def splice(model: nn.Module, autoencoders: Mapping[SiteLike, Any]) -> Generator[nn.Module, None, None]:
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
            An SAE with parameters computes in their dtype, whatever the model's.

    Raises `CircuitsError` for a site that has no position axis or an SAE already, and for an SAE of another width or on
    another device than the model.
    """
    hooked = HookedModel(model)
    if not isinstance(autoencoders, Mapping) or not autoencoders:
        raise CircuitsError(f'{CALLER}: give sites and autoencoders, such as {{"resid_post.1": sae}}')
    new: dict[str, SAEInsertion] = {}
    for given, sae in autoencoders.items():
        hook, splice = _parse_autoencoder(given, sae, hooked)
        if hook in new:
            raise CircuitsError(f"{CALLER}: {splice.site} is named twice")
        new[hook] = splice
    with hold_model_exclusively(hooked.model):
        current = get_edit_state(hooked.model).splices
        for hook, splice in new.items():
            if hook in current:
                raise CircuitsError(f"{CALLER}: there is an autoencoder at {splice.site} already")
        current.update(new)
        try:
            insert = [partial(hooked.on_forward, hook, one.edited_activation) for hook, one in new.items()]
            with keep_hooks_last(model, insert):
                yield model
        finally:
            for hook in new:
                current.pop(hook, None)


def _parse_autoencoder(given: Any, sae: Any, hooked: HookedModel) -> tuple[str, SAEInsertion]:
    """Returns the hook that a site names, and its autoencoder, which has been tried on one activation of zeros."""
    with prefix_circuits_errors(CALLER):
        site = Site.parse(given)
        if site.name not in KINDS or site.kind.axes[1] != "pos":
            raise CircuitsError(
                f"an autoencoder reads a site of the table that has a position axis, not {str(site)!r}"
            )
        places = hooked.hooks_at(site)
    if len(places) > 1:
        raise CircuitsError(f'{CALLER}: {site} is of {len(places)} layers; name one, such as "{site}.0"')
    ((layer, hook),) = places
    site = Site(site.name, layer)
    what, pair = f"{CALLER}: {site}", sae if isinstance(sae, tuple | list) else ()
    encode, decode = pair if len(pair) == 2 else (getattr(sae, "encode", None), getattr(sae, "decode", None))
    if not callable(encode) or not callable(decode):
        raise CircuitsError(
            f"{what}: give an object with encode and decode, or a pair of functions, got {type(sae).__name__}"
        )
    weights = sae.parameters() if isinstance(sae, nn.Module) else ()
    dtype = next((weight.dtype for weight in weights if weight.is_floating_point()), None)
    splice = SAEInsertion(site, encode, decode, dtype)
    sizes = {**hooked.sizes, "head": hooked.head_count(site.kind)}
    size = math.prod(sizes[axis] or 0 for axis in site.kind.axes[2:])
    zeros = torch.zeros(1, 1, size, device=hooked.device, dtype=next(hooked.model.parameters()).dtype)
    try:
        with torch.no_grad():
            features = encode(splice.to_sae_dtype(zeros))
            back = decode(features)
    except Exception as error:
        raise CircuitsError(f"{what} fails on x {list(zeros.shape)}: {str(error).splitlines()[0]}") from error
    if features.ndim != 3 or features.shape[:2] != (1, 1) or back.shape != zeros.shape:
        raise CircuitsError(
            f"{what}: encode gives {list(features.shape)} and decode {list(back.shape)} for x {list(zeros.shape)}; "
            "they map [batch pos d_in] to [batch pos feature] and back"
        )
    splice.width = features.shape[2]
    return hook, splice
