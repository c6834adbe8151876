"""The checkpoints of a sweep: models, and state_dicts that are loaded into a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from circuits.engine.check import side_by_side
from circuits.engine.engine import Engine
from circuits.engine.memory import copied_weights
from circuits.engine.replay import NotReplayed
from circuits.errors import CircuitsError
from circuits.model.interrupts import contextmanager
from circuits.model.record import evaluating
from circuits.model.state import holding, inside_block, same_bits, state_of
from circuits.model.supported import foreign_names
from circuits.model.surface import Surface
from circuits.sweeps.inputs import SweepInputs, Variant
from circuits.sweeps.measure import ModelSweep, measure_stacked
from circuits.sweeps.measurements import Measurements


def measure_checkpoints(
    loaders: Iterable[LabelledLoader],
    variants: Callable[[Surface], list[Variant]],
    inputs: SweepInputs,
    engine: str,
) -> Iterator[list[Measurements]]:
    """Yields the measurements of each checkpoint in their order; those measured together in one list.

    Each is compared with its own replay. Checkpoints that differ from the first only in their parameters are stacked,
    as many as fit. The first runs alone, so that errors of the metric show before the second is loaded.
    """
    seen: set[str | None] = set()
    pending: _PendingCheckpoints | None = None
    for label, load in loaders:
        if label in seen:
            raise CircuitsError(f"sweep, checkpoints: two checkpoints are called {label!r}")
        seen.add(label)
        checkpoint = load()
        # Where they are not stacked, one is gone before the next is made.
        del load
        if pending is not None and pending.take(label, checkpoint):
            del checkpoint
            if pending.full:
                yield pending.measured()
            continue
        with checkpoint.loaded() as surface:
            job = ModelSweep.of(surface, variants(surface), inputs, engine, label)
            measurements = checkpoint.counted(job.run())
        if pending is not None and pending.jobs:
            yield pending.measured()
        yield measurements
        max_stacked = job.max_stacked() if checkpoint.values is not None else 1
        pending = (
            _PendingCheckpoints(job, engine, max_stacked, Weights(checkpoint, max_stacked))
            if max_stacked > 1
            else None
        )
        # A model of its own is gone before the next one is read.
        del checkpoint, surface, job, measurements
    if pending is not None and pending.jobs:
        yield pending.measured()


@dataclass
class _PendingCheckpoints:
    """Checkpoints of one model that are yet to be measured, together."""

    like: ModelSweep  # the sweep of the checkpoint that was measured alone
    engine: str  # the caller's choice
    max_stacked: int
    weights: Weights
    checkpoints: list[Checkpoint] = field(default_factory=list)
    jobs: list[ModelSweep] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return len(self.jobs) == self.max_stacked

    def take(self, label: str | None, checkpoint: Checkpoint) -> bool:
        """Adds a checkpoint; returns False where it cannot be stacked with the others."""
        if checkpoint.values is None or checkpoint.surface is not self.like.surface:
            return False
        kept, job = self.weights.put(len(self.jobs), checkpoint), self.like.another(label)
        self.checkpoints.append(kept)
        self.jobs.append(job)
        return True

    def measured(self) -> list[Measurements]:
        checkpoints, jobs = self.checkpoints, self.jobs
        self.checkpoints, self.jobs = [], []
        try:
            engine = self._engine(checkpoints, jobs)
            # In the stack, put aside to be put back, and what the replay copies.
            held = self.weights.nbytes + checkpoints[0].nbytes
            held += len(jobs) * copied_weights(self.like.surface)
            with checkpoints[0].loaded():
                return measure_stacked(engine, jobs, lambda at: checkpoints[at].load_into_model(), held)
        except NotReplayed:
            # At least one cannot be replayed; measuring each alone shows which.
            each = zip(checkpoints, jobs, strict=True)
            return [one for checkpoint, job in each for one in self._alone(checkpoint, job)]

    def _engine(self, checkpoints: list[Checkpoint], jobs: list[ModelSweep]) -> Engine:
        """Returns the engine of all their weights, each compared with the model itself; clean passes are run along the
        way.
        """
        like, together = self.like.parts[0].engine, self.weights.first(len(checkpoints))
        assert isinstance(like, Engine)
        with evaluating(self.like.surface.model), torch.no_grad():
            seen = like.observed_together(self.weights.parameters(len(checkpoints)))
            observations = []
            for checkpoint, job in zip(checkpoints, jobs, strict=True):
                if seen is not None and not job.needs_clean_passes:
                    continue
                with checkpoint.loaded():
                    if seen is None:
                        observations.append(like.observed())
                    job.fetch()
            if seen is None:
                seen = side_by_side(observations)
            return like.of(together, seen)

    def _alone(self, checkpoint: Checkpoint, job: ModelSweep) -> list[Measurements]:
        label = job.parts[0].measurements.checkpoint
        with checkpoint.loaded() as surface:
            measured = ModelSweep.of(surface, job.variants, job.inputs, self.engine, label).run()
        return checkpoint.counted(measured)


@dataclass(frozen=True)
class Checkpoint:
    """A model as it is, or with other parameters: (name in the state_dict, parameter, its value)."""

    surface: Surface
    what: str = "sweep"
    values: tuple[tuple[str, nn.Parameter, Tensor], ...] | None = None
    #: Names of parameters that share memory: tied ones, and views of each other.
    shared: frozenset[str] = frozenset()

    @contextmanager
    def loaded(self) -> Iterator[Surface]:
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
            self._refuse_lost()
            yield self.surface

    @property
    def nbytes(self) -> int:
        """The bytes of the parameters that it replaces, which are put aside meanwhile."""
        return sum(parameter.nbytes for _, parameter, _ in self.values or ())

    def counted(self, measured: list[Measurements]) -> list[Measurements]:
        """Returns what was measured on it, with what is put aside counted as memory."""
        return [replace(one, bytes_held=one.bytes_held + self.nbytes) for one in measured]

    def load_into_model(self) -> None:
        """Replaces the parameters inside a block that holds another checkpoint of the same model."""
        for _, parameter, value in self.values or ():
            parameter.copy_(value)
        self._refuse_lost()

    def _refuse_lost(self) -> None:
        """Refuses values of which the model cannot hold all, as some of its parameters are one."""
        for name, parameter, value in self.values or ():
            if name in self.shared and not same_bits(parameter, value):
                raise CircuitsError(
                    f"{self.what}: {name} is tied to another parameter of the model, and they differ in the state_dict"
                )


class Weights:
    """Stacked copies of the weights of several checkpoints of one model."""

    def __init__(self, like: Checkpoint, max_stacked: int) -> None:
        assert like.values is not None
        self._surface = like.surface
        self._stacked = {
            name: parameter.new_empty((max_stacked, *parameter.shape)) for name, parameter, _ in like.values
        }

    @property
    def nbytes(self) -> int:
        return sum(stacked.nbytes for stacked in self._stacked.values())

    def put(self, at: int, checkpoint: Checkpoint) -> Checkpoint:
        """Copies a checkpoint's values into the stack, as those of a state_dict may change (a model in training), and
        returns the checkpoint with the copies.
        """
        values = []
        for name, parameter, value in checkpoint.values or ():
            stack_slice = self._stacked[name][at]
            stack_slice.copy_(value)
            values.append((name, parameter, stack_slice))
        return replace(checkpoint, values=tuple(values))

    def parameters(self, count: int) -> dict[str, Tensor]:
        """Returns the parameters of the first `count` checkpoints, each with an extra first axis."""
        return {name: stacked[:count] for name, stacked in self._stacked.items()}

    def first(self, count: int) -> dict[str, Tensor]:
        """Returns a state_dict of the first `count` checkpoints, stacked, buffers included."""
        model_weights = self._surface.model.state_dict()
        expanded = {name: value.expand(count, *value.shape) for name, value in model_weights.items()}
        return {**expanded, **self.parameters(count)}


LabelledLoader = tuple[str | None, Callable[[], Checkpoint]]


def read_checkpoints(given: Any, surface: Surface) -> Iterator[LabelledLoader]:
    """Returns an iterator of (label, function that loads the checkpoint). All items of a dict are checked first; an
    iterator is read lazily.
    """
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

    surface: Surface

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
        surface = Surface.of(given)
        _refuse_block_around(model.surface, surface, what)
        return Checkpoint(surface, what)
    if not isinstance(given, Mapping):
        raise CircuitsError(f"{what}: expected a model or a state_dict, got {type(given).__name__}")
    return Checkpoint(model.surface, what, _read_weights(given, model, what), model.shared)


def _refuse_block_around(swept: Surface, checkpoint: Surface, what: str) -> None:
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
