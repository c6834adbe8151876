"""The checkpoints of a sweep: models, and state_dicts that are loaded into a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.model.blocks import model_block
from circuits.model.hooked_model import HookedModel
from circuits.model.state import holding, inside_block, same_bits, state_of
from circuits.model.supported import foreign_names


@dataclass(frozen=True)
class Checkpoint:
    """A model as it is, or with other parameters: (name in the state_dict, parameter, its value)."""

    surface: HookedModel
    what: str = "sweep"
    values: tuple[tuple[str, nn.Parameter, Tensor], ...] | None = None
    #: Names of parameters that share memory: tied ones, and views of each other.
    shared: frozenset[str] = frozenset()

    @model_block
    def loaded(self) -> Iterator[HookedModel]:
        """Yields the model with these parameters, which its clean passes see too."""
        if self.values is None:
            yield self.surface
            return
        if state_of(self.surface.model).originals:
            raise CircuitsError(
                f"{self.what}: a block around this sweep has replaced weights of the model, which a state_dict would "
                "undo; put the transplant among the variants"
            )
        with holding((parameter, value) for _, parameter, value in self.values):
            self._check_tied()
            yield self.surface

    def _check_tied(self) -> None:
        """Refuses values of which the model cannot hold all, as some of its parameters are one."""
        for name, parameter, value in self.values or ():
            if name in self.shared and not same_bits(parameter, value):
                raise CircuitsError(
                    f"{self.what}: {name} is tied to another parameter of the model, and they differ in the state_dict"
                )


LabelledLoader = tuple[str | None, Callable[[], Checkpoint]]


def loaded_checkpoints(given: Any, surface: HookedModel) -> Iterator[tuple[str | None, Checkpoint]]:
    """Yields each checkpoint with its label.

    All items of a dict are checked first. An iterator is read as it goes, and one is gone before the next is made.
    """
    seen: set[str | None] = set()
    for label, load in _read_checkpoints(given, surface):
        if label in seen:
            raise CircuitsError(f"sweep, checkpoints: two checkpoints are called {label!r}")
        seen.add(label)
        yield label, load()
        del load


def _read_checkpoints(given: Any, surface: HookedModel) -> Iterator[LabelledLoader]:
    if given is None:
        return iter([(None, partial(Checkpoint, surface))])
    model = _Model(surface)
    if isinstance(given, Mapping):
        return iter([_read(pair, model) for pair in given.items()])
    if isinstance(given, Iterable) and not isinstance(given, str):
        return _read_as_it_goes(given, model)
    raise CircuitsError(f"sweep, checkpoints: give a dict of labels and models or state_dicts, got {given!r}")


@dataclass(frozen=True)
class _Model:
    """A model into which state_dicts are loaded, with its names read once."""

    surface: HookedModel

    @cached_property
    def weights(self) -> dict[str, nn.Parameter]:
        return self.surface.named_weights()

    @cached_property
    def state_dict(self) -> dict[str, Tensor]:
        return self.surface.model.state_dict()

    @cached_property
    def shared(self) -> frozenset[str]:
        weights = self.weights
        memory = {name: weight.untyped_storage().data_ptr() for name, weight in weights.items()}
        counts = Counter(memory.values())
        return frozenset(name for name, address in memory.items() if counts[address] > 1)


def _read(pair: Any, model: _Model) -> LabelledLoader:
    if isinstance(getattr(pair, "model", None), nn.Module) and hasattr(pair, "ref"):
        pair = (pair.ref, pair.model)
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise CircuitsError(
            f"sweep, checkpoints: give pairs (label, model), got {type(pair).__name__}, which has no .ref and .model"
        )
    label, given = pair
    if callable(given) and not isinstance(given, nn.Module):
        return str(label), partial(_loaded, label, given, model)
    checkpoint = _checkpoint(label, given, model)
    return str(label), lambda: checkpoint


def _read_as_it_goes(given: Iterable[Any], model: _Model) -> Iterator[LabelledLoader]:
    for pair in given:
        found = [_read(pair, model)]
        # A local would keep it in memory until the next one is there.
        del pair
        yield found.pop()


def _loaded(label: Any, load: Callable[[], Any], model: _Model) -> Checkpoint:
    """Calls the function that loads a checkpoint, so that only one is in memory at a time."""
    given = load()
    if callable(given) and not isinstance(given, nn.Module):
        raise CircuitsError(f"sweep, checkpoint {label}: the function must return a model or a state_dict")
    return _checkpoint(label, given, model)


def _checkpoint(label: Any, given: Any, model: _Model) -> Checkpoint:
    what = f"sweep, checkpoint {label}"
    if not isinstance(given, nn.Module) and isinstance(getattr(given, "model", None), nn.Module):
        given = given.model
    if isinstance(given, nn.Module):
        surface = HookedModel.of(given)
        _check_block_around(model.surface, surface, what)
        return Checkpoint(surface, what)
    if not isinstance(given, Mapping):
        raise CircuitsError(f"{what}: expected a model or a state_dict, got {type(given).__name__}")
    return Checkpoint(model.surface, what, _read_weights(given, model, what), model.shared)


def _check_block_around(swept: HookedModel, checkpoint: HookedModel, what: str) -> None:
    """Refuses a block that edits the model of the sweep, where the checkpoint is another model and in no block."""
    if checkpoint.model is swept.model:
        return
    edited, itself = (inside_block(one.model) or bool(one.spliced) for one in (swept, checkpoint))
    if edited and not itself:
        raise CircuitsError(
            f"{what}: a block around this sweep edits another model than this one, which would be measured without; "
            "give state_dicts, or put the edits among the variants"
        )


def _read_weights(
    given: Mapping[str, Any], model: _Model, what: str
) -> tuple[tuple[str, nn.Parameter, Tensor], ...]:
    """Returns each parameter of the model with its value in a state_dict, which must be of the same architecture."""
    values: list[tuple[str, nn.Parameter, Tensor]] = []
    for name, current in model.state_dict.items():
        value = given.get(name)
        if name not in model.weights:
            # Buffers such as masks may be left out; as they are not exchanged, they must not differ.
            if value is not None and not (
                value.shape == current.shape and bool((value.to(current) == current).all())
            ):
                raise CircuitsError(f"{what}: {name} differs from the model's, and is no parameter")
            continue
        if not isinstance(value, Tensor) or value.shape != current.shape:
            got = list(value.shape) if isinstance(value, Tensor) else "none"
            raise CircuitsError(
                f"{what}: the model has {name} {list(current.shape)}, the state_dict has {got}"
                f"{foreign_names(given)}"
            )
        values.append((name, model.weights[name], value.detach()))
    unknown = [name for name in given if name not in model.state_dict]
    if unknown:
        raise CircuitsError(f"{what}: the state_dict has {unknown[0]}, the model has not")
    return tuple(values)
