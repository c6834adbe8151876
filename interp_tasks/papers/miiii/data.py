"""Shows a task's data: the grid of inputs with its answers, or some examples, and the accuracy of guessing.

Of each answer (the ``variant``): how many classes it has, the accuracy of guessing and of the commonest class, and
how often exchanged operands have the same answer. Of targets that are numbers their mean and spread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from circuits.figures.layout import draw
from circuits.figures.panels import Series, heat, scatter
from interp_tasks.errors import UserError
from interp_tasks.measurement.activations import grid_of
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.options import check_choice, check_samples, check_seed
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.subjects import SPLITS, Progress
from interp_tasks.measurement.table import Row, filled, side_by_side, tidy
from interp_tasks.pages import Column, Figure, number

if TYPE_CHECKING:
    import numpy as np
    import pandas
    import plotly.graph_objects
    from numpy.typing import NDArray
    from torch import Tensor

    from tasks import Batch, GridAxis, Task

SAMPLES = 256
#: What multiples the polar plot shows, as figure 1 of the paper says.
MULTIPLES = (11, 17, 23)
#: Examples that are drawn, of a task without a grid of inputs.
DRAWN = 6
#: What stands in the column ``split`` where every input is looked at.
GRID = "grid"
#: What tasks of two digits call their sum, among the targets of probes.
SUM = "sum"
#: Numbers beyond which none is a point of the polar plot; maps side by side; cells have their number up to this side.
MAX_NUMBERS, COLUMNS, WRITTEN = 20_000, 4, 13
POLAR, INPUTS, ANSWERS, DFT, EXAMPLES = "Polar plot", "Inputs (X)", "Answers (Y)", "DFT matrix", "Examples"
CAPTIONS: Mapping[str, str] = {
    POLAR: "Every number n at radius n and angle n (in radians, so n mod 2π).",
    INPUTS: "The token of each coordinate over the grid: first coordinate downwards, second to the right.",
    ANSWERS: "Each answer over the grid: first coordinate downwards, second to the right.",
    DFT: "The orthonormal basis that spectra are taken in: constant, cos 1, sin 1, cos 2, ... as rows.",
    EXAMPLES: "Targets of the first examples; a cross is hidden from the model.",
}


@dataclass(frozen=True)
class Inputs:
    """The complete grid of inputs of two coordinates.

    Attributes:
        axes: the names of the coordinates, and how many values each has.
        tokens: coordinate -> its token ids over the grid ``[first second]``.
        answers: answer -> its classes over the grid.
        multiples: which multiples the polar plot shows.
    """

    axes: Mapping[str, int]
    tokens: Mapping[str, NDArray[np.int64]]
    answers: Mapping[str, NDArray[np.int64]]
    multiples: tuple[int, ...]


@dataclass(frozen=True)
class Matrices:
    """Examples whose positions form a grid, ``values [example row column]``, and which entries are hidden."""

    values: NDArray[np.float64]
    hidden: NDArray[np.bool_] | None


@experiment("tasks")
def data(
    task: str | Task,
    config: Mapping[str, Any] | None = None,
    *,
    multiples: Sequence[int] = MULTIPLES,
    samples: int | None = None,
    split: str = "test",
    seed: int = 0,
    progress: Progress | None = None,
) -> Result:
    """Look at a task's data: how many classes its answers have, and what guessing gets.

    Syrkis & Søgaard 2024 (MIIII), figures 1 to 3 and 21.

    Args:
        task: the name of a task with its settings in ``config``, or a task.
        multiples: of a grid of inputs: which multiples the polar plot shows, of as many numbers from 0 as there are
            inputs.
        samples: how many examples, of a task without a grid of inputs; by default 256.
        split: which examples these are.
        seed: of their draw.

    Raises:
        UserError, TaskError: in one line.
    """
    check_samples(samples)
    check_seed(seed)
    check_choice("--split", split, SPLITS)
    check_multiples(multiples)
    if not isinstance(task, str) and not hasattr(task, "grid_axes"):
        raise UserError(f"task {task!r}: give the name of a task, or a task; interp-run tasks lists them")
    chosen = resolve_task(task, config or {})
    axes = [axis for axis in chosen.grid_axes() if axis.position is not None]
    rows: list[Row]
    inputs = matrices = None
    if axes and hasattr(chosen, "input_grid"):
        batch, split = chosen.input_grid(), GRID
        answers = answers_of(chosen, batch)
        rows = [*answer_rows(chosen, answers)]
        rows += [*exchanged_rows(over_grid(batch, axes, answers, tuple(multiples))), *split_rows(chosen)]
        if len(axes) == 2:
            inputs = over_grid(batch, axes, {**answers, **sum_of(chosen, batch)}, tuple(multiples))
    else:
        batch = chosen.sample(samples or SAMPLES, seed=seed, split=split)  # type: ignore[arg-type]  # the split was checked as text
        rows = [*answer_rows(chosen, answers_of(chosen, batch)), *number_rows(batch)]
        matrices = first_matrices(chosen, batch)
    if not rows:
        raise UserError(
            f"task {chosen.name!r} declares neither classes to look for (probe_targets) nor numbers"
        )
    config = {"task": chosen.name, **chosen.model_dump(mode="json"), "multiples": list(multiples)}
    note_texts = tuple(notes(split, getattr(chosen, "variant", "plain")))
    return Result(
        "data",
        framed(rows, chosen, len(batch), seed, split),
        config,
        note_texts,
        data={"inputs": inputs, "matrices": matrices},
    )


def framed(rows: list[Row], task: Task, examples: int, seed: int, split: str) -> pandas.DataFrame:
    """Returns the tidy table of rows about a task's examples."""
    import pandas

    labels = {"experiment": "data", "run": "", "ref": task.name, "seed": seed, "split": split}
    shared = {**labels, "n_runs": 0, "engine": "exact"}
    return tidy(pandas.DataFrame([{"n": examples, **row, **shared} for row in rows]))


