"""Measures the memory of tensors, and divides a sweep so that it keeps to a bound."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from circuits.errors import CircuitsError
from circuits.model.interrupts import contextmanager
from circuits.model.prompts import Prompts
from circuits.model.record import evaluating
from circuits.model.state import kept_to_compare, modules_of, parameters_of
from circuits.model.surface import Surface
from circuits.validate import is_whole

#: What calling the modules of a block costs whatever their input, in multiplications of weights that take as long.
CALL = {"cpu": 10**7}
CALL_ON_DEVICE = 10**10
# On an accelerator calls are what costs: a forward takes so many times as many tokens, where there is room for them.
_MORE_ON_DEVICE = 16
#: Outputs of a stack are computed in pieces of at most this many numbers.
OUTPUTS = 2**25
# As many tensors of the size of an output are there together: itself, its difference from the clean one, the metric's.
_OUTPUTS_HELD = 3
# The memory that a sweep may take by default, as a multiple of what a loop over the variants takes, the model included;
_LOOP_MEMORY = 1.5
# and the bytes beside the model that it may take at least, so that forwards of small models are worth their calls.
FLOOR = {"cpu": 2**23}
FLOOR_ON_DEVICE = 2**30
# Residual streams that a clean pass keeps of each layer, at most.
_STREAMS_KEPT = 3
# Memory of edits and the metric beside that of a forward, as a factor of it.
_MARGIN = 1.25


@cache
def _makes_tensors(function: Any) -> bool:
    """Says whether the results of an operation have storage of their own.

    A view has the storage of what it is a view of, and so has what is written in place.
    """
    return not any(value.alias_info is not None for value in function._schema.returns)


class Meter(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is on, until they are freed.

    Attributes:
        held: bytes now.
        peak: the most bytes at one time while it was on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._on = False
        self._known: dict[int, weakref.ref[Any]] = {}

    @contextmanager
    def on(self, start: bool = True) -> Iterator[None]:
        """Leaves it off at the end of the block; it may be started, and stopped, in there."""
        try:
            if start:
                self.start()
            yield
        finally:
            self.stop()

    def start(self) -> None:
        if not self._on:
            self.__enter__()
            self._on = True

    def stop(self) -> None:
        if self._on:
            self._on = False
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if _makes_tensors(function):
            for one in (found,) if isinstance(found, Tensor) else tree_leaves(found):
                # A metric may make sparse tensors, whose parts are made by operations of their own.
                if isinstance(one, Tensor) and one.layout == torch.strided:
                    self._add(one.untyped_storage())
        return found

    def _add(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._known and storage.nbytes():
            size = storage.nbytes()
            self._known[key] = weakref.ref(storage, lambda _: self._gone(key, size))
            self.held += size
            self.peak = max(self.peak, self.held)

    def _gone(self, key: int, size: int) -> None:
        if self._known.pop(key, None) is not None:
            self.held -= size


# What sweeps of a model took, by what decides it: the meter slows every operation down.
_measured: WeakKeyDictionary[nn.Module, dict[Hashable, dict[Hashable, int]]] = WeakKeyDictionary()


def known_peaks(model: nn.Module) -> dict[Hashable, dict[Hashable, int]]:
    """Returns the peaks that were measured for sweeps of a model, by their sizes and engines; may be added to."""
    return _measured.setdefault(model, {})


def forward_sizes(surface: Surface) -> Hashable:
    """Returns what decides, of a model as it is now, how much memory its forward takes: types, switches, hooks."""
    modules = modules_of(surface.model)
    types = frozenset(
        one.dtype for module in modules for one in module._parameters.values() if one is not None
    )
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules)
    wrapped = getattr(surface.model.__dict__.get("original_model"), "config", None)
    settings = (
        value
        for config in (surface.model.cfg, wrapped)
        for value in getattr(config, "__dict__", {}).values()
        if isinstance(value, bool | str)
    )
    return types, hooks, tuple(settings)


def call_in_tokens(surface: Surface) -> float:
    """Returns the cost of calling a block's modules as the number of tokens whose products take as long."""
    weights = sum(weight.numel() for weight in parameters_of(surface.block_module(surface.n_layers - 1)))
    return CALL.get(surface.device.type, CALL_ON_DEVICE) / max(1, weights)


def read_chunk(chunk: Any, automatic: int, caller: str) -> int:
    """Returns the number of tokens in a forward that a caller asks for, or with "auto" leaves to us."""
    if isinstance(chunk, str) and chunk == "auto":
        return automatic
    if not is_whole(chunk, 1):
        raise CircuitsError(
            f'{caller}: chunk={chunk!r}; give "auto" or a number of tokens per forward, at least 1'
        )
    return int(chunk)


def more_on_device(surface: Surface, on_cpu: int) -> int:
    """Returns how much of something is computed at a time, of which a processor takes so much."""
    return on_cpu if surface.device.type == "cpu" else _MORE_ON_DEVICE * on_cpu


def tokens_with_room(surface: Surface, length: int, on_cpu: int) -> int:
    """Returns how many tokens run in a forward where no loop of the user's says what memory there is.

    On an accelerator more than on a processor, as long as they keep to the memory that any sweep may take there.
    """
    stream, itemsize = surface.sizes["d_model"] or 1, next(surface.model.parameters()).element_size()
    in_forward = max(_estimated(surface, length), 2 * (stream + output_size(surface)))
    each = (in_forward + _STREAMS_KEPT * surface.n_layers * stream) * itemsize
    return max(on_cpu, min(more_on_device(surface, on_cpu), int(FLOOR_ON_DEVICE / each)))


