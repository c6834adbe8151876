"""The main job on the shipped models: uniform attention before and after each has learned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints import resolve
from interp_tasks.checkpoints.meta import read_meta
from interp_tasks.measurement.result import Result, join
from interp_tasks.measurement.run_logs import Run, read_runs, task_of_run
from interp_tasks.measurement.subjects import Examples, LoadedCheckpoint, Progress, subjects
from interp_tasks.pages import number, percent, with_interval

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.floating]

MATRIX_RUN = "zoo:matrix-completion-7x7"
MODULAR_RUN = "zoo:modular-addition-113"
#: What the table calls uniform attention over the two numbers of a sum alone.
OPERANDS = "uniform(keys=0,1)"
#: The error at the blanks before and after uniform attention, by Gopalani, Lubana, Hu 2024, sections 3.1.2 and 3.2.1.
PUBLISHED = {"pre": "0.2236 -> 0.2236", "post": "0.0128 -> 0.2183"}
#: When the marks of a table are.
WHEN = {"pre": "before", "post": "after"}


@dataclass(frozen=True)
class Outcome:
    """A shipped run with its log and task, and what the edits of all heads do before and after its drop."""

    log: Run
    task: Any
    width: int
    result: Result

    def row(self, mark: str, metric: str, intervention: str = "uniform") -> dict[str, Any]:
        """Returns the one row of a checkpoint (``pre`` or ``post``), metric and edit."""
        frame = self.result.frame
        of_edit = (frame["metric"] == metric) & (frame["intervention"] == intervention)
        row: dict[str, Any] = frame[frame["ref"].str.endswith(f"@{mark}") & of_edit].to_dict("records")[0]
        return row


@dataclass(frozen=True)
class Completed:
    """A matrix and its completions, the one whose error after training is the median.

    Attributes:
        steps: of the checkpoints.
        truth, hidden: the matrix and where it is blank, ``[row column]``.
        outputs: of each checkpoint as it is and with uniform attention in all heads, ``[checkpoint 2 row column]``.
    """

    steps: Sequence[int]
    truth: Array
    hidden: NDArray[np.bool_]
    outputs: Array

    def error(self, checkpoint: int, edit: int) -> float:
        """Returns the mean squared error at the blanks, NaN where there is none."""
        errors = ((self.outputs[checkpoint, edit] - self.truth) ** 2)[self.hidden]
        return float(errors.mean()) if errors.size else float("nan")


@dataclass(frozen=True)
class Added:
    """A sum and its answers.

    Attributes:
        steps: of the checkpoints.
        operands: the two numbers.
        right: their sum modulo ``modulus``.
        answers: of each checkpoint as it is and with uniform attention in all heads, ``[checkpoint 2]``.
        looks: attention from the last position ``[checkpoint 2 head key]``.
    """

    steps: Sequence[int]
    operands: Sequence[int]
    right: int
    answers: NDArray[np.integer]
    looks: Array


@dataclass(frozen=True)
class Ring:
    """Embeddings of digits in the plane of one frequency, that which has most of their variance in the end.

    Attributes:
        points: ``[checkpoint digit 2]``: centred embeddings on the two directions in which the last checkpoint's go as
            the cosine and the sine of the frequency.
        shares: of the variance of the embeddings, how much is of this frequency, ``[checkpoint]``.
        phases: of each digit on the ring, 0 to 1.
    """

    frequency: int
    points: Array
    shares: Array
    phases: Sequence[float]


@dataclass(frozen=True)
class Demo:
    """Both models: what uniform attention does to each, and what their pictures show."""

    matrices: Outcome
    completed: Completed
    sums: Outcome
    added: Added
    ring: Ring


def check_runs() -> None:
    """Refuse, before slow work, a demo whose checkpoints are not there."""
    for run in (MATRIX_RUN, MODULAR_RUN):
        for mark in WHEN:
            resolve(f"{run}@{mark}")


def demo(samples: int = 256, seed: int = 0, progress: Progress | None = None) -> Demo:
    """Ablate attention in shipped models before and after they learn abruptly: some twenty seconds."""
    total = sum(len(resolve(f"{run}@all")) for run in (MATRIX_RUN, MODULAR_RUN))
    done = 0

    def checkpoints(run: str) -> Iterator[LoadedCheckpoint]:
        nonlocal done
        for subject in subjects(f"{run}@all", Examples(samples=samples, seed=seed)):
            if progress is not None:
                progress(done, total, subject.name)
            done += 1
            yield subject

    completed = complete(MATRIX_RUN, samples, seed, checkpoints)
    added, ring = add(checkpoints(MODULAR_RUN))
    matrices = measured(MATRIX_RUN, [None], samples, seed)
    return Demo(matrices, completed, measured(MODULAR_RUN, [None, (0, 1)], samples, seed), added, ring)


def measured(run: str, keys: Sequence[Sequence[int] | None], samples: int, seed: int) -> Outcome:
    """Returns what uniform attention in all heads does before and after a run's drop, over all keys or over some."""
    from interp_tasks import experiments

    refs = [f"{run}@{mark}" for mark in WHEN]
    results = [experiments.ablation(refs, keys=some, samples=samples, seed=seed) for some in keys]
    (log,) = read_runs(run)
    width = read_meta(resolve(refs[-1])[0].path)["model"]["d_model"]
    return Outcome(log, task_of_run(log), width, join(results))


