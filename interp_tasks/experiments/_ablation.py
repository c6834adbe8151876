"""Measures which metrics move when attention heads are changed.

Its ``frame`` has a row for each checkpoint, variant and metric. The metrics are the task's, or for bare tokens the
distance of the output from the unedited one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.head_edits import (
    HEADS,
    KEYS,
    MODE,
    POSITIONS,
    SCALE,
    HeadEdit,
    parse_choices,
    resolve_choices,
)
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure, run_sweep
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options, Refs

if TYPE_CHECKING:
    from typing_extensions import Unpack


@experiment(
    "Intervene",
    says={"mode": None, "keys": None, "positions": "all", "scale": None},
    judged_by_task=True,
)
def ablation(
    refs: Refs,
    heads: Annotated[str | Sequence[Any], HEADS, list[str]] = "all",
    mode: Annotated[str, MODE] = "uniform",
    keys: Annotated[str | Sequence[int] | None, KEYS, str | None] = None,
    positions: Annotated[str | Sequence[int], POSITIONS, str] = "all",
    scale: Annotated[int | float | None, SCALE, float | None] = None,
    **options: Unpack[Options],
) -> Result:
    """Ablate attention heads, by default with uniform attention, and see which metrics move.

    Every number is compared with the unedited model on the same examples. Means and resamples are taken over the
    examples evaluated.

    Args:
        refs: one or several REFs; all see the same examples.
        heads: ``"all"``, ``"each"`` (a row per head), ``"each-layer"`` or a spec such as ``"0.1+2.3-5"``; a list: a
            row each.
        mode: ``uniform`` attention, the ``mean_pattern`` (of the unedited model, or within the edited pass:
            ``edited_mean_pattern``), or the heads' output ``zero``, its ``mean``, that of another example
            (``resample``) or with Gaussian ``noise``. Means and resamples are over the examples evaluated.
        keys: with ``uniform``, attend uniformly to these positions only.
        positions: edit only here: positions, or a boolean mask of the task's examples by name
            (``"hidden"``, ``"observed"``).
        scale: with ``noise``, its standard deviation.
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Examples`.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    choices, edit = parse_choices(heads), HeadEdit.parse(mode, keys, positions, scale)

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        return run_sweep(subject, edit.on(subject, resolve_choices(choices, subject.sizes)), edit.name)

    return measure(
        "ablation",
        refs,
        options,
        measure_checkpoint,
        config={"heads": list(choices), **edit.describe()},
        check_sizes=lambda sizes, _: resolve_choices(choices, sizes),
        check=edit.check,
    )
