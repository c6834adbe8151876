"""Finds which parts of a model belong to which modular answer, and how far answers share them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from interp_tasks.errors import UserError
from interp_tasks.measurement.activations_in_passes import record_in_passes
from interp_tasks.measurement.loaded_checkpoints import LoadedCheckpoint
from interp_tasks.measurement.measure_checkpoints import measure
from interp_tasks.measurement.option_parsing import check_draws
from interp_tasks.measurement.options_and_examples import Options
from interp_tasks.measurement.result import Result, Row, experiment, number_columns
from interp_tasks.papers.input_grid_and_answers import AnswerOnGrid, GridInputs

if TYPE_CHECKING:
    import pandas
    from torch import Tensor
    from typing_extensions import Unpack

    from circuits import Intervention
    from interp_tasks.measurement.token_and_position_embeddings import Array

DRAWS = 20
#: Metrics and other words of rows.
SHARE, SERVING, BEST = "share of variance", "neurons serving it", "neurons serving it most"
TOGETHER, DIGIT, NEURONS = "all answers", "digit", "neurons"
WITHOUT, CONTROL = "without ", "control of "
OWN, OTHERS = "damage to itself", "damage to the others"
#: Random assignments behind the counts that chance would give.
ASSIGNMENTS = 200
NOTES = (
    "share: of the variance over all inputs, by functions of the answer (of W_E: of the digit modulo q). baseline: the "
    "control, the mean over draws of shuffled digits; interval of the effect: 95% of the draws.",
    "neurons serving it: their share exceeds that of every neuron in every control; most: and none of another answer "
    "is larger; several: those of more than one answer, control: if each answer had drawn its neurons.",
    "damage: with functions of each digit modulo q, or neurons, taken away; the share of the accuracy above chance "
    "that is lost, of answers given more often than halfway between chance and always. Control: as much taken away at "
    "random.",
)
DRAWS_OPTION = typer.Option("--draws", metavar="N", help="Shuffles of the digits for controls.")
ABLATE = typer.Option("--ablate/--no-ablate", help="Take each answer away, and judge the others.")


@experiment(says={"draws": DRAWS, "ablate": True}, samples=2048, without=("tokens", "prompts"))
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
    """
    check_draws(draws)

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        """Measures what the tensors of one checkpoint hold of each prime's remainder, and what its removal does."""
        inputs, last = GridInputs.of(subject.task, "primes"), None
        rows = list(embedding_share_rows(subject, inputs, draws))
        for tensor in record_attention_and_mlp(subject, inputs):
            new_rows, best = share_rows_and_best_features(subject, inputs, tensor, draws)
            rows += new_rows
            if tensor.site == "mlp_post" and best:
                last = tensor, best
        if ablate and last is not None:
            rows += removal_damage_rows(subject, inputs, *last)
        if not rows:
            raise UserError(
                "primes: what this model computes is the same for every input: no variance to share out"
            )
        return rows

    result = measure("primes", refs, options, measure_checkpoint, config={"draws": draws, "ablate": ablate})
    return replace(result, notes=NOTES)


# ---- shares of variance


class LabelledTensor(NamedTuple):
    """A tensor of activations or weights, ``values [example feature]``, and its place in the model."""

    label: str
    site: str
    layer: int | None
    position: int | None
    values: Tensor

    @property
    def squared_deviations_by_feature(self) -> Tensor:
        """Returns the sum over examples of each feature's squared distance from its mean."""
        values = self.values.double()
        total: Tensor = (values - values.mean(0)).square().sum(0)
        return total


def record_attention_and_mlp(subject: LoadedCheckpoint, inputs: GridInputs) -> Iterator[LabelledTensor]:
    """Yields the outputs of attention and MLP of every layer, and the neurons, where the task reads."""
    at, cfg = inputs.task.read_positions[-1], subject.model.cfg
    kinds = ("attn_out",) if cfg.attn_only else ("attn_out", "mlp_post", "mlp_out")
    sites = {f"{kind}.{layer}": (kind, layer) for layer in range(cfg.n_layers) for kind in kinds}
    tokens = inputs.tokens.to(subject.tokens.device)
    seen = record_in_passes(subject.model, tokens, list(sites), lambda values: values[:, at].cpu())
    for label, (kind, layer) in sites.items():
        yield LabelledTensor(label, kind, layer, at, seen[label])


