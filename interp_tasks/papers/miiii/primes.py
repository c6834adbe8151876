"""Finds which parts of a model belong to which modular answer, and how far answers share them.

Shares of variance have the mean over shuffled digits as ``baseline``, and the range of 95% of the draws in the interval
of ``effect``. Counts of neurons that serve an answer, and several, stand beside the same number drawn for each answer
at random. ``damage``: the share of the accuracy above chance that is lost without an answer; ``baseline``: with as much
taken away at random.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.errors import UserError
from interp_tasks.measurement.activations import recorded
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.options import check_draws
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import measure
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options, check_has_task
from interp_tasks.measurement.table import Row, numbers

if TYPE_CHECKING:
    import pandas
    from torch import Tensor
    from typing_extensions import Unpack

    from circuits import Intervention
    from interp_tasks.measurement.embeddings import Array
    from tasks import GridAxis, ModularAnswer

SAMPLES = 2048
DRAWS = 20
#: Metrics and other words of rows.
SHARE, ADJUSTED = "share of variance", "share less chance"
SERVING, BEST, SEVERAL, SPREAD = (
    "neurons serving it",
    "neurons serving it most",
    "neurons serving several",
    "answers per neuron",
)
TOGETHER = "all answers"
DIGIT, ANSWER, NEURONS = "digit", "answer", "neurons"
WITHOUT, CONTROL = "without ", "control of "
OWN, OTHERS = "damage to itself", "damage to the others"
#: Random assignments behind the counts that chance would give.
ASSIGNMENTS = 200
DRAWS_OPTION = typer.Option("--draws", metavar="N", help="Shuffles of the digits for controls.")
ABLATE = typer.Option("--ablate/--no-ablate", help="Take each answer away, and judge the others.")


@experiment("modular", says={"draws": DRAWS, "ablate": True}, samples=SAMPLES)
def primes(
    refs: str | Sequence[str],
    *,
    draws: Annotated[int, DRAWS_OPTION] = DRAWS,
    ablate: Annotated[bool, ABLATE] = True,
    **options: Unpack[Options],
) -> Result:
    """Say which parts of a model belong to which modular answer, and how far answers share them.

    Shares of the variance of embeddings, attention and MLP; every answer judged with each one taken away.

    An answer r = Σ coefficient · digit mod q is looked for through its own waves cos, sin(2πjr/q), j = 1..(q−1)/2,
    which with a constant are all functions of r: their share of a variance is that between the means of inputs with
    the same r, whether or not q divides the number of digits. Shares are over all inputs.

    Args:
        refs: one or several REFs.
        draws: how often digits are shuffled for the controls.
        ablate: take each answer away as well: all functions of the digits mod q from the embedding; the neurons of
            the last layer that serve it most.
        options: as :class:`Options` has them; accuracies are of 2048 samples by default.

    Raises:
        UserError, TaskError, CircuitsError: in one line; a UserError for a task without modular answers.
    """
    check_draws(draws)
    check_has_task("primes", options)

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        """Measures what the tensors of one checkpoint hold of each prime's remainder, and what its removal does."""
        inputs, last = read_inputs(subject), None
        rows = list(embedding_rows(subject, inputs, draws))
        for place in tensors_of(subject, inputs):
            new_rows, best = grid_rows(subject, inputs, place, draws)
            rows += new_rows
            if place.site == "mlp_post" and best:
                last = place, best
        if ablate and last is not None:
            rows += removal_rows(subject, inputs, *last)
        if not rows:
            raise UserError(
                "primes: what this model computes is the same for every input: no variance to share out"
            )
        return rows

    options = {**options, "samples": options.get("samples") or SAMPLES}
    result = measure("primes", refs, options, measure_checkpoint, config={"draws": draws, "ablate": ablate})
    return replace(result, notes=tuple(notes(draws, ablate)))


