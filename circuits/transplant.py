"""Weight transplants: runs of a model with some of another checkpoint's weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from circuits.arguments import parse_integers
from circuits.errors import CircuitsError
from circuits.frozen_tensors_and_positions import Snapshot, to_tensor_if_array
from circuits.interventions.base import Intervention, WeightEdit
from circuits.model.edit_state import hold_model_exclusively
from circuits.model.hooked_model import HookedModel
from circuits.model.supported_models import missing_weights_hint
from circuits.model.types import IndicesLike
from circuits.model.weight_component_names import COMPONENTS, PARTS

__all__ = ["COMPONENTS", "weights"]
__dir__ = __all__.copy


@dataclass(frozen=True)
class Transplant(Intervention):
    """Replaces the parameters of chosen components and layers by values, by state_dict name."""

    components: tuple[str, ...]
    layers: tuple[int, ...] | None
    values: tuple[tuple[str, Snapshot], ...]

    def plan(self, hooked: HookedModel) -> tuple[WeightEdit, ...]:
        """Returns an edit for each parameter that is exchanged; refuses a source of another architecture."""
        parameters, values = hooked.named_weights(), dict(self.values)
        unlike = "both must be of one architecture"
        if self.layers is not None and max(self.layers) >= hooked.n_layers:
            raise CircuitsError(
                f"{self.label}: no layer {max(self.layers)}: the model has layers 0-{hooked.n_layers - 1}"
            )
        chosen = parts_and_layers_by_name(parameters, self.components, self.layers)
        for name in (name for name in chosen if name not in values):
            raise CircuitsError(f"{self.label}: the source has no {name}, the model has; {unlike}")
        for name, value in values.items():
            if name not in chosen:
                buffer = hooked.model.state_dict().get(name)
                # transformer-lens 4.3 holds a zero bias as a buffer.
                if buffer is not None and torch.equal(buffer, value.tensor.to(buffer)):
                    continue
                raise CircuitsError(
                    f"{self.label}: the model has no parameter {name}, the source has; {unlike}"
                    f"{missing_weights_hint(parameters)}"
                )
            if value.shape != tuple(parameters[name].shape):
                raise CircuitsError(
                    f"{self.label}: {name} is {list(value.shape)} in the source and {list(parameters[name].shape)} in "
                    "the model; shapes must be equal"
                )
        _check_not_tied(self.label, chosen, parameters)
        return tuple(
            WeightEdit(self.label, part, layer, name, parameters[name], values[name])
            for name, (part, layer) in chosen.items()
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


def weights(
    source: nn.Module | Mapping[str, Tensor], components: str | Iterable[str], layers: IndicesLike = None
) -> Transplant:
    """Returns an intervention that gives a model some weights of `source`, a model or a state_dict of the same
    architecture.

    Args:
        components: one or several of q, k, v, qkv, o, attn (= q, k, v, o), mlp, embed, pos_embed, unembed, ln1, ln2
            (with those after attention and MLP), ln_embed (after the embeddings of a post-norm model), ln_final, ln
            (those four, as far as the model has them), each with its biases; `COMPONENTS` lists them, and `describe()`
            every parameter by name. Attention and MLP never include a LayerNorm.
        layers: the layers (0-based) whose parts are transplanted; default: all.

    Only the named weights are copied, immediately, so that the source may change or be deleted. They are put in before
    any activation is edited, and the model's own weights are restored, bit for bit, when the block ends; clean passes
    run with the model's own. A backward pass inside the block uses the source's weights; torch refuses one that is run
    after the block if it would use the model's own. With `components="qkv"` and every layer this is the
    model switch of Gopalani et al. 2024 (arXiv:2410.22244, section 3.1.2).

    Raises `CircuitsError` for unknown components, for a model and a source whose names or shapes differ, and
    for a parameter that two components share (tied embeddings): before anything is changed.
    """
    caller = "transplant.weights"
    components = components.tolist() if isinstance(components, np.ndarray) else components
    is_list = isinstance(components, Iterable) and not isinstance(components, str | Tensor)
    names = tuple(dict.fromkeys(map(str, components))) if is_list else (str(components),)
    unknown = [name for name in names if name not in COMPONENTS]
    if unknown or not names:
        problem = f"no component {unknown[0]!r}" if unknown else "no component given"
        raise CircuitsError(f"{caller}: {problem}; choose from {', '.join(COMPONENTS)}")
    chosen = parse_integers(layers, caller, "layers")
    # Another thread may have replaced weights of the source.
    with hold_model_exclusively(source) if isinstance(source, nn.Module) else nullcontext():
        tensors = _source_weights(source, caller)
        if adapted := next((name for name in tensors if ".base_layer." in name), None):
            raise CircuitsError(f"{caller}: the source has {adapted}{missing_weights_hint(tensors)}")
        for name in names:
            if not parts_and_layers_by_name(tensors, (name,), chosen):
                where = "" if chosen is None else f" in layers {','.join(map(str, chosen))}"
                raise CircuitsError(
                    f"{caller}: the source has no weights of {name!r}{where}; it has "
                    f"{', '.join([*tensors][:3]) or 'no tensors'}, ...{missing_weights_hint(tensors)}"
                )
        values = tuple(
            (name, Snapshot(to_tensor_if_array(tensors[name], f"{caller}: the source's {name}")))
            for name in parts_and_layers_by_name(tensors, names, chosen)
        )
    return Transplant(names, chosen, values)


def parts_and_layers_by_name(
    names: Iterable[str], components: Iterable[str], layers: tuple[int, ...] | None
) -> dict[str, tuple[str, int | None]]:
    """Returns the state_dict names of components and layers, each with its part and layer."""
    parts = list(dict.fromkeys(part for component in components for part in COMPONENTS[component]))
    chosen: dict[str, tuple[str, int | None]] = {}
    for name in names:
        for part in parts:
            in_layer, pattern = PARTS[part]
            match = re.fullmatch(rf"blocks\.(\d+)\.{pattern}" if in_layer else pattern, name)
            layer = int(match[1]) if match and in_layer else None
            if match and (layers is None or layer is None or layer in layers):
                chosen[name] = (part, layer)
    return chosen


def _source_weights(source: Any, caller: str) -> dict[str, Any]:
    """Returns the weights by name."""
    if isinstance(source, nn.Module):
        return dict(HookedModel(source).named_weights())
    if isinstance(source, Mapping):
        return {str(name): x for name, x in source.items() if isinstance(x, Tensor | np.ndarray)}
    raise CircuitsError(f"{caller}: source must be a model or a state_dict, got {type(source).__name__}")


def _check_not_tied(label: str, names: Iterable[str], parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuses tied weights: one parameter under two names, or two that share memory."""
    for name in names:
        for other in parameters:
            if other != name and _share_memory(parameters[name], parameters[other]):
                one, two = (each for each in parameters if each in (name, other))
                raise CircuitsError(
                    f"{label}: {one} and {two} are one parameter, or share its memory; transplant neither of them"
                )


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Tells whether two tensors have an entry in common; the q, k and v of GPT-2's bridge, columns of one matrix, have
    none.
    """
    storage = one.untyped_storage()
    if storage.data_ptr() != other.untyped_storage().data_ptr() or not one.numel() or not other.numel():
        return False
    taken = torch.zeros(storage.nbytes() // one.element_size(), dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())
