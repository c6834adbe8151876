"""Trains one run: updates, and the logging, observing and storing between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interp_tasks.checkpoints.checkpoint import fill_parameters
from interp_tasks.checkpoints.run_reader import WEIGHTS_FILE, read_clock
from interp_tasks.checkpoints.run_writer import ResumePoint, RunFolder
from interp_tasks.errors import Diverged, Stopped, UserError
from interp_tasks.training.config import TrainConfig
from interp_tasks.training.cuda_graph_capture import (
    CapturedUpdate,
    flatten_inputs,
    unflatten_inputs,
    why_not_captured,
)
from interp_tasks.training.fused_forward import DropoutMasks, FusedForward, HookedForward, fastest_forward
from interp_tasks.training.observers_and_clock import (
    ActivationWriter,
    Observer,
    TrainingClock,
    check_observed,
)
from interp_tasks.training.parameter_update import GradientWatcher, Updater
from interp_tasks.training.teacher_attention import load_teacher_forward
from tasks.base import Batch, Split, Task, check_loss_and_metrics, checked_sample, pool, pool_parts
from tasks.errors import TaskError
from tasks.model_settings import shortened_repr
from tasks.seeds_and_device_tensors import derive_seed

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer

#: Called as progress(step, steps, line) with every logged line.
StepProgress = Callable[[int, int, Mapping[str, Any]], None]


def whole_train_split(task: Task) -> Batch:
    """Returns the whole train split, the batch of every update where no batch size is set."""
    try:
        return task.sample(None, seed=0, split="train")
    except (TaskError, TypeError) as error:
        # A task of the user's may hand None on to torch, whose complaint has a line for every signature.
        said, *_ = str(error).splitlines() or [""]
        raise UserError(
            "without train.batch_size every update takes the whole train split, which task "
            f"{task.name!r} does not give ({shortened_repr(said)}): set it, or take a preset that does"
        ) from error


class TrainingLoop:
    """The state of one run while it trains."""

    def __init__(
        self,
        task: Task,
        model: HookedTransformer,
        config: TrainConfig,
        device: str,
        observers: Sequence[Observer],
        progress: StepProgress | None,
    ) -> None:
        """Draws the data that stay, chooses the fastest forward that is the model's, and makes the optimiser."""
        self.task, self.model, self.config = task, model, config
        self.device, self.progress = device, progress
        self.whole_split = None if config.batch_size else whole_train_split(task).to(device)
        # Of a mixture each kind of examples, of any other task the one there is.
        self.validation = {
            name: (part, self.sample_on_device(part, config.eval_samples, config.seed, "validation"))
            for name, part in (task.parts() or {"": task}).items()
        }
        self.forward: FusedForward | HookedForward
        if config.attention_from is not None:
            self.forward = load_teacher_forward(model, task.read_positions, config, device)
            self.forward_reason: str | None = "attention of another model"
        else:
            first = self.whole_split or self.sample_on_device(
                task, config.batch_size, self.batch_seed(0), "train"
            )
            self.forward, self.forward_reason = fastest_forward(
                model, task.read_positions, first.tokens[: 4 * task.d_vocab]
            )
        for part, batch in self.validation.values():
            few = batch[:4]
            with torch.no_grad():
                check_loss_and_metrics(part, self.forward(few.tokens), few)
        self.eager_reason = why_not_captured(device, task, model, config, self.forward.kind)
        self.updater = Updater(model, config, captured=self.eager_reason is None)
        self.captured: CapturedUpdate | None = None
        if self.eager_reason is None:
            self.captured = CapturedUpdate(self.update_from_tensors, self.updater.parameters, device)
        self.observers = [*observers]
        if config.observe:
            check_observed(config.observe, model)
            seed = derive_seed(config.seed, "observe")
            fixed = task.sample(config.observe_samples, seed=seed, split="validation").to(device)
            self.observers.append(ActivationWriter(config.observe, config.observe_every, fixed))
        self.clock = TrainingClock(device)
        self.wanted = set(config.checkpoint_steps(task.published_steps))

    def loop_part_of_run_json(self) -> dict[str, Any]:
        """Returns the loop's record in ``run.json``."""
        return {
            "forward": {"kind": self.forward.kind, "reason": self.forward_reason},
            "updates": {
                "kind": "eager" if self.captured is None else "captured",
                "reason": self.eager_reason,
            },
            "validation_examples": {name: len(batch) for name, (_, batch) in self.validation.items()},
        }

    def run(self, folder: RunFolder, stop: Callable[[], bool] | None = None) -> None:
        start = self.start_or_resume(folder, folder.resume())
        try:
            for step in range(start, self.config.steps):
                self.clock.go()
                self.log_observe_and_store(folder, step + 1, self.train_step(step))
                if stop is not None and step + 1 < self.config.steps and stop():
                    self.store_stop(folder, step + 1)
                    raise Stopped(
                        f"{folder.path}: stopped after step {step + 1} of {self.config.steps}, which is stored; the "
                        "same command goes on from there"
                    )
        finally:
            if self.captured is not None:
                # What is captured holds the loop, and the loop it: nobody else would free its memory.
                self.captured.forget()
        if start < self.config.steps:
            folder.record_peak_memory(self.clock.process_and_device_peak_bytes())

    def start_or_resume(self, folder: RunFolder, point: ResumePoint | None) -> int:
        """Resumes a run, or stores the start of a new one; returns the number of updates made."""
        if point is None:
            self.log_observe_and_store(folder, 0, {})
            return 0
        fill_parameters(self.model, point.parameters, point.path / WEIGHTS_FILE)
        self.updater.load_resume_tensors(point.tensors)
        # A run that was begun without a clock has none.
        self.clock.seconds = read_clock(folder.path).get(point.step)
        return point.step

    def sample_on_device(self, task: Task, n: int | None, seed: int, split: Split) -> Batch:
        return checked_sample(task, n, seed, split).to(self.device)

    def batch_seed(self, step: int) -> int:
        return derive_seed(self.config.seed, "batch", step)

    def batch(self, step: int) -> Batch:
        """Returns the examples of update number ``step``, counted from 0."""
        if self.whole_split is not None:
            return self.whole_split
        seed = self.batch_seed(step)
        return self.task.sample(self.config.batch_size, seed=seed, split="train").to(self.device)

    def train_step(self, step: int) -> dict[str, Any]:
        """Takes one step, and returns what is logged of it: norms of gradients, where they are due."""
        batch = self.batch(step)
        dropout = self.masks_of_step(step, batch.tokens.shape[1])
        self.model.train()
        self.updater.set_learning_rate(step)
        every = self.config.gradient_norms_every
        if every and (step + 1) % every == 0:
            norms: dict[str, dict[str, float]] = {}

            def store_norms(stage: str, gradients: Mapping[str, Tensor]) -> None:
                found = [gradient.norm() for gradient in gradients.values()]
                norms[stage] = dict(zip(gradients, torch.stack(found).tolist() if found else (), strict=True))

            self.update_on_batch(batch, dropout, store_norms)
            return {"gradient_norm": norms}
        if self.captured is None:
            self.update_on_batch(batch, dropout)
        else:
            self.captured(flatten_inputs(batch, dropout.masks_of(self.model, len(batch)) if dropout else {}))
        return {}

    def update_from_tensors(self, inputs: Mapping[str, Tensor]) -> None:
        """Makes one update at the learning rate that is set, from tensors alone."""
        batch, masks = unflatten_inputs(inputs)
        # Of a step the masks are all that is read.
        dropout = self.masks_of_step(0, batch.tokens.shape[1])
        self.update_on_batch(batch, dropout and replace(dropout, drawn=masks))

    def update_on_batch(
        self, batch: Batch, dropout: DropoutMasks | None, watch: GradientWatcher | None = None
    ) -> None:
        """Makes one update at the learning rate that is set, from a batch."""
        with self.autocast():
            output = self.forward(batch.tokens, dropout)
        loss = self.task.loss(output.float() if output.dtype == torch.bfloat16 else output, batch)
        if self.config.l1:
            loss = loss + self.config.l1 * sum(each.abs().sum() for each in self.updater.parameters.values())
        loss.backward()
        self.updater.update_parameters(watch)

    def is_log_step(self, step: int) -> bool:
        """Returns whether metrics are due after ``step`` updates."""
        return step % self.config.log_every == 0 or step in self.wanted or step == self.config.steps

    def log_observe_and_store(self, folder: RunFolder, step: int, line: dict[str, Any]) -> None:
        """Logs, observes and stores the model after ``step`` updates."""
        last = step == self.config.steps
        if line or self.is_log_step(step) or any(step % observer.every == 0 for observer in self.observers):
            self.clock.stop()
        if self.is_log_step(step):
            line |= self._validation_and_train_metrics(step)
        for observer in self.observers:
            if step % observer.every == 0 or last:
                line |= observer(step, self.model, folder.path)
        if line:
            line = {"step": step, **line}
            folder.log(line)
            if self.clock.seconds is not None:
                folder.log_time(step, self.clock.seconds)
            if self.progress:
                self.progress(step, self.config.steps, line)
        if step in self.wanted:
            folder.save(
                step, self.model, self.task, self.updater.resume_tensors(), metrics=line.get("validation")
            )

    def store_stop(self, folder: RunFolder, step: int) -> None:
        """Stores all that is needed to go on from ``step`` updates, where no checkpoint is due."""
        self.clock.stop()
        if self.clock.seconds is not None:
            folder.log_time(step, self.clock.seconds)
        if step not in self.wanted:
            folder.save_stop(step, self.model, self.task, self.updater.resume_tensors())

    @torch.no_grad()
    def _validation_and_train_metrics(self, step: int) -> dict[str, Any]:
        """Returns metrics on the validation sample and on the last training batch, both without dropout."""
        self.model.eval()
        seen = self.batch(max(step - 1, 0))
        output = self.forward(seen.tokens)
        line = {
            "learning_rate": self.config.learning_rate_at(max(step - 1, 0)),
            "train": pool(self.task.metrics(output, seen)),
            "validation": pool_parts(
                {
                    name: part.metrics(self.forward(batch.tokens), batch)
                    for name, (part, batch) in self.validation.items()
                }
            ),
            "train_loss": self.task.loss(output, seen).item(),
        }
        if not torch.stack([each.isfinite().all() for each in self.updater.parameters.values()]).all():
            raise Diverged(
                f"training diverged: weights are not finite at step {step}; "
                "lower train.learning_rate, or set train.warmup_steps or train.clip_norm"
            )
        return line

    def masks_of_step(self, step: int, positions: int) -> DropoutMasks | None:
        config = self.config
        if not config.dropout:
            return None
        return DropoutMasks(config.dropout, config.dropout_masks, positions, config.seed, step)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.config.precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16)
