"""Removes what a model represents of one modular answer, and measures the accuracy of every answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from interp_tasks.measurement.subjects import LoadedCheckpoint
from interp_tasks.papers.miiii.remainders import (
    ACCURACY,
    CONTROL,
    LOSS,
    OTHERS,
    OWN,
    SELECTIVE,
    SIZE,
    TOGETHER,
    WITHOUT,
    Inputs,
    sampled,
)
from interp_tasks.papers.miiii.shares import TensorValues, squares

if TYPE_CHECKING:
    import pandas
    from torch import Tensor

    from circuits import Intervention

#: The directions removed carry this share of the variance between the means of an answer's classes.
CARRIED = 0.9
#: Of examples, behind the intervals of the matrices.
RESAMPLES = 200
#: What is taken away, in the order of the table.
KINDS = ("waves of the digits", "waves of the answer", "directions", "neurons")


@dataclass(frozen=True)
class RightAnswers:
    """The right remainder of every answer ``[example answer]``, as a batch that ``circuits.sweep`` can slice."""

    answers: Tensor

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, rows: slice) -> RightAnswers:
        return RightAnswers(self.answers[rows])


@dataclass(frozen=True)
class Damage:
    """The accuracies of every answer after one kind of removal of each answer, and under a control.

    Attributes:
        kind, place: what was removed, where.
        names: answers, as rows (removed) and columns (judged).
        accuracy, chance: ``[answer]``, of the unedited model.
        without, control: accuracies ``[removed judged]``.
    """

    kind: str
    place: str
    names: tuple[str, ...]
    accuracy: Any
    without: Any
    control: Any
    chance: Any

    @property
    def solved(self) -> Any:
        """Tells which answers the unedited model gives more often than halfway between chance and always."""
        return self.accuracy > (1 + self.chance) / 2

    def lost(self, accuracy: Any) -> Any:
        """Returns the lost share of the accuracy above chance ``[removed judged]``; NaN for unsolved answers."""
        share = (self.accuracy - accuracy) / (self.accuracy - self.chance)
        return np.where(self.solved, share, np.nan)

    def maps(self) -> tuple[pandas.DataFrame, pandas.DataFrame]:
        """Returns tables of the losses of accuracy: those without each answer, and those under the control."""
        import pandas

        without, control = (
            pandas.DataFrame(self.lost(accuracy), index=self.names, columns=self.names)
            for accuracy in (self.without, self.control)
        )
        return without, control

    def own_and_others(self, accuracy: Any) -> tuple[Any, Any]:
        """Returns for each removed answer its own damage, and the mean over the other solved ones."""
        lost = self.lost(accuracy)
        away = ~np.eye(len(lost), dtype=bool)
        others = np.array(
            [
                np.nanmean(one[keep]) if np.isfinite(one[keep]).any() else np.nan
                for one, keep in zip(lost, away, strict=True)
            ]
        )
        return np.diag(lost), others


@dataclass
class Removals:
    """Builds edits of several kinds that remove each answer, and controls of the same size."""

    subject: LoadedCheckpoint
    inputs: Inputs
    place: TensorValues
    best: Mapping[str, Tensor]
    edits: dict[str, dict[str, Intervention]] = field(default_factory=dict)
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, kind: str, name: str, edits: Sequence[Any], size: int) -> None:
        """Adds the edit that removes an answer, and its control."""
        self.edits.setdefault(kind, {}).update(zip((WITHOUT + name, CONTROL + name), edits, strict=True))
        self.sizes.setdefault(kind, {})[name] = size

    def add_all(self) -> None:
        self.add_functions()
        self.add_directions()
        self.add_neurons()

    def add_functions(self) -> None:
        """Adds edits that remove all functions of the digits modulo q (embedding) or of the answer (neurons)."""
        import torch

        from circuits import ablate

        tokens = self.inputs.tokens
        site = f"{self.place.site}.{self.place.layer}"
        read = None if self.place.position is None else [self.place.position]
        orders = self.inputs.shuffles(self.subject.seed)
        for name, answer in self.inputs.answers.items():
            q = answer.modulus
            digits = [torch.stack(self.inputs.digits(q, order), 1) for order in (None, orders)]
            edits = [ablate.classes("embed", kinds, tokens) for kinds in digits]
            self.add(KINDS[0], name, edits, len(self.inputs.axes) * (q - 1))
            forms = [self.inputs.form(answer.coefficients, q, order) for order in (None, orders)]
            edits = [ablate.classes(site, kinds, tokens, positions=read) for kinds in forms]
            self.add(KINDS[1], name, edits, q - 1)

    def add_directions(self) -> None:
        """Adds edits that remove the directions, in neuron space, in which the means of the answer's classes lie."""
        import torch

        from tasks import generator

        values = self.place.values.double()
        mean = values.mean(0)
        for name in self.inputs.answers:
            basis = class_directions(values - mean, self.inputs.remainders(name))
            draw = torch.randn(
                basis.shape[1],
                len(values),
                generator=generator(self.subject.seed, "directions", name),
                dtype=torch.float64,
            )
            # Combinations of inputs at random: directions that activations have, without an answer's order.
            random_basis = torch.linalg.qr((draw @ (values - mean)).T).Q
            self.add(
                KINDS[2],
                name,
                [self.projection_off(basis, mean), self.projection_off(random_basis, mean)],
                basis.shape[1],
            )

    def projection_off(self, basis: Tensor, mean: Tensor) -> Any:
        """Returns an edit that projects activations, from their mean, off directions ``[feature direction]``."""
        from circuits import edit

        def project(x: Tensor) -> Tensor:
            at, middle = basis.to(x), mean.to(x)
            return x - ((x - middle) @ at) @ at.T

        read = None if self.place.position is None else [self.place.position]
        return edit(f"{self.place.site}.{self.place.layer}", project, positions=read)

    def add_neurons(self) -> None:
        """Adds edits that set the neurons that serve the answer most, or as many random ones, to their mean."""
        import torch

        from circuits import ablate
        from tasks import generator

        live = (squares(self.place.values) > 0).nonzero().flatten()
        for name, chosen in self.best.items():
            count = int(chosen.sum())
            if not count:
                continue
            order = torch.randperm(len(live), generator=generator(self.subject.seed, "neurons", name))
            edits = [
                ablate.neurons(self.place.layer, neurons.tolist(), "mean", reference=self.inputs.tokens)
                for neurons in (chosen.nonzero().flatten(), live[order[:count]])
            ]
            self.add(KINDS[3], name, edits, count)


