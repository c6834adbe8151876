"""Compares a replay with the model itself: two examples layer by layer, then every output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from circuits.engine.parts import HALF, Places
from circuits.engine.replay import NotReplayed, Replay
from circuits.model.prompts import Prompts
from circuits.model.record import recording
from circuits.model.sites import KINDS
from circuits.model.state import modules_of, state_of, substituted
from circuits.model.surface import IN_LINE, Surface
from circuits.tensors import largest

#: Largest difference allowed between the replay and the model, relative to the largest entry. In half precision it is
#: measured (`_rounding`).
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11}

_OUTPUT = "the output"
# Packages whose modules are known. A user's own may treat some tokens in any other way, and keep state.
_KNOWN = ("torch", "transformer_lens", "transformers")
# Standard-library modules that may appear among a module's base classes.
_BASES = ("abc", "typing", "collections")
# Packages whose wrappers around a function only call it.
_CHECKS = ("jaxtyping", "beartype", "typeguard", "contextlib", "functools")

Seen = dict[str, Tensor]


@dataclass(frozen=True)
class Observed:
    """Activations of the model itself: z and the residual stream of every layer for two examples, and the output for
    all.
    """

    layers: Seen
    output: Tensor


def first_and_last(tokens: Tensor) -> slice:
    """Returns a slice of the first and the last example: two, as a model may depend on its tokens."""
    return slice(None, None, max(1, len(tokens) - 1))


def observed(surface: Surface, prompts: Prompts) -> Observed:
    """Runs the examples through the model itself.

    This is done for every checkpoint: a part of the forward may be zero before training.
    """
    _refuse_unknown(surface)
    rows = first_and_last(prompts.tokens)
    seen = _run(surface, prompts, rows)
    return Observed({**seen, _OUTPUT: seen[_OUTPUT][rows]}, seen[_OUTPUT])


def observed_whole(surface: Surface, prompts: Prompts) -> Seen:
    """Runs the examples through the model itself, and returns every layer of all of them."""
    return _run(surface, prompts, slice(None))


def observed_together(surface: Surface, prompts: Prompts, weights: Mapping[str, Tensor]) -> Observed | None:
    """Does as `observed` for several checkpoints with stacked weights: the rows of the first come first.

    Uses the model's own forward under vmap. Returns None where that cannot be: its parameters are tied, or are
    kept elsewhere (a bridge), or some module does what vmap does not know.
    """
    model, rows = surface.model, first_and_last(prompts.tokens)
    slots = dict(model.named_parameters(remove_duplicate=False))
    tied = len({id(parameter) for parameter in slots.values()}) < len(slots)
    if surface.family not in IN_LINE or tied or not set(weights) <= set(slots):
        return None
    _refuse_unknown(surface)

    def run_checkpoint(checkpoint_weights: Mapping[str, Tensor]) -> Seen:
        with substituted(model, checkpoint_weights):
            return _run(surface, prompts, rows)

    try:
        outputs = torch.func.vmap(run_checkpoint)(dict(weights))
    except (RuntimeError, TypeError, ValueError):
        return None
    layers = {name: tensor.flatten(0, 1) for name, tensor in outputs.items()}
    layers[_OUTPUT] = outputs[_OUTPUT][:, rows].flatten(0, 1)
    return Observed(layers, outputs[_OUTPUT].flatten(0, 1))


def side_by_side(several: Sequence[Observed]) -> Observed:
    """Concatenates the activations of several checkpoints."""
    names = several[0].layers
    layers = {name: torch.cat([one.layers[name] for one in several]) for name in names}
    return Observed(layers, torch.cat([one.output for one in several]))


def _run(surface: Surface, prompts: Prompts, rows: slice) -> Seen:
    """Runs the model; returns these rows of every layer, and the whole output."""
    layers = range(surface.n_layers)
    names = [KINDS[name].hook.format(layer) for layer in layers for name in ("z", "resid_post")]
    with recording(surface, names, rows) as seen:
        output = surface.call(prompts)
    if not isinstance(output, Tensor) or any(name not in seen for name in names):
        raise NotReplayed("its output is no tensor, or some of its layers do not run")
    return {**{name: seen[name] for name in names}, _OUTPUT: output.clone()}


#: A user's class sets this attribute to True in its body to declare that tokens reach its output only through the
#: embeddings: a replay that agrees on some tokens then agrees on all.
DECLARED = "tokens_enter_by_embeddings_alone"


def _refuse_unknown(surface: Surface) -> None:
    """Refuses code that is not the library's, which may do something else on tokens that are not compared."""
    _refuse_hooks(surface.model)
    if torch.is_autocast_enabled(surface.device.type):
        raise NotReplayed("autocast is on")
    classes: set[type] = set()
    for module in modules_of(surface.model):
        classes.add(type(module))
        for attribute, value in vars(module).items():
            # A tokenizer does not affect a run on token ids; padding comes from the inputs' own mask.
            if callable(value) and attribute != "tokenizer" and not _known(value):
                raise NotReplayed(f"{_name_of(surface.model, module)} has a {attribute} of its own")
    for kind in classes:
        for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            if base.__module__ in _BASES:
                continue
            declared = vars(base).get(DECLARED) is True
            if not declared and not _from_library(base):
                raise NotReplayed(f"its class {base.__name__} is not the library's")
            functions = {name: getattr(one, "__func__", one) for name, one in vars(base).items()}
            # A function that was put into a declared class from elsewhere is not covered by the declaration.
            home = base.__module__ if declared else None
            wrong = [
                n for n, one in functions.items() if isinstance(one, FunctionType) and not _known(one, home)
            ]
            if wrong:
                raise NotReplayed(f"{base.__name__}.{wrong[0]} is not the library's")


