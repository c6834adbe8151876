"""Weight transplants: run a model with some of another checkpoint's weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.interventions.base import Intervention, WeightEdit
from circuits.model.locks import exclusive
from circuits.model.surface import Surface
from circuits.tensors import Snapshot, as_dense_tensor
from circuits.validate import read_indices

__all__ = ["COMPONENTS", "weights"]

# Each part of a component: what its parameters are called in a state_dict, after "blocks.N." where it has
# layers. HookedTransformer writes attn.W_Q (attn._W_K where key-value heads are grouped), a bridge
# attn.q.weight. Attention and MLP do not include LayerNorm, as in Gopalani et al. 2024 (section 3.1.2).
_PARTS: dict[str, tuple[bool, str]] = {
    "q": (True, r"attn\.(W_Q|b_Q|q\.(weight|bias))"),
    "k": (True, r"attn\.(_?W_K|_?b_K|k\.(weight|bias))"),
    "v": (True, r"attn\.(_?W_V|_?b_V|v\.(weight|bias))"),
    "o": (True, r"attn\.(W_O|b_O|o\.(weight|bias))"),
    "mlp": (True, r"mlp\.(?!ln\.).+"),
    "ln1": (True, r"ln1\..+"),
    "ln2": (True, r"ln2\..+"),
    "embed": (False, r"embed\..+"),
    "pos_embed": (False, r"pos_embed\..+"),
    "unembed": (False, r"unembed\..+"),
    "ln_embed": (False, r"ln_embed\..+"),
    "ln_final": (False, r"ln_final\..+"),
}

#: Every component that can be named, and the parts it stands for.
COMPONENTS: dict[str, tuple[str, ...]] = {
    "q": ("q",),
    "k": ("k",),
    "v": ("v",),
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "attn": ("q", "k", "v", "o"),
    "mlp": ("mlp",),
    "embed": ("embed",),
    "pos_embed": ("pos_embed",),
    "unembed": ("unembed",),
    "ln1": ("ln1",),
    "ln2": ("ln2",),
    "ln_embed": ("ln_embed",),
    "ln_final": ("ln_final",),
    "ln": ("ln1", "ln2", "ln_embed", "ln_final"),
}


@dataclass(frozen=True)
class Transplant(Intervention):
    """Parameters by state_dict name, of chosen components and layers, and the values they get."""

    components: tuple[str, ...]
    layers: tuple[int, ...] | None
    values: tuple[tuple[str, Snapshot], ...]
    # Of the source; None where it was a state_dict, which does not tell.
    post_norm: bool | None = field(default=None, compare=False)

    def plan(self, surface: Surface) -> tuple[WeightEdit, ...]:
        if self.post_norm not in (None, surface.post_norm):
            one, other = "a post-norm model", "none"
            raise CircuitsError(
                f"{self.label}: the source is {one if self.post_norm else other}, the model is "
                f"{one if surface.post_norm else other}; both must be of one architecture"
            )
        there = surface.named_weights()
        mine = selected(there, self.components, self.layers)
        values = dict(self.values)
        if self.layers is not None and max(self.layers) >= surface.n_layers:
            raise CircuitsError(
                f"{self.label}: no layer {max(self.layers)}: the model has layers 0-{surface.n_layers - 1}"
            )
        for name in mine:
            if name not in values:
                raise CircuitsError(
                    f"{self.label}: the source has no {name}, the model has; both must be of one architecture"
                )
        for name, value in values.items():
            if name not in mine:
                if _is_equal_buffer(surface.model.state_dict().get(name), value.tensor):
                    continue
                raise CircuitsError(
                    f"{self.label}: the model has no parameter {name}, the source has; both must be of one architecture"
                )
            if value.shape != tuple(there[name].shape):
                raise CircuitsError(
                    f"{self.label}: {name} is {list(value.shape)} in the source and {list(there[name].shape)} in "
                    "the model; shapes must be equal"
                )
            if there[name].is_inference():
                raise CircuitsError(
                    f"{self.label}: {name} of the model was made under torch.inference_mode and cannot be exchanged; "
                    "make or copy the model outside of it"
                )
        _refuse_shared(self.label, mine, there)
        return tuple(
            WeightEdit(self.label, part, layer, name, there[name], values[name])
            for name, (part, layer) in mine.items()
        )

    def describe(self) -> dict[str, Any]:
        return {
            "intervention": "transplant.weights",
            "components": list(self.components),
            "layers": None if self.layers is None else list(self.layers),
            "parameters": {name: value.describe() for name, value in self.values},
        }

    @property
    def label(self) -> str:
        where = "" if self.layers is None else f", layers {','.join(map(str, self.layers))}"
        return f"transplant.weights({'+'.join(self.components)}{where})"


def weights(source: Any, components: Any, layers: Any = None) -> Transplant:
    """Run with some weights of `source`, a model or a state_dict of the same architecture.

    Args:
        components: one or several of q, k, v, qkv, o, attn (= q, k, v, o), mlp, embed, pos_embed, unembed, ln1, ln2,
            ln_embed (after the embeddings of a post-norm model), ln_final, ln (those four, as far as the model has
            them), each with its biases; `COMPONENTS` lists them, and `describe()` every parameter by name. Attention
            and MLP never include a LayerNorm. `layers` (0-based) limits those that lie in a layer; default: all layers.

    Only the named weights are copied, at once, so that the source may change or go. They are put in before any
    activation is edited, and the model's own come back, bit for bit, when the block ends; clean passes run with
    the model's own. A backward pass inside the block sees the source's weights; one that is left for after the block
    never meets the model's own: torch refuses it where it would. With `components="qkv"` and every layer this is the
    model switch of Gopalani et al. 2024 (arXiv:2410.22244, section 3.1.2).

    Raises `CircuitsError` for unknown components, for a model and a source whose names or shapes differ, and
    for a parameter that two components share (tied embeddings): before anything is changed.
    """
    caller = "transplant.weights"
    components = components.tolist() if isinstance(components, np.ndarray) else components
    several = isinstance(components, Iterable) and not isinstance(components, str | Tensor)
    given = tuple(dict.fromkeys(map(str, components))) if several else (str(components),)
    wrong = [name for name in given if name not in COMPONENTS]
    if wrong or not given:
        what = f"no component {wrong[0]!r}" if wrong else "no component given"
        raise CircuitsError(f"{caller}: {what}; choose from {', '.join(COMPONENTS)}")
    chosen = read_indices(layers, caller, "layers")
    # Not while another thread has replaced a part of them.
    with exclusive(source) if isinstance(source, nn.Module) else nullcontext():
        return _taken(_tensors(source, caller), given, chosen, caller)


def _taken(
    source: tuple[Mapping[str, Any], bool | None],
    given: tuple[str, ...],
    chosen: tuple[int, ...] | None,
    caller: str,
) -> Transplant:
    there, post_norm = source
    names = selected(there, given, chosen)
    for component in given:
        if not selected(there, (component,), chosen):
            where = "" if chosen is None else f" in layers {','.join(map(str, chosen))}"
            raise CircuitsError(
                f"{caller}: the source has no weights of {component!r}{where}; it has {_shown(there)}"
            )
    values = {name: as_dense_tensor(there[name], f"{caller}: the source's {name}") for name in names}
    snapshots = tuple((name, Snapshot(value)) for name, value in values.items())
    return Transplant(given, chosen, snapshots, post_norm)


def selected(
    names: Iterable[str], components: Iterable[str], layers: tuple[int, ...] | None
) -> dict[str, tuple[str, int | None]]:
    """The state_dict names that components and layers stand for, each with its part and layer."""
    parts = list(dict.fromkeys(part for component in components for part in COMPONENTS[component]))
    found: dict[str, tuple[str, int | None]] = {}
    for name in names:
        for part in parts:
            in_layer, pattern = _PARTS[part]
            match = re.fullmatch(rf"blocks\.(\d+)\.{pattern}" if in_layer else pattern, name)
            layer = int(match[1]) if match and in_layer else None
            if match and (layers is None or layer is None or layer in layers):
                found[name] = (part, layer)
    return found


def _tensors(source: Any, caller: str) -> tuple[dict[str, Any], bool | None]:
    """The weights by name, and whether they are of a post-norm model, where that is known."""
    if isinstance(source, nn.Module):
        surface = Surface.of(source)
        return dict(surface.named_weights()), surface.post_norm
    if isinstance(source, Mapping):
        return {str(name): x for name, x in source.items() if isinstance(x, Tensor | np.ndarray)}, None
    raise CircuitsError(f"{caller}: source must be a model or a state_dict, got {type(source).__name__}")


def _shown(there: Mapping[str, Any]) -> str:
    names = [*there][:3]
    return "no tensors" if not names else ", ".join(names) + (", ..." if len(there) > 3 else "")


def _is_equal_buffer(mine: Tensor | None, theirs: Tensor) -> bool:
    """Whether the model holds as a constant what the source lists: transformer-lens 4.3 does so with a zero bias."""
    return mine is not None and mine.shape == theirs.shape and bool((mine == theirs.to(mine)).all())


def _refuse_shared(label: str, mine: Iterable[str], there: Mapping[str, nn.Parameter]) -> None:
    """Tied weights: one parameter under two names, or two that lie in the same memory."""
    spans = {name: _span(parameter) for name, parameter in there.items()}
    for name in mine:
        device, start, end = spans[name]
        for other, (where, first, last) in spans.items():
            if other != name and where == device and max(start, first) < min(end, last):
                one, two = (held for held in there if held in (name, other))
                raise CircuitsError(
                    f"{label}: {one} and {two} are one parameter, or share its memory; transplant neither of them"
                )


def _span(parameter: Tensor) -> tuple[torch.device, int, int]:
    """The addresses from the first to the last entry."""
    steps = zip(parameter.shape, parameter.stride(), strict=True)
    entries = 1 + sum((size - 1) * step for size, step in steps) if parameter.numel() else 0
    start = parameter.data_ptr()
    return parameter.device, start, start + entries * parameter.element_size()
