"""Some matrices with blanks, and what every checkpoint of a run fills in, as it is and under uniform attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from interp_tasks.measurement.subjects import Examples, LoadedCheckpoint, subjects

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Matrices that the page shows.
SHOWN = 8


@dataclass(frozen=True)
class Filled:
    """Matrices and their completions.

    Attributes:
        steps: of the checkpoints.
        truth, hidden: the matrices and where they are blank, ``[matrix row column]``.
        trained, uniform: outputs ``[checkpoint matrix row column]``, as they are and with uniform
            attention in all heads.
    """

    steps: Sequence[int]
    truth: NDArray[np.floating]
    hidden: NDArray[np.bool_]
    trained: NDArray[np.floating]
    uniform: NDArray[np.floating]

    def error(self, outputs: NDArray[np.floating], checkpoint: int, matrix: int) -> float:
        """Returns the mean squared error at the blanks of one matrix, NaN where there is none."""
        blank = self.hidden[matrix]
        if not blank.any():
            return float("nan")
        return float(((outputs[checkpoint, matrix] - self.truth[matrix]) ** 2)[blank].mean())


def spread(errors: NDArray[np.floating]) -> list[int]:
    """Returns which matrices are shown: evenly spaced by rank of their errors, from the median on.

    After the largest of these errors comes the smallest; a matrix without an error, as it has no blanks, counts as
    one of the largest.
    """
    import numpy as np

    count = min(SHOWN, len(errors))
    ranked = np.argsort(errors, kind="stable")
    spaced = [int(ranked[part * len(errors) // count]) for part in range(count)]
    return [*spaced[count // 2 :], *spaced[: count // 2]]


def fill_in(run: str, samples: int, seed: int, tell: Callable[[str], None]) -> Filled:
    """Returns completions of some matrices of a sample, chosen by the last checkpoint's errors, by every checkpoint."""
    import numpy as np

    from circuits import ablate
    from circuits import run as run_model

    examples = Examples(samples=samples, seed=seed)
    (last,) = subjects(f"{run}@last", examples)
    assert last.task is not None
    assert last.batch is not None
    sums, counts = last.task.metrics(run_model(last.model, last.tokens), last.batch)["mse_masked"]
    shown = spread((sums / counts).double().numpy())
    trained, uniform, steps = [], [], []
    subject: LoadedCheckpoint | None = None
    for subject in subjects(f"{run}@all", examples):
        tell(subject.name)
        tokens = subject.tokens[shown]
        steps.append(subject.checkpoint.step)
        trained.append(run_model(subject.model, tokens)[..., 0].double().numpy())
        uniform.append(run_model(subject.model, tokens, ablate.uniform("all"))[..., 0].double().numpy())
    assert subject is not None
    assert subject.batch is not None
    shape = tuple(len(axis.values) for axis in subject.task.grid_axes()) if subject.task is not None else ()
    batch = subject.batch[shown]
    truth, hidden = batch.targets.double().numpy(), batch.extras["hidden"].numpy()
    return Filled(
        steps,
        truth.reshape(-1, *shape),
        hidden.reshape(-1, *shape),
        np.stack(trained).reshape(len(steps), -1, *shape),
        np.stack(uniform).reshape(len(steps), -1, *shape),
    )
