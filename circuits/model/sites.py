"""Names the sites of a forward pass, their hooks and their axes."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from circuits.errors import CircuitsError


@dataclass(frozen=True)
class SiteKind:
    """One kind of activation: its hook (`{}` stands for the layer) and the names of its axes."""

    name: str
    hook: str
    axes: tuple[str, ...]

    @cached_property
    def per_layer(self) -> bool:
        return "{}" in self.hook

    @cached_property
    def base_site(self) -> str:
        """The name of the site of the model that it is, or is a part of."""
        return self.name.split(".")[-1] if self.name.startswith(_PREFIXES) else self.name

    @cached_property
    def unit(self) -> str | None:
        """What an entry of its last axis is called, where entries are edited one by one."""
        return UNITS.get(self.axes[-1])

    @cached_property
    def head_axis(self) -> int | None:
        return self.axes.index("head") if "head" in self.axes else None

    @cached_property
    def query_axis(self) -> int:
        """The axis that `positions=` selects on: the query of a pattern, else the position."""
        return self.axes.index("query" if "query" in self.axes else "pos")

    @cached_property
    def position_axes(self) -> tuple[int, ...]:
        """The axes that run over positions."""
        return tuple(index for index, axis in enumerate(self.axes) if axis in ("pos", "query", "key"))


_RESIDUAL = ("batch", "pos", "d_model")
_HEAD = ("batch", "pos", "head", "d_head")
_ATTENTION = ("batch", "head", "query", "key")
_NEURON = ("batch", "pos", "d_mlp")

KINDS: dict[str, SiteKind] = {
    kind.name: kind
    for kind in (
        SiteKind("embed", "hook_embed", _RESIDUAL),
        SiteKind("pos_embed", "hook_pos_embed", _RESIDUAL),
        SiteKind("resid_pre", "blocks.{}.hook_resid_pre", _RESIDUAL),
        SiteKind("q", "blocks.{}.attn.hook_q", _HEAD),
        SiteKind("k", "blocks.{}.attn.hook_k", _HEAD),
        SiteKind("v", "blocks.{}.attn.hook_v", _HEAD),
        SiteKind("scores", "blocks.{}.attn.hook_attn_scores", _ATTENTION),
        SiteKind("pattern", "blocks.{}.attn.hook_pattern", _ATTENTION),
        SiteKind("z", "blocks.{}.attn.hook_z", _HEAD),
        SiteKind("attn_out", "blocks.{}.hook_attn_out", _RESIDUAL),
        SiteKind("resid_mid", "blocks.{}.hook_resid_mid", _RESIDUAL),
        SiteKind("mlp_pre", "blocks.{}.mlp.hook_pre", _NEURON),
        SiteKind("mlp_post", "blocks.{}.mlp.hook_post", _NEURON),
        SiteKind("mlp_out", "blocks.{}.hook_mlp_out", _RESIDUAL),
        SiteKind("resid_post", "blocks.{}.hook_resid_post", _RESIDUAL),
    )
}

# Hooks that only some models have, or call; they are sites where a model has them, and have heads to name.
_HEAD_INPUT = ("batch", "pos", "head", "d_model")
_OPTIONAL = {
    kind.name: kind
    for kind in (
        SiteKind("rot_q", "blocks.{}.attn.hook_rot_q", _HEAD),
        SiteKind("rot_k", "blocks.{}.attn.hook_rot_k", _HEAD),
        SiteKind("attn_in", "blocks.{}.hook_attn_in", _HEAD_INPUT),
        SiteKind("q_input", "blocks.{}.hook_q_input", _HEAD_INPUT),
        SiteKind("k_input", "blocks.{}.hook_k_input", _HEAD_INPUT),
        SiteKind("v_input", "blocks.{}.hook_v_input", _HEAD_INPUT),
        SiteKind("result", "blocks.{}.attn.hook_result", _HEAD_INPUT),
    )
}
#: Sites whose head axis holds key-value groups where heads share these.
GROUPED = ("k", "v", "rot_k", "k_input", "v_input")

#: What an entry of these axes is called.
UNITS = {"d_mlp": "neuron", "feature": "feature"}

# A site into which a sparse autoencoder is spliced has two parts, which are sites too.
FEATURES, ERROR = "features", "error"
_PREFIXES = (f"{FEATURES}.", f"{ERROR}.")


def sae_part_kind(part: str, whole: SiteKind) -> SiteKind:
    """Returns the kind of a part, features or error, of a site into which an autoencoder is spliced."""
    axes = (*whole.axes[:2], "feature") if part == FEATURES else whole.axes
    return SiteKind(f"{part}.{whole.name}", f"{whole.hook}.{part}", axes)


#: The kinds of activations that have a position axis of their own, with their parts.
_PARTS = {
    kind.name: kind
    for whole in KINDS.values()
    if whole.axes[1] == "pos"
    for kind in (sae_part_kind(FEATURES, whole), sae_part_kind(ERROR, whole))
}


_LISTED = {**KINDS, **_PARTS, **_OPTIONAL}
_WRITE = 'write "z", "z.2", a full hook name or Site("z", layer=2)'


@dataclass(frozen=True)
class Site:
    """A named site of one layer or (`layer=None`) of every layer, or any full hook name of the model.

    `Site("z", layer=2)`, `Site.parse("z.2")` and `Site.parse("blocks.2.attn.hook_z")` are equal.
    """

    name: str
    layer: int | None = None

    def __post_init__(self) -> None:
        """Checks the name and the layer; a full hook name becomes its short one."""
        if not isinstance(self.name, str):
            raise CircuitsError(f"not a site: {self.name!r}; {_WRITE}")
        if self.layer is not None:
            try:
                layer = None if isinstance(self.layer, bool) else self.layer
                object.__setattr__(self, "layer", operator.index(layer))  # type: ignore[arg-type]  # None is refused
            except TypeError as error:
                raise CircuitsError(
                    f"site {self.name!r}: layer={self.layer!r}; give a whole number from 0, or None"
                ) from error
        if self.name not in _LISTED:
            short, layer = _parse_hook_name(self.name)
            if self.name.startswith(_PREFIXES):
                raise CircuitsError(
                    f"no site {self.name!r}: an autoencoder is spliced in at one of "
                    f"{', '.join(name.split('.')[1] for name in _PARTS if name.startswith(FEATURES))}"
                )
            if short is None and "hook_" not in self.name:
                raise CircuitsError(f"no site {self.name!r}; closest: {', '.join(closest_sites(self.name))}")
            if short is not None:
                if self.layer not in (None, layer):
                    raise CircuitsError(f"site {self.name!r} is of layer {layer}, not {self.layer}")
                object.__setattr__(self, "name", short)
                object.__setattr__(self, "layer", layer)
        if self.layer is not None and (not self.kind.per_layer or self.layer < 0):
            raise CircuitsError(f"site {self.name!r} has no layer {self.layer}")

    @classmethod
    def parse(cls, spec: SiteLike) -> Site:
        """Reads "z", "z.2", a full hook name, or a Site."""
        if isinstance(spec, Site) or not isinstance(spec, str):
            return spec if isinstance(spec, Site) else cls(spec)
        match = re.fullmatch(r"((?:\w+\.)?\w+)\.(\d{1,6})", spec.strip())
        return cls(match[1], int(match[2])) if match else cls(spec.strip())

    @cached_property
    def kind(self) -> SiteKind:
        # A hook outside the table is taken as [batch pos ...]; its further axes are unknown.
        return _LISTED.get(self.name) or SiteKind(self.name, self.name, ("batch", "pos", "..."))

    def hook(self, layer: int | None = None) -> str:
        """Returns the full hook name, at `layer` where the site itself names none."""
        return self.kind.hook.format(self.layer if self.layer is not None else layer)

    def __str__(self) -> str:
        return self.name if self.layer is None else f"{self.name}.{self.layer}"


#: "z.1", "resid_post", a full hook name, a `Site`.
SiteLike = str | Site


def closest_sites(name: str, among: Iterable[str] = KINDS) -> list[str]:
    """Returns the three sites of `among` that look most like `name` (its last part, without "hook_")."""
    tail = name.split(".")[-1].removeprefix("hook_")
    # `result`, the output of each head in d_model, is edited at z where it is off, however close other names are.
    tail = "z" if tail == "result" else tail
    return difflib.get_close_matches(tail, list(among), n=3, cutoff=0.0)


def _parse_hook_name(hook: str) -> tuple[str | None, int | None]:
    for kind in _LISTED.values():
        match = re.fullmatch(re.escape(kind.hook).replace(r"\{\}", r"(\d+)"), hook)
        if match:
            return kind.name, int(match[1]) if kind.per_layer else None
    return None, None