def notes(draws: int, ablate: bool) -> Iterator[str]:
    """Yields the notes below the table."""
    yield (
        "baseline: the control. share: of the variance over all inputs, by functions of the answer (of W_E: of the "
        f"digit modulo q); control: the mean over {draws} draws of shuffled digits."
    )
    yield (
        "neurons serving it: their share exceeds that of every neuron in every control; most: and none of another "
        "answer is larger; several: those of more than one answer, control: if each answer had drawn its neurons."
    )
    if ablate:
        yield (
            "damage: with functions of each digit modulo q, or neurons, taken away; the share of the accuracy "
            "above chance that is lost, of answers given more often than halfway between chance and always. Control: "
            "as much taken away at random."
        )


# ---- shares of variance


@dataclass(frozen=True)
class GridInputs:
    """Inputs that lie on the task's grid.

    Attributes:
        tokens: ``[input pos]``.
        at: ``[input coordinate]``, the index of each coordinate's value in its axis.
        axes, answers: the task's.
    """

    tokens: Tensor
    at: Tensor
    axes: tuple[GridAxis, ...]
    answers: Mapping[str, ModularAnswer]

    @classmethod
    def of(
        cls, tokens: Tensor, axes: tuple[GridAxis, ...], answers: Mapping[str, ModularAnswer]
    ) -> GridInputs:
        """Returns the inputs all of whose coordinates have a value in its axis."""
        import torch

        columns = []
        for axis in axes:
            match = tokens[:, int(axis.position or 0)][:, None] == torch.tensor(axis.values)
            columns.append(torch.where(match.any(1), match.long().argmax(1), -1))
        at = torch.stack(columns, 1)
        on_grid = (at >= 0).all(1)
        return cls(tokens[on_grid], at[on_grid], axes, answers)

    def remainders(self, name: str, order: tuple[Tensor, ...] | None = None) -> Tensor:
        """Returns the right remainder of an answer, ``[input]``; of shuffled digits, those of ``order``."""
        import torch

        answer = self.answers[name]
        return (self.digits(order) * torch.tensor(answer.coefficients)).sum(1) % answer.modulus

    def digits(self, order: tuple[Tensor, ...] | None = None) -> Tensor:
        """Returns the coordinates ``[input coordinate]``, or the number that stands for each in ``order``."""
        import torch

        if order is None:
            return self.at
        return torch.stack([names[column] for names, column in zip(order, self.at.T, strict=True)], 1)

    def shuffled(self, seed: int) -> tuple[Tensor, ...]:
        """Returns a random permutation of the values of each coordinate."""
        return tuple(shuffled(len(axis.values), seed, place) for place, axis in enumerate(self.axes))


def shuffled(size: int, seed: int, draw: int) -> Tensor:
    """Returns a random permutation of the digits 0 to ``size`` − 1."""
    import torch

    from tasks import generator

    return torch.randperm(size, generator=generator(seed, "shuffled digits", draw))


def read_inputs(subject: LoadedCheckpoint) -> GridInputs:
    """Returns the complete grid of the checkpoint's task.

    Raises:
        UserError: for a task without modular answers.
    """
    task: Any = subject.task
    answers = task.modular_answers()
    if not answers:
        raise UserError(f"task {task.name!r} declares no modular answers, which primes is about")
    return GridInputs.of(task.input_grid().tokens, task.grid_axes(), answers)


@dataclass(frozen=True)
class TensorValues:
    """A tensor of activations or weights, ``values [example feature]``, and its name and place in the model."""

    label: str
    site: str
    layer: int | None
    position: int | None
    values: Tensor


