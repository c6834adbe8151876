"""Splits a sweep into units that run on an executor, and joins what they measured.

A unit is some examples of some variants on one engine. Workers load the model themselves; what goes to them and comes
back is pickled: prompts, interventions, the metric with its batch, and numbers per example.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import BrokenExecutor, Future, as_completed
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.model.surface import Surface
from circuits.sweeps.checkpoints import measure_checkpoints, read_checkpoints
from circuits.sweeps.engine_choice import NAIVE, EngineRefused
from circuits.sweeps.inputs import SweepInputs, Variant
from circuits.sweeps.measure import ModelSweep
from circuits.sweeps.measurements import BASELINE, Measurements
from circuits.validate import is_whole

_CALLER = "sweep, executor="
_SPLIT = ("examples", "variants")
#: The model that this process loaded last, by the sweep that it was loaded for.
_loaded: dict[str, Any] = {}
# Units of several threads, and of several sweeps, may run in one process.
_loading = threading.RLock()


@dataclass(frozen=True)
class Unit:
    """A part of a sweep, complete in itself.

    Attributes:
        key: names all that decides its result, where results are kept.
        sweep: names the call of `sweep` that it is a part of.
        variants: as the caller of `sweep` gave them.
        read: makes variants of these for a model.
    """

    key: str
    sweep: str
    load: Callable[[], Any]
    inputs: SweepInputs
    variants: Mapping[str, Any]
    read: Callable[[Mapping[str, Any], Surface], list[Variant]]
    engine: str


@dataclass(frozen=True)
class Refusal:
    """The reason why a unit's engine could not run one of its chunks."""

    reason: str


