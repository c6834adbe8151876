"""Several seeds of one run trained as one on one device: the same steps in fewer, larger operations."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interp_tasks.checkpoints.atomic import folder_of
from interp_tasks.checkpoints.run_files import check_no_run, stored_steps
from interp_tasks.checkpoints.run_folder import RunFolder, resumable
from interp_tasks.checkpoints.training_state import TrainingState
from interp_tasks.devices import check_device, float32_products
from interp_tasks.errors import Diverged, UserError
from interp_tasks.training.captured import CapturedUpdate, batch_and_masks, inputs_of
from interp_tasks.training.clock import Clock, free_memory
from interp_tasks.training.config import TrainConfig
from interp_tasks.training.cost import state_bytes, weight_bytes
from interp_tasks.training.dropout import Dropout
from interp_tasks.training.forward import FusedForward
from interp_tasks.training.launch import launched
from interp_tasks.training.loop import Loop, StepProgress, stopped
from interp_tasks.training.observers import GradientNorms
from interp_tasks.training.optimizer import RANDOM, GradientWatcher
from interp_tasks.training.stacked_forward import StackedForward
from interp_tasks.training.stacked_optimizer import StackedParameters, StackedUpdater
from interp_tasks.training.trainer import (
    check_precision,
    open_run_folder,
    prepare_model,
    reproducible,
    resolve_settings,
    train,
    with_threads,
)
from tasks.base import Batch, Task
from tasks.devices import moved
from tasks.seeds import derive_seed
from tasks.settings import ModelSettings

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer

#: Tokens, targets and extras of a batch: ``[seed batch ...]``, or ``[batch ...]`` where every seed has the same.
Tensors = tuple[Tensor, Tensor, dict[str, Tensor]]

VARIOUS = "task {!r} draws batches of several shapes: train its seeds one after another"


def train_stacked(
    task: str | Task,
    *,
    out: str | Path,
    seeds: Iterable[int],
    preset: str | None = None,
    settings: ModelSettings | Mapping[str, Any] | None = None,
    config: TrainConfig | Mapping[str, Any] | None = None,
    device: str = "cpu",
    progress: StepProgress | None = None,
    stop: Callable[[], bool] | None = None,
) -> list[Path]:
    """Train a run for each seed, all at once on one device, into ``out/seed-0`` and so on.

    Every run has the initial weights, batches and dropout masks that :func:`train` would give it, and its folder is
    one that either of the two goes on from. Sums are taken in another order, so weights agree with those of
    separate runs to rounding, not to the bit.

    Runs that are behind others go on from the last step that all of them have stored; finished ones are left alone.

    Args:
        task: as for :func:`train`, and so are ``preset``, ``settings``, ``config``, ``device`` and ``stop``.
        seeds: which replace ``train.seed``.
        progress: is told of every logged line of every run, its seed under ``"seed"``.

    Returns:
        The run folders, in the order of the seeds.

    Raises:
        UserError: as :func:`train`; for a task whose batches have no common shape, an architecture without a fused
            forward, runs that have no step in common, or more seeds than memory has room for.
        Stopped: as :func:`train`, once all runs are stored.
    """
    out = folder_of(out)
    check_no_run(out)
    task, settings, config = resolve_settings(task, preset, settings, config)
    if launched().count > 1:
        raise UserError(
            "stacked seeds train in one process: leave out torchrun, or train them one after another"
        )
    check_device(device)
    check_precision(config, device)
    seeds = checked_seeds(seeds)
    if task.parts():
        raise UserError(VARIOUS.format(task.name))
    places = {seed: out / f"seed-{seed}" for seed in seeds}
    configs = {
        seed: with_threads(config.model_copy(update={"seed": seed}), place) for seed, place in places.items()
    }
    finished = [seed for seed, place in places.items() if config.steps in stored_steps(place)]
    for seed in finished:
        train(task, out=places[seed], preset=preset, settings=settings, config=configs[seed], device=device)
    open_seeds = [seed for seed in places if seed not in finished]
    if not open_seeds:
        return list(places.values())
    common_step([places[seed] for seed in open_seeds])
    with reproducible(configs[open_seeds[0]]), contextlib.ExitStack() as folders:
        runs: list[Seed] = []
        described: list[dict[str, Any]] = []
        for seed in open_seeds:
            model, content = prepare_model(task, settings, configs[seed], device)
            if not runs:
                check_memory(model, config, len(open_seeds), free_memory(device))
            runs.append(Seed(task, model, configs[seed], device, open_seeds, progress))
            described.append(content)
        stack = Stack(runs)
        # Those that are there first: where one of them is refused, no new one has been made.
        order = sorted(range(len(runs)), key=lambda index: not places[open_seeds[index]].exists())
        opened = {
            index: folders.enter_context(
                open_run_folder(places[open_seeds[index]], described[index], runs[index], preset)
            )
            for index in order
        }
        if stack.captured is not None:
            # As a run alone does, see :meth:`Loop.run`.
            folders.callback(stack.captured.forget)
        stack.run([opened[index] for index in range(len(runs))], stop)
    return list(places.values())


def checked_seeds(given: Any) -> list[int]:
    """Returns seeds as Python's numbers, each once.

    Raises:
        UserError: in one line.
    """
    wrong = f"seeds are whole numbers from 0 up, such as [0, 1, 2], not {given!r}"
    if isinstance(given, (str, bytes)):
        raise UserError(wrong)
    try:
        seeds = list(given)
        numbers = list(dict.fromkeys(operator.index(seed) for seed in seeds))
    except TypeError:
        raise UserError(wrong) from None
    if any(isinstance(seed, bool) for seed in seeds) or any(number < 0 for number in numbers):
        raise UserError(wrong)
    if not numbers:
        raise UserError("no seeds to train: name at least one")
    return numbers


def common_step(runs: Sequence[Path]) -> int:
    """Returns the last step that all runs can go on from.

    Raises:
        UserError: if there is none.
    """
    steps = [list(resumable(run)) for run in runs]
    common = set.intersection(*map(set, steps))
    if not common:
        behind, ahead = (
            runs[steps.index(chosen)] for chosen in (min(steps, key=max_or_0), max(steps, key=max_or_0))
        )
        raise UserError(
            f"{behind} and {ahead} have no step in common to go on from: train them one after another"
        )
    return max(common)


def check_memory(model: HookedTransformer, config: TrainConfig, seeds: int, free: int | None) -> None:
    """Refuses seeds that do not fit in memory even without activations.

    Args:
        model: one of them, in memory already.
        free: bytes beside it; ``None``: nobody knows, and nothing is refused.

    Raises:
        UserError: in one line.
    """
    weights, gradients = weight_bytes(model)
    each = weights + gradients + sum(state_bytes(model, config))
    if free is not None and seeds * each > free + weights:
        raise UserError(
            f"{seeds} seeds as one need {seeds * each / 2**30:.3g} GiB for parameters, gradients and optimiser "
            f"alone, and {free / 2**30:.3g} GiB are free, for {(free + weights) // each} of them: stack fewer"
        )


class Seed(Loop):
    """One run of a stack, with all that is not shared with the others."""

    def __init__(
        self,
        task: Task,
        model: Any,
        config: TrainConfig,
        device: str,
        seeds: Sequence[int],
        progress: StepProgress | None,
    ) -> None:
        self.seeds = seeds
        torch.manual_seed(derive_seed(config.seed, "global"))
        super().__init__(task, model, config, device, (), progress and self._named(progress))
        self.random = torch.get_rng_state()
        self.stored: Mapping[str, Tensor] = {}

    def share(self, stack: Stack, index: int) -> None:
        self.stack, self.index = stack, index

    @contextlib.contextmanager
    def randomness(self) -> Iterator[None]:
        """Sets torch's generator as the run would have it if it were alone."""
        torch.set_rng_state(self.random)
        yield
        self.random = torch.get_rng_state()

    def described(self) -> dict[str, Any]:
        return super().described() | {"stacked": {"seeds": list(self.seeds), "loss": self.stack.loss_kind}}

    def training_state(self) -> TrainingState:
        return TrainingState(self.stack.updater.state_of(self.index))

    def load_training_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Keeps the state until those of all runs are there."""
        self.stored = tensors
        torch.set_rng_state(tensors[RANDOM])

    def _named(self, progress: StepProgress) -> StepProgress:
        return lambda step, steps, line: progress(step, steps, {"seed": self.config.seed, **line})


class Stack:
    """The runs that train together, and the updates that they share."""

    def __init__(self, runs: Sequence[Seed]) -> None:
        """Joins the runs' models into one forward and one optimiser; refuses models that have no fast forward."""
        self.runs = runs
        self.task, self.config = runs[0].task, runs[0].config
        self.clock = Clock(runs[0].device)
        if type(runs[0].forward) is not FusedForward:
            raise UserError(
                f"seeds of this model cannot be stacked ({runs[0].forward_reason}): train them one after another"
            )
        for index, run in enumerate(runs):
            run.share(self, index)
            # The whole split is the same for all.
            run.whole_split = runs[0].whole_split
        models = [run.model for run in runs]
        parameters = StackedParameters(models)
        self.forward = StackedForward(models, self.task.read_positions, parameters.tensors)
        # One of them says what holds for all.
        eager = runs[0].eager_reason is not None
        self.updater = StackedUpdater(parameters, self.config, captured=not eager)
        self.captured = None
        if not eager:
            self.captured = CapturedUpdate(self._compute_from, self.updater.parameters, runs[0].device)
        self.maps_loss = True
        with float32_products(rounded=False):
            self._check()

    @property
    def loss_kind(self) -> str:
        return "mapped" if self.maps_loss else "one by one"

    def run(self, folders: Sequence[RunFolder], stop: Callable[[], bool] | None = None) -> None:
        """Trains all runs to the end, or until ``stop`` says so, and stores checkpoints as they fall due."""
        start = self._begin(folders)
        before = [run.clock.seconds for run in self.runs]
        for step in range(start, self.config.steps):
            self.clock.go()
            lines = self.update(step)
            stopping = stop is not None and step + 1 < self.config.steps and stop()
            if stopping or any(lines) or any(run.pauses(step + 1) for run in self.runs):
                self._pause(step + 1, folders, lines, before)
            if stopping:
                for run, folder in zip(self.runs, folders, strict=True):
                    with run.randomness():
                        run.store_stop(folder, step + 1)
                names = (
                    f"{folders[0].path} and {len(folders) - 1} more" if folders[1:] else f"{folders[0].path}"
                )
                raise stopped(names, step + 1, self.config.steps)
        if start < self.config.steps:
            for run, folder in zip(self.runs, folders, strict=True):
                folder.finish(run.clock.memory())

    def _begin(self, folders: Sequence[RunFolder]) -> int:
        """Goes on from the last step that all runs have stored."""
        start = common_step([folder.path for folder in folders])
        for run, folder in zip(self.runs, folders, strict=True):
            with run.randomness():
                run.begin(folder, folder.resume(start))
        if start:
            self.updater.load_states([run.stored for run in self.runs])
        return start

    def _pause(
        self,
        step: int,
        folders: Sequence[RunFolder],
        lines: Sequence[dict[str, Any]],
        before: Sequence[float | None],
    ) -> None:
        """Does what each run does between updates; the time of an update is shared out evenly."""
        self.clock.stop()
        share = (self.clock.seconds or 0.0) / len(self.runs)
        for run, folder, line, seconds in zip(self.runs, folders, lines, before, strict=True):
            run.clock.seconds = None if seconds is None else seconds + share
            try:
                with run.randomness():
                    run.after(folder, step, line)
            except Diverged as error:
                raise Diverged(f"{folder.path}: {error}") from None

    def update(self, step: int) -> list[dict[str, Any]]:
        """Takes one step of all runs together, and returns what each logs."""
        batch = Batch(*self._batch(step))
        dropouts = self._dropouts(step, batch.tokens.shape[-1])
        masks = self.forward.masks(dropouts, batch.tokens.shape[-2])
        self.updater.set_rate(step)
        every = self.config.gradient_norms_every
        if not every or (step + 1) % every:
            inputs = inputs_of(batch, masks)
            if self.captured is None:
                self._compute_from(inputs)
            else:
                self.captured(inputs)
            return [{} for _ in self.runs]
        norms = [GradientNorms() for _ in self.runs]

        def watch(stage: str, gradients: Mapping[str, Tensor]) -> None:
            for index, each in enumerate(norms):
                each(stage, {name: gradient[index] for name, gradient in gradients.items()})

        self._compute_from(inputs_of(batch, masks), watch)
        return [{"gradient_norm": each.line} for each in norms]

    def _dropouts(self, step: int, positions: int) -> list[Dropout]:
        dropouts = (run.dropout(step, positions) for run in self.runs)
        return [each for each in dropouts if each is not None]

    def _compute_from(self, inputs: Mapping[str, Tensor], watch: GradientWatcher | None = None) -> None:
        """Makes one update of all runs at the learning rate that is set, from tensors alone."""
        batch, masks = batch_and_masks(inputs)
        with self.runs[0].autocast():
            # Of a step the masks are all that is read.
            outputs = self.forward(batch.tokens, self._dropouts(0, batch.tokens.shape[-1]), masks)
        loss = self._losses(outputs, (batch.tokens, batch.targets, dict(batch.extras))).sum()
        if self.config.l1:
            loss = loss + self.config.l1 * sum(each.abs().sum() for each in self.updater.parameters.values())
        loss.backward()
        self.updater.apply(watch)

    def _batch(self, step: int) -> Tensors:
        """Returns the tensors of the step, stacked by run, or the whole split that all runs share."""
        if self.runs[0].whole_split is not None:
            batch = self.runs[0].whole_split
            return batch.tokens, batch.targets, dict(batch.extras)
        batches = []
        for run in self.runs:
            with run.randomness():
                batches.append(run.drawn(step))
        if len({batch.tokens.shape for batch in batches}) > 1:
            raise UserError(VARIOUS.format(self.task.name))

        def stacked(tensors: list[Tensor]) -> Tensor:
            # One copy to the device, not one for each seed.
            return moved(torch.stack(tensors), self.runs[0].device)

        return (
            stacked([batch.tokens for batch in batches]),
            stacked([batch.targets for batch in batches]),
            {name: stacked([batch.extras[name] for batch in batches]) for name in batches[0].extras},
        )

    def _losses(self, outputs: Tensor, tensors: Tensors) -> Tensor:
        """Returns the task's loss of every run, ``[seed]``."""
        if outputs.dtype == torch.bfloat16:
            outputs = outputs.float()
        axis = 0 if tensors[0].ndim == 3 else None

        def loss(output: Tensor, tokens: Tensor, targets: Tensor, extras: dict[str, Tensor]) -> Tensor:
            return self.task.loss(output, Batch(tokens, targets, extras))

        if self.maps_loss:
            mapped: Tensor = torch.func.vmap(loss, in_dims=(0, axis, axis, axis))(outputs, *tensors)
            return mapped
        tokens, targets, extras = tensors
        return torch.stack(
            [
                loss(output, tokens, targets, extras)
                if axis is None
                else loss(output, tokens[i], targets[i], {name: each[i] for name, each in extras.items()})
                for i, output in enumerate(outputs)
            ]
        )

    @torch.no_grad()
    def _check(self) -> None:
        """Compares with each model by itself, on the first batch; a loss that cannot be mapped is taken one by one."""
        tensors = self._batch(0)
        outputs = self.forward(tensors[0])
        for index, run in enumerate(self.runs):
            expected = run.forward(tensors[0][index] if tensors[0].ndim == 3 else tensors[0])
            difference = (outputs[index] - expected).abs().max().item() / (expected.std().item() or 1.0)
            if not difference < 1e-3:
                raise UserError(
                    f"seeds of this model cannot be stacked (outputs would differ by {difference:.1e} s.d.): "
                    "train them one after another"
                )
        self.maps_loss = False
        one_by_one = self._losses(outputs, tensors)
        self.maps_loss = True
        try:
            self.maps_loss = torch.allclose(self._losses(outputs, tensors), one_by_one, rtol=1e-3)
        except Exception:  # Whatever a task's own code or torch says of a loss that vmap cannot see through.
            self.maps_loss = False


def max_or_0(steps: Sequence[int]) -> int:
    return max(steps, default=0)