def _from_library(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] in _KNOWN


def _known(thing: Any, home: str | None = None) -> bool:
    """Tells whether a function or another callable is the library's own code, whatever wraps it.

    Args:
        home: a module whose code counts as the library's.
    """
    if isinstance(thing, nn.Module):
        return True  # one of the modules that are looked at
    if isinstance(thing, partial):
        return _known(thing.func, home)
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


def differs(expected: Tensor, replayed: Tensor, tolerance: float, copies: int = 1) -> bool:
    """Tells whether outputs differ by more than a share of the largest entry, in any checkpoint."""
    if expected.shape != replayed.shape or expected.dtype != replayed.dtype:
        return True
    # The comparison is negated so that NaN counts as a difference.
    return not bool((_apart(expected, replayed, copies) <= tolerance * _largest(expected, copies)).all())


def half_precision_tolerance(expected: Tensor, replayed: Tensor) -> float:
    """Returns twice the largest difference between two computations of an output in half precision, relative to its
    largest entry, and one unit in the last place at least.
    """
    apart = float((expected.float() - replayed.float()).abs().max() / expected.abs().max().float())
    return max(2 * apart, torch.finfo(expected.dtype).eps)


def compare(
    seen: Mapping[str, Tensor],
    replay: Replay,
    tokens: Tensor,
    what: str = "two examples",
    places: Places | None = None,
) -> None:
    """Refuses a replay that differs from the model's own activations in any layer.

    Each layer is replayed from the model's own activations before it, so that rounding does not grow over layers.
    """
    try:
        for name, replayed, wide in _replayed(replay, tokens, seen, places):
            expected = seen[name]
            if expected.shape != replayed.shape or expected.dtype != replayed.dtype:
                raise NotReplayed(f"the replay differs from the model at {name} in shape or dtype")
            expected, replayed = (_real(one, places, replay.copies) for one in (expected, replayed))
            largest = _largest(expected, replay.copies)
            apart = _apart(expected, replayed, replay.copies)
            allowed = TOLERANCE.get(expected.dtype, 0.0) * largest
            if wide is not None:
                allowed = _rounding(replayed, _real(wide, places, replay.copies), replay.copies)
            # The comparison is negated so that NaN counts as a difference.
            if not bool((apart <= allowed).all()):
                raise NotReplayed(
                    f"the replay of {what} differs from the model at {name} by {float((apart / largest).max()):.1e}"
                )
    except RuntimeError as error:
        raise NotReplayed(f"the replay of {what} fails: {str(error).splitlines()[0]}") from error


def rounding_of_output(
    seen: Mapping[str, Tensor], replay: Replay, tokens: Tensor, places: Places | None
) -> float:
    """Returns what counts as rounding in the output of a whole replay, relative to its largest entry. In half precision
    it is measured: see `_rounding`.
    """
    if replay.dtype not in HALF:
        return TOLERANCE[replay.dtype]
    rows = tokens.repeat(replay.copies, 1)
    repeated = None if places is None else places.times(len(rows))
    x = replay.embedded(rows, _identity_tap, repeated).float()
    for layer in range(replay.n_layers):
        x = _one_layer(replay.wide(layer), layer, x, repeated)[1]
    given, wide = (_real(one, places, replay.copies) for one in (seen[_OUTPUT], replay.wide().output(x)))
    return float((_rounding(given, wide, replay.copies) / _largest(given.float(), replay.copies)).max())


