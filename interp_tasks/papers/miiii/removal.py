"""Takes away what a model represents of one modular answer, and measures the accuracy of every answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from interp_tasks.measurement.subjects import LoadedCheckpoint
from interp_tasks.measurement.table import Row, numbers
from interp_tasks.papers.miiii.shares import TOGETHER, GridInputs, TensorValues, squares

if TYPE_CHECKING:
    import pandas
    from torch import Tensor

    from circuits import Intervention
    from interp_tasks.measurement.embeddings import Array

WITHOUT, CONTROL = "without ", "control of "
OWN, OTHERS = "damage to itself", "damage to the others"
#: Lost shares ``[taken away, judged]``, without each answer and with as much taken away at random.
Lost = tuple["pandas.DataFrame", "pandas.DataFrame"]


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
    live = (squares(place.values) > 0).nonzero().flatten()
    for name, answer in inputs.answers.items():
        for prefix, order in ((WITHOUT, None), (CONTROL, shuffled)):
            kinds = inputs.digits(order) % answer.modulus
            digits[prefix + name] = ablate.classes("embed", kinds, inputs.tokens)
        own = best[name].nonzero().flatten()
        drawn = torch.randperm(len(live), generator=generator(subject.seed, "neurons", name))[: len(own)]
        for prefix, taken in ((WITHOUT, own), (CONTROL, live[drawn])) if len(own) else ():
            edit = ablate.neurons(place.layer, taken.tolist(), "mean", reference=inputs.tokens)
            neurons[prefix + name] = edit
    return {"digits at embed": digits, f"neurons at {place.label}": neurons}


def measure_removals(
    subject: LoadedCheckpoint, inputs: GridInputs, place: TensorValues, best: Mapping[str, Tensor]
) -> tuple[list[Row], dict[str, Lost]]:
    """Returns what an answer and the others lose with each answer taken away, as rows and as tables by what it was."""
    import torch

    from circuits import sweep

    task: Any = subject.task
    device = subject.tokens.device
    examples = GridInputs.of(subject.tokens.cpu(), inputs.axes, inputs.answers)
    remainders = torch.stack([examples.remainders(name) for name in inputs.answers], 1).to(device)

    def judge(output: Tensor, right: Tensor) -> dict[str, Tensor]:
        logits = task.read(output)[:, 0]
        given = {name: logits[:, list(one.classes)].argmax(-1) for name, one in inputs.answers.items()}
        return {name: (given[name] == right[:, at]).double() for at, name in enumerate(given)}

    rows: list[Row] = []
    tables: dict[str, Lost] = {}
    for label, edits in edits_of(subject, inputs, place, best).items():
        if not edits:
            continue
        tokens, read = examples.tokens.to(device), task.read_positions
        frame = sweep(subject.model, tokens, edits, judge, remainders, positions=read, draws=1, flips=1).frame
        tables[label] = lost(frame, inputs)
        about: Row = {"intervention": label, "site": place.site, "layer": place.layer}
        if label.endswith("embed"):
            about |= {"site": "embed", "layer": None}
        about |= {"n": len(examples.tokens), "engine": "naive"}
        rows += ({**about, **row} for row in damage_rows(*tables[label]))
    return rows, tables


def lost(frame: pandas.DataFrame, inputs: GridInputs) -> Lost:
    """Returns the lost share of the accuracy above chance, without answers and at random.

    NaN for answers that the unedited model gives less often than halfway between chance and always.
    """
    chance = np.array([1 / answer.modulus for answer in inputs.answers.values()])
    names = list(inputs.answers)
    table = frame.pivot(index="variant", columns="metric", values="value")[names]
    clean = frame.drop_duplicates("metric").set_index("metric")["baseline"][names].to_numpy(dtype=float)
    shares = (clean - table) / np.where(clean > (1 + chance) / 2, clean - chance, np.nan)
    without, control = (
        shares.reindex([prefix + name for name in names]).set_axis(names) for prefix in (WITHOUT, CONTROL)
    )
    return without, control


def own_and_others(lost: Array) -> tuple[Array, Array]:
    """Returns for each answer taken away its own loss, and the mean over the others that the model had solved."""
    away = np.where(np.eye(len(lost), dtype=bool), np.nan, lost)
    return np.diag(lost), np.array([mean(one) for one in away])


def damage_rows(without: pandas.DataFrame, control: pandas.DataFrame) -> Iterator[Row]:
    """Yields each answer's damage to itself and to the others, and their means, with the same under the control.

    An answer whose removal was not tried, as no neuron serves it, has no rows.
    """
    pairs = zip(*(own_and_others(each.to_numpy(dtype=float)) for each in (without, control)), strict=True)
    for metric, (values, controls) in zip((OWN, OTHERS), pairs, strict=True):
        each = zip(without.index, values, controls, without.notna().any(axis=1), strict=True)
        together = (TOGETHER, mean(values), mean(controls))
        for name, value, baseline in (*(one[:3] for one in each if one[3]), together):
            yield {"variant": name, "metric": metric, **numbers(value, baseline=baseline)}


def mean(values: Array) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")