def tensors_of(subject: LoadedCheckpoint, inputs: GridInputs) -> Iterator[TensorValues]:
    """Yields the outputs of attention and MLP of every layer, and the neurons, at the positions that the task reads."""
    model: Any = subject.model
    task: Any = subject.task
    ends = {"attn_out": "hook_attn_out", "mlp_post": "mlp.hook_post", "mlp_out": "hook_mlp_out"}
    hooks = {
        f"blocks.{layer}.{end}": (site, layer)
        for layer in range(model.cfg.n_layers)
        for site, end in ends.items()
    }
    hooks = {hook: place for hook, place in hooks.items() if hook in model.hook_dict}
    read = list(task.read_positions)
    tokens = inputs.tokens.to(subject.tokens.device)
    activations = recorded(model, tokens, list(hooks), lambda values: values[:, read].cpu())
    for hook, (site, layer) in hooks.items():
        values = activations.pop(hook)
        for index, position in enumerate(read):
            at = f", position {position}" if len(read) > 1 else ""
            yield TensorValues(f"{site}.{layer}{at}", site, layer, position, values[:, index])


def embedding_rows(subject: LoadedCheckpoint, inputs: GridInputs, draws: int) -> Iterator[Row]:
    """Yields the share of each coordinate's token embedding that is a function of the digit modulo q, of all q too."""
    import numpy as np
    import torch

    from circuits import variance

    tables = {axis.values: axis.name for axis in inputs.axes}
    for values, name in tables.items():
        weight = subject.model.W_E[list(values)].detach().cpu()
        moduli = {
            one: answer.modulus for one, answer in inputs.answers.items() if answer.modulus < len(values)
        }
        if not moduli:
            continue
        place = TensorValues("W_E" if len(tables) == 1 else f"W_E ({name})", "embed", None, None, weight)
        orders = [shuffled(len(values), subject.seed, draw) for draw in range(draws)]
        for one, q in moduli.items():
            kinds = torch.stack([order % q for order in (torch.arange(len(values)), *orders)])
            shares = variance.total(weight, kinds).numpy()
            yield row(place, one, DIGIT, SHARE, float(shares[0]), shares[1:])
        degrees = sum(q - 1 for q in moduli.values())
        weights = squares(weight)
        # Answers whose functions span the whole space explain everything.
        if degrees >= len(weight) - 1 or weights.sum() == 0:
            continue
        together = [
            pooled(
                variance.partition(weight, {one: order % q for one, q in moduli.items()}).together, weights
            )
            for order in (torch.arange(len(values)), *orders)
        ]
        yield row(place, TOGETHER, DIGIT, SHARE, together[0], np.array(together[1:]))
        yield row(place, TOGETHER, DIGIT, ADJUSTED, variance.adjusted(together[0], len(weight), degrees))


def squares(values: Tensor) -> Tensor:
    """Returns the sum over examples of each feature's squared distance from its mean."""
    values = values.double()
    total: Tensor = (values - values.mean(0)).square().sum(0)
    return total


def pooled(shares: Tensor, weights: Tensor) -> float:
    """Returns the share of variance of all features together; the weights are the features' variances."""
    return float(shares @ weights / weights.sum())


def grid_rows(
    subject: LoadedCheckpoint, inputs: GridInputs, place: TensorValues, draws: int
) -> tuple[list[Row], dict[str, Tensor]]:
    """Returns one tensor's rows over all inputs, and the features that serve each answer most, bool ``[feature]``.

    A feature serves an answer if its share exceeds that of every feature in every control, and serves it most if
    no other answer's share is larger, chance taken off both.
    """
    import torch

    from circuits import variance

    orders = [inputs.shuffled(subject.seed + draw) for draw in range(draws)]
    weights = squares(place.values)
    rows: list[Row] = []
    if weights.sum() == 0:
        return rows, {}
    strength, serving = [], []
    for name, answer in inputs.answers.items():
        kinds = torch.stack([inputs.remainders(name, order) for order in (None, *orders)])
        shares = variance.explained(place.values, kinds)
        each = (shares @ weights / weights.sum()).numpy()
        rows.append(row(place, name, ANSWER, SHARE, float(each[0]), each[1:]))
        chance = (answer.modulus - 1) / (len(place.values) - 1)
        strength.append((shares[0] - chance) / (1 - chance))
        serving.append(shares[0] > shares[1:].max())
    most = torch.stack(strength).argmax(0)
    best = {name: serving[at] & (most == at) for at, name in enumerate(inputs.answers)}
    if place.site == "mlp_post":
        for name, chosen in zip(best, serving, strict=True):
            rows.append(row(place, name, NEURONS, SERVING, float(chosen.sum())))
            rows.append(row(place, name, NEURONS, BEST, float(best[name].sum())))
        live = (weights > 0).numpy()
        served = torch.stack(serving).numpy()[:, live]
        rows += sharing_rows(place, torch.stack(strength).clamp(min=0).numpy()[:, live], served, subject.seed)
    return rows, best


