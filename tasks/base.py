"""The base class of tasks: a validated config, and methods that turn it into data, a model, a loss and metrics.

Everything else in the toolkit (trainer, checkpoints, interventions, command line) sees a task only
through :class:`Task`; a new one is a subclass, registered under a name.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from tasks.errors import TaskError
from tasks.model_building import build_from_config, init_params_and_freeze_biases, make_model_config
from tasks.model_settings import ModelSettings
from tasks.seeds_and_device_tensors import constant, move_to_device

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer

Split = Literal["train", "validation", "test"]

#: Per-example values ``[batch]``, or a pair (sum, count) of them to be pooled as Σsum / Σcount.
Metric = Tensor | tuple[Tensor, Tensor]


#: Samples must have fewer examples than this: beyond it the sizes of tensors overflow.
MAX_EXAMPLES = 2**40


@dataclass(frozen=True)
class Batch:
    """Examples of a task: ``tokens [batch pos]``, ``targets [batch ...]``, named extras ``[batch ...]``."""

    tokens: Int[Tensor, "batch pos"]
    targets: Tensor
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: slice | Tensor | list[int]) -> Batch:
        """Returns the examples that a slice, an index tensor, a boolean mask or a list selects, in its order."""
        if isinstance(rows, int):  # iteration, too
            raise TypeError(f"a Batch gives batches: index it with a slice, batch[{rows}:{rows + 1}]")
        return replace(
            self,
            tokens=self.tokens[rows],
            targets=self.targets[rows],
            extras={name: value[rows] for name, value in self.extras.items()},
        )

    def to(self, device: str | torch.device) -> Batch:
        return replace(
            self,
            tokens=move_to_device(self.tokens, device),
            targets=move_to_device(self.targets, device),
            extras={name: move_to_device(value, device) for name, value in self.extras.items()},
        )


@dataclass(frozen=True)
class ProbeTarget:
    """A target of linear probes: numbers to regress on, or classes from 0.

    Attributes:
        values: ``[batch]`` or ``[batch pos]``; of vectors ``[batch 1 d]`` or ``[batch pos d]``.
    """

    values: Tensor
    kind: Literal["regression", "classification"]


@dataclass(frozen=True)
class ProbeTargets:
    """The targets of probes in a model of a task, and the positions at which they are read.

    Attributes:
        splits: name -> boolean ``[batch pos]``: kinds of entries to be scored separately as well.
        positions: default positions at which the probes read; ``None``: all positions.
    """

    targets: Mapping[str, ProbeTarget] = field(default_factory=dict)
    splits: Mapping[str, Tensor] = field(default_factory=dict)
    positions: tuple[int, ...] | None = None


@dataclass(frozen=True)
class GridAxis:
    """One coordinate of the grid that a task's activations are functions on, for Fourier analysis.

    Attributes:
        name: its name in tables and figures, such as ``"a"`` or ``"row"``.
        values: its values in order (around a cycle, or along a side of a matrix).
        position: the position in the input whose token ids are its values. ``None``: the axes are those of the sequence
            itself, whose positions they unfold, the last axis varying fastest; values are then 0, 1, ...
    """

    name: str
    values: tuple[int, ...]
    position: int | None = None


@dataclass(frozen=True)
class ModularAnswer:
    """An answer that is a linear form of the coordinates of the input grid, modulo a number.

    Attributes:
        modulus: q.
        coefficients: one for each of ``grid_axes``: the answer is r = Σ coefficient · coordinate mod q, a coordinate
            being the index of a value in its axis.
        classes: for each remainder r = 0 .. q − 1, its column on the output axis.
    """

    modulus: int
    coefficients: tuple[int, ...]
    classes: tuple[int, ...]


@dataclass(frozen=True)
class InputPerturbations:
    """Changes of an input at one position at a time, and the outputs that they may influence.

    Attributes:
        tokens: ``[batch pos]``: the token that a position holds when it is changed.
        changed: boolean ``[batch pos]``: the positions that are changed, one at a time.
        read: boolean ``[batch pos]``: the positions at which the output, one number, is read.
        kinds: name -> boolean ``[changed read]``: pairs of positions to be pooled.
    """

    tokens: Int[Tensor, "batch pos"]
    changed: Tensor
    read: Tensor
    kinds: Mapping[str, Tensor]


@dataclass(frozen=True)
class HeadClassRule:
    """The conditions under which a template counts as a class of heads; by template, in ``attention_rules()``.

    Attributes:
        unless: another template, which must not fit the head; it serves only this and is no class itself.
        static: a change of ``attention_moves`` that must leave the head's attention where it is.
    """

    unless: str | None = None
    static: str | None = None


@dataclass(frozen=True)
class FeatureRelocation:
    """Pairs of examples between which a feature of the input, such as the longest column, changes its group of
    positions.

    Attributes:
        before, after: the pairs, row by row; they differ in nothing else.
        groups: the group of each position, from 0.
        source, target: the feature's group before, and after; they differ in every pair.
    """

    before: Batch
    after: Batch
    groups: Int[Tensor, " pos"]
    source: Int[Tensor, " batch"]
    target: Int[Tensor, " batch"]


@dataclass(frozen=True)
class DropMetric:
    """The metric whose sudden change is the task's drop, and the direction of that change."""

    name: str
    direction: Literal["down", "up"]


