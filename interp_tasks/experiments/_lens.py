"""Finds when the answer can be read out and which components write it.

A :class:`Result` with the rows ``read-out after embed``, ``read-out after layer 0``, ... (the final norm and
unembedding applied there) and ``without direct 0.1``, ``without direct mlp 0``, ... (the output minus what the
component adds to it along the residual stream), each compared with the full output.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement.activations import in_passes
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options, Refs

if TYPE_CHECKING:
    from typing_extensions import Unpack

READ_OUT, WITHOUT = "read-out", "without direct"


NOTES = (
    "read-out after: final norm and unembedding applied to the residual stream there; after the last layer "
    "it is the output.",
    "without direct: what the component adds straight to the output is taken away, the final norm's scale "
    "kept; what later layers make of it stays.",
)


@experiment(judged_by_task=True)
def lens(refs: Refs, **options: Unpack[Options]) -> Result:
    """Read the residual stream out after each layer, and the output without each component's direct effect.

    Every number is compared with the full output on the same examples.

    Args:
        refs: one or several REFs; all see the same examples.
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Examples`.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    return measure("lens", refs, options, measure_checkpoint, config={}, notes=NOTES)


def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
    """Returns the rows of one checkpoint."""
    from circuits import compare
    from circuits import lens as through

    columns: dict[str, dict[str, Any]] = {}

    def parts() -> Iterator[tuple[Any, dict[str, Any]]]:
        for tokens in in_passes(subject.tokens):
            seen = through(subject.model, tokens)
            outputs: dict[str, Any] = {}
            for name, output in seen.readouts.items():
                variant = f"{READ_OUT} after {name}"
                outputs[variant] = output
                layer = None if name == "embed" else int(name.removeprefix("layer "))
                place = (
                    {"site": "resid_pre", "layer": 0}
                    if layer is None
                    else {"site": "resid_post", "layer": layer}
                )
                columns[variant] = {"intervention": READ_OUT, "head": None, **place}
            for name in seen.contributions:
                label, about = component(name)
                outputs[f"{WITHOUT} {label}"] = seen.without(name)
                columns[f"{WITHOUT} {label}"] = {"intervention": WITHOUT, **about}
            yield seen.output, outputs

    metric = None if subject.task is None else subject.task.metrics
    return Measured(compare(parts(), metric, subject.batch, columns, subject.seed).frame)


def component(name: str) -> tuple[str, dict[str, Any]]:
    """Returns the label and columns of a component that ``circuits`` calls ``0.1``, ``mlp_out.0`` or ``embed``."""
    if name[0].isdigit():
        layer, head = map(int, name.split("."))
        return name, {"site": "z", "layer": layer, "head": head}
    site, dot, layer_text = name.partition(".")
    label = f"{'mlp' if site == 'mlp_out' else site} {layer_text}".strip()
    return label, {"site": site, "layer": int(layer_text) if dot else None, "head": None}