def shuffled_digits(size: int, seed: int, draw: int) -> Tensor:
    """Returns a random permutation of the digits 0 to ``size`` − 1."""
    import torch

    from tasks import generator

    return torch.randperm(size, generator=generator(seed, "shuffled digits", draw))


def shuffled_coordinates(inputs: GridInputs, seed: int) -> Tensor:
    """Returns the coordinates ``[input coordinate]`` with the values of each permuted at random."""
    import torch

    at = inputs.grid.coordinates()
    orders = [shuffled_digits(size, seed, axis) for axis, size in enumerate(inputs.grid.sizes)]
    return torch.stack([order[column] for order, column in zip(orders, at.T, strict=True)], 1)


def embedding_share_rows(subject: LoadedCheckpoint, inputs: GridInputs, draws: int) -> Iterator[Row]:
    """Yields the share of each coordinate's token embedding that is a function of the digit modulo q, of all q too."""
    import numpy as np
    import torch

    from circuits import variance

    tables = {axis.values: axis.name for axis in inputs.axes}
    for values, name in tables.items():
        weight = subject.model.W_E[list(values)].detach().cpu()
        moduli = {one: answer.sum.period for one, answer in inputs.answers.items()}
        moduli = {one: q for one, q in moduli.items() if q < len(values)}
        tensor = LabelledTensor("W_E" if len(tables) == 1 else f"W_E ({name})", "embed", None, None, weight)
        orders = [torch.arange(len(values))]
        orders += [shuffled_digits(len(values), subject.seed, draw) for draw in range(draws)]
        for one, q in moduli.items():
            shares = variance.total(weight, torch.stack([order % q for order in orders])).numpy()
            yield row_with_control(tensor, one, DIGIT, SHARE, float(shares[0]), shares[1:])
        degrees, weights = sum(q - 1 for q in moduli.values()), tensor.squared_deviations_by_feature
        # Answers whose functions span the whole space explain everything.
        if not moduli or degrees >= len(weight) - 1 or weights.sum() == 0:
            continue
        parts = [
            variance.partition(weight, {one: order % q for one, q in moduli.items()}) for order in orders
        ]
        together = np.array([float(part.together @ weights / weights.sum()) for part in parts])
        yield row_with_control(tensor, TOGETHER, DIGIT, SHARE, together[0], together[1:])
        adjusted = variance.adjusted(together[0], len(weight), degrees)
        yield row_with_control(tensor, TOGETHER, DIGIT, "share less chance", adjusted)


def share_rows_and_best_features(
    subject: LoadedCheckpoint, inputs: GridInputs, tensor: LabelledTensor, draws: int
) -> tuple[list[Row], dict[str, Tensor]]:
    """Returns one tensor's rows over all inputs, and the features that serve each answer most, bool ``[feature]``.

    A feature serves an answer if its share exceeds that of every feature in every control, and serves it most if
    no other answer's share is larger, chance taken off both.
    """
    import torch

    from circuits import variance

    orders = [shuffled_coordinates(inputs, subject.seed + draw) for draw in range(draws)]
    weights = tensor.squared_deviations_by_feature
    rows: list[Row] = []
    if weights.sum() == 0:
        return rows, {}
    strength, serving = [], []
    for name, answer in inputs.answers.items():
        controls = [replace(answer.sum, coordinates=order).remainders for order in orders]
        shares = variance.explained(tensor.values, torch.stack([answer.sum.remainders, *controls]))
        each = (shares @ weights / weights.sum()).numpy()
        rows.append(row_with_control(tensor, name, "answer", SHARE, float(each[0]), each[1:]))
        chance = (answer.sum.period - 1) / (len(tensor.values) - 1)
        strength.append((shares[0] - chance) / (1 - chance))
        serving.append(shares[0] > shares[1:].max())
    most = torch.stack(strength).argmax(0)
    best = {name: serving[at] & (most == at) for at, name in enumerate(inputs.answers)}
    if tensor.site == "mlp_post":
        for name, chosen in zip(best, serving, strict=True):
            rows.append(row_with_control(tensor, name, NEURONS, SERVING, float(chosen.sum())))
            rows.append(row_with_control(tensor, name, NEURONS, BEST, float(best[name].sum())))
        live = (weights > 0).numpy()
        served = torch.stack(serving).numpy()[:, live]
        rows += sharing_rows(
            tensor, torch.stack(strength).clamp(min=0).numpy()[:, live], served, subject.seed
        )
    return rows, best


