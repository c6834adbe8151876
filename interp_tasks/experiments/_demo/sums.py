"""Some sums modulo a number, what every checkpoint of a run answers and where its heads look, and its digits' ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from interp_tasks.measurement.subjects import Examples, LoadedCheckpoint, subjects

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.floating]

#: Sums that the page shows, the first of the sample.
SHOWN = 8


@dataclass(frozen=True)
class Answered:
    """Sums and their answers.

    Attributes:
        steps: of the checkpoints.
        operands: ``[sum 2]``.
        right: the answers, ``[sum]``.
        said: of each checkpoint, as it is and with uniform attention in all heads: ``[checkpoint 2 sum]``.
        looks: attention from the last position ``[checkpoint 2 sum head key]``.
        modulus: what the sums are taken by.
    """

    steps: Sequence[int]
    operands: NDArray[np.integer]
    right: NDArray[np.integer]
    said: NDArray[np.integer]
    looks: Array
    modulus: int


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


def answer(run: str, samples: int, seed: int, tell: Callable[[str], None]) -> tuple[Answered, Ring]:
    """Returns the answers of every checkpoint of a run to the first sums of a sample, and the ring of its digits."""
    import numpy as np

    from circuits import ablate
    from circuits import run as run_model
    from interp_tasks.measurement.embeddings.tables import Tables, tables_of

    said, looks, steps, tables = [], [], [], []
    subject: LoadedCheckpoint | None = None
    for subject in subjects(f"{run}@all", Examples(samples=samples, seed=seed)):
        tell(subject.name)
        task = subject.task
        assert task is not None
        steps.append(subject.checkpoint.step)
        tables.append(tables_of(task, Tables.of(subject.model))[0].rows)
        passes = [
            run_model(subject.model, subject.tokens[:SHOWN], *edits, cache=["pattern.0"])
            for edits in ((), (ablate.uniform("all"),))
        ]
        digits = len(tables[-1])
        said.append([output[:, -1, :digits].argmax(-1).numpy() for output, _ in passes])
        looks.append([kept["pattern.0"][:, :, -1].double().numpy() for _, kept in passes])
    assert subject is not None
    assert subject.batch is not None
    answered = Answered(
        steps,
        subject.batch.extras["operands"][:SHOWN].numpy(),
        subject.batch.targets[:SHOWN].numpy(),
        np.array(said),
        np.array(looks),
        len(tables[-1]),
    )
    return answered, ring_of(tables)


def right_by_mirror(ref: str) -> tuple[float, float]:
    """Returns how many untrained sums are right with attention uniform over both numbers, by whether b + a was trained.

    Equal weights do away with the order of the numbers, so that a model answers a + b as it does b + a.
    """
    from circuits import ablate
    from circuits import run as run_model

    (subject,) = subjects(ref, Examples())
    task = subject.task
    assert task is not None
    batch = task.sample(None, split="test")
    trained = {(a, b) for a, b in task.sample(None, split="train").extras["operands"].tolist()}
    output = run_model(subject.model, batch.tokens, ablate.uniform("all", keys=(0, 1)))
    right = output[:, -1].argmax(-1) == batch.targets
    mirrored = right.new_tensor([(b, a) in trained for a, b in batch.extras["operands"].tolist()])
    return float(right[mirrored].double().mean()), float(right[~mirrored].double().mean())


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
