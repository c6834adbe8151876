"""Shows a task's data: the answers over the grid of inputs, or some examples, and the accuracy of guessing.

Of each answer (the ``variant``): how many classes it has, and the accuracy of guessing and of the commonest class. Of
targets that are numbers their mean and spread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from circuits.figures.layout import draw
from circuits.figures.panels import heat
from interp_tasks.errors import UserError
from interp_tasks.measurement.activations import grid_of
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.options import check_choice, check_samples, check_seed
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.subjects import SPLITS, Progress
from interp_tasks.measurement.table import COLUMNS, Row, filled, side_by_side, tidy
from interp_tasks.pages import Column, Figure, number

if TYPE_CHECKING:
    import numpy as np
    import pandas
    from numpy.typing import NDArray
    from torch import Tensor

    from tasks import Batch, Task

SAMPLES = 256
#: Examples that are drawn, of a task without a grid of inputs.
DRAWN = 6
#: What stands in the column ``split`` where every input is looked at.
GRID = "grid"
#: Maps side by side; cells have their number up to this side.
COLUMNS_OF_MAPS, WRITTEN = 4, 13


class Drawn(NamedTuple):
    """Matrices to draw: answers over the grid, by name, or examples with hidden entries.

    Attributes:
        axes: names of what lies down and across.
        values: title -> ``[down across]``.
        hidden: which entries of each example are, ``[example down across]``; ``None`` for answers.
    """

    axes: tuple[str, str]
    values: Mapping[str, NDArray[Any]]
    hidden: NDArray[np.bool_] | None = None


@experiment("tasks")
def data(
    task: str | Task,
    config: Mapping[str, Any] | None = None,
    *,
    samples: int | None = None,
    split: str = "test",
    seed: int = 0,
    progress: Progress | None = None,
) -> Result:
    """Look at a task's data: how many classes its answers have, and what guessing gets.

    Args:
        task: the name of a task with its settings in ``config``, or a task.
        samples: how many examples, of a task without a grid of inputs; by default 256.
        split: which examples these are.
        seed: of their draw.

    Raises:
        UserError, TaskError: in one line.
    """
    import pandas

    from tasks import get

    check_samples(samples)
    check_seed(seed)
    check_choice("--split", split, SPLITS)
    if not isinstance(task, str) and not hasattr(task, "grid_axes"):
        raise UserError(f"task {task!r}: give the name of a task, or a task; interp-run tasks lists them")
    chosen = get(task, **(config or {})) if isinstance(task, str) else task
    axes = [axis for axis in chosen.grid_axes() if axis.position is not None]
    rows: list[Row]
    if axes and hasattr(chosen, "input_grid"):
        batch, split = chosen.input_grid(), GRID
        answers = answers_of(chosen, batch)
        rows = [*answer_rows(answers), *split_rows(chosen)]
        drawn = over_grid(chosen, batch, answers) if len(axes) == 2 else None
    else:
        batch = chosen.sample(samples or SAMPLES, seed=seed, split=split)  # type: ignore[arg-type]  # the split was checked as text
        rows = [*answer_rows(answers_of(chosen, batch)), *number_rows(batch)]
        drawn = first_matrices(chosen, batch)
    if not rows:
        raise UserError(
            f"task {chosen.name!r} declares neither classes to look for (probe_targets) nor numbers"
        )
    labels = {"experiment": "data", "run": "", "ref": chosen.name, "seed": seed, "split": split}
    shared = {**labels, "n_runs": 0, "engine": "exact"}
    frame = tidy(pandas.DataFrame([{"n": len(batch), **row, **shared} for row in rows]))
    note = "Every input of the task. chance: of guessing evenly among the classes that occur."
    settings = {"task": chosen.name, **chosen.model_dump(mode="json")}
    return Result("data", frame, settings, (note,) if split == GRID else (), data={"drawn": drawn})


def answers_of(task: Task, batch: Batch) -> dict[str, Tensor]:
    """Returns each answer's classes ``[batch]``: the linear forms of the inputs where there are any, else all."""
    targets = task.probe_targets(batch).targets
    classes = {
        name: target.values.flatten()
        for name, target in targets.items()
        if target.kind == "classification" and target.values.numel() == len(batch)
    }
    answers = {name: classes[name] for name in task.modular_answers() if name in classes}
    if not answers and not classes and batch.targets.ndim == 1 and not batch.targets.is_floating_point():
        return {"answer": batch.targets}
    return answers or classes