def class_directions(centred: Tensor, classes: Tensor) -> Tensor:
    """Returns the fewest directions ``[feature direction]`` that carry most of the variance between classes."""
    import torch

    counts = torch.bincount(classes)
    sums = centred.new_zeros(len(counts), centred.shape[1]).index_add_(0, classes, centred)
    between = sums / counts.clamp(min=1).sqrt()[:, None]
    _, strength, rows = torch.linalg.svd(between, full_matrices=False)
    carried = strength.square().cumsum(0) / strength.square().sum()
    return rows[: int((carried < CARRIED).sum()) + 1].T


def measure_removals(
    subject: LoadedCheckpoint, inputs: Inputs, place: TensorValues, best: Mapping[str, Tensor]
) -> tuple[pandas.DataFrame, list[Damage], dict[str, Any]]:
    """Returns the table of every answer with each answer removed, its matrices of damage, and the edits."""
    import pandas
    import torch

    from circuits import sweep

    task: Any = subject.task
    examples = sampled(subject, inputs)
    names = tuple(inputs.answers)
    answers = torch.stack([examples.remainders(name) for name in names], 1).to(subject.tokens.device)
    builder = Removals(subject, inputs, place, best)
    builder.add_all()
    columns = [list(inputs.answers[name].classes) for name in names]

    def judge(output: Tensor, right: RightAnswers) -> dict[str, Tensor]:
        scores = {}
        logits = task.read(output)[:, 0]
        for at, name in enumerate(names):
            answer_logits = logits[:, columns[at]].double()
            target = right.answers[:, at]
            scores[ACCURACY + name] = (answer_logits.argmax(-1) == target).double()
            loss = -answer_logits.log_softmax(-1).gather(-1, target[:, None])[:, 0]
            scores[LOSS + name] = loss / np.log(inputs.answers[name].modulus)
        return scores

    frames, damages, done = [], [], {}
    for kind, edits in builder.edits.items():
        site = "embed" if kind == KINDS[0] else place.label
        label = f"{kind} at {site}"
        # Of so many rows no p-values are made: the control says what chance does.
        result = sweep(
            subject.model,
            examples.tokens.to(subject.tokens.device),
            edits,
            metric=judge,
            batch=RightAnswers(answers),
            positions=task.read_positions,
            seed=subject.seed,
            draws=RESAMPLES,
            flips=1,
        )
        frame = result.frame.assign(intervention=label, p_value=float("nan"), p_adjusted=float("nan"))
        scores = damage(frame, kind, site, names, inputs)
        damages.append(scores)
        frames += [
            frame,
            pandas.DataFrame(summary(scores, label, place, len(examples.tokens), builder.sizes[kind])),
        ]
        done[label] = {"directions": builder.sizes[kind]}
    return pandas.concat(frames, ignore_index=True), damages, done


