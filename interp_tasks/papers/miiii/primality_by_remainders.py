"""The remainders of a number read together: no remainder is 0, so it is called prime.

The ``variant`` is train, validation, test or all inputs; the ``metric`` is ``precision for ...``, ``recall for ...``,
and ``right in all remainders`` (a share). ``baseline`` is the number of right remainders, ``effect`` the difference.
Intervals by bootstrap over numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.measurement.confidence_intervals import paired_columns
from interp_tasks.measurement.loaded_checkpoints import LoadedCheckpoint
from interp_tasks.measurement.measure_checkpoints import measure
from interp_tasks.measurement.option_parsing import SPLITS
from interp_tasks.measurement.options_and_examples import Options
from interp_tasks.measurement.result import Result, Row, experiment, number_columns

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Unpack

RESAMPLES = 2000


@experiment(without=("tokens", "prompts", "samples", "split"))
def detector(refs: str | Sequence[str], **options: Unpack[Options]) -> Result:
    """Read the remainders of a number together, and call it prime where none is 0: precision and recall.

    Over all inputs of every split, beside what right remainders would find.

    A number n is called prime if no answer of the model says that n mod q = 0. Two things it may be compared with:
    ``rough numbers``, those without a factor among the moduli, 1 included, which right remainders find exactly;
    ``primes``, the moduli themselves included, which right remainders miss, as each has remainder 0 modulo itself. If
    the moduli are all primes below p and n < p², rough numbers are 1 and the primes from p on.

    Args:
        refs: REFs of checkpoints of a task whose answers are the remainders of one number.
        options: seed, task, task_config, device, progress: see :class:`Options`.
    """

    def check(subject: LoadedCheckpoint) -> None:
        if not hasattr(subject.task, "numbers"):
            raise UserError(
                "detector is of tasks whose answers are the remainders of one number, such as miiii; "
                f"{getattr(subject.task, 'name', None)!r} has none"
            )

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        shared = {"intervention": "none", "engine": "naive"}
        return [{**row, "split": row["variant"], **shared} for row in prime_detection_rows(subject)]

    result = measure("detector", refs, options, measure_checkpoint, config={}, check=check)
    notes = (
        "Called prime: no answer says remainder 0. Rough: without a factor among the moduli, 1 included; right "
        "remainders (the baseline) find exactly these, and of the primes miss the moduli themselves.",
        "Intervals: 95%, bootstrap over numbers.",
    )
    return replace(result, notes=notes)


def prime_detection_rows(subject: LoadedCheckpoint) -> Iterator[Row]:
    """Yields the rows of one checkpoint: of all inputs together, and of each split."""
    import numpy as np
    import torch

    task: Any = subject.task
    answers = task.modular_answers().values()
    moduli = np.array([answer.modulus for answer in answers])
    parts: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
    for split in SPLITS:
        batch = task.sample(None, split=split).to(subject.tokens.device)
        with torch.no_grad():
            read = [task.read(subject.model(tokens))[:, 0] for tokens in batch.tokens.split(2048)]
        output, n = torch.cat(read), task.numbers(batch.extras["operands"]).cpu().numpy()
        if (batch.targets.cpu().numpy().reshape(len(n), -1) != n[:, None] % moduli).any():
            raise UserError(
                f"{subject.labels['ref']}: the answers of this task are not the remainders of its numbers"
            )
        predictions = torch.stack([output[:, list(answer.classes)].argmax(-1) for answer in answers], 1)
        parts[split] = n, predictions.cpu().numpy()
    everything = tuple(map(np.concatenate, zip(*parts.values(), strict=True)))
    for name, (counted, given) in {"all": everything, **parts}.items():
        for row in precision_recall_rows(counted, given, moduli, subject.seed):
            yield {**row, "variant": name, "n": len(counted)}


def precision_recall_rows(
    n: NDArray[Any], predictions: NDArray[Any], moduli: NDArray[Any], seed: int
) -> Iterator[Row]:
    """Yields rows about numbers ``[number]`` and the remainders that a model gives them, ``[number modulus]``."""
    import numpy as np

    from circuits.statistics import ratio
    from tasks.modular_arithmetic import primes_below

    right = n[:, None] % moduli
    called, exact = (predictions != 0).all(1), (right != 0).all(1)
    for name, truth in (("rough numbers", exact), ("primes", np.isin(n, primes_below(int(n.max()) + 1)))):
        for measure_of, among in (("precision", (called, exact)), ("recall", (truth, truth))):
            # The model first, then right remainders.
            sums = np.stack([called & truth, exact & truth]).astype(float)
            counts = np.stack(among).astype(float)
            columns = paired_columns(ratio(sums.sum(1), counts.sum(1)), resampled_ratios(sums, counts, seed))
            yield {"metric": f"{measure_of} for {name}", **columns}
    all_right = float((predictions == right).all(1).mean())
    yield {"metric": "right in all remainders", **number_columns(all_right, baseline=1.0)}


def resampled_ratios(sums: NDArray[Any], counts: NDArray[Any], seed: int) -> NDArray[Any]:
    """Bootstraps Σsum / Σcount over numbers; both ``[series number]`` of zeros and ones; ``[resample series]``.

    Numbers of which all series say the same are drawn together: there are a few kinds of them only.
    """
    import numpy as np

    from circuits.statistics import ratio

    kinds, how_many = np.unique(np.concatenate([sums, counts]), axis=1, return_counts=True)
    of_kind = np.random.default_rng([seed, 5]).multinomial(
        how_many.sum(), how_many / how_many.sum(), size=RESAMPLES
    )
    return ratio(*(of_kind @ part.T for part in np.split(kinds, 2)))
