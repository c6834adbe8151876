"""Shows a task's data: the grid of inputs with its answers, or some examples, and the accuracy of guessing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.options import check_choice, check_samples, check_seed
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.subjects import SPLITS, Progress
from interp_tasks.measurement.table import tidy
from interp_tasks.pages import Figure

if TYPE_CHECKING:
    import numpy as np
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


@dataclass(frozen=True, repr=False)
class DataResult(Result):
    """A :class:`Result` with the data that its figures show."""

    inputs: Inputs | None = None
    matrices: Matrices | None = None

    def plot(self) -> plotly.graph_objects.Figure:
        """Returns the first of :meth:`views`."""
        from circuits.plots import titled
        from interp_tasks.experiments._data.figure import CAPTIONS

        name, view = next(iter(self.views().items()))
        return titled(view, name, CAPTIONS.get(name, ""))

    def views(self) -> dict[str, plotly.graph_objects.Figure]:
        """Returns every figure by title: for grids the polar plot, X, Y and the DFT matrix; else some examples."""
        from interp_tasks.experiments._data.figure import of_inputs, of_matrices

        if self.inputs is not None:
            return of_inputs(**vars(self.inputs))
        if self.matrices is not None:
            return of_matrices(**vars(self.matrices))
        name = self.frame["ref"].iloc[0]
        raise UserError(
            f"--plot: task {name!r} declares no grid of two coordinates (grid_axes) to draw; leave it out"
        )

    def page_title(self) -> str:
        return f"data: {self.frame['ref'].iloc[0]}"

    def figures(self) -> list[Figure]:
        """Returns every figure, with its caption."""
        from interp_tasks.experiments._data.figure import CAPTIONS

        return [Figure(figure, name, CAPTIONS.get(name, "")) for name, figure in self.views().items()]


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
) -> DataResult:
    """Look at a task's data: how many classes its answers have, and what guessing gets.

    Syrkis & Søgaard 2024 (MIIII), figures 1 to 3 and 21.

    Args:
        task: the name of a task with its settings in ``config``, or a task.
        multiples: of a grid of inputs: which multiples the polar plot shows, of as many numbers from 0 as there are
            inputs.
        samples: how many examples, of a task without a grid of inputs; by default 256.
        split: which examples these are.
        seed: of their draw.

    Returns:
        A :class:`DataResult`. Of each answer (the ``variant``): how many classes it has, the accuracy of guessing and
        of the commonest class, and how often exchanged operands have the same answer. Of targets that are numbers
        their mean and spread.

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
    rows: list[dict[str, Any]]
    inputs = matrices = None
    if axes and hasattr(chosen, "input_grid"):
        batch = chosen.input_grid()
        split = GRID
        answers = answers_of(chosen, batch)
        answer_grid = over_grid(batch, axes, answers, tuple(multiples))
        maps = over_grid(batch, axes, {**answers, **sum_of(chosen, batch)}, tuple(multiples))
        inputs = maps if len(axes) == 2 else None
        rows = [*answer_rows(chosen, answers), *exchanged_rows(answer_grid), *split_rows(chosen)]
    else:
        batch = chosen.sample(samples or SAMPLES, seed=seed, split=split)  # type: ignore[arg-type]  # the split was checked as text
        rows = [*answer_rows(chosen, answers_of(chosen, batch)), *number_rows(batch)]
        matrices = first_matrices(chosen, batch)
    import pandas

    if not rows:
        raise UserError(
            f"task {chosen.name!r} declares neither classes to look for (probe_targets) nor numbers"
        )
    frame = pandas.DataFrame(rows).assign(
        experiment="data", run="", ref=chosen.name, seed=seed, split=split, n_runs=0, engine="exact"
    )
    frame["n"] = frame["n"].fillna(len(batch)) if "n" in frame else len(batch)
    recorded = {"task": chosen.name, **chosen.model_dump(mode="json"), "multiples": list(multiples)}
    return DataResult(
        "data",
        tidy(frame),
        recorded,
        tuple(notes(split, getattr(chosen, "variant", "plain"))),
        inputs=inputs,
        matrices=matrices,
    )


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
    from circuits.fourier import Grid

    grid = Grid.of_inputs(
        batch.tokens, {axis.name: int(axis.position or 0) for axis in axes}, [axis.values for axis in axes]
    )

    def laid(values: Tensor) -> NDArray[np.int64]:
        grid_values: NDArray[np.int64] = grid.arrange(values.double(), 0).round().long().numpy()
        return grid_values

    return Inputs(
        {axis.name: len(axis.values) for axis in axes},
        {axis.name: laid(batch.tokens[:, int(axis.position or 0)]) for axis in axes},
        {name: laid(values) for name, values in answers.items()},
        multiples,
    )


def split_rows(task: Task) -> Iterator[dict[str, Any]]:
    """Counts the inputs in each split of a finite task."""
    for split in SPLITS:
        size = len(task.sample(None, split=split))  # type: ignore[arg-type]  # of SPLITS
        yield {"variant": split, "intervention": "split", "metric": "inputs", "value": float(size), "n": size}


def answer_rows(task: Task, answers: Mapping[str, Tensor]) -> Iterator[dict[str, Any]]:
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


def exchanged_rows(inputs: Inputs) -> Iterator[dict[str, Any]]:
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


def number_rows(batch: Batch) -> Iterator[dict[str, Any]]:
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