def notes(split: str, variant: str) -> Iterator[str]:
    if variant == "shuffled":
        yield "Shuffled: the coefficients are those of the answers before shuffling."
    if split == GRID:
        yield "Every input of the task. chance: of guessing evenly among the classes that occur."
        yield (
            "exchanged operands: how often an input has the answer of the one with its two operands exchanged; 1 where "
            "the answer does not depend on their order."
        )


def check_multiples(multiples: Sequence[int]) -> None:
    wrong = [number for number in multiples if not 1 < number < 10**6]
    if wrong:
        raise UserError(f"--multiples {wrong[0]}: give whole numbers from 2 to 999999, such as 17,23")


def resolve_task(task: str | Task, config: Mapping[str, Any]) -> Task:
    if not isinstance(task, str):
        return task
    from tasks import get

    return get(task, **config)


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


def sum_of(task: Task, batch: Batch) -> dict[str, Tensor]:
    """Returns the sum of the digits modulo p, which figure 3 shows, for tasks that declare it."""
    target = task.probe_targets(batch).targets.get(SUM)
    return {} if target is None else {SUM: target.values.flatten()}


def over_grid(
    batch: Batch, axes: Sequence[GridAxis], answers: Mapping[str, Tensor], multiples: tuple[int, ...]
) -> Inputs:
    """Arranges tokens and answers by coordinate, whatever the order of the inputs."""
    grid = grid_of(axes, batch.tokens)

    def laid(values: Tensor) -> NDArray[np.int64]:
        grid_values: NDArray[np.int64] = grid.arrange(values.double(), 0).round().long().numpy()
        return grid_values

    return Inputs(
        {axis.name: len(axis.values) for axis in axes},
        {axis.name: laid(batch.tokens[:, int(axis.position or 0)]) for axis in axes},
        {name: laid(values) for name, values in answers.items()},
        multiples,
    )


def split_rows(task: Task) -> Iterator[Row]:
    """Counts the inputs in each split of a finite task."""
    for split in SPLITS:
        size = len(task.sample(None, split=split))  # type: ignore[arg-type]  # of SPLITS
        yield {"variant": split, "intervention": "split", "metric": "inputs", "value": float(size), "n": size}