def over_grid(task: Task, batch: Batch, answers: Mapping[str, Tensor]) -> Drawn:
    """Arranges answers by the two coordinates of the inputs, whatever their order."""
    first, second = task.grid_axes()
    grid = grid_of((first, second), batch.tokens)
    values = {
        name: grid.arrange(answer.double(), 0).round().long().numpy() for name, answer in answers.items()
    }
    return Drawn((first.name, second.name), values)


def first_matrices(task: Task, batch: Batch) -> Drawn | None:
    """Returns the first examples as matrices; ``None`` unless the positions form a grid of two coordinates."""
    axes = task.grid_axes()
    if len(axes) != 2 or any(axis.position is not None for axis in axes):
        return None
    sizes = [len(axis.values) for axis in axes]
    if batch.targets[0].numel() != math.prod(sizes):
        return None
    values = batch.targets[:DRAWN].double().reshape(-1, *sizes).numpy()
    hidden = batch.extras.get("hidden")
    crossed = None if hidden is None else hidden[:DRAWN].reshape(-1, *sizes).numpy()
    return Drawn(("row", "column"), {f"example {at}": matrix for at, matrix in enumerate(values)}, crossed)


def split_rows(task: Task) -> Iterator[Row]:
    """Counts the inputs in each split of a finite task."""
    for split in SPLITS:
        size = len(task.sample(None, split=split))  # type: ignore[arg-type]  # of SPLITS
        yield {"variant": split, "intervention": "split", "metric": "inputs", "value": float(size), "n": size}


def answer_rows(answers: Mapping[str, Tensor]) -> Iterator[Row]:
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


def number_rows(batch: Batch) -> Iterator[Row]:
    """Yields the mean and spread of numerical targets, and the share of them that is hidden."""
    if not batch.targets.is_floating_point():
        return
    values = batch.targets.double()
    measures = {
        "mean": values.mean(),
        "standard deviation": values.std(correction=0),
        "smallest": values.min(),
        "largest": values.max(),
    }
    if "hidden" in batch.extras:
        measures["share hidden"] = batch.extras["hidden"].double().mean()
    for metric, value in measures.items():
        yield {"variant": "targets", "intervention": "entries", "metric": metric, "value": float(value)}


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row per answer, what guessing gets side by side."""
    return side_by_side(frame, lambda row: (row["variant"],), lambda row: {row["metric"]: row["value"]})


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns of ``view_rows``."""
    metrics = [str(name) for name in frame.columns if name not in COLUMNS]
    return [Column("", "variant"), *(Column(name, name, filled(name, number)) for name in metrics)]


def figures(result: Result) -> list[Figure]:
    """Returns the answers over the grid, or some examples with hidden entries crossed."""
    drawn: Drawn | None = result.data["drawn"]
    if drawn is None:
        name = result.frame["ref"].iloc[0]
        raise UserError(
            f"--plot: task {name!r} declares no grid of two coordinates (grid_axes) to draw; leave it out"
        )
    down, across = drawn.axes
    panels = []
    largest = max(float(abs(values).max()) for values in drawn.values.values())
    for at, (title, values) in enumerate(drawn.values.items()):
        options: dict[str, Any] = {"across": across, "down": down, "numbers": False, "bar": False}
        if drawn.hidden is not None:
            options |= {"text": [["×" if one else "" for one in row] for row in drawn.hidden[at]]}
            options |= {"unit": "entry", "signed": True, "end": largest, "bar": at % 3 == 2, "width": 160}
        else:
            written = values.astype(str) if max(values.shape) <= WRITTEN else None
            options |= {"text": written, "row": 230 // min(60, len(values)), "width": 200}
        panels.append(heat(values, title, **options))
    if drawn.hidden is not None:
        caption = "Targets of the first examples; a cross is hidden from the model."
        return [Figure(draw(panels, columns=min(3, len(panels))), "Examples", caption)]
    caption = "Each answer over the grid: first coordinate downwards, second to the right."
    return [Figure(draw(panels, columns=min(COLUMNS_OF_MAPS, len(panels))), "Answers", caption)]