class Task(BaseModel, ABC):
    """A task; its fields are its whole configuration, validated, frozen and JSON.

    ``loss`` and ``metrics`` accept a model's output at all positions, or at ``read_positions`` alone
    (what a fast forward computes); use :meth:`read` to get from one to the other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __eq__(self, other: object) -> bool:
        """Returns whether both are the same task with the same settings, whatever else it keeps."""
        if type(self) is not type(other):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in type(self).model_fields)

    #: The name the task is registered under.
    name: ClassVar[str]
    #: The architecture settings the task accepts, with its defaults.
    Model: ClassVar[type[ModelSettings]] = ModelSettings
    #: Preset name -> {"task": {...}, "model": {...}, "train": {...}}.
    presets: ClassVar[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {"cpu": {}}
    #: Steps at which the paper analyses its own model; a run always stores those it reaches.
    published_steps: ClassVar[tuple[int, ...]] = ()
    #: Whether ``loss``, with all that it calls, is operations on tensors alone, the same for every batch: an update on
    #: a CUDA device is then recorded once and repeated. A loss that draws numbers or decides by values leaves it out.
    #: It is not inherited.
    capturable: ClassVar[bool] = False
    drop_metric: ClassVar[DropMetric] = DropMetric("loss", "down")
    #: Steps of the paper's marks (pre, onset, end, post) in a run of its own scale; they replace the detected ones.
    published_marks: ClassVar[Mapping[str, int]] = {}

    @property
    @abstractmethod
    def sequence_length(self) -> int:
        """Number of positions of an input."""

    @property
    @abstractmethod
    def d_vocab(self) -> int:
        """Number of input token ids."""

    @property
    def d_vocab_out(self) -> int:
        """Number of outputs per position."""
        return self.d_vocab

    @property
    def n_read_outs(self) -> int:
        """Number of separate answers along the output axis (for the fan-in of "he")."""
        return 1

    @property
    def read_positions(self) -> tuple[int, ...]:
        """Positions whose output the loss and the metrics read, ascending."""
        return tuple(range(self.sequence_length))

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of what ``metrics`` returns, in its order."""
        batch = self.sample(2, split="validation")
        zeros = torch.zeros(len(batch), batch.tokens.shape[1], self.d_vocab_out)
        return tuple(self.metrics(zeros, batch))

    def probe_targets(self, batch: Batch) -> ProbeTargets:
        """Returns the targets of linear probes on a batch; by default none."""
        return ProbeTargets()

    def grid_axes(self) -> tuple[GridAxis, ...]:
        """Returns the axes of the grid over which spectra are computed: of the inputs, or of the positions; empty where
        there is none.

        Axes of the inputs also need a method ``input_grid()``: a batch with every combination of their values.
        """
        return ()

    def modular_answers(self) -> Mapping[str, ModularAnswer]:
        """Returns the answers that add the grid's coordinates modulo a number, by name; by default none.

        Measures of trigonometric mechanisms (Nanda et al. 2023) use them. For a task with shuffled answers they are
        those before shuffling.
        """
        return {}

    def parts(self) -> Mapping[str, Task]:
        """Returns the tasks of a mixture by name, where each batch is of one of them; by default empty.

        Such a task is evaluated on each of them. Their inputs may differ in length.
        """
        return {}

    def plateau_levels(self) -> Mapping[str, float]:
        """Returns theoretical values of metrics on the plateau before the drop; by default empty."""
        return {}

    def loss_shares(self) -> Mapping[str, float]:
        """Returns the metrics whose weighted sum is the loss, with their weights; by default empty."""
        return {}

    def accuracies(self, output: Float[Tensor, "batch _ d_out"], batch: Batch) -> dict[str, Metric]:
        """Returns shares of exactly right answers, in the form of :meth:`metrics`, that those lack."""
        return {}

    def token_values(self) -> Mapping[int, float]:
        """Returns the numbers that token ids stand for, for ids that examples can hold; by default empty."""
        return {}

    def influences(self, batch: Batch, shift: float, seed: int) -> InputPerturbations | None:
        """Returns changes of the inputs by ``shift``, up or down at random; by default ``None``."""
        return None

    @abstractmethod
    def sample(self, n: int | None, seed: int = 0, split: Split = "test") -> Batch:
        """Samples ``n`` examples of a split; for a finite task, without replacement and at most the whole split.

        ``None`` means the whole split, which only a finite task has. The same (n, seed, split) give
        the same examples.

        Raises:
            TaskError: for n below 1 (see :func:`check_sample_size`).
        """

    @abstractmethod
    def loss(self, output: Float[Tensor, "batch _ d_out"], batch: Batch) -> Float[Tensor, ""]:
        """Returns the training loss, a scalar."""

    @abstractmethod
    def metrics(self, output: Float[Tensor, "batch _ d_out"], batch: Batch) -> dict[str, Metric]:
        """Returns per-example values ``[batch]`` or (sum, count) pairs, by name."""

    def read(self, output: Float[Tensor, "batch _ d_out"]) -> Float[Tensor, "batch _ d_out"]:
        """Returns the output at ``read_positions``, from an output at all positions or at those alone."""
        if output.shape[1] == len(self.read_positions):
            return output
        return output[:, constant(tuple(self.read_positions), torch.long, output.device)]

    def build_model(self, seed: int = 0, settings: ModelSettings | None = None) -> HookedTransformer:
        """Builds a fresh ``HookedTransformer`` on the CPU, a function of the seed alone.

        Raises:
            TaskError: if the settings leave no room for the task's inputs.
        """
        settings = settings or self.Model()
        n_ctx = settings.n_ctx or self.sequence_length
        if n_ctx < self.sequence_length:
            raise TaskError(
                f"model.n_ctx = {n_ctx} is too short: task {self.name!r} has {self.sequence_length} positions"
            )
        model = build_from_config(make_model_config(settings, n_ctx, self.d_vocab, self.d_vocab_out))
        init_params_and_freeze_biases(model, settings, seed, self.n_read_outs)
        return model

    def constrain(self, model: HookedTransformer, settings: ModelSettings) -> None:
        """Restores the parameters that the settings hold fixed, after weights were copied in."""

    def check_model(self, model: HookedTransformer) -> None:
        """Refuses, in one line, a model that cannot take this task's inputs."""
        sizes = model.cfg
        wrong = []
        if sizes.n_ctx < self.sequence_length:
            wrong.append(f"{self.sequence_length} positions, the model has {sizes.n_ctx}")
        if sizes.d_vocab < self.d_vocab:
            wrong.append(f"{self.d_vocab} token ids, the model has {sizes.d_vocab}")
        if sizes.d_vocab_out != self.d_vocab_out:
            wrong.append(f"{self.d_vocab_out} outputs per position, the model has {sizes.d_vocab_out}")
            if sizes.d_vocab_out == self.d_vocab > self.d_vocab_out > 1:
                wrong[-1] += (
                    f", one for each token, such as '=': keep the first {self.d_vocab_out} of its unembedding"
                )
        if wrong:
            raise TaskError(f"task {self.name!r} does not fit this model: it needs {'; '.join(wrong)}")


