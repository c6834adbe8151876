"""Shows a task's data: the answers over the grid of inputs, and the accuracy of guessing.

Of each answer (the ``variant``): how many classes it has, and the accuracy of guessing and of the commonest class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from circuits.figures.panel_grid import draw_panels
from circuits.figures.panel_kinds import heatmap
from interp_tasks.errors import UserError
from interp_tasks.measurement.result import Result, Row, experiment, tidy_frame
from interp_tasks.pages import Figure
from interp_tasks.papers.input_grid_and_answers import GridInputs, fourier_grid_of_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from tasks import Task

#: Cells of maps have their number up to this side.
WRITTEN = 13


GUESSES = ("classes", "chance accuracy", "accuracy of the commonest")


@experiment(side_by_side={"variant": "", **dict(zip(GUESSES, GUESSES, strict=True))})
def data(task: str | Task, config: Mapping[str, Any] | None = None) -> Result:
    """Look at a task's data: how many classes its answers have, and what guessing gets.

    Args:
        task: the name of a task with a grid of inputs, or such a task.
        config: settings of a task that is given by name.
    """

    from tasks import get

    if not isinstance(task, str) and not hasattr(task, "grid_axes"):
        raise UserError(f"task {task!r}: give the name of a task, or a task; interp-run tasks lists them")
    chosen: Any = get(task, **(config or {})) if isinstance(task, str) else task
    axes = GridInputs.of(chosen, "data", coordinates=2).axes
    batch = chosen.input_grid()
    targets = {
        name: target.values.flatten()
        for name, target in chosen.probe_targets(batch).targets.items()
        if target.kind == "classification" and target.values.numel() == len(batch)
    }
    answers = {name: targets[name] for name in chosen.modular_answers() if name in targets}
    answers = answers or targets or {"answer": batch.targets}
    shared = {"experiment": "data", "ref": chosen.name, "split": "grid", "n": len(batch), "n_runs": 0}
    frame = tidy_frame(class_count_and_chance_rows(answers), engine="exact", run="", **shared)
    grid = fourier_grid_of_inputs(axes, batch.tokens)
    drawn = {name: grid.arrange(each, 0).numpy() for name, each in answers.items()}
    note = "Every input of the task. chance: of guessing evenly among the classes that occur."
    settings = {"task": chosen.name, **chosen.model_dump(mode="json")}
    return Result("data", frame, settings, (note,), data={"maps": drawn, "axes": list(grid.axes)})


def class_count_and_chance_rows(answers: Mapping[str, Tensor]) -> Iterator[Row]:
    """Yields the accuracy of guessing for each answer, and for all together."""
    chances = []
    for name, values in answers.items():
        counts = values.unique(return_counts=True)[1]
        chances.append(1 / len(counts))
        about = {"variant": name, "intervention": "answer"}
        yield {**about, "metric": "classes", "value": float(len(counts))}
        yield {**about, "metric": "chance accuracy", "value": chances[-1]}
        commonest = float(counts.max()) / len(values)
        yield {**about, "metric": "accuracy of the commonest", "value": commonest}
    if len(chances) > 1:
        about = {"variant": "all answers", "intervention": "mean over answers"}
        yield {**about, "metric": "chance accuracy", "value": math.fsum(chances) / len(chances)}


def figures(result: Result) -> list[Figure]:
    """Returns a map of each answer over the grid."""
    down, across = result.data["axes"]
    panels = []
    for title, values in result.data["maps"].items():
        size: dict[str, Any] = {"row": 230 // min(60, len(values)), "width": 200}
        size["text"] = values.astype(str) if max(values.shape) <= WRITTEN else None
        panels.append(heatmap(values, title, across=across, down=down, numbers=False, bar=False, **size))
    caption = "Each answer over the grid: first coordinate downwards, second to the right."
    return [Figure(draw_panels(panels, columns=min(4, len(panels))), "Answers", caption)]
