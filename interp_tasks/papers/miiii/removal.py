"""Takes away what a model represents of one modular answer, and measures the accuracy of every answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from interp_tasks.measurement.subjects import LoadedCheckpoint
from interp_tasks.papers.miiii.shares import TOGETHER, GridInputs, TensorValues, squares

if TYPE_CHECKING:
    import pandas
    from torch import Tensor

    from circuits import Intervention
    from interp_tasks.measurement.embeddings import Array

ACCURACY, WITHOUT, CONTROL = "accuracy of ", "without ", "control of "
OWN, OTHERS = "damage to itself", "damage to the others"
#: Of examples, behind the intervals of the accuracies.
RESAMPLES = 200


@dataclass(frozen=True)
class RightAnswers:
    """The right remainder of every answer ``[example answer]``, as a batch that ``circuits.sweep`` can slice."""

    answers: Tensor

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, rows: slice) -> RightAnswers:
        return RightAnswers(self.answers[rows])


def edits_of(
    subject: LoadedCheckpoint, inputs: GridInputs, place: TensorValues, best: Mapping[str, Tensor]
) -> dict[str, dict[str, Intervention]]:
    """Returns by what is taken away an edit for each answer, and one that takes away as much at random.

    ``digits``: all functions of the digits modulo q, from the embedding; the control is of shuffled digits.
    ``neurons``: those that serve the answer most are set to their mean; the control is of as many random ones.
    """
    import torch

    from circuits import ablate
    from tasks import generator

    digits: dict[str, Intervention] = {}
    neurons: dict[str, Intervention] = {}
    shuffled = inputs.shuffled(subject.seed)
    for name, answer in inputs.answers.items():
        for prefix, order in ((WITHOUT, None), (CONTROL, shuffled)):
            kinds = inputs.digits(order) % answer.modulus
            digits[prefix + name] = ablate.classes("embed", kinds, inputs.tokens)
    live = (squares(place.values) > 0).nonzero().flatten()
    for name, chosen in best.items():
        own = chosen.nonzero().flatten()
        drawn = torch.randperm(len(live), generator=generator(subject.seed, "neurons", name))[: len(own)]
        for prefix, taken in ((WITHOUT, own), (CONTROL, live[drawn])):
            if len(own):
                neurons[prefix + name] = ablate.neurons(
                    place.layer, taken.tolist(), "mean", reference=inputs.tokens
                )
    return {"digits at embed": digits, f"neurons at {place.label}": neurons}


def measure_removals(
    subject: LoadedCheckpoint, inputs: GridInputs, place: TensorValues, best: Mapping[str, Tensor]
) -> pandas.DataFrame:
    """Returns the accuracy of every answer with each answer taken away, and what an answer and the others lose."""
    import pandas
    import torch

    from circuits import sweep

    task: Any = subject.task
    examples = GridInputs.of(subject.tokens.cpu(), inputs.axes, inputs.answers)
    right = torch.stack([examples.remainders(name) for name in inputs.answers], 1)

    def judge(output: Tensor, right: RightAnswers) -> dict[str, Tensor]:
        logits = task.read(output)[:, 0]
        given = {name: logits[:, list(one.classes)].argmax(-1) for name, one in inputs.answers.items()}
        return {
            ACCURACY + name: (remainder == right.answers[:, at]).double()
            for at, (name, remainder) in enumerate(given.items())
        }

    frames = []
    for label, edits in edits_of(subject, inputs, place, best).items():
        if not edits:
            continue
        # Of so many rows no p-values are made: the control says what chance does.
        frame = sweep(
            subject.model,
            examples.tokens.to(subject.tokens.device),
            edits,
            metric=judge,
            batch=RightAnswers(right.to(subject.tokens.device)),
            positions=task.read_positions,
            seed=subject.seed,
            draws=RESAMPLES,
            flips=1,
        ).frame.assign(intervention=label, p_value=float("nan"), p_adjusted=float("nan"))
        without, control = lost(frame, inputs)
        about = {"intervention": label, "site": place.site, "layer": place.layer}
        if label.endswith("embed"):
            about |= {"site": "embed", "layer": None}
        about |= {"n": len(examples.tokens), "engine": "naive"}
        frames += [frame, pandas.DataFrame(damage_rows(without, control, about))]
    return pandas.concat(frames, ignore_index=True)


def lost(frame: pandas.DataFrame, inputs: GridInputs) -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """Returns the lost share of the accuracy above chance, ``[taken away, judged]``, without answers and at random.

    NaN for answers that the unedited model gives less often than halfway between chance and always.
    """
    chance = np.array([1 / answer.modulus for answer in inputs.answers.values()])
    names = list(inputs.answers)
    judged = [ACCURACY + name for name in names]
    table = frame.pivot(index="variant", columns="metric", values="value")[judged]
    clean = frame.drop_duplicates("metric").set_index("metric")["baseline"][judged].to_numpy(dtype=float)
    shares = (clean - table) / np.where(clean > (1 + chance) / 2, clean - chance, np.nan)
    without, control = (
        shares.reindex([prefix + name for name in names]).set_axis(names).set_axis(names, axis=1)
        for prefix in (WITHOUT, CONTROL)
    )
    return without, control


def own_and_others(lost: Array) -> tuple[Array, Array]:
    """Returns for each answer taken away its own loss, and the mean over the others that the model had solved."""
    away = np.where(np.eye(len(lost), dtype=bool), np.nan, lost)
    return np.diag(lost), np.array([mean(one) for one in away])


def damage_rows(
    without: pandas.DataFrame, control: pandas.DataFrame, about: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yields each answer's damage to itself and to the others, and their means, with the same under the control.

    An answer whose removal was not tried, as no neuron serves it, has no rows.
    """
    pairs = zip(*(own_and_others(each.to_numpy(dtype=float)) for each in (without, control)), strict=True)
    for metric, (values, controls) in zip((OWN, OTHERS), pairs, strict=True):
        together = (TOGETHER, mean(values), mean(controls))
        each = zip(without.index, values, controls, without.notna().any(axis=1), strict=True)
        for name, value, baseline in (*(one[:3] for one in each if one[3]), together):
            row = {**about, "variant": name, "metric": metric, "value": float(value)}
            yield row | {"baseline": float(baseline), "effect": float(value) - float(baseline)}


def mean(values: Array) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")
