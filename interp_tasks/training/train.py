"""Trains a model on a task, or goes on with a stored run: ``train``, and what it sets up."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from interp_tasks.checkpoints.checkpoint import config_to_json
from interp_tasks.checkpoints.checkpoint_refs import resolve_one_ref
from interp_tasks.checkpoints.run_reader import check_run_target, read_run
from interp_tasks.checkpoints.run_writer import LearningRateFromSettings, RunFolder
from interp_tasks.devices import check_device, float32_matmul_precision
from interp_tasks.errors import UserError
from interp_tasks.training.config import (
    MAX_THREADS,
    SCHEDULE,
    ResolvedConfig,
    TrainConfig,
    parse_train_config,
    read_task_presets,
)
from interp_tasks.training.observers_and_clock import Observer
from interp_tasks.training.run_provenance import run_provenance
from interp_tasks.training.start_weights_and_freezing import copy_weights, freeze_untrained, source_record
from interp_tasks.training.training_loop import StepProgress, TrainingLoop
from tasks.base import Task
from tasks.model_settings import ModelSettings, validation_error_line
from tasks.registry import get
from tasks.seeds_and_device_tensors import derive_seed

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer


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
    progress: StepProgress | None = None,
    stop: Callable[[], bool] | None = None,
) -> Path:
    """Train a task's model into a run folder, or continue or extend the run that the folder holds.

    Args:
        task: a task, or the name of one.
        out: the run folder.
        preset: a preset of the task, whose sections the other arguments then override key by key.
            With a task *instance* its ``task`` section is not used.
        settings: architecture, for ``task.build_model``; keys of ``task.Model``.
        config: how to train; keys of ``TrainConfig``.
        model: a ``HookedTransformer`` of your own to train instead of ``task.build_model``; it is trained in place.
            To resume, pass one of the same configuration.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or ``"mps"``.
        observers: called after each update whose number their ``every`` divides; what they return joins that log line.
        progress: called as progress(step, steps, line) with every logged line.
        stop: asked after each update whether to stop there.

    Returns:
        The run folder.

    Raises:
        UserError: before any work, for an impossible config, weights to start from that do not fit or have
            changed, a folder that holds another run or lies in one, or one that is being written; during
            training, if the weights are no longer finite.
        Stopped: where ``stop`` said so, once all is stored that the same call goes on from.
        TaskError: if the model cannot take the task's inputs.
    """
    out = Path(out)
    check_run_target(out)
    task, settings, config = resolve_settings(task, preset, settings, config)
    check_device(device)
    check_precision(config, device)
    config = config_with_threads(config, out)
    model, described = prepare_model(task, settings, config, device, model)
    with reproducible_run(config):
        loop = TrainingLoop(task, model, config, device, observers, progress)
        info = run_provenance(task, config, preset, device) | loop.loop_part_of_run_json()
        schedule = LearningRateFromSettings(
            SCHEDULE, lambda train: parse_train_config(train).learning_rate_at
        )
        defaults = {"train": TrainConfig().model_dump(mode="json")}
        with RunFolder.open(out, described, info, defaults=defaults, schedule=schedule) as folder:
            loop.run(folder, stop)
    return out


def train_resolved(
    configuration: ResolvedConfig,
    out: str | Path,
    *,
    seed: int | None = None,
    steps: int | None = None,
    **how: Any,
) -> Path:
    """Trains a resolved configuration in a run folder; ``seed`` and ``steps`` replace its own, ``how`` is passed on."""
    changes = {key: value for key, value in {"seed": seed, "steps": steps}.items() if value is not None}
    config, preset = configuration.train.model_copy(update=changes), configuration.preset
    return train(
        configuration.make_task(), out=out, preset=preset, settings=configuration.model, config=config, **how
    )


def prepare_model(
    task: Task,
    settings: ModelSettings,
    config: TrainConfig,
    device: str,
    model: HookedTransformer | None = None,
) -> tuple[HookedTransformer, dict[str, Any]]:
    """Returns the model before its first update, on its device, and the content that ``run.json`` compares."""
    own_model = model is not None
    if model is None:
        model = task.build_model(config.seed, settings)
    task.check_model(model)
    sources = {}
    if config.start_from is not None:
        sources["start"] = copy_weights(model, config)
        if not own_model:
            task.constrain(model, settings)
    if config.attention_from is not None:
        teacher = resolve_one_ref(config.attention_from, f"train.attention_from={config.attention_from}")
        sources["attention"] = source_record(teacher)
    freeze_untrained(model, config)
    model.to(device, print_details=False)
    described = {
        "task": {"name": task.name, **task.model_dump(mode="json")},
        "model": {"own": config_to_json(model.cfg, torch.float32)}
        if own_model
        else settings.model_dump(mode="json"),
        "train": config.model_dump(mode="json"),
        **sources,
    }
    return model, described


def resolve_settings(
    task: str | Task,
    preset: str | None,
    settings: ModelSettings | Mapping[str, Any] | None,
    config: TrainConfig | Mapping[str, Any] | None,
) -> tuple[Task, ModelSettings, TrainConfig]:
    """Returns the task, the model's settings and the training's, those of a preset beneath those that are given."""
    name = task if isinstance(task, str) else task.name
    sections: Mapping[str, Mapping[str, Any]] = {}
    if preset is not None:
        presets = read_task_presets(name) if isinstance(task, str) else task.presets
        if preset not in presets:
            raise UserError(f"task {name!r} has no preset {preset!r}: presets are {', '.join(presets)}")
        sections = presets[preset]
    if isinstance(task, str):
        task = get(name, **sections.get("task", {}))
    if not isinstance(settings, ModelSettings):
        settings = parse_model_settings(task, {**sections.get("model", {}), **(settings or {})})
    if not isinstance(config, TrainConfig):
        config = parse_train_config({**sections.get("train", {}), **(config or {})})
    return task, settings, config


def parse_model_settings(task: Task, values: Mapping[str, Any]) -> ModelSettings:
    """Returns validated architecture settings of a task."""
    try:
        return task.Model(**values)
    except ValidationError as error:
        raise UserError(validation_error_line(error, "model", task.Model.model_fields)) from None


def config_with_threads(config: TrainConfig, out: Path) -> TrainConfig:
    """Returns the config with the run's stored number of threads, else the current one: sums depend on it."""
    if config.threads is not None:
        return config
    threads = torch.get_num_threads()
    if (out / "run.json").is_file():
        config_there = read_run(out).get("config")
        section = config_there.get("train") if isinstance(config_there, dict) else None
        stored = section.get("threads") if isinstance(section, dict) else None
        threads = stored if type(stored) is int and 1 <= stored <= MAX_THREADS else threads
    return config.model_copy(update={"threads": threads})


