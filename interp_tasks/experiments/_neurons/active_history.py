"""Active frequencies over the checkpoints of a run: the published count, which needs all of them, and its peak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.experiments._neurons.active_counts import (
    DEVIATIONS,
    MIN_CHECKPOINTS,
    active_counts,
    amplitudes,
    of_equal_size,
)
from interp_tasks.experiments._neurons.features import MeasuredFeatures
from interp_tasks.experiments._neurons.rows import common_of, row
from interp_tasks.experiments._neurons.table import ACTIVE, ACTIVE_EACH, ALL, SIZE
from interp_tasks.measurement.subjects import LoadedCheckpoint

if TYPE_CHECKING:
    import numpy as np

PEAK, PEAK_STEP, END = ", peak", ", step of the peak", ", end / peak"


@dataclass(frozen=True)
class Entry:
    """A checkpoint of a run: the labels of its rows, the measures of its neurons, and those with rows of their own."""

    labels: Mapping[str, Any]
    amplitudes: np.ndarray
    active_each: float
    wanted: Sequence[int]


@dataclass
class History:
    """Measures that need all checkpoints of a run: the published count of active frequencies, and its peaks."""

    seen: dict[tuple[str, str], list[Entry]] = field(default_factory=dict)

    def add(self, subject: LoadedCheckpoint, measures: MeasuredFeatures, wanted: Sequence[int]) -> None:
        if subject.checkpoint.run is None:
            return
        features, varying = measures.features, measures.clusters.best >= 0
        labels = {**subject.labels, **common_of(features), "experiment": "neurons", "n_runs": 1}
        each = float(measures.active.counts[varying].double().mean()) if bool(varying.any()) else 0.0
        entry = Entry(labels, amplitudes(features.grid.arrange(features.values)), each, wanted)
        # A checkpoint's folder lies in the run's folder of checkpoints.
        run = str(subject.checkpoint.path.parent.parent)
        self.seen.setdefault((run, features.label), []).append(entry)

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for (run, _), entries in self.seen.items():
            if len(entries) >= MIN_CHECKPOINTS:
                rows += of_run(run, sorted(entries, key=lambda entry: entry.labels["step"]))
        return rows


def of_run(run: str, entries: Sequence[Entry]) -> Iterator[dict[str, Any]]:
    """Yields the published counts at every checkpoint; where they and the counts against relabelled digits peak."""
    import numpy as np

    over_time = np.stack([entry.amplitudes for entry in entries])
    varying = (over_time[:, 1:] > 0).any((0, 1))
    end = end_of(run)
    series = {(ALL, ACTIVE_EACH): np.array([entry.active_each for entry in entries])}
    kinds = {f"{ACTIVE}, mean + {deviations} sd": (over_time, deviations) for deviations in DEVIATIONS}
    kinds[f"{ACTIVE}, mean + {DEVIATIONS[0]} sd{SIZE}"] = of_equal_size(over_time), DEVIATIONS[0]
    for name, (of, deviations) in kinds.items():
        counts = active_counts(of, deviations)
        series |= {(f"neuron {at}", name): counts[:, at].astype(float) for at in entries[0].wanted}
        if varying.any():
            series[ALL, name] = counts[:, varying].mean(1)
    for (variant, name), values in series.items():
        if name != ACTIVE_EACH:
            for entry, value in zip(entries, values, strict=True):
                yield {**entry.labels, "variant": variant, **row(name, value)}
        last, at = {**entries[-1].labels, "variant": variant}, int(values.argmax())
        yield {**last, **row(name + PEAK, values[at], values[-1])}
        yield {**last, **row(name + PEAK_STEP, entries[at].labels["step"], end)}
        if values[at] > 0:
            yield {**last, **row(name + END, values[-1] / values[at])}


def end_of(run: str) -> int | None:
    """Returns the end of the drop that a run logged; ``None`` where there is none."""
    from pathlib import Path

    from interp_tasks.checkpoints.marks import find_drop
    from interp_tasks.checkpoints.run_files import RUN_FILE, read_run

    folder = Path(run)
    if not (folder / RUN_FILE).is_file():
        return None
    try:
        return find_drop(folder, read_run(folder), folder.name).end
    except UserError:
        return None