def answer_rows(task: Task, answers: Mapping[str, Tensor]) -> Iterator[Row]:
    """Yields the accuracy of guessing for each answer and for all together, and each coordinate's coefficient."""
    chances = []
    forms, axes = task.modular_answers(), task.grid_axes()
    for name, values in answers.items():
        counts = values.unique(return_counts=True)[1]
        chances.append(1 / len(counts))
        about = {"variant": name, "intervention": "answer"}
        for metric, value in (
            ("classes", float(len(counts))),
            ("chance accuracy", chances[-1]),
            ("accuracy of the commonest", float(counts.max()) / len(values)),
        ):
            yield {**about, "metric": metric, "value": value}
        if name in forms:
            for axis, coefficient in zip(axes, forms[name].coefficients, strict=True):
                yield {**about, "metric": f"coefficient of {axis.name}", "value": float(coefficient)}
    if len(chances) > 1:
        about = {"variant": "all answers", "intervention": "mean over answers"}
        yield {**about, "metric": "chance accuracy", "value": math.fsum(chances) / len(chances)}


def exchanged_rows(inputs: Inputs) -> Iterator[Row]:
    """Yields the share of inputs whose answer stays when the two operands, as tokens, change places."""
    import numpy as np

    if len(inputs.axes) != 2:
        return
    first, second = inputs.tokens.values()
    row_of_pair = {pair: index for index, pair in enumerate(zip(first.flat, second.flat, strict=True))}
    other = [row_of_pair.get((b, a)) for a, b in row_of_pair]
    has_partner = np.array([index is not None for index in other])
    partner = np.array([index or 0 for index in other])
    # An operand with itself says nothing.
    has_partner &= first.flatten() != second.flatten()
    for name, values in inputs.answers.items():
        flat = values.flatten()
        if has_partner.any():
            same = float((flat == flat[partner])[has_partner].mean())
            row = {"variant": name, "intervention": "answer", "metric": "same with exchanged operands"}
            yield {**row, "value": same, "n": int(has_partner.sum())}


def number_rows(batch: Batch) -> Iterator[Row]:
    """Yields the mean and spread of numerical targets, and the share of them that is hidden."""
    if not batch.targets.is_floating_point():
        return
    values = batch.targets.double()
    about = {"variant": "targets", "intervention": "entries"}
    for metric, value in (
        ("mean", values.mean()),
        ("standard deviation", values.std(correction=0)),
        ("smallest", values.min()),
        ("largest", values.max()),
    ):
        yield {**about, "metric": metric, "value": float(value)}
    if "hidden" in batch.extras:
        yield {**about, "metric": "share hidden", "value": float(batch.extras["hidden"].double().mean())}


def first_matrices(task: Task, batch: Batch) -> Matrices | None:
    """Returns the first examples as matrices; ``None`` unless the positions form a grid of two coordinates."""
    axes = task.grid_axes()
    if len(axes) != 2 or any(axis.position is not None for axis in axes):
        return None
    sizes = [len(axis.values) for axis in axes]
    if batch.targets[0].numel() != math.prod(sizes):
        return None
    hidden = batch.extras.get("hidden")
    shown = slice(DRAWN)
    return Matrices(
        batch.targets[shown].double().reshape(-1, *sizes).numpy(),
        None if hidden is None else hidden[shown].reshape(-1, *sizes).numpy(),
    )


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row per answer, what guessing gets side by side."""
    return side_by_side(frame, lambda row: (row["variant"],), lambda row: {row["metric"]: row["value"]})


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns of ``view_rows``."""
    from interp_tasks.measurement.table import COLUMNS

    metrics = [str(name) for name in frame.columns if name not in COLUMNS]
    return [Column("", "variant"), *(Column(name, name, filled(name, number)) for name in metrics)]


def of_inputs(
    axes: Mapping[str, int],
    tokens: Mapping[str, NDArray[np.int64]],
    answers: Mapping[str, NDArray[np.int64]],
    multiples: Sequence[int],
) -> dict[str, plotly.graph_objects.Figure]:
    """Draws by title the polar plot, X, Y, and the DFT matrix of each length of a coordinate.

    Args:
        axes: the names of the coordinates, and how many values each has.
        tokens: coordinate -> its token ids over the grid ``[first second]``.
        answers: answer -> its classes over the grid.
        multiples: which multiples the polar plot shows.
    """
    figures = {
        POLAR: polar(math.prod(axes.values()), multiples),
        INPUTS: grid_maps(tokens, list(axes)),
        ANSWERS: grid_maps(answers, list(axes)),
    }
    sizes = dict.fromkeys(axes.values())
    for size in sizes:
        figures[DFT if len(sizes) == 1 else f"{DFT}, {size}"] = dft(size)
    return figures


