"""Some matrices with blanks, and what every checkpoint of a run fills in, as it is and under uniform attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from interp_tasks.measurement.subjects import Examples, Subject, subjects

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Matrices that the page shows, the first of the sample.
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


def fill_in(run: str, samples: int, seed: int, tell: Callable[[str], None]) -> Filled:
    """Returns the completions of the first matrices of a sample by every checkpoint of a run."""
    import numpy as np

    from circuits import ablate
    from circuits import run as run_model

    trained, uniform, steps = [], [], []
    subject: Subject | None = None
    for subject in subjects(f"{run}@all", Examples(samples=samples, seed=seed)):
        tell(subject.name)
        tokens = subject.tokens[:SHOWN]
        steps.append(subject.checkpoint.step)
        trained.append(run_model(subject.model, tokens)[..., 0].double().numpy())
        uniform.append(run_model(subject.model, tokens, ablate.uniform("all"))[..., 0].double().numpy())
    assert subject is not None
    assert subject.batch is not None
    shape = tuple(len(axis.values) for axis in subject.task.grid_axes()) if subject.task is not None else ()
    batch = subject.batch[:SHOWN]
    truth, hidden = batch.targets.double().numpy(), batch.extras["hidden"].numpy()
    return Filled(
        steps,
        truth.reshape(-1, *shape),
        hidden.reshape(-1, *shape),
        np.stack(trained).reshape(len(steps), -1, *shape),
        np.stack(uniform).reshape(len(steps), -1, *shape),
    )