def _rounding(half: Tensor, wide: Tensor, copies: int) -> Tensor:
    """Returns by how much the model may differ from a replay in half precision, for each checkpoint.

    The replay in single precision is what both would be without rounding. The model may be as far from it as the
    replay in half precision is, on the other side; and one unit in the last place of the largest entry, for what is
    exact here by chance.
    """
    unit = torch.finfo(half.dtype).eps
    return 2 * _apart(half.float(), wide, copies) + unit * _largest(half.float(), copies)


def _replayed(
    replay: Replay, tokens: Tensor, seen: Mapping[str, Tensor], places: Places | None
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yields what is compared, by name, as it is replayed and, for half precision, as it is in single precision."""
    half = replay.dtype in HALF
    rows = tokens.repeat(replay.copies, 1)
    places = None if places is None else places.times(len(rows))
    x = replay.embedded(rows, _identity_tap, places)
    for layer in range(replay.n_layers):
        z, after = _one_layer(replay, layer, x, places)
        wide = _one_layer(replay.wide(layer), layer, x.float(), places) if half else (None, None)
        name = KINDS["resid_post"].hook.format(layer)
        yield KINDS["z"].hook.format(layer), z, wide[0]
        yield name, after, wide[1]
        x = seen[name]
    yield _OUTPUT, replay.output(x), replay.wide().output(x.float()) if half else None


def _one_layer(replay: Replay, layer: int, x: Tensor, places: Places | None) -> tuple[Tensor, Tensor]:
    """Returns z and resid_post of a layer, given the output of the layer before."""
    found: list[Tensor] = []

    def keep(site: str, layer: int | None, x: Tensor) -> Tensor:
        if site == "z":
            found.append(x)
        return x

    x = replay.entering(layer, x)
    after = replay.mlp(
        layer, replay.block(layer, x, keep, places=places), keep, x if replay.parallel else None
    )
    return found[0], after


def _identity_tap(site: str, layer: int | None, x: Tensor) -> Tensor:
    return x


def _real(x: Tensor, places: Places | None, copies: int) -> Tensor:
    """Returns what is not padding of an activation [row pos ...]: [copy ...]."""
    if places is None:
        return x
    by_copy = x.unflatten(0, (copies, -1))
    return by_copy[:, places.mask]


def _apart(x: Tensor, y: Tensor, copies: int) -> Tensor:
    """Returns the largest difference of each checkpoint."""
    return largest(x.reshape(copies, -1) - y.reshape(copies, -1), 1)


def _largest(x: Tensor, copies: int) -> Tensor:
    return largest(x.reshape(copies, -1), 1).clamp(min=torch.finfo(x.dtype).tiny)


def _refuse_hooks(model: nn.Module) -> None:
    """Refuses hooks, which are not replayed. Those of the model class itself are part of its forward, and those with
    which transformers collects what layers give only look on.
    """
    if state_of(model).suspended:
        raise NotReplayed("a clean pass is under way")
    everywhere = [hook for name in _GLOBAL_HOOKS for hook in getattr(nn.modules.module, name).values()]
    # torch's own, such as the FLOP counter's, only observe.
    if any(not str(getattr(hook, "__module__", "")).startswith("torch.utils.") for hook in everywhere):
        raise NotReplayed("there are hooks on all modules")
    for module in modules_of(model):
        if not module._forward_hooks and not module._forward_pre_hooks:
            continue
        name = _name_of(model, module)
        hooks: list[Callable[..., Any]] = [
            *module._forward_hooks.values(),
            *module._forward_pre_hooks.values(),
        ]
        point = name.split(".")[-1].startswith("hook_")
        packages = {str(getattr(hook, "__module__", "")).partition(".")[0] for hook in hooks}
        if point or not packages <= {"transformer_lens", "transformers"}:
            raise NotReplayed(f"there is a hook on {name}")


def _name_of(model: nn.Module, module: nn.Module) -> str:
    """Returns the name of a module of a model, or of the model that a bridge is around."""
    inner = model.__dict__.get("original_model")
    named = chain(model.named_modules(), inner.named_modules() if isinstance(inner, nn.Module) else ())
    return next(name for name, one in named if one is module) or "the model"


_GLOBAL_HOOKS = tuple(
    name
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks")
    if hasattr(nn.modules.module, name)
)