def damage(frame: pandas.DataFrame, kind: str, site: str, names: tuple[str, ...], inputs: Inputs) -> Damage:
    """Returns the accuracies of a sweep's table as matrices."""
    accuracy = frame[frame["metric"].str.startswith(ACCURACY)]
    table = accuracy.pivot(index="variant", columns="metric", values="value")
    judged = [ACCURACY + name for name in names]
    before = accuracy.drop_duplicates("metric").set_index("metric")["baseline"].reindex(judged)
    matrices = [
        table.reindex(index=[prefix + name for name in names], columns=judged).to_numpy(dtype=float)
        for prefix in (WITHOUT, CONTROL)
    ]
    chance = np.array([1 / inputs.answers[name].modulus for name in names])
    without, control = matrices
    return Damage(kind, site, names, before.to_numpy(dtype=float), without, control, chance)


def summary(
    damaged: Damage, label: str, place: TensorValues, examples: int, sizes: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """Yields each answer's damage to itself and to the others, with the same under the control."""
    about = {
        "intervention": label,
        "site": place.site,
        "layer": place.layer,
        "n": examples,
        "engine": "naive",
    }
    if damaged.kind == KINDS[0]:
        about |= {"site": "embed", "layer": None}
    own_losses, others = damaged.own_and_others(damaged.without)
    control_own, control_others = damaged.own_and_others(damaged.control)
    for at, name in enumerate(damaged.names):
        if name not in sizes:
            continue
        shared = {**about, "variant": name}
        yield {**shared, "metric": SIZE, "value": float(sizes[name])}
        yield {**shared, "metric": OWN, **compared(own_losses[at], control_own[at])}
        yield {**shared, "metric": OTHERS, **compared(others[at], control_others[at])}
    shared = {**about, "variant": TOGETHER}
    means = [mean(each) for each in (own_losses, control_own, others, control_others)]
    yield {**shared, "metric": OWN, **compared(means[0], means[1])}
    yield {**shared, "metric": OTHERS, **compared(means[2], means[3])}
    yield {**shared, "metric": SELECTIVE, **compared(means[0] - means[2], means[1] - means[3])}


def mean(values: Any) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def compared(value: float, control: float) -> dict[str, float]:
    return {"value": float(value), "baseline": float(control), "effect": float(value) - float(control)}
