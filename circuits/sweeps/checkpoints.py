"""The checkpoints of a sweep: models, and state_dicts that are loaded into a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.model.contexts import model_block
from circuits.model.edit_state import holding, inside_block, same_bits, state_of
from circuits.model.hooked_model import HookedModel
from circuits.model.supported import missing_weights_hint


@dataclass(frozen=True)
class Checkpoint:
    """A model as it is, or with other values of its parameters, by their name in the state_dict."""

    surface: HookedModel
    what: str = "sweep"
    values: Mapping[str, Tensor] | None = None

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
        weights = self.surface.named_weights()
        memory = {name: weight.untyped_storage().data_ptr() for name, weight in weights.items()}
        counts = Counter(memory.values())
        with holding((weights[name], value) for name, value in self.values.items()):
            for name, value in self.values.items():
                if counts[memory[name]] > 1 and not same_bits(weights[name], value):
                    raise CircuitsError(
                        f"{self.what}: {name} is tied to another parameter of the model, and they differ in the "
                        "state_dict"
                    )
            yield self.surface


def parse_checkpoints(given: Any, surface: HookedModel) -> Iterator[tuple[str | None, Checkpoint]]:
    """Yields each checkpoint with its label.

    What a dict holds is checked before the first one runs. An iterator is read as it goes, a function is called when
    its turn comes, and one checkpoint is gone before the next is made.
    """
    if given is None:
        yield None, Checkpoint(surface)
        return
    if isinstance(given, Mapping):
        read = {label: one if _is_loader(one) else _read(label, one, surface) for label, one in given.items()}
        pairs: Iterator[tuple[Any, Any]] = iter(read.items())
    elif isinstance(given, Iterable) and not isinstance(given, str):
        pairs = map(_labelled, given)
    else:
        raise CircuitsError(
            f"sweep, checkpoints: give a dict of labels and models or state_dicts, got {given!r}"
        )
    seen: set[str] = set()
    for label, one in pairs:
        if str(label) in seen:
            raise CircuitsError(f"sweep, checkpoints: two checkpoints are called {str(label)!r}")
        seen.add(str(label))
        checkpoint = _read(label, one() if _is_loader(one) else one, surface)
        # A local would keep it in memory until the next one is there.
        del one
        yield str(label), checkpoint
        del checkpoint


def _is_loader(given: Any) -> bool:
    return callable(given) and not isinstance(given, nn.Module)


def _labelled(pair: Any) -> tuple[Any, Any]:
    if isinstance(getattr(pair, "model", None), nn.Module) and hasattr(pair, "ref"):
        return pair.ref, pair.model
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise CircuitsError(
            f"sweep, checkpoints: give pairs (label, model), got {type(pair).__name__}, which has no .ref and .model"
        )
    return pair


def _read(label: Any, given: Any, surface: HookedModel) -> Checkpoint:
    """Returns a checkpoint given as a model, as an object that has a .model, or as a state_dict."""
    what = f"sweep, checkpoint {label}"
    if isinstance(given, Checkpoint):
        return given
    given = given if isinstance(given, nn.Module) else getattr(given, "model", given)
    if isinstance(given, Mapping):
        return Checkpoint(surface, what, _values(given, surface, what))
    if not isinstance(given, nn.Module):
        raise CircuitsError(f"{what}: expected a model or a state_dict, got {type(given).__name__}")
    other = HookedModel.of(given)
    edited, itself = (inside_block(one.model) or bool(one.spliced) for one in (surface, other))
    if edited and not itself:
        raise CircuitsError(
            f"{what}: a block around this sweep edits another model than this one, which would be measured without; "
            "give state_dicts, or put the edits among the variants"
        )
    return Checkpoint(other, what)


def _values(given: Mapping[str, Any], surface: HookedModel, what: str) -> dict[str, Tensor]:
    """Returns the value of each parameter in a state_dict, which must be of the model's architecture."""
    weights, values = surface.named_weights(), dict[str, Tensor]()
    state = surface.model.state_dict()
    for name, current in state.items():
        value = given.get(name)
        if name not in weights:
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
                f"{missing_weights_hint(given)}"
            )
        values[name] = value.detach()
    if unknown := [name for name in given if name not in state]:
        raise CircuitsError(f"{what}: the state_dict has {unknown[0]}, the model has not")
    return values