def complete(
    run: str, samples: int, seed: int, checkpoints: Callable[[str], Iterator[LoadedCheckpoint]]
) -> Completed:
    """Returns what every checkpoint of a run completes a matrix to, the one of median error after training."""
    import numpy as np

    from circuits import ablate
    from circuits import run as run_model

    (last,) = subjects(f"{run}@last", Examples(samples=samples, seed=seed))
    task, batch = last.task, last.batch
    assert task is not None
    assert batch is not None
    sums, counts = task.metrics(run_model(last.model, last.tokens), batch)["mse_masked"]
    # A matrix without blanks has no error, and counts as one of the largest.
    ranked = np.argsort((sums / counts).double().numpy(), kind="stable")
    median = batch[[int(ranked[len(ranked) // 2])]]
    shape = tuple(len(axis.values) for axis in task.grid_axes())
    steps, outputs = [], []
    for subject in checkpoints(run):
        steps.append(subject.checkpoint.step)
        passes = [run_model(subject.model, median.tokens, *edits) for edits in ((), (ablate.uniform("all"),))]
        outputs.append([each[0, :, 0].double().numpy().reshape(shape) for each in passes])
    truth, hidden = median.targets.double().numpy(), median.extras["hidden"].numpy()
    return Completed(steps, truth.reshape(shape), hidden.reshape(shape), np.array(outputs))


def add(checkpoints: Iterator[LoadedCheckpoint]) -> tuple[Added, Ring]:
    """Returns what checkpoints answer to the first sum of a sample, and the ring of their digits."""
    import numpy as np

    from circuits import ablate
    from circuits import run as run_model
    from interp_tasks.measurement.embeddings import Tables, tables_of

    answers, looks, steps, tables = [], [], [], []
    operands, right = [], 0
    for subject in checkpoints:
        assert subject.task is not None
        assert subject.batch is not None
        sum_ = subject.batch[:1]
        operands, right = sum_.extras["operands"][0].tolist(), int(sum_.targets[0])
        steps.append(subject.checkpoint.step)
        tables.append(tables_of(subject.task, Tables.of(subject.model))[0].rows)
        passes = [
            run_model(subject.model, sum_.tokens, *edits, cache=["pattern.0"])
            for edits in ((), (ablate.uniform("all"),))
        ]
        answers.append([int(output[0, -1, : len(tables[-1])].argmax()) for output, _ in passes])
        looks.append([kept["pattern.0"][0, :, -1].double().numpy() for _, kept in passes])
    return Added(steps, operands, right, np.array(answers), np.array(looks)), ring_of(tables)


def ring_of(tables: Sequence[Array]) -> Ring:
    """Returns the ring of the embeddings of digits ``[digit d]`` of several checkpoints."""
    import numpy as np

    from circuits.fourier import basis, frequencies, spectrum

    last = np.asarray(tables[-1])
    digits = len(last)
    power = [spectrum(table).total().power.numpy() for table in tables]
    frequency = int(np.argmax(power[-1][1:])) + 1
    waves = basis(digits).numpy()[frequencies(digits).numpy() == frequency]
    directions, _ = np.linalg.qr((waves @ last).T)
    # A direction has no sign of its own: digit 0 stands at the right, and the digits go round to the left.
    directions = directions * np.sign(np.diagonal(waves @ last @ directions))
    points = np.stack([(table - table.mean(0)) @ directions for table in map(np.asarray, tables)])
    shares = np.array([each[frequency] / each[1:].sum() for each in power])
    return Ring(frequency, points, shares, [frequency * digit % digits / digits for digit in range(digits)])


def guessing(outcome: Outcome) -> float:
    """Returns the error of answering 0 at every blank: the variance of an entry, the plateau by theory."""
    return float(outcome.task.plateau_levels()["mse_masked"])


def summary(found: Demo) -> list[str]:
    """Returns ten lines: both models over training, as trained and edited, and what is published."""
    outcome, sums = found.matrices, found.sums
    matrices, answers = (
        one.row("post", metric)["n"] for one, metric in ((outcome, "mse_masked"), (sums, "accuracy"))
    )
    lines = [
        f"Matrix completion (Gopalani et al. 2024): error at the blanks of {matrices} matrices",
        history(outcome, f"{number(guessing(outcome))} is guessing 0"),
        line("", "as trained", "uniform attention", "published"),
        *(moment(outcome.row(mark, "mse_masked"), mark, number, PUBLISHED[mark]) for mark in WHEN),
        f"Modular addition (Nanda et al. 2023): right answers to {answers} sums mod {sums.task.p}",
        history(sums, f"chance is {1 / sums.task.p:.1%}"),
        line("", "as trained", "uniform attention", "over the numbers only"),
    ]
    for mark in WHEN:
        more = edited(sums.row(mark, "accuracy", OPERANDS), percent)
        lines.append(moment(sums.row(mark, "accuracy"), mark, percent, more))
    return lines


def moment(row: dict[str, Any], mark: str, shown: Callable[[float], str], more: str) -> str:
    when = f"{WHEN[mark]}, step {row['step']:,}"
    return line(when, shown(row["baseline"]), edited(row, shown), more)


def line(when: str, trained: str, edited: str, more: str) -> str:
    return f"  {when:<19}{trained:<12}{edited:<25}{more}".rstrip()


def edited(row: dict[str, Any], shown: Callable[[float], str]) -> str:
    ends = (percent,) if shown is percent else ()
    return with_interval(shown(row["value"]), row["value_ci_low"], row["value_ci_high"], *ends)


#: Characters of a curve, lowest first, and how many of them it takes.
BLOCKS, PLACES = "▁▂▃▄▅▆▇█", 24


def history(outcome: Outcome, says: str) -> str:
    """Returns the drop metric over training as a row of blocks, and where its drop begins."""
    import numpy as np

    curve = outcome.log.curve(outcome.log.drop_metric)
    last = curve.steps[-1]
    # At each place the last value logged until there.
    ends = np.searchsorted(curve.steps, last * np.arange(1, PLACES + 1) / PLACES, side="right") - 1
    heights = curve.values[ends] / curve.values.max() * (len(BLOCKS) - 1)
    blocks = "".join(BLOCKS[round(height)] for height in heights.tolist())
    moves = "" if curve.drop is None else f", turns at {curve.drop.onset:,}"
    return f"  {says:<20} {blocks} {last:,} steps{moves}"