@dataclass(frozen=True)
class Division:
    """How a sweep is divided into forwards.

    Attributes:
        step: examples in a forward.
        tokens: tokens in one, of all variants stacked.
        outputs: tokens whose outputs are in memory together; of one variant at least.
        not_replayed: why the replay, which copies some of the weights, does not fit; None: it does.
    """

    step: int
    tokens: int
    outputs: int
    not_replayed: str | None = None


def copied_weights(surface: Surface) -> int:
    """Returns how many bytes of weights a replay copies: those of q, k and v."""
    heads = (surface.n_heads + 2 * surface.key_value_heads) * (surface.sizes["d_head"] or 1)
    itemsize = next(surface.model.parameters()).element_size()
    return surface.n_layers * (surface.sizes["d_model"] or 1) * heads * itemsize


def divided(
    surface: Surface,
    prompts: Prompts,
    most: int,
    memory: int | None,
    given: bool,
    sources: int = 0,
    held: int = 0,
    of_metric: Callable[[int, int], int] = lambda examples, numbers: 0,
) -> Division:
    """Divides a sweep so that it keeps to a bound.

    Without `memory`, it gets half as much again as a loop over the variants takes, the model included, or `FLOOR`.

    Args:
        most: the number of tokens in a forward that is not exceeded, but for one example.
        memory: the bytes that a sweep may take beside the model.
        given: whether `most` is the user's choice, which is kept to where there is no `memory`.
        sources: bytes that are kept of the sources of patches.
        held: bytes of a copy of the model's weights, which checkpoints take the place of.
        of_metric: the bytes that the metric takes for so many examples, with outputs of so many numbers.
    """
    examples, length = prompts.shape[:2]
    out = output_size(surface)
    if given and memory is None:
        return Division(max(1, most // length), most, OUTPUTS // out)
    stream, itemsize = surface.sizes["d_model"] or 1, next(surface.model.parameters()).element_size()
    kept = _STREAMS_KEPT * surface.n_layers * stream * itemsize
    copied = copied_weights(surface)
    beside = sources + held + kept_to_compare(surface.model)

    def needed(step: int) -> float:
        # The checks run two examples, each beside another copy.
        return (
            beside
            + of_metric(step, length * out)
            + length * (step * kept + max(step, 2 * min(2, step)) * token)
        )

    not_replayed: str | None = None
    if memory is None:
        in_blocks = _estimated(surface, length) * itemsize
        token = max(in_blocks, 2 * (stream + out) * itemsize)
        # The clean output is there twice, of the engine and of the model.
        kept += 2 * out * itemsize
        weights = sum(weight.nbytes for weight in parameters_of(surface.model))
        loop = weights + int(token * examples * length)
        floor = FLOOR.get(surface.device.type, FLOOR_ON_DEVICE)
        room = max(_LOOP_MEMORY * loop - weights, floor) - copied
    else:
        token = in_blocks = _MARGIN * _forward_bytes(surface, prompts[:1]) / length
        least = int(needed(1))
        room = memory - copied
        if room < least:
            not_replayed = (
                f"its copies of weights take {copied} bytes, and an example {least}; memory= is {memory}"
            )
            room = memory
        if room < least:
            of_sources = f", {sources} of them the sources of patches, of all examples" if sources else ""
            raise CircuitsError(
                f"sweep, memory={memory}: one example at a time takes about {least} bytes beside the "
                f"model{of_sources}; give at least that, or {'fewer examples' if sources else 'shorter prompts'}"
            )
    step = max(1, min(examples, most // length))
    while step > 1 and needed(step) > room:
        step -= max(1, step // 16)
    # Of equal size, as far as that goes.
    step = -(-examples // -(-examples // step))
    room -= step * length * kept + beside + of_metric(step, length * out)
    tokens = max(step * length, min(most, int(room / in_blocks)))
    # Beside the streams of the last layer.
    outputs = int((room - tokens * stream * itemsize) / (_OUTPUTS_HELD * out * itemsize))
    return Division(step, tokens, max(step * length, min(outputs, OUTPUTS // out)), not_replayed)


def output_size(surface: Surface) -> int:
    """Returns how many numbers the output of a token has."""
    cfg: Any = surface.model.cfg
    return next(
        (int(size) for name in ("d_vocab_out", "d_vocab") if (size := getattr(cfg, name, 0)) and size > 0), 1
    )


def _estimated(surface: Surface, length: int) -> float:
    """Returns about how many numbers the blocks hold at one time for each token."""
    cfg: Any = surface.model.cfg
    stream = surface.sizes["d_model"] or 1
    heads = surface.n_heads * (surface.sizes["d_head"] or 1)
    mlp = (surface.sizes["d_mlp"] or 4 * stream) * (5 if getattr(cfg, "gated_mlp", False) else 4)
    attention = 4 * stream + 5 * heads + 3 * surface.n_heads * length
    return float(max(attention, 4 * stream + mlp))


def _forward_bytes(surface: Surface, prompts: Prompts) -> int:
    """Returns the most bytes that a forward of some prompts holds."""
    known = known_peaks(surface.model).setdefault("forward", {})
    key = (forward_sizes(surface), prompts.shape, prompts.padded)
    if key not in known:
        meter = Meter()
        with evaluating(surface.model), torch.no_grad(), meter.on():
            surface.call(prompts)
        known[key] = meter.peak
    return known[key]