def sharing_rows(place: TensorValues, strength: Array, served: Array, seed: int) -> Iterator[Row]:
    """Yields how many neurons serve an answer, and several; chance assigns as many at random to each answer.

    Args:
        strength, served: ``[answer neuron]``.
    """
    import numpy as np

    if len(served) < 2:
        return
    draws = np.random.default_rng([seed, 3])
    several, spread = [], []
    for _ in range(ASSIGNMENTS):
        orders = draws.permuted(np.tile(np.arange(served.shape[1]), (len(served), 1)), axis=1)
        mixed = np.take_along_axis(served, orders, 1)
        several.append(float((mixed.sum(0) > 1).sum()))
        spread.append(spread_of(np.take_along_axis(strength, orders, 1), mixed))
    yield row(place, TOGETHER, NEURONS, SERVING, float(served.any(0).sum()))
    yield row(place, TOGETHER, NEURONS, SEVERAL, float((served.sum(0) > 1).sum()), np.array(several))
    yield row(place, TOGETHER, NEURONS, SPREAD, spread_of(strength, served), np.array(spread))


def spread_of(strength: Array, served: Array) -> float:
    """Returns (Σ s)² / Σ s² over answers, averaged over neurons that serve one: 1 for a single answer."""
    is_alive = served.any(0) & (strength.sum(0) > 0)
    if not is_alive.any():
        return float("nan")
    chosen = strength[:, is_alive]
    return float((chosen.sum(0) ** 2 / (chosen**2).sum(0)).mean())


def row(
    place: TensorValues, variant: str, what: str, metric: str, value: float, control: Array | None = None
) -> Row:
    """Returns a row of the table; with a control, its mean, the difference, and the 95% range of its draws."""
    import numpy as np

    about: Row = {
        "variant": variant,
        "intervention": f"{what}: {place.label}",
        "metric": metric,
        "split": "grid",
    }
    about |= {"site": place.site, "layer": place.layer, "position": place.position}
    about |= {"n": len(place.values), "engine": "naive"}
    if control is None or not np.isfinite(control).any():
        return {**about, **numbers(value)}
    low, high = np.nanquantile(control, [0.025, 0.975])
    return {**about, **numbers(value, None, float(np.nanmean(control)), (value - high, value - low))}


# ---- answers taken away


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


def removal_rows(
    subject: LoadedCheckpoint, inputs: GridInputs, place: TensorValues, best: Mapping[str, Tensor]
) -> Iterator[Row]:
    """Yields what an answer and the others lose with each answer taken away."""
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

    for label, edits in edits_of(subject, inputs, place, best).items():
        if not edits:
            continue
        tokens, read = examples.tokens.to(device), task.read_positions
        frame = sweep(subject.model, tokens, edits, judge, remainders, positions=read, draws=1, flips=1).frame
        at_embed = label.endswith("embed")
        about = {"site": "embed" if at_embed else place.site, "layer": None if at_embed else place.layer}
        about |= {"intervention": label, "n": len(examples.tokens), "engine": "naive"}
        yield from ({**about, **row} for row in damage_rows(*lost(frame, inputs)))


def lost(frame: pandas.DataFrame, inputs: GridInputs) -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """Returns the lost share of the accuracy above chance ``[taken away, judged]``, without answers and at random.

    NaN for answers that the unedited model gives less often than halfway between chance and always.
    """
    import numpy as np

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
    import numpy as np

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
    import numpy as np

    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")
