"""One training loop for every task and model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from interp_tasks.checkpoints.architecture import config_to_json
from interp_tasks.checkpoints.run_files import read_run
from interp_tasks.checkpoints.run_folder import RunFolder
from interp_tasks.checkpoints.training_state import TrainingState
from interp_tasks.errors import Diverged, UserError
from interp_tasks.training.config import TrainConfig, presets_of, train_config
from interp_tasks.training.dropout import Dropout
from interp_tasks.training.forward import Forward, fastest_forward
from interp_tasks.training.observers import Activations, GradientNorms, Observer
from interp_tasks.training.optimisation import Updater
from interp_tasks.training.parts import freeze_others, put_in, read_source
from interp_tasks.training.provenance import run_info
from tasks.base import Batch, Task, derive_seed, pool, pool_parts
from tasks.messages import one_line
from tasks.registry import get
from tasks.settings import ModelSettings

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer

#: Called as progress(step, steps, line) with every logged line.
Progress = Callable[[int, int, Mapping[str, Any]], None]


def train(
    task: str | Task,
    *,
    out: str | Path,
    preset: str | None = None,
    settings: ModelSettings | Mapping[str, Any] | None = None,
    config: TrainConfig | Mapping[str, Any] | None = None,
    model: HookedTransformer | None = None,
    device: str = "cpu",
    observers: Sequence[Observer] = (),
    progress: Progress | None = None,
) -> Path:
    """Train a task's model into a run folder; on a folder that is there, continue or extend that run.

    Args:
        task: a task, or the name of one.
        out: the run folder.
        preset: a preset of the task, whose sections the other arguments then override key by key.
            With a task *instance* its ``task`` section is not used.
        settings: architecture, for ``task.build_model``.
        config: how to train.
        model: a ``HookedTransformer`` of your own to train instead of ``task.build_model``; it is trained in place.
            To resume, pass one of the same configuration.

    Returns:
        The run folder.

    Raises:
        UserError: before any work, for a config that cannot be, weights to start from that do not fit or have
            changed, a folder that holds another run, or one that is being written; during training, if the
            weights are no longer finite.
        TaskError: if the model cannot take the task's inputs.
    """
    task, settings, config = _resolve(task, preset, settings, config)
    out = Path(out)
    config = _with_threads(config, out)
    own_model = model is not None
    if model is None:
        model = task.build_model(config.seed, settings)
    task.check_model(model)
    source = read_source(config)
    if source is not None:
        put_in(model, source, config)
        if not own_model:
            task.constrain(model, settings)
    freeze_others(model, config)
    model = _placed(model, device)
    described = {
        "task": {"name": task.name, **task.model_dump(mode="json")},
        "model": {"own": config_to_json(model.cfg, torch.float32)}
        if own_model
        else settings.model_dump(mode="json"),
        "train": config.model_dump(mode="json"),
        **({} if source is None else {"start": source.describe()}),
    }
    with _reproducible(config):
        loop = _Loop(task, model, config, device, observers, progress)
        info = run_info(task, config, preset, device) | {"forward": loop.described_forward}
        defaults = {"train": TrainConfig().model_dump(mode="json")}
        with RunFolder.open(out, described, info, defaults=defaults) as folder:
            loop.run(folder)
    return out


class _Loop:
    """The state of one run while it trains."""

    def __init__(
        self,
        task: Task,
        model: HookedTransformer,
        config: TrainConfig,
        device: str,
        observers: Sequence[Observer],
        progress: Progress | None,
    ) -> None:
        self.task, self.model, self.config = task, model, config
        self.device, self.progress = device, progress
        self.whole_split = None if config.batch_size else self._sample(None, "train", 0)
        # Of a mixture each kind of examples, of any other task the one there is.
        self.validation = {
            name: (part, part.sample(config.eval_samples, seed=config.seed, split="validation").to(device))
            for name, part in (task.parts() or {"": task}).items()
        }
        self.forward: Forward
        self.forward, reason = fastest_forward(
            model, task.read_positions, self.batch(0).tokens[: 4 * task.d_vocab]
        )
        self.described_forward = {"kind": self.forward.kind, "reason": reason}
        self.updater = Updater(model, config)
        self.observers = [*observers, *self._observer_of_activations()]

    def run(self, folder: RunFolder) -> None:
        start = self._resume(folder)
        wanted = set(self.config.checkpoint_steps(self.task.published_steps))
        if start is None:
            start = 0
            self._after(folder, 0, {}, wanted)
        for step in range(start, self.config.steps):
            self._after(folder, step + 1, self._update(step), wanted)

    def batch(self, step: int) -> Batch:
        """The examples of update number ``step``, counted from 0."""
        if self.whole_split is not None:
            return self.whole_split
        return self._sample(self.config.batch_size, "train", derive_seed(self.config.seed, "batch", step))

    def _sample(self, n: int | None, split: Any, seed: int) -> Batch:
        return self.task.sample(n, seed=seed, split=split).to(self.device)

    def _update(self, step: int) -> dict[str, Any]:
        batch = self.batch(step)
        dropout = self._dropout(step, batch)
        self.model.train()
        with self._autocast():
            output = self.forward(batch.tokens, dropout)
        loss = self.task.loss(output.float() if output.dtype == torch.bfloat16 else output, batch)
        loss.backward()
        line: dict[str, Any] = {}
        every = self.config.gradient_norms_every
        if every and (step + 1) % every == 0:
            norms = GradientNorms()
            self.updater.update(step, norms)
            line["gradient_norm"] = norms.line
        else:
            self.updater.update(step)
        return line

    def _after(self, folder: RunFolder, step: int, line: dict[str, Any], wanted: set[int]) -> None:
        """Log, observe and store the model as it is after ``step`` updates."""
        last = step == self.config.steps
        if step % self.config.log_every == 0 or step in wanted or last:
            line |= self._evaluate(step)
        for observer in self.observers:
            if step % observer.every == 0 or last:
                line |= observer(step, self.model, folder.path)
        if line:
            line = {"step": step, **line}
            folder.log(line)
            if self.progress:
                self.progress(step, self.config.steps, line)
        if step in wanted:
            state = TrainingState(self.updater.state())
            folder.save(step, self.model, self.task, state, metrics=line.get("validation"))

    @torch.no_grad()
    def _evaluate(self, step: int) -> dict[str, Any]:
        """Metrics on the validation sample, and on the last batch trained on, both without dropout."""
        self.model.eval()
        seen = self.batch(max(step - 1, 0))
        output = self.forward(seen.tokens)
        line = {
            "learning_rate": self.updater.learning_rate(max(step - 1, 0)),
            "train": pool(self.task.metrics(output, seen)),
            "validation": pool_parts(
                {
                    name: part.metrics(self.forward(batch.tokens), batch)
                    for name, (part, batch) in self.validation.items()
                }
            ),
            "train_loss": self.task.loss(output, seen).item(),
        }
        if not all(parameter.isfinite().all() for parameter in self.updater.parameters.values()):
            raise Diverged(
                f"training diverged: weights are not finite at step {step}; "
                "lower train.learning_rate, or set train.warmup_steps or train.clip_norm"
            )
        return line

    def _dropout(self, step: int, batch: Batch) -> Dropout | None:
        config = self.config
        if not config.dropout:
            return None
        return Dropout(config.dropout, config.dropout_masks, batch.tokens.shape[1], config.seed, step)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.config.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16)

    def _observer_of_activations(self) -> list[Observer]:
        config = self.config
        if not config.observe:
            return []
        fixed = self._sample(config.observe_samples, "validation", derive_seed(config.seed, "observe"))
        return [Activations(config.observe, config.observe_every, fixed, self.model)]

    def _resume(self, folder: RunFolder) -> int | None:
        point = folder.resume()
        if point is None:
            return None
        point.restore(self.model)
        self.updater.load_state(point.tensors)
        return point.step


def _resolve(
    task: str | Task,
    preset: str | None,
    settings: ModelSettings | Mapping[str, Any] | None,
    config: TrainConfig | Mapping[str, Any] | None,
) -> tuple[Task, ModelSettings, TrainConfig]:
    name = task if isinstance(task, str) else task.name
    sections: Mapping[str, Mapping[str, Any]] = {}
    if preset is not None:
        presets = presets_of(name) if isinstance(task, str) else task.presets
        if preset not in presets:
            raise UserError(f"task {name!r} has no preset {preset!r}: presets are {', '.join(presets)}")
        sections = presets[preset]
    if isinstance(task, str):
        task = get(name, **sections.get("task", {}))
    if not isinstance(settings, ModelSettings):
        settings = model_settings(task, {**sections.get("model", {}), **(settings or {})})
    if not isinstance(config, TrainConfig):
        config = train_config({**sections.get("train", {}), **(config or {})})
    return task, settings, config


def model_settings(task: Task, values: Mapping[str, Any]) -> ModelSettings:
    """Validated architecture settings of a task.

    Raises:
        UserError: one line naming every key that is wrong.
    """
    try:
        return task.Model(**values)
    except ValidationError as error:
        raise UserError(one_line(error, "model", task.Model.model_fields)) from None


def _with_threads(config: TrainConfig, out: Path) -> TrainConfig:
    """Sums depend on the number of threads, so a run keeps the number it began with."""
    if config.threads is not None:
        return config
    threads = torch.get_num_threads()
    if (out / "run.json").is_file():
        threads = read_run(out).get("config", {}).get("train", {}).get("threads") or threads
    return config.model_copy(update={"threads": threads})


def check_place(device: str) -> None:
    """Refuse a device that torch does not see.

    Raises:
        UserError: in one line.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise UserError(f"no device {device!r}: devices are cpu, cuda, cuda:1, mps") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {device!r} is not there: torch sees no CUDA GPU; use --device cpu")


def _placed(model: HookedTransformer, device: str) -> HookedTransformer:
    check_place(device)
    if device != "cpu":
        try:
            model.to(device, print_details=False)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise UserError(f"device {device!r} is not there: {' '.join(str(error).split())}") from None
    return model


@contextlib.contextmanager
def _reproducible(config: TrainConfig) -> Iterator[None]:
    """Threads, deterministic kernels and torch's generator set for the run, and put back after it."""
    threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(config.threads or threads)
    if config.deterministic:
        # On CUDA torch refuses every matrix product in deterministic mode without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic or deterministic)
    torch.manual_seed(derive_seed(config.seed, "global"))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(random_state)
        torch.use_deterministic_algorithms(deterministic)
