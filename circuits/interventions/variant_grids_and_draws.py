"""Makes grids of interventions: one for each combination of some arguments; and draws: one for each seed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from circuits.arguments import is_whole, parse_seed
from circuits.errors import CircuitsError, format_value
from circuits.frozen_tensors_and_positions import Snapshot, to_tensor_if_array
from circuits.interventions.base import Intervention
from circuits.model.heads import Head, KeyValueGroup


def grid(
    make: Callable[..., Intervention | Draws], axes: Mapping[str, Iterable[Any]], **arguments: Any
) -> dict[str, Intervention | Draws]:
    """Makes one intervention for each combination of the axes' items, by name, ready for one `sweep`.

        grid(ablate.uniform, {"heads": heads("all", model)})                                   # per head
        grid(patch.activations, {"site": ["resid_pre.0", "resid_pre.1"], "positions": range(6)}, source=tokens)
        grid(transplant.weights, {"components": ["qkv", "mlp"], "layers": range(2)}, source=donor)

    Args:
        axes: argument of `make` -> its items; the last axis varies fastest. A name joins the items:
            "0.1" for a head, "position 3", "layer 2" for numbers, those of a list joined by "+", else the item itself.
            `arguments` are the same in all.
    """
    _check_callable(make, "grid", "the axes' items")
    if not isinstance(axes, Mapping) or not axes:
        raise CircuitsError('grid: axes are a dict of argument -> items, such as {"positions": range(6)}')
    items: list[list[tuple[str, Any]]] = []
    for axis, values in axes.items():
        if isinstance(values, Tensor | np.ndarray) and values.ndim < 2:
            values = values.tolist()
        listed = [] if isinstance(values, str | bytes) or not isinstance(values, Iterable) else list(values)
        if not isinstance(axis, str) or not listed:
            raise CircuitsError(
                f"grid: an axis is the name of an argument with a list of items, got {axis!r}: {values!r}; "
                "heads(spec, model) makes a list of heads"
            )
        items.append([name_and_convert_item(axis, item) for item in listed])
    interventions: dict[str, Intervention | Draws] = {}
    for combination in itertools.product(*items):
        name = ", ".join(label for label, _ in combination)
        if name in interventions:
            raise CircuitsError(f"grid: two combinations are called {name!r}; axes must hold different items")
        chosen = {axis: value for axis, (_, value) in zip(axes, combination, strict=True)}
        interventions[name] = make(**chosen, **arguments)
    return interventions


def _check_callable(make: Any, caller: str, argument_text: str) -> None:
    if not callable(make):
        raise CircuitsError(
            f"{caller}: make is a function of {argument_text} that returns an intervention; got {format_value(make)}"
        )


#: What one item of an axis is called.
_SINGULAR = {
    "positions": "position",
    "layers": "layer",
    "neurons": "neuron",
    "features": "feature",
    "keys": "key",
}
# What a number is called that is all an argument is given.
_NUMBERS = _SINGULAR | {"what": "layer", "permutation_or_seed": "seed"}


def name_and_convert_item(axis: str, item: Any) -> tuple[str, Any]:
    """Returns the name of an item in a table, and the item as `make` takes it."""
    if isinstance(item, Tensor | np.ndarray):
        return repr(Snapshot(to_tensor_if_array(item, axis or "item"))), item
    if isinstance(item, Head | KeyValueGroup):
        return str(item), [item]
    if is_whole(item) and axis:
        return f"{_NUMBERS.get(axis, axis)} {item}", int(item)
    # A group: "0.1+0.2", "q+k", "position 0+position 1". A pair of numbers may be a head, and has no such name.
    several = item if isinstance(item, tuple | list) else ()
    if several and all(
        isinstance(one, Head | KeyValueGroup | str) or (is_whole(one) and axis in _SINGULAR)
        for one in several
    ):
        return "+".join(name_and_convert_item(axis, one)[0] for one in several), item
    return str(item), item


@dataclass(frozen=True)
class Draws:
    """The draws of one variant, in order. In a sweep's table each has a row, and one row pools all of them."""

    interventions: tuple[Intervention, ...]

    def __len__(self) -> int:
        return len(self.interventions)


#: What a row of a sweep is about: an intervention, several that act together, or draws of one.
VariantLike = Intervention | Draws | Sequence[Intervention]


def draws(make: Callable[[int], Intervention], count: int, seed: int = 0) -> Draws:
    """Makes `count` draws of `make(seed)`.

        draws(permute.positions, 20)
        draws(lambda seed: ablate.resample("all", source=tokens, seed=seed), 20)

    Seeds of different draws, and of the same draw under different `seed`, are unrelated (numpy's SeedSequence).
    """
    _check_callable(make, "draws", "a seed")
    if not is_whole(count, 1):
        raise CircuitsError(f"draws: count={count!r}; give the number of draws, at least 1")
    children = np.random.SeedSequence(parse_seed(seed, "draws")).generate_state(int(count), np.uint64) >> 1
    interventions = tuple(make(int(child)) for child in children)
    if not all(isinstance(one, Intervention) for one in interventions):
        raise CircuitsError(f"draws: make(seed) makes an intervention; got {type(interventions[0]).__name__}")
    return Draws(interventions)
