"""Two examples through the model itself: what a replay must give, layer by layer, before it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from circuits.recording import recording
from circuits.replaying import NotReplayed, Replay
from circuits.sites import KINDS
from circuits.state import state_of, substituted
from circuits.surface import IN_LINE, Surface

#: What the replay may differ from the model by, relative to the largest entry.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11}

_OUTPUT = "the output"
# Whose modules are known to do nothing but compute: a user's own may keep what they have seen.
_KNOWN = ("torch", "transformer_lens")

Seen = dict[str, Tensor]


def observed(surface: Surface, examples: Tensor) -> Seen:
    """The examples through the model itself: its layers' z and residual streams, and output.

    With every checkpoint: what a model adds to its forward may be zero before training.
    """
    _refuse_hooks(surface.model)
    if torch.is_autocast_enabled(surface.device.type):
        raise NotReplayed("autocast is on")
    return _run(surface, examples)


def observed_together(surface: Surface, examples: Tensor, weights: Mapping[str, Tensor]) -> Seen | None:
    """The same with each of several checkpoints, whose weights are stacked: the rows of the first come first.

    The model's own forward, traced once for all by vmap. None where that cannot be: its parameters are tied, or are
    kept elsewhere (a bridge), or some module is not the library's, or does what vmap does not know.
    """
    model = surface.model
    slots = dict(model.named_parameters(remove_duplicate=False))
    tied = len({id(parameter) for parameter in slots.values()}) < len(slots)
    if surface.family not in IN_LINE or tied or not set(weights) <= set(slots) or not _known(model):
        return None
    _refuse_hooks(model)
    if torch.is_autocast_enabled(surface.device.type):
        raise NotReplayed("autocast is on")

    def one(of_one: Mapping[str, Tensor]) -> Seen:
        with substituted(model, of_one):
            return _run(surface, examples)

    try:
        found = torch.func.vmap(one)(dict(weights))
    except (RuntimeError, TypeError, ValueError):
        return None
    return {name: tensor.flatten(0, 1) for name, tensor in found.items()}


def _run(surface: Surface, examples: Tensor) -> Seen:
    layers = range(surface.n_layers)
    names = [KINDS[name].hook.format(layer) for layer in layers for name in ("z", "resid_post")]
    with recording(surface, names) as seen:
        output = surface.model(examples)
    if not isinstance(output, Tensor) or any(name not in seen for name in names):
        raise NotReplayed("its output is no tensor, or some of its layers do not run")
    return {**{name: seen[name] for name in names}, _OUTPUT: output}


def _known(model: nn.Module) -> bool:
    return all(
        type(module).__module__.partition(".")[0] in _KNOWN and "forward" not in vars(module)
        for module in model.modules()
    )


def compare(seen: Mapping[str, Tensor], replay: Replay, tokens: Tensor) -> None:
    """Refuse a replay that is not what the model computes, layer by layer."""
    found = _replayed(replay, tokens, seen)
    for name, own in seen.items():
        if own.shape != found[name].shape or own.dtype != found[name].dtype:
            raise NotReplayed(f"the replay differs from the model at {name} in shape or dtype")
        apart = _apart(own, found[name], replay.copies)
        # Written so that NaN is apart too.
        if not bool((apart <= TOLERANCE[own.dtype]).all()):
            raise NotReplayed(
                f"the replay of two examples differs from the model at {name} by {float(apart.max()):.1e}"
            )


def _replayed(replay: Replay, tokens: Tensor, seen: Mapping[str, Tensor]) -> Seen:
    """Each layer from what the model itself has before it, so that rounding does not grow from layer to layer."""
    found: Seen = {}

    def keep(site: str, layer: int | None, x: Tensor) -> Tensor:
        found[KINDS[site].hook.format(layer)] = x
        return x

    x = replay.embedded(tokens.repeat(replay.copies, 1), keep)
    for layer in range(replay.n_layers):
        between = replay.block(layer, replay.entering(layer, x), keep)
        after = keep("resid_post", layer, replay.mlp(layer, between, keep))
        own = seen[KINDS["resid_post"].hook.format(layer)]
        if own.shape != after.shape:
            raise NotReplayed("its residual stream has another shape than that of the replay")
        x = own.to(after.dtype)
    return {**found, _OUTPUT: replay.output(x)}


def _apart(x: Tensor, y: Tensor, copies: int) -> Tensor:
    """Of each checkpoint by itself, the largest difference, relative to the largest entry."""
    x, y = x.reshape(copies, -1), y.reshape(copies, -1)
    return (x - y).abs().amax(1) / x.abs().amax(1).clamp(min=torch.finfo(x.dtype).tiny)


def _refuse_hooks(model: nn.Module) -> None:
    """Hooks may do anything, and are not replayed. A model class's own are part of its forward."""
    if state_of(model).suspended:
        raise NotReplayed("a clean pass is under way")
    everywhere = [hook for name in _GLOBAL_HOOKS for hook in getattr(nn.modules.module, name).values()]
    # torch's own, such as that of the FLOP counter, look on.
    if any(not str(getattr(hook, "__module__", "")).startswith("torch.utils.") for hook in everywhere):
        raise NotReplayed("there are hooks on all modules")
    wrapped = model.__dict__.get("original_model")
    inner = wrapped.named_modules() if isinstance(wrapped, nn.Module) else ()
    for name, module in chain(model.named_modules(), inner):
        if not module._forward_hooks and not module._forward_pre_hooks:
            continue
        hooks: list[Callable[..., Any]] = [
            *module._forward_hooks.values(),
            *module._forward_pre_hooks.values(),
        ]
        point = name.split(".")[-1].startswith("hook_")
        if any(
            point or not str(getattr(hook, "__module__", "")).startswith("transformer_lens") for hook in hooks
        ):
            raise NotReplayed(f"there is a hook on {name or 'the model'}")


_GLOBAL_HOOKS = tuple(
    name
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks")
    if hasattr(nn.modules.module, name)
)
