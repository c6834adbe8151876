"""Untrained models of a checkpoint's task and architecture, with another seed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.measurement.loaded_checkpoints import LoadedCheckpoint

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer

#: Settings of a task's model by the field of the config that holds them.
HELD_AS = {
    **{name: name for name in ("n_layers", "n_heads", "d_model", "d_head", "n_ctx", "attn_only", "act_fn")},
    "normalization": "normalization_type",
    "attention": "attention_dir",
}


def build_untrained(subject: LoadedCheckpoint, draw: int = 0) -> HookedTransformer:
    """Returns a model of the subject's architecture, initialised as its run was where known, else by its task.

    The seed is the subject's, but no run's: no checkpoint began as this model.

    Args:
        draw: which of several such models.
    """
    from pydantic import ValidationError

    from tasks import derive_seed
    from tasks.model_building import is_post_norm

    task, device = subject.task, subject.tokens.device
    assert task is not None
    if task.name == "prompts":
        model = build_reinitialised(subject, derive_seed(subject.seed, "untrained", draw))
        return model.to(device, print_details=False)
    cfg, why = subject.model.cfg, ""
    settings = model_settings_of_run(subject) | {name: getattr(cfg, held) for name, held in HELD_AS.items()}
    settings |= {"norm": "post" if is_post_norm(subject.model) else "pre"}
    settings |= {} if cfg.attn_only else {"d_mlp": cfg.d_mlp}
    try:
        label = ("untrained", draw) if draw else ("untrained",)
        model = task.build_model(derive_seed(subject.seed, *label), task.Model(**settings))
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))} = {first['input']!r}"
    else:
        own, built = (
            {name: [*p.shape] for name, p in one.named_parameters()} for one in (subject.model, model)
        )
        differ = [name for name in {**own, **built} if own.get(name) != built.get(name)]
        why = f"{differ[0]} is {built.get(differ[0])}, not {own.get(differ[0])}" if differ else ""
    if why:
        raise UserError(
            f"{subject.labels['ref']}: task {task.name!r} builds no untrained model of its architecture ({why}); "
            "leave that control out with --no-untrained"
        )
    return model.to(device, print_details=False)


def build_reinitialised(subject: LoadedCheckpoint, seed: int) -> HookedTransformer:
    """Returns the subject's architecture with weights drawn as transformer-lens draws them for it."""
    import torch

    from interp_tasks.checkpoints.checkpoint import model_from_json
    from tasks.model_building import global_randomness_untouched

    model = model_from_json(subject.stored.meta["model"], subject.stored.path)
    with global_randomness_untouched():
        torch.manual_seed(seed)
        model.init_weights()
    return model


def model_settings_of_run(subject: LoadedCheckpoint) -> dict[str, Any]:
    """Returns the settings that a model's weights do not show, from the run of this task that the checkpoint is in."""
    from interp_tasks.checkpoints.run_reader import RUN_FILE, read_run

    run = subject.stored.run_path
    stored = read_run(run).get("config", {}) if run is not None and (run / RUN_FILE).is_file() else {}
    is_own = stored.get("task", {}).get("name") == getattr(subject.task, "name", None)
    return dict(stored.get("model", {})) if is_own else {}
