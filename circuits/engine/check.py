"""What the model itself computes, and a replay must give: two examples layer by layer, then every output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from circuits.engine.replay import NotReplayed, Replay
from circuits.model.record import recording
from circuits.model.sites import KINDS
from circuits.model.state import state_of, substituted
from circuits.model.surface import IN_LINE, Surface

#: What the replay may differ from the model by, relative to the largest entry.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11}

_OUTPUT = "the output"
# Whose modules are known: a user's own may do anything with some of the tokens, and keep what they have seen.
_KNOWN = ("torch", "transformer_lens")
# Of Python's own, from which theirs inherit.
_BASES = ("abc", "typing", "collections")
# Whose wrappers around a function do no more than call it.
_CHECKS = ("jaxtyping", "beartype", "typeguard", "contextlib", "functools")

Seen = dict[str, Tensor]


@dataclass(frozen=True)
class Observed:
    """The model's own: of two examples every layer's z and residual stream and the output, of all the output."""

    layers: Seen
    output: Tensor


def few(tokens: Tensor) -> slice:
    """The first example and the last, as what a model does may depend on its tokens."""
    return slice(None, None, max(1, len(tokens) - 1))


def observed(surface: Surface, tokens: Tensor) -> Observed:
    """The examples through the model itself.

    With every checkpoint: what a model adds to its forward may be zero before training.
    """
    _refuse_unknown(surface)
    seen = _run(surface, tokens, few(tokens))
    return Observed({**seen, _OUTPUT: seen[_OUTPUT][few(tokens)]}, seen[_OUTPUT])


def observed_whole(surface: Surface, tokens: Tensor) -> Seen:
    """Every layer of all examples."""
    return _run(surface, tokens, slice(None))


def observed_together(surface: Surface, tokens: Tensor, weights: Mapping[str, Tensor]) -> Observed | None:
    """As `observed`, with each of several checkpoints, whose weights are stacked: the rows of the first come first.

    The model's own forward, traced once for all by vmap. None where that cannot be: its parameters are tied, or are
    kept elsewhere (a bridge), or some module does what vmap does not know.
    """
    model = surface.model
    slots = dict(model.named_parameters(remove_duplicate=False))
    tied = len({id(parameter) for parameter in slots.values()}) < len(slots)
    if surface.family not in IN_LINE or tied or not set(weights) <= set(slots):
        return None
    _refuse_unknown(surface)

    def one(of_one: Mapping[str, Tensor]) -> Seen:
        with substituted(model, of_one):
            return _run(surface, tokens, few(tokens))

    try:
        found = torch.func.vmap(one)(dict(weights))
    except (RuntimeError, TypeError, ValueError):
        return None
    layers = {name: tensor.flatten(0, 1) for name, tensor in found.items()}
    layers[_OUTPUT] = found[_OUTPUT][:, few(tokens)].flatten(0, 1)
    return Observed(layers, found[_OUTPUT].flatten(0, 1))


def side_by_side(several: Sequence[Observed]) -> Observed:
    """Those of several checkpoints, one after the other."""
    names = several[0].layers
    layers = {name: torch.cat([one.layers[name] for one in several]) for name in names}
    return Observed(layers, torch.cat([one.output for one in several]))


def _run(surface: Surface, tokens: Tensor, rows: slice) -> Seen:
    """These rows of every layer, and the whole output."""
    layers = range(surface.n_layers)
    names = [KINDS[name].hook.format(layer) for layer in layers for name in ("z", "resid_post")]
    with recording(surface, names, rows) as seen:
        output = surface.model(tokens.clone())
    if not isinstance(output, Tensor) or any(name not in seen for name in names):
        raise NotReplayed("its output is no tensor, or some of its layers do not run")
    return {**{name: seen[name] for name in names}, _OUTPUT: output.clone()}


#: A class of one's own says by this attribute, set to True in its body, that tokens reach its output by no other way
#: than through the embeddings: a replay that agrees on some tokens then agrees on all.
DECLARED = "tokens_enter_by_embeddings_alone"


def _refuse_unknown(surface: Surface) -> None:
    """Code that is not the library's may do something else on tokens that are not looked at."""
    _refuse_hooks(surface.model)
    if torch.is_autocast_enabled(surface.device.type):
        raise NotReplayed("autocast is on")
    inner = surface.model.__dict__.get("original_model")
    named = chain(
        surface.model.named_modules(), inner.named_modules() if isinstance(inner, nn.Module) else ()
    )
    classes: set[type] = set()
    for name, module in named:
        where = name or "the model"
        classes.add(type(module))
        for attribute, value in vars(module).items():
            if callable(value) and not _known(value):
                raise NotReplayed(f"{where} has a {attribute} of its own")
    for kind in classes:
        for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            if base.__module__ in _BASES:
                continue
            declared = vars(base).get(DECLARED) is True
            if not declared and not _from_library(base):
                raise NotReplayed(f"its class {base.__name__} is not the library's")
            own = {name: getattr(one, "__func__", one) for name, one in vars(base).items()}
            # What was put into a declared class from elsewhere is not what was declared.
            home = base.__module__ if declared else None
            wrong = [n for n, one in own.items() if isinstance(one, FunctionType) and not _known(one, home)]
            if wrong:
                raise NotReplayed(f"{base.__name__}.{wrong[0]} is not the library's")


def _from_library(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] in _KNOWN


def _known(thing: Any, home: str | None = None) -> bool:
    """Whether a function or an object that can be called is the library's own code, whatever wraps it.

    Args:
        home: a module whose code counts as the library's.
    """
    if isinstance(thing, nn.Module):
        return True  # one of the modules that are looked at
    if isinstance(thing, MethodType):
        thing = thing.__func__
    if not isinstance(thing, FunctionType):
        return _from_library(thing) or _from_library(type(thing))
    while True:
        name = str(thing.__globals__.get("__name__", ""))
        is_known = name == home or name.partition(".")[0] in _KNOWN
        if not is_known and name.partition(".")[0] not in _CHECKS:
            return False
        if not hasattr(thing, "__wrapped__"):
            return is_known
        thing = thing.__wrapped__


def differs(own: Tensor, found: Tensor, copies: int = 1) -> bool:
    """Whether outputs are apart, by more than rounding in one layer, in a checkpoint or in all."""
    if own.shape != found.shape or own.dtype != found.dtype:
        return True
    # Written so that NaN is apart too.
    return not bool((_apart(own, found, copies) <= TOLERANCE[own.dtype]).all())


def compare(seen: Mapping[str, Tensor], replay: Replay, tokens: Tensor, what: str = "two examples") -> None:
    """Refuse a replay that is not what the model computes, layer by layer."""
    found = _replayed(replay, tokens, seen)
    for name, own in seen.items():
        if own.shape != found[name].shape or own.dtype != found[name].dtype:
            raise NotReplayed(f"the replay differs from the model at {name} in shape or dtype")
        apart = _apart(own, found[name], replay.copies)
        # Written so that NaN is apart too.
        if not bool((apart <= TOLERANCE[own.dtype]).all()):
            raise NotReplayed(
                f"the replay of {what} differs from the model at {name} by {float(apart.max()):.1e}"
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
