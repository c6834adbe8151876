"""Finds the hooks of a `TransformerBridge`, native or around a Hugging Face model."""

from __future__ import annotations

from torch import nn

from circuits.model.bridges.base import Bridge, is_native, wrapped_model
from circuits.model.bridges.families import family_of, unproved_version
from circuits.model.bridges.huggingface import HuggingFaceBridge
from circuits.model.bridges.native import NativeBridge
from circuits.model.bridges.qualification import qualified


def bridge_of(model: nn.Module, hooks: dict[str, nn.Module], parallel: bool) -> Bridge:
    """Returns the hooks of a bridge, at the sites that are supported.

    Args:
        hooks: its hook points by name; those of other sites are removed from it.
        parallel: whether attention and MLP of a block read the same stream.
    """
    wrapped = wrapped_model(model)
    if is_native(wrapped):
        return NativeBridge(model, hooks, wrapped)
    family = family_of(wrapped, parallel)
    if family is None or unproved_version() is not None:
        family = qualified(model, wrapped, parallel, family)
    return HuggingFaceBridge(model, hooks, wrapped, family)