def check_precision(config: TrainConfig, device: str) -> None:
    """Refuses a precision that a device has not."""
    if config.precision == "tf32" and torch.device(device).type != "cuda":
        raise UserError(
            f"train.precision=tf32 is for CUDA devices, not for {device}: use --device cuda or train.precision=float32"
        )


@contextlib.contextmanager
def reproducible_run(config: TrainConfig) -> Iterator[None]:
    """Sets threads, deterministic kernels, denormals and torch's generator for the run, and restores them."""
    threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    deterministic = torch.are_deterministic_algorithms_enabled()
    # Whether numbers below 1.2e-38 are 0 here.
    flushed = not bool(torch.tensor([1e-39]) * 1.0)
    torch.set_num_threads(config.threads or threads)
    # Once the training data are known, gradients hold numbers below 1e-38, which CPUs are slow with. The threads of a
    # pool keep the arithmetic they began with, so that of several some would flush and others not.
    torch.set_flush_denormal(flushed or config.threads == 1)
    if config.deterministic:
        # On CUDA torch refuses every matrix product in deterministic mode without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic or deterministic)
    torch.manual_seed(derive_seed(config.seed, "global"))
    try:
        with float32_matmul_precision(rounded=config.precision == "tf32"):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(flushed)
        torch.set_rng_state(random_state)
        torch.use_deterministic_algorithms(deterministic)