def polar(cells: int, multiples: Sequence[int]) -> plotly.graph_objects.Figure:
    """Draws the numbers from 0 that the cells of a grid stand for; on the left multiples, on the right primes."""
    from tasks.modular_arithmetic import primes_below

    count = min(cells, MAX_NUMBERS)
    small = {"marker": {"size": 2 if count > 1000 else 4, "opacity": 0.35}}

    def placed(numbers: Sequence[int], **more: Any) -> Series:
        x, y = ([number * turn(number) for number in numbers] for turn in (math.cos, math.sin))
        return Series(x, y, hover=[str(number) for number in numbers], **more)

    series = {"n": placed(range(count), style=small, look=6)}
    for index, step in enumerate(multiples):
        style = {"marker": {"size": 4}}
        series[f"multiples of {step}"] = placed(range(step, count, step), style=style, look=index)
    primes = {"primes": placed(primes_below(count), style={"marker": {"size": 4}}, look=0)}
    size: dict[str, Any] = {"x": "n · cos n", "y": "n · sin n", "height": 380, "width": 380}
    panels = [
        scatter(series, f"n < {count} and multiples", **size),
        scatter(primes, f"primes below {count}", **size),
    ]
    hide: dict[str, Any] = {"showticklabels": False, "showgrid": False, "range": [-count, count]}
    return draw(panels, columns=2).update_xaxes(**hide).update_yaxes(**hide)


def grid_maps(maps: Mapping[str, NDArray[np.int64]], axes: list[str]) -> plotly.graph_objects.Figure:
    """Returns a p × p image of each, in whole numbers from 0."""
    panels = []
    for title, values in maps.items():
        numbers = values.astype(str) if max(values.shape) <= WRITTEN else None
        options: dict[str, Any] = {"across": axes[1], "down": axes[0], "numbers": False, "bar": False}
        panels.append(
            heat(values, title, text=numbers, row=230 // min(60, len(values)), width=200, **options)
        )
    return draw(panels, columns=min(COLUMNS, len(panels)))


def dft(size: int) -> plotly.graph_objects.Figure:
    """Draws the rows of the discrete Fourier basis of so many values."""
    from circuits.fourier import basis

    rows = basis(size).numpy()
    return draw([heat(rows, signed=True, across="x", down="row of the basis", numbers=False, row=8)])


def of_matrices(
    values: NDArray[np.float64], hidden: NDArray[np.bool_] | None
) -> dict[str, plotly.graph_objects.Figure]:
    """Draws a map of each example ``[example row column]``, hidden entries crossed, by title."""
    import numpy as np

    largest = float(np.abs(values).max())
    panels = []
    for at, matrix in enumerate(values):
        crossed = np.zeros(matrix.shape, bool) if hidden is None else hidden[at]
        options: dict[str, Any] = {"unit": "entry", "signed": True, "end": largest, "bar": at % 3 == 2}
        text = np.where(crossed, "×", "")
        panels.append(
            heat(matrix, f"example {at}", text=text, across="column", down="row", width=160, **options)
        )
    return {EXAMPLES: draw(panels, columns=min(3, len(panels)))}


def figures(result: Result) -> list[Figure]:
    """Returns for grids the polar plot, X, Y and the DFT matrix; else some examples."""
    inputs, matrices = result.data["inputs"], result.data["matrices"]
    if inputs is None and matrices is None:
        name = result.frame["ref"].iloc[0]
        raise UserError(
            f"--plot: task {name!r} declares no grid of two coordinates (grid_axes) to draw; leave it out"
        )
    views = of_inputs(**vars(inputs)) if inputs is not None else of_matrices(**vars(matrices))
    return [Figure(view, name, CAPTIONS.get(name, "")) for name, view in views.items()]
