"""Outputs that were made in any way, compared with the model's own on the same examples."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.arguments import read_batch, read_seed
from circuits.resampling import Resampling
from circuits.sweeps.metrics import UNTESTED, called, metric_name, read_metric, read_values, unedited_metrics
from circuits.sweeps.result import SweepResult, make_result
from circuits.sweeps.table import BASELINE, Comparison, Measured, Row, adjust, tabulate


def compare(
    parts: Iterable[tuple[Tensor, Mapping[str, Tensor]]],
    metric: Any = None,
    batch: Any = None,
    columns: Mapping[str, Row] | None = None,
    seed: int = 0,
    draws: int = 1000,
    flips: int = 9999,
) -> SweepResult:
    """The table of a `sweep`, of outputs that something else has made: a read-out, a lens, code of your own.

        compare([(model(tokens), {"doubled": 2 * model(tokens)})], metric=metric)

    Args:
        parts: for consecutive lots of examples, the unedited output [n pos out] and, by variant, what is compared with
            it. One lot is in memory at a time.
        metric: as in `sweep`; batch covers the examples of all lots.
        batch: see `metric`.
        seed: see `metric`.
        draws: see `metric`.
        flips: see `metric`.
        columns: by variant, what the table is to say of it: intervention, site, layer, head, position.

    Raises `CircuitsError` for lots with different variants, and for what `sweep` refuses of a metric.
    """
    seed, batch = read_seed(seed, "compare"), read_batch(batch, "compare")
    if metric is not None:
        read_metric(metric, batch is not None)
    baseline = Measured(BASELINE, {})
    measured: dict[str, Measured] = {}
    done = 0
    for clean, outputs in parts:
        rows = slice(done, done + len(clean))
        done = rows.stop
        if baseline.parts and list(outputs) != list(measured):
            raise CircuitsError(
                f"compare: a lot has {', '.join(outputs)}; the first had {', '.join(measured)}"
            )
        for name, output in {BASELINE: clean, **outputs}.items():
            if output.shape != clean.shape:
                raise CircuitsError(
                    f"compare: {name} is {list(output.shape)}, the unedited {list(clean.shape)}"
                )
            if metric is None:
                values: Any = unedited_metrics(output, clean)
            else:
                values = called(metric, output, None if batch is None else batch[rows])
            about = {"variant": name, **(columns or {}).get(name, {})}
            one = baseline if name == BASELINE else measured.setdefault(name, Measured(name, about))
            one.parts.append(read_values(values, metric_name(metric), len(output), name))
    if not measured or (batch is not None and len(batch) != done):
        got = "no outputs" if not measured else f"{done} examples, batch has {len(batch)}"
        raise CircuitsError(f"compare: {got}; give the unedited output and others, of all examples")
    settings = {"seed": seed, "draws": draws, "flips": flips, "engine": "given", "n": done}
    untested: Collection[str] = UNTESTED if metric is None else ()
    given = Comparison(baseline, list(measured.values()), "given")
    [(found, unedited)] = tabulate([given], Resampling(seed, draws, flips), untested)
    adjust(found)
    return make_result(found, unedited, {}, settings)
