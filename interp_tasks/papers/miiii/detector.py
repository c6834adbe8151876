"""The remainders of a number read together: no remainder is 0, so it is called prime.

The ``variant`` is train, validation, test or all inputs; the ``metric`` is ``precision for ...``, ``recall for ...``,
the counts ``called prime``, ``primes``, ``rough numbers``, and ``right in all remainders`` (a share). ``baseline`` is
the number of right remainders, ``effect`` the difference. Intervals by bootstrap over numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import measure
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options
from interp_tasks.measurement.table import Row, numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from tasks import ModularAnswer

RESAMPLES = 2000
#: What a number may be, and what it is called together with precision and recall.
ROUGH, PRIME = "rough numbers", "primes"
EVERY = "all"


@experiment("modular")
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

    Raises:
        UserError: for a task without such answers, or with shuffled ones.
    """
    for name in ("tokens", "samples", "split"):
        if options.get(name) is not None:
            raise UserError(f"detector looks at all inputs of every split: leave --{name} out")

    def check(subject: LoadedCheckpoint) -> None:
        answers_of(subject.task)

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        return [{**row, "split": row["variant"], "engine": "naive"} for row in rows_of(subject)]

    result = measure("detector", refs, options, measure_checkpoint, config={}, check=check)
    notes = (
        "Called prime: no answer says remainder 0. Rough: without a factor among the moduli, 1 included; right "
        "remainders (the baseline) find exactly these, and of the primes miss the moduli themselves.",
        "Intervals: 95%, bootstrap over numbers.",
    )
    return replace(result, notes=notes)


def answers_of(task: Any) -> Mapping[str, ModularAnswer]:
    """Returns the remainders that a task asks for, by name.

    Raises:
        UserError: for a task whose answers are no remainders of one number.
    """
    answers: Mapping[str, ModularAnswer] = task.modular_answers()
    if not hasattr(task, "numbers") or not answers:
        raise UserError(
            "detector is of tasks whose answers are the remainders of one number, such as miiii; "
            f"{task.name!r} has none"
        )
    return answers


def rows_of(subject: LoadedCheckpoint) -> Iterator[Row]:
    """Yields the rows of one checkpoint: of all inputs together, and of each split."""
    import numpy as np
    import torch

    task: Any = subject.task
    answers = answers_of(task)
    moduli = np.array([answer.modulus for answer in answers.values()])
    parts: list[tuple[str, Any, Any]] = []
    for split in ("train", "validation", "test"):
        batch = task.sample(None, split=split).to(subject.tokens.device)
        with torch.no_grad():
            output = torch.cat(
                [task.read(subject.model(tokens))[:, 0] for tokens in batch.tokens.split(2048)]
            )
        predictions = torch.stack([output[:, list(one.classes)].argmax(-1) for one in answers.values()], 1)
        n = task.numbers(batch).cpu().numpy()
        if (batch.targets.cpu().numpy().reshape(len(n), -1) != n[:, None] % moduli).any():
            raise UserError(
                f"{subject.labels['ref']}: the answers of this task are not the remainders of its numbers"
            )
        parts.append((split, n, predictions.cpu().numpy()))
    everything = [np.concatenate([part[column] for part in parts]) for column in (1, 2)]
    all_numbers = (EVERY, everything[0], everything[1])
    for name, n, answered in [all_numbers, *parts]:
        for row in scores(n, answered, moduli, subject.seed):
            yield {**row, "variant": name, "intervention": "none", "n": len(n)}


def scores(n: NDArray[Any], predictions: NDArray[Any], moduli: NDArray[Any], seed: int) -> Iterator[Row]:
    """Yields rows about numbers ``[number]`` and the remainders that a model gives them, ``[number modulus]``."""
    import numpy as np

    from circuits.statistics import interval, ratio

    right = n[:, None] % moduli
    called, exact = (predictions != 0).all(1), (right != 0).all(1)
    prime = primes_among(n)
    for name, truth in ((ROUGH, exact), (PRIME, prime)):
        for measure_of, among in (("precision", (called, exact)), ("recall", (truth, truth))):
            # The model first, then right remainders.
            sums = np.stack([called & truth, exact & truth]).astype(float)
            counts = np.stack(among).astype(float)
            resampled = resampled_ratios(sums, counts, seed)
            low, high = interval(resampled, 0.95)
            below, above = interval(resampled[:, :1] - resampled[:, 1:], 0.95)
            value, baseline = ratio(sums.sum(1), counts.sum(1))
            columns = numbers(value, (low[0], high[0]), baseline, (below[0], above[0]))
            yield {"metric": f"{measure_of} for {name}", **columns}
    all_right = float((predictions == right).all(1).mean())
    yield {"metric": "right in all remainders", **numbers(all_right, baseline=1.0)}
    for metric, values, of_right in (
        ("called prime", called, exact),
        (PRIME, prime, prime),
        (ROUGH, exact, exact),
    ):
        yield {"metric": metric, **numbers(values.sum(), baseline=of_right.sum())}


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


def primes_among(n: NDArray[Any]) -> NDArray[Any]:
    """Tells which numbers ``[number]`` are prime, by the sieve of Eratosthenes."""
    import numpy as np

    sieve = np.ones(int(n.max(initial=1)) + 1, dtype=bool)
    sieve[:2] = False
    for divisor in range(2, int(len(sieve) ** 0.5) + 1):
        if sieve[divisor]:
            sieve[divisor * divisor :: divisor] = False
    return np.asarray(sieve[n])