@dataclass(frozen=True)
class Across:
    """Where the units of a sweep run, and what is known of them.

    Attributes:
        executor: has `submit`, as those of `concurrent.futures` and Dask's `client.get_executor()`.
        load: returns the model; a function that can be pickled.
        split: the most `examples` and `variants` of a unit.
        done: what units have measured, by key, as JSON-able data; filled as they end.
        keeps: whether the caller gave `done`, so that keys must mean the same in another process.
    """

    executor: Any
    load: Callable[[], Any]
    split: Mapping[str, int]
    done: MutableMapping[str, Any]
    keeps: bool
    sweep: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def of(cls, executor: Any, load: Any, split: Any, done: Any) -> Across:
        """Reads `executor=`, `load=`, `split=` and `done=` of a sweep, and refuses what cannot be shared out."""
        if not callable(getattr(executor, "submit", None)):
            raise CircuitsError(
                f"{_CALLER}: it has submit, as concurrent.futures.ProcessPoolExecutor has; got "
                f"{type(executor).__name__}"
            )
        if isinstance(load, nn.Module) or not callable(load):
            raise CircuitsError(
                f"{_CALLER}: every worker loads the model; give a function without arguments that returns it"
            )
        split = {} if split is None else split
        if not isinstance(split, Mapping) or not all(
            name in _SPLIT and is_whole(count, 1) for name, count in split.items()
        ):
            raise CircuitsError(
                f'{_CALLER}: split is the most of each in a unit, such as {{"examples": 64, "variants": 12}}; got '
                f"{split!r}"
            )
        if done is not None and not isinstance(done, MutableMapping):
            raise CircuitsError(f"{_CALLER}: done is a dict, or another mapping that can be filled")
        return cls(executor, load, dict(split), {} if done is None else done, done is not None)

    def measure(
        self,
        surface: Surface,
        given: Mapping[str, Any],
        read: Callable[[Mapping[str, Any], Surface], list[Variant]],
        inputs: SweepInputs,
        engine: str,
    ) -> Iterator[list[Measurements]]:
        """Yields the measurements of all variants, in one list; this process only sees which engine serves which.

        Variants of which some chunk cannot be run by their engine run naive, all of their chunks.
        """
        parts = ModelSweep.of(surface, read(given, surface), inputs, engine).parts
        columns: list[tuple[Measurements, list[Unit]]] = []
        for part in parts:
            names = list(dict.fromkeys(one.name for one in part.variants))
            size = self.split.get("variants", len(names))
            for start in range(0, len(names), size):
                here = set(names[start : start + size])
                some = {str(name): one for name, one in given.items() if str(name) in here}
                like = replace(
                    part.measurements,
                    runs=[one.run for one in part.variants if one.name in some],
                    chunks=[],
                )
                columns.append((like, self._units(inputs, some, read, like.engine)))
        found = self._run([unit for _, units in columns for unit in units])
        measured: list[Measurements] = []
        for like, units in columns:
            parts_of_column = [found[unit.key] for unit in units]
            refusal = next((one for one in parts_of_column if isinstance(one, Refusal)), None)
            if refusal is not None:
                if engine != "auto":
                    raise EngineRefused(f"sweep, engine={engine!r}: {refusal.reason}; use engine='auto'")
                names = list(dict.fromkeys(run["variant"] for run in like.runs))
                refused = {name: like.refused.get(name, {}) | {like.engine: refusal.reason} for name in names}
                reasons = {name: refused[name].get("fast", refusal.reason) for name in names}
                like = replace(like, engine=NAIVE, naive=reasons, refused=refused)
                again = [self._named(replace(unit, engine=NAIVE)) for unit in units]
                found_again = self._run(again)
                parts_of_column = [found_again[unit.key] for unit in again]
            whole = [one for one in parts_of_column if isinstance(one, Measurements)]
            for one in whole:
                whole[0].check(one.chunks[0][0], BASELINE)
            measured.append(
                replace(
                    like,
                    bytes_held=max(one.bytes_held for one in whole),
                    chunks=[chunk for one in whole for chunk in one.chunks],
                )
            )
        yield measured

    def _units(
        self,
        inputs: SweepInputs,
        variants: Mapping[str, Any],
        read: Callable[[Mapping[str, Any], Surface], list[Variant]],
        engine: str,
    ) -> list[Unit]:
        """Cuts a sweep into units of whole chunks of examples, each with the name of what it measures."""
        # Whole chunks, so that every forward is the one of a sweep in one process.
        # Workers have a model of their own.
        inputs = replace(inputs, metric=replace(inputs.metric, model=None))
        step = inputs.step * -(-self.split.get("examples", inputs.step) // inputs.step)
        units: list[Unit] = []
        for start in range(0, len(inputs.tokens), step):
            rows = slice(start, min(start + step, len(inputs.tokens)))
            units.append(
                self._named(
                    Unit("", self.sweep, self.load, replace(inputs, rows=rows), variants, read, engine)
                )
            )
        return units

    def _named(self, unit: Unit) -> Unit:
        return replace(unit, key=_key(unit) if self.keeps else uuid.uuid4().hex)

    def _run(self, units: Sequence[Unit]) -> dict[str, Measurements | Refusal]:
        """Runs the units that are not done yet; what has ended stays in `done` whatever becomes of the rest."""
        futures: dict[str, Future[Any]] = {}
        try:
            for unit in units:
                if unit.key not in self.done and unit.key not in futures:
                    futures[unit.key] = self.executor.submit(measure_unit, unit)
            # As they end, so that what a slow one keeps waiting is kept.
            keys = {future: key for key, future in futures.items()}
            for future in as_completed(keys):
                self.done[keys[future]] = future.result()
            return {unit.key: _read(self.done[unit.key]) for unit in units}
        except BrokenExecutor as error:
            raise CircuitsError(f"{_CALLER}: a worker ended: {error}; what is done stays in done=") from error
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if isinstance(error, pickle.PicklingError) or "pickle" in str(error):
                raise CircuitsError(
                    f"{_CALLER}: cannot be sent to a worker: {error}; use functions of a module, not lambdas"
                ) from error
            raise
        finally:
            for key, future in futures.items():
                if not future.cancel() and future.done() and key not in self.done and not future.exception():
                    self.done[key] = future.result()


def measure_unit(unit: Unit) -> dict[str, Any]:
    """Measures a unit in the process that this is called in; returns JSON-able data."""
    with _loading:
        if unit.sweep not in _loaded:
            # One at a time, as models are large; and anew for every sweep, as what is loaded may have changed.
            _loaded.clear()
            _loaded[unit.sweep] = unit.load()
        surface = Surface.of(_loaded[unit.sweep])
    loaders = read_checkpoints(None, surface)
    inputs = replace(unit.inputs, metric=replace(unit.inputs.metric, model=surface.model))
    try:
        ((measurements,),) = measure_checkpoints(
            loaders, partial(unit.read, unit.variants), inputs, unit.engine
        )
    except EngineRefused as error:
        return {"refusal": str(error)}
    return measurements.describe()


def _read(given: Any) -> Measurements | Refusal:
    return Refusal(given["refusal"]) if "refusal" in given else Measurements.read(given)


def _key(unit: Unit) -> str:
    inputs, metric = unit.inputs, unit.inputs.metric
    assert inputs.rows is not None
    described = {
        "model": _digest(unit.load),
        "prompts": inputs.prompts.describe(),
        "rows": [inputs.rows.start, inputs.rows.stop],
        "forward": [inputs.step, inputs.chunk, inputs.outputs, inputs.not_replayed],
        "metric": [metric.name, _digest(metric.function), _digest(metric.batch), str(metric.positions)],
        "variants": {name: _digest(one) for name, one in unit.variants.items()},
        "engine": unit.engine,
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


class _ContentPickler(pickle.Pickler):
    """Pickles what is the same in another process: not addresses, which torch's pickles of tensors hold, nor what
    objects have computed of themselves, which is there after a first use and not before.
    """

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, Tensor) and thing.layout == torch.strided:
            values = thing.detach().cpu().resolve_conj().resolve_neg()
            raw = values.contiguous().reshape(-1).view(torch.uint8)
            return type(thing), (str(thing.dtype), tuple(thing.shape), raw.numpy().tobytes())
        kept = vars(thing) if hasattr(thing, "__dict__") and not isinstance(thing, type) else {}
        computed = {name for name in kept if isinstance(getattr(type(thing), name, None), cached_property)}
        if not computed:
            return NotImplemented
        make, given, state, *rest = thing.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name not in computed}
        return make, given, state, *rest


def _digest(thing: Any) -> str:
    """Returns a name for a value by its content; functions are pickled by their names."""
    stream = io.BytesIO()
    try:
        _ContentPickler(stream).dump(thing)
    except Exception as error:
        # Its type alone would name another such value too, whose results would be taken for its own.
        raise CircuitsError(
            f"{_CALLER}: with done= everything can be pickled, so that results are known again: {error}"
        ) from error
    return hashlib.sha256(stream.getvalue()).hexdigest()