def sharing_rows(tensor: LabelledTensor, strength: Array, served: Array, seed: int) -> Iterator[Row]:
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
        spread.append(effective_answers_per_neuron(np.take_along_axis(strength, orders, 1), mixed))
    yield row_with_control(tensor, TOGETHER, NEURONS, SERVING, float(served.any(0).sum()))
    more = float((served.sum(0) > 1).sum())
    yield row_with_control(tensor, TOGETHER, NEURONS, "neurons serving several", more, np.array(several))
    answers = effective_answers_per_neuron(strength, served)
    yield row_with_control(tensor, TOGETHER, NEURONS, "answers per neuron", answers, np.array(spread))


def effective_answers_per_neuron(strength: Array, served: Array) -> float:
    """Returns (Σ s)² / Σ s² over answers, averaged over neurons that serve one: 1 for a single answer."""
    chosen = strength[:, served.any(0) & (strength.sum(0) > 0)]
    return mean_of_finite(chosen.sum(0) ** 2 / (chosen**2).sum(0))


def mean_of_finite(values: Array) -> float:
    import numpy as np

    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def row_with_control(
    tensor: LabelledTensor, variant: str, part: str, metric: str, value: float, control: Array | None = None
) -> Row:
    """Returns a row of the table; with a control, its mean, the difference, and the 95% range of its draws."""
    import numpy as np

    about: Row = {"variant": variant, "intervention": f"{part}: {tensor.label}", "metric": metric}
    about |= {"site": tensor.site, "layer": tensor.layer, "position": tensor.position}
    about |= {"split": "grid", "n": len(tensor.values), "engine": "naive"}
    if control is None or not np.isfinite(control).any():
        return {**about, **number_columns(value)}
    low, high = np.nanquantile(control, [0.025, 0.975])
    return {**about, **number_columns(value, None, mean_of_finite(control), (value - high, value - low))}


# ---- answers taken away


def digit_and_neuron_removals(
    subject: LoadedCheckpoint, inputs: GridInputs, tensor: LabelledTensor, best: Mapping[str, Tensor]
) -> tuple[dict[str, Intervention], dict[str, Intervention]]:
    """Returns edits that take each answer away, and as much at random: of digits at the embedding, and of neurons.

    All functions of the digits modulo q, beside those of shuffled digits; the neurons that serve the answer most, set
    to their mean, beside as many random ones.
    """
    import torch

    from circuits import ablate
    from tasks import generator

    digits: dict[str, Intervention] = {}
    neurons: dict[str, Intervention] = {}
    mixed = shuffled_coordinates(inputs, subject.seed)
    live = (tensor.squared_deviations_by_feature > 0).nonzero().flatten()
    assert tensor.layer is not None  # that of the neurons
    for name, answer in inputs.answers.items():
        for prefix, at in ((WITHOUT, inputs.grid.coordinates()), (CONTROL, mixed)):
            digits[prefix + name] = ablate.classes("embed", at % answer.sum.period, inputs.tokens)
        own = best[name].nonzero().flatten()
        drawn = torch.randperm(len(live), generator=generator(subject.seed, "neurons", name))[: len(own)]
        for prefix, taken in ((WITHOUT, own), (CONTROL, live[drawn])) if len(own) else ():
            edit = ablate.neurons(tensor.layer, taken.tolist(), "mean", reference=inputs.tokens)
            neurons[prefix + name] = edit
    return digits, neurons