def check_sample_size(n: int | None) -> None:
    """Refuses to sample fewer than one example, or more than any memory holds."""
    if n is not None and n < 1:
        raise TaskError(f"cannot sample {n} examples: ask for at least 1")
    if n is not None and n >= MAX_EXAMPLES:
        raise TaskError(f"cannot sample {n} examples: more than memory can hold")


def pool(metrics: Mapping[str, Metric]) -> dict[str, float | None]:
    """Pools each metric to a number: the mean over examples, or Σsum / Σcount; ``None`` if Σcount is 0."""
    pairs = [metric if isinstance(metric, tuple) else (metric, None) for metric in metrics.values()]
    found = [
        values.double().mean() if counts is None else values.double().sum() for values, counts in pairs
    ] + [counts.double().sum() for _, counts in pairs if counts is not None]
    # All at once: a GPU is waited for once.
    numbers = torch.stack([each.to(found[0].device) for each in found]).tolist() if found else []
    counted = iter(numbers[len(pairs) :])
    pooled: dict[str, float | None] = {}
    for name, number, (_, counts) in zip(metrics, numbers, pairs, strict=False):
        count = 1.0 if counts is None else next(counted)
        pooled[name] = number / count if count else None
    return pooled


def pool_parts(metrics_by_part: Mapping[str, Mapping[str, Metric]]) -> dict[str, float | None]:
    """Pools each metric over the examples of all parts together, and over each named part as ``metric (part)``."""
    pooled: dict[str, Metric] = {}
    for name in next(iter(metrics_by_part.values())):
        values: list[Any] = [metrics[name] for metrics in metrics_by_part.values()]
        if isinstance(values[0], tuple):
            sums, counts = zip(*values, strict=True)
            pooled[name] = torch.cat(sums), torch.cat(counts)
        else:
            pooled[name] = torch.cat(values)
    of_parts = {
        f"{name} ({part})": metric
        for part, metrics in metrics_by_part.items()
        if part
        for name, metric in metrics.items()
    }
    return pool(pooled | of_parts)


