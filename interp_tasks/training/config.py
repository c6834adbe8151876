"""Every setting of a training run, and how presets and ``--set key=value`` become one. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from interp_tasks.errors import UserError
from tasks import registry
from tasks.model_settings import list_valued_fields, validation_error_line

if TYPE_CHECKING:
    from tasks import Task

SECTIONS = ("task", "model", "train")
#: The parts of a model, see :mod:`interp_tasks.training.start_weights_and_freezing`.
Part = Literal["attn", "qk", "mlp", "embed", "pos_embed", "unembed"]
PARTS: tuple[Part, ...] = get_args(Part)
#: Those that share out all parameters; ``qk`` is within ``attn``.
WHOLE_PARTS: tuple[Part, ...] = tuple(part for part in PARTS if part != "qk")
#: More threads than a machine has; torch crashes where it cannot start them all.
MAX_THREADS = 1024
#: What says how the learning rate falls. A run may be given another schedule while no step taken is changed by it.
SCHEDULE = ("schedule", "schedule_start", "schedule_end", "schedule_floor")


class TrainConfig(BaseModel):
    """Holds the settings by which a run trains; exactly these are saved in ``run.json``.

    Attributes:
        steps: parameter updates. A larger number extends a run that is there.
        batch_size: fresh examples per step; ``None``: the whole train split every step (finite tasks only).
        optimizer: ``"adam"`` adds weight decay to the gradient, ``"adamw"`` decouples it, ``"sgd"`` takes no betas.
        l1: times the sum of the absolute values of all parameters that train, added to the loss that is minimised.
        momentum: of ``"sgd"`` alone.
        warmup_steps: the learning rate rises linearly over so many updates.
        schedule: after that it stays, or falls along a line or half a cosine from step ``schedule_start`` (``None``:
            the end of the warm-up) to step ``schedule_end``, then stays. Steps are counted from the run's first update,
            whatever ``steps`` is: a shorter run has the same first steps.
        schedule_floor: the share of ``learning_rate`` that it falls to.
        clip_norm: largest global gradient norm, applied after the Grokfast filter; ``None``: no clipping.
        grokfast: ``"ema"``: g ← g + λ h with h ← α h + (1 − α) g; ``"ma"``: h is the mean of the last
            ``grokfast_window`` gradients, and nothing is added before there are as many (Lee et al. 2024).
        grokfast_start: of ``"ema"``: h before the first step, the first gradient (their code) or zero (MIIII's code).
        dropout: rate, applied to the residual stream after each addition to it (MIIII, code).
        dropout_masks: one mask for each sample, or one shared by the whole batch (MIIII, code).
        precision: ``"bf16"`` runs the forward and backward products in bfloat16 (autocast), weights stay float32;
            ``"tf32"`` rounds the factors of float32 products to 11 significant bits (a CUDA device alone).
        start_from: a REF of one checkpoint to take weights from.
        start_parts: the parts taken from there, the others are drawn from the seed; none named: those that do not
            train, or all where all do.
        train_parts: the parts that train, the others keep what they begin with; none named: all. ``qk``: the weights
            and biases of queries and keys, a part of ``attn``.
        attention_from: a REF of one checkpoint, whose attention patterns on each batch stand in the place of the
            model's own, in training and in validation.
        attention_layers: the layers in which they do, counted from 0; none named: all.
        seed: initialisation, batches and dropout; batch s is a function of (seed, "batch", s).
        log_every, eval_samples: every so many steps, metrics on a fixed validation sample and the step's batch
            (``eval_samples = None``: the whole validation split of a finite task).
        checkpoint_every: checkpoints at 0, 1, 2, 4, 8, ... up to this step, then at its multiples, at the task's
            published steps, at ``checkpoint_at`` and at the end.
        gradient_norms_every: log the gradient norm of every tensor, before and after the filter; 0: never.
        observe, observe_every, observe_samples: store these hooked activations on a fixed batch.
        threads: CPU threads; ``None``: torch's default for a new run, the stored number for a resumed one.
        deterministic: refuse non-deterministic kernels (CUDA).
    """

    # An infinity would be null in run.json, and so be another setting when the run is resumed.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # Larger numbers are slips, and some do not fit what counts them.
    steps: int = Field(1000, ge=0, le=10**9)
    batch_size: int | None = Field(None, ge=1, le=10**9)
    optimizer: Literal["adam", "adamw", "sgd"] = "adamw"
    momentum: float = Field(0.0, ge=0, lt=1)
    learning_rate: float = Field(1e-3, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    l1: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = Field(1e-8, gt=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    schedule_start: int | None = Field(None, ge=0, le=10**9)
    schedule_end: int | None = Field(None, ge=1, le=10**9)
    schedule_floor: float = Field(0.0, ge=0, le=1)
    clip_norm: float | None = Field(None, gt=0)
    grokfast: Literal["ema", "ma"] | None = None
    grokfast_alpha: float = Field(0.98, ge=0, lt=1)
    grokfast_lambda: float = Field(2.0, ge=0)
    grokfast_start: Literal["first-gradient", "zero"] = "first-gradient"
    grokfast_window: int = Field(100, ge=1)
    dropout: float = Field(0.0, ge=0, lt=1)
    dropout_masks: Literal["per-sample", "shared"] = "per-sample"
    precision: Literal["float32", "tf32", "bf16"] = "float32"
    start_from: str | None = Field(None, min_length=1)
    start_parts: tuple[Part, ...] = ()
    train_parts: tuple[Part, ...] = ()
    attention_from: str | None = Field(None, min_length=1)
    attention_layers: tuple[NonNegativeInt, ...] = ()
    seed: int = Field(0, ge=0, lt=2**63)
    log_every: int = Field(25, ge=1)
    eval_samples: int | None = Field(512, ge=1)
    checkpoint_every: int = Field(500, ge=1)
    checkpoint_at: tuple[NonNegativeInt, ...] = ()
    gradient_norms_every: int = Field(0, ge=0)
    observe: tuple[str, ...] = ()
    observe_every: int = Field(100, ge=1)
    observe_samples: int = Field(64, ge=1)
    threads: int | None = Field(None, ge=1, le=MAX_THREADS)
    deterministic: bool = False

    @model_validator(mode="after")
    def _settings_go_together(self) -> TrainConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), got {self.betas}")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum belongs to optimizer sgd, {self.optimizer} has betas")
        if self.start_parts and self.start_from is None:
            raise ValueError("start_parts needs start_from, the checkpoint that they come from")
        if self.start_from is not None and not self.start_parts and {*self.train_parts} >= {*WHOLE_PARTS}:
            raise ValueError("start_from would give nothing: every part trains; name start_parts")
        if self.attention_layers and self.attention_from is None:
            raise ValueError(
                "attention_layers needs attention_from, the checkpoint whose attention they are given"
            )
        return self

    @model_validator(mode="after")
    def _schedule_falls_after_the_warm_up(self) -> TrainConfig:
        """Refuses a schedule whose fall ends before it begins, or that begins within the warm-up."""
        start, end = self.schedule_start, self.schedule_end
        if self.schedule == "constant":
            given = [
                name for name in SCHEDULE if getattr(self, name) != type(self).model_fields[name].default
            ]
            if given:
                raise ValueError(f"{given[0]} belongs to schedule linear or cosine, this one is constant")
        elif end is None:
            raise ValueError(
                f"schedule {self.schedule} needs schedule_end, the step at which the rate has fallen"
            )
        elif start is not None and start < self.warmup_steps:
            raise ValueError(
                f"schedule_start = {start:,} lies within the warm-up of {self.warmup_steps:,} steps; choose it later"
            )
        elif end <= self._decay_start():
            raise ValueError(
                f"schedule_end = {end:,} does not come after step {self._decay_start():,}, where the rate begins to "
                "fall"
            )
        return self

    def learning_rate_at(self, step: int) -> float:
        """Returns the learning rate of update number ``step``, counted from 0: warm-up, then the schedule.

        The update at ``schedule_start`` is the last at the full rate, that at ``schedule_end`` the first at the floor.
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        start, end = self._decay_start(), self.schedule_end
        if end is None or step <= start:
            return self.learning_rate
        if step >= end:
            return self.learning_rate * self.schedule_floor
        fallen = (step - start) / (end - start)
        if self.schedule == "cosine":
            fallen = (1 - math.cos(math.pi * fallen)) / 2
        return self.learning_rate * (1 - (1 - self.schedule_floor) * fallen)

    def _decay_start(self) -> int:
        return self.warmup_steps if self.schedule_start is None else self.schedule_start

    @property
    def state_copies(self) -> int:
        """Returns how many times the parameters that train the optimiser's moments and the filter's memory are."""
        moments = (1 if self.momentum else 0) if self.optimizer == "sgd" else 2
        # The moving average keeps the sum of its gradients too, in float64.
        return moments + {None: 0, "ema": 1, "ma": self.grokfast_window + 2}[self.grokfast]

    def checkpoint_steps(self, published: tuple[int, ...] = ()) -> list[int]:
        """Returns the steps whose weights are stored: log-spaced, linear, published ones, and the last."""
        doubling = {0}
        step = 1
        while step < self.checkpoint_every:
            doubling.add(step)
            step *= 2
        linear = range(self.checkpoint_every, self.steps + 1, self.checkpoint_every)
        wanted = {*doubling, *linear, *published, *self.checkpoint_at, self.steps}
        return sorted(step for step in wanted if 0 <= step <= self.steps)


@dataclass(frozen=True)
class ResolvedConfig:
    """A task name and the three sections of a run's configuration, preset and overrides merged."""

    task_name: str
    preset: str
    task: dict[str, Any]
    model: dict[str, Any]
    train: TrainConfig

    def make_task(self) -> Task:
        """Returns the task with its settings; this imports torch."""
        return registry.get(self.task_name, **self.task)


def parse_train_config(values: Mapping[str, Any]) -> TrainConfig:
    """Returns a validated :class:`TrainConfig`."""
    try:
        return TrainConfig(**values)
    except ValidationError as error:
        raise UserError(validation_error_line(error, "train", TrainConfig.model_fields)) from None


def read_task_presets(task_name: str) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Returns the presets of a task; torch-free for a built-in one."""
    if task_name in registry.BUILT_IN:
        return registry.built_in_presets(task_name)
    if task_name not in registry.task_names():
        raise UserError(registry.unknown_task_message(task_name))
    return registry.task_class(task_name).presets


def resolve_config(
    task_name: str, preset: str = "cpu", overrides: Mapping[str, str] | None = None
) -> ResolvedConfig:
    """Merges a preset and overrides such as ``{"train.steps": "100"}``.

    Values are as typed: JSON, or else a string; of keys that hold a list also ``0.9, 0.95``.
    """
    presets = read_task_presets(task_name)
    if preset not in presets:
        raise UserError(f"task {task_name!r} has no preset {preset!r}: presets are {', '.join(presets)}")
    sections: dict[str, dict[str, Any]] = {name: dict(presets[preset].get(name, {})) for name in SECTIONS}
    lists = list_valued_keys(task_name)
    for key, text in (overrides or {}).items():
        section, dot, name = key.partition(".")
        if not dot or section not in SECTIONS or not name:
            raise UserError(f"no setting {key!r}: keys start with task., model. or train., as in train.steps")
        sections[section][name] = parse_setting_value(text, is_list=key in lists)
    train = parse_train_config(sections["train"])
    return ResolvedConfig(task_name, preset, sections["task"], sections["model"], train)


def list_valued_keys(task_name: str) -> frozenset[str]:
    """Returns the keys, such as ``train.betas``, whose value is a list; torch-free for a built-in task."""
    lists = {f"train.{name}" for name in list_valued_fields(TrainConfig)}
    if task_name in registry.BUILT_IN:
        return frozenset({*lists, *registry.LIST_KEYS.get(task_name, ())})
    task_type = registry.task_class(task_name)
    lists |= {f"task.{name}" for name in list_valued_fields(task_type)}
    return frozenset(lists | {f"model.{name}" for name in list_valued_fields(task_type.Model)})


def parse_setting_value(text: str, *, is_list: bool = False) -> Any:
    """Returns a value as typed on a command line: JSON where it reads as JSON, a plain string otherwise.

    Args:
        is_list: the key holds a list: ``2, 3`` is one, ``2`` has one element, and nothing is the empty one.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = {"none": None, "None": None, "True": True, "False": False}.get(text, text)
    if not is_list or value is None or isinstance(value, list):
        return value
    return [parse_setting_value(part.strip()) for part in text.split(",")] if text.strip() else []