def removal_damage_rows(
    subject: LoadedCheckpoint, inputs: GridInputs, tensor: LabelledTensor, best: Mapping[str, Tensor]
) -> Iterator[Row]:
    """Yields what an answer and the others lose with each answer taken away."""
    import torch

    from circuits import sweep

    task, answers, device = inputs.task, inputs.answers, subject.tokens.device
    rows = inputs.rows_on_grid(subject.tokens)
    remainders = torch.stack([answer.sum.remainders[rows] for answer in answers.values()], 1).to(device)

    def correct_by_answer(output: Tensor, right: Tensor) -> dict[str, Tensor]:
        logits = task.read(output)[:, 0]
        given = {name: logits[:, answer.classes.to(device)].argmax(-1) for name, answer in answers.items()}
        return {name: (given[name] == right[:, at]).double() for at, name in enumerate(given)}

    tokens = inputs.tokens[rows].to(device)
    digits_and_neurons = digit_and_neuron_removals(subject, inputs, tensor, best)
    places: list[Row] = [
        {"intervention": "digits at embed", "site": "embed"},
        {"intervention": f"neurons at {tensor.label}", "site": tensor.site, "layer": tensor.layer},
    ]
    for about, edits in zip(places, digits_and_neurons, strict=True):
        if edits:
            read: dict[str, Any] = {"positions": task.read_positions, "draws": 1, "flips": 1}
            frame = sweep(subject.model, tokens, edits, correct_by_answer, remainders, **read).frame
            shared = {**about, "n": len(tokens), "engine": "naive"}
            yield from ({**shared, **row} for row in damage_rows(frame, answers))


def lost_accuracy(
    frame: pandas.DataFrame, answers: Mapping[str, AnswerOnGrid], prefix: str
) -> tuple[Array, Array]:
    """Returns the lost share of the accuracy above chance, of each answer taken away: its own, and the others' mean.

    NaN for answers that the unedited model gives less often than halfway between chance and always.
    """
    import numpy as np

    names = list(answers)
    chance = np.array([1 / answer.sum.period for answer in answers.values()])
    table = frame.pivot(index="variant", columns="metric", values="value")
    left = table.reindex([prefix + name for name in names])[names].to_numpy(dtype=float)
    clean = frame.drop_duplicates("metric").set_index("metric")["baseline"][names].to_numpy(dtype=float)
    lost = (clean - left) / np.where(clean > (1 + chance) / 2, clean - chance, np.nan)
    away = np.where(np.eye(len(lost), dtype=bool), np.nan, lost)
    return np.diag(lost), np.array([mean_of_finite(one) for one in away])


def damage_rows(frame: pandas.DataFrame, answers: Mapping[str, AnswerOnGrid]) -> Iterator[Row]:
    """Yields each answer's damage to itself and to the others, and their means, with the same under the control.

    An answer of whose removal nothing is known, as where no neuron serves it, has no rows.
    """
    import numpy as np

    without, control = (lost_accuracy(frame, answers, WITHOUT), lost_accuracy(frame, answers, CONTROL))
    known = [bool(np.isfinite(pair).any()) for pair in zip(*without, strict=True)]
    for metric, values, controls in zip((OWN, OTHERS), without, control, strict=True):
        for name, value, baseline, is_known in zip(answers, values, controls, known, strict=True):
            if is_known:
                yield {"variant": name, "metric": metric, **number_columns(value, baseline=baseline)}
        yield {
            "variant": TOGETHER,
            "metric": metric,
            **number_columns(mean_of_finite(values), baseline=mean_of_finite(controls)),
        }