def checked_sample(task: Task, n: int | None, seed: int, split: Split) -> Batch:
    """Returns examples of a task, checked; what is wrong is refused under the name of the method."""
    with name_method_in_errors(task, "read_positions"):
        outside = [at for at in task.read_positions if not 0 <= at < task.sequence_length]
        check(not outside, f"no position {outside and outside[0]}: sequence_length is {task.sequence_length}")
    before = torch.get_rng_state()
    with name_method_in_errors(task, "sample"):
        batch: Any = task.sample(n, seed=seed, split=split)
        is_batch = isinstance(batch, Batch) and batch.tokens.dtype == torch.long and batch.tokens.ndim == 2
        check(is_batch, "give a tasks.Batch whose tokens are whole numbers [batch pos]")
        is_own = torch.equal(before, torch.get_rng_state())
        check(is_own, "it draws from torch's global generator: draw from tasks.generator(seed, label)")
        for name, values in {"targets": batch.targets, **batch.extras}.items():
            same = len(values) == len(batch)
            check(same, f"{len(batch)} rows of tokens and {len(values)} of {name}")
        check(1 <= len(batch) <= (n or len(batch)), f"asked for {n} examples, it gives {len(batch)}")
        length, (low, high) = batch.tokens.shape[1], (int(batch.tokens.min()), int(batch.tokens.max()))
        fits = length <= task.sequence_length
        check(fits, f"inputs of {length} positions, sequence_length is {task.sequence_length}")
        check(low >= 0 and high < task.d_vocab, f"token ids from {low} to {high}, d_vocab is {task.d_vocab}")
    return batch


def check_loss_and_metrics(task: Task, output: Tensor, batch: Batch) -> None:
    """Refuses a loss that is no scalar, and metrics that are not one value for each example.

    Args:
        output: a model's, of the batch, at the positions that are read.
    """

    def shape(value: Any) -> str:
        return f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"

    with name_method_in_errors(task, "loss"):
        loss: Any = task.loss(output, batch)
        is_scalar = isinstance(loss, Tensor) and not loss.ndim and loss.is_floating_point()
        check(is_scalar, f"give a scalar, not of {shape(loss)}")
    with name_method_in_errors(task, "metrics"):
        metrics: Any = task.metrics(output, batch)
        check(isinstance(metrics, dict) and bool(metrics), "give a dict of values by name")
        for name, metric in metrics.items():
            for part in metric if isinstance(metric, tuple) and len(metric) == 2 else (metric,):
                fits = isinstance(part, Tensor) and part.shape == (len(batch),)
                check(fits, f"{name} is one value for each of {len(batch)} examples, not of {shape(part)}")


def check(holds: bool, complaint: str) -> None:
    if not holds:
        raise TaskError(complaint)


@contextlib.contextmanager
def name_method_in_errors(task: Task, name: str) -> Iterator[None]:
    """Names the method in whatever goes wrong in it."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, TaskError) else f"{type(error).__name__}: "
        reason = next(iter(str(error).splitlines()), "")
        raise TaskError(f"task {task.name!r}: {name}: {kind}{reason}") from error
