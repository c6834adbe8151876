"""The checkpoints of a sweep: models, and state_dicts whose parameters a model takes on for their turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from circuits.engine.check import side_by_side
from circuits.engine.engine import Engine
from circuits.engine.replay import NotReplayed
from circuits.errors import CircuitsError
from circuits.model.locks import exclusive
from circuits.model.record import evaluating
from circuits.model.state import holding, state_of
from circuits.model.surface import Surface
from circuits.sweeps.measure import Measurements, ModelSweep, SweepInputs, Variant, measure_stacked


def measure_checkpoints(
    turns: Iterable[Turn], variants: Callable[[Surface], list[Variant]], question: SweepInputs, engine: str
) -> Iterator[list[tuple[str | None, Measurements]]]:
    """(label, what was measured) of each, in their order; those that were measured together in one list.

    Each is compared with its own replay, and those that are its model with other parameters are stacked, as many as
    fit. The first runs alone: what is wrong with the metric shows before the second is asked for.
    """
    seen: set[str | None] = set()
    waiting: _PendingCheckpoints | None = None
    for label, turn in turns:
        if label in seen:
            raise CircuitsError(f"sweep, checkpoints: two checkpoints are called {label!r}")
        seen.add(label)
        checkpoint = turn()
        if waiting is not None and waiting.take(label, checkpoint):
            if waiting.full:
                yield waiting.measured()
            continue
        with checkpoint.held() as at:
            job = ModelSweep.of(at, variants(at), question, engine)
            found = job.run()
        if waiting is not None and waiting.jobs:
            yield waiting.measured()
        yield [(label, found)]
        max_stacked = job.max_stacked() if checkpoint.values is not None else 1
        waiting = (
            _PendingCheckpoints(job, engine, max_stacked, Weights(checkpoint, max_stacked))
            if max_stacked > 1
            else None
        )
    if waiting is not None and waiting.jobs:
        yield waiting.measured()


@dataclass
class _PendingCheckpoints:
    """Checkpoints of one model that are yet to be measured, together."""

    like: ModelSweep  # of one that was measured alone
    engine: str  # as it was asked for
    max_stacked: int
    weights: Weights
    labels: list[str | None] = field(default_factory=list)
    held: list[Checkpoint] = field(default_factory=list)
    jobs: list[ModelSweep] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return len(self.jobs) == self.max_stacked

    def take(self, label: str | None, checkpoint: Checkpoint) -> bool:
        """False where it cannot wait."""
        if checkpoint.values is None or checkpoint.surface is not self.like.surface:
            return False
        kept, job = self.weights.put(len(self.jobs), checkpoint), self.like.another()
        self.labels.append(label)
        self.held.append(kept)
        self.jobs.append(job)
        return True

    def measured(self) -> list[tuple[str | None, Measurements]]:
        labels, held, jobs = self.labels, self.held, self.jobs
        self.labels, self.held, self.jobs = [], [], []
        try:
            engine = self._engine(held, jobs)
            with held[0].held():
                found = measure_stacked(engine, jobs, lambda at: held[at].load_into_model())
        except NotReplayed:
            # Of one at least: each by itself tells which.
            each = zip(labels, held, jobs, strict=True)
            return [(label, self._alone(checkpoint, job)) for label, checkpoint, job in each]
        return list(zip(labels, found, strict=True))

    def _engine(self, held: list[Checkpoint], jobs: list[ModelSweep]) -> Engine:
        """That of all their weights, each compared with the model itself; clean passes are run on the way."""
        like, together = self.like.engine, self.weights.first(len(held))
        assert like is not None
        with evaluating(self.like.surface.model), torch.no_grad():
            seen = like.observed_together(self.weights.parameters(len(held)))
            apart = []
            for checkpoint, job in zip(held, jobs, strict=True):
                if seen is not None and not job.needs_clean_passes:
                    continue
                with checkpoint.held():
                    if seen is None:
                        apart.append(like.observed())
                    job.fetch()
            if seen is None:
                seen = side_by_side(apart)
            return like.of(together, seen)

    def _alone(self, checkpoint: Checkpoint, job: ModelSweep) -> Measurements:
        variants = [one for group in job.groups for one in group.variants]
        with checkpoint.held() as at:
            return ModelSweep.of(at, variants, job.question, self.engine).run()


@dataclass(frozen=True)
class Checkpoint:
    """A model as it is, or with other parameters: (name in the state_dict, parameter, its value)."""

    surface: Surface
    what: str = "sweep"
    values: tuple[tuple[str, nn.Parameter, Tensor], ...] | None = None

    @contextmanager
    def held(self) -> Iterator[Surface]:
        """The model with these parameters, which its clean passes see too."""
        with exclusive(self.surface.model), self._held() as surface:
            yield surface

    @contextmanager
    def _held(self) -> Iterator[Surface]:
        if self.values is None:
            yield self.surface
            return
        if state_of(self.surface.model).originals:
            raise CircuitsError(
                f"{self.what}: a block around this sweep has replaced weights of the model, which a state_dict would "
                "undo; put the transplant among the variants, or give models"
            )
        with holding((parameter, value) for _, parameter, value in self.values):
            yield self.surface

    def load_into_model(self) -> None:
        """In a block where another checkpoint of the same model is held, in its place."""
        for _, parameter, value in self.values or ():
            parameter.copy_(value)


class Weights:
    """Of several checkpoints of one model, copies that are stacked."""

    def __init__(self, like: Checkpoint, max_stacked: int) -> None:
        assert like.values is not None
        self._surface = like.surface
        self._stacked = {name: mine.new_empty((max_stacked, *mine.shape)) for name, mine, _ in like.values}

    def put(self, at: int, checkpoint: Checkpoint) -> Checkpoint:
        """The same with the copies: a state_dict may change where it lies, as that of a model in training does."""
        values = []
        for name, mine, value in checkpoint.values or ():
            place = self._stacked[name][at]
            place.copy_(value)
            values.append((name, mine, place))
        return replace(checkpoint, values=tuple(values))

    def parameters(self, count: int) -> dict[str, Tensor]:
        """Those of so many, each with an axis more at the front."""
        return {name: stacked[:count] for name, stacked in self._stacked.items()}

    def first(self, count: int) -> dict[str, Tensor]:
        """A state_dict of so many, buffers and all."""
        held = self._surface.model.state_dict()
        found = {name: value.expand(count, *value.shape) for name, value in held.items()}
        return {**found, **self.parameters(count)}


Turn = tuple[str | None, Callable[[], Checkpoint]]


def read_checkpoints(given: Any, surface: Surface) -> Iterator[Turn]:
    """(label, what gives the checkpoint when its turn comes). Of a dict all are checked first; an iterator is read as
    it goes.
    """
    if given is None:
        return iter([(None, partial(Checkpoint, surface))])
    model = _Model(surface)
    if isinstance(given, Mapping):
        return iter([_read(pair, model) for pair in given.items()])
    if isinstance(given, Iterable) and not isinstance(given, str):
        return (_read(pair, model) for pair in given)
    raise CircuitsError(f"sweep, checkpoints: give a dict of labels and models or state_dicts, got {given!r}")


@dataclass(frozen=True)
class _Model:
    """What takes on the weights of state_dicts, its names read once."""

    surface: Surface

    @cached_property
    def weights(self) -> dict[str, nn.Parameter]:
        return self.surface.named_weights()

    @cached_property
    def held(self) -> dict[str, Tensor]:
        return self.surface.model.state_dict()


def _read(pair: Any, model: _Model) -> Turn:
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise CircuitsError(f"sweep, checkpoints: give pairs (label, model), got {type(pair).__name__}")
    label, given = pair
    if callable(given) and not isinstance(given, nn.Module):
        return str(label), partial(_loaded, label, given, model)
    checkpoint = _checkpoint(label, given, model)
    return str(label), lambda: checkpoint


def _loaded(label: Any, load: Callable[[], Any], model: _Model) -> Checkpoint:
    """What a function gives, so that one is in memory at a time."""
    given = load()
    if callable(given) and not isinstance(given, nn.Module):
        raise CircuitsError(f"sweep, checkpoint {label}: the function must return a model or a state_dict")
    return _checkpoint(label, given, model)


def _checkpoint(label: Any, given: Any, model: _Model) -> Checkpoint:
    what = f"sweep, checkpoint {label}"
    if isinstance(given, nn.Module):
        return Checkpoint(Surface.of(given), what)
    if not isinstance(given, Mapping):
        raise CircuitsError(f"{what}: expected a model or a state_dict, got {type(given).__name__}")
    return Checkpoint(model.surface, what, _read_weights(given, model, what))


def _read_weights(
    given: Mapping[str, Any], model: _Model, what: str
) -> tuple[tuple[str, nn.Parameter, Tensor], ...]:
    """Each parameter of the model with its value in a state_dict, which must be that of the same architecture."""
    values: list[tuple[str, nn.Parameter, Tensor]] = []
    for name, mine in model.held.items():
        value = given.get(name)
        if name not in model.weights:
            # Masks and the like may be left out; as they are not exchanged, they must not differ.
            if value is not None and not (value.shape == mine.shape and bool((value.to(mine) == mine).all())):
                raise CircuitsError(f"{what}: {name} differs from the model's, and is no parameter")
            continue
        if not isinstance(value, Tensor) or value.shape != mine.shape:
            got = list(value.shape) if isinstance(value, Tensor) else "none"
            raise CircuitsError(f"{what}: the model has {name} {list(mine.shape)}, the state_dict has {got}")
        values.append((name, model.weights[name], value.detach()))
    unknown = [name for name in given if name not in model.held]
    if unknown:
        raise CircuitsError(f"{what}: the state_dict has {unknown[0]}, the model has not")
    return tuple(values)
