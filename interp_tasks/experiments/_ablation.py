"""Measures which metrics move when attention heads are changed.

Its ``frame`` has a row for each checkpoint, variant and metric. The metrics are the task's, or for bare tokens the
distance of the output from the unedited one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.measurement.experiment import experiment, metrics_of_task
from interp_tasks.measurement.heads.edits import (
    HEADS_HELP,
    KEYS,
    MODE,
    POSITIONS,
    SCALE,
    HeadEdit,
    choices,
    read_specs,
)
from interp_tasks.measurement.model_parts import ModelParts
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import measure, swept
from interp_tasks.measurement.subjects import Options

if TYPE_CHECKING:
    from typing_extensions import Unpack


HEADS = typer.Option("--heads", metavar="SPEC", help=HEADS_HELP)


@experiment(
    "Intervene", says={"mode": None, "keys": None, "positions": "all", "scale": None}, metrics=metrics_of_task
)
def ablation(
    refs: str | Sequence[str],
    heads: Annotated[str | Sequence[Any], HEADS, list[str]] = "all",
    mode: Annotated[str, MODE] = "uniform",
    keys: Annotated[str | Sequence[int] | None, KEYS, str | None] = None,
    positions: Annotated[str | Sequence[int], POSITIONS, str] = "all",
    scale: Annotated[float | None, SCALE] = None,
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
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Options`.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    specs, edit = read_specs(heads), HeadEdit.read(mode, keys, positions, scale)

    return measure(
        "ablation",
        refs,
        options,
        lambda subject: swept(subject, edit.on(subject, choices(specs, subject.sizes)), edit.name),
        config={"heads": [str(spec) for spec in specs], **edit.describe()},
        notes=edit.notes,
        parts=ModelParts(specs, positions=edit.positions_by_option),
        check=edit.check,
    )
