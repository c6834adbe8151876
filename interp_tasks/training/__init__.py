"""The shared trainer: :func:`train`, and :class:`TrainConfig` for every setting of it.

``train`` loads on first use; configuring a run needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interp_tasks.training.config import Resolved, TrainConfig, resolve_config

if TYPE_CHECKING:
    from interp_tasks.training.trainer import train

__all__ = ["Resolved", "TrainConfig", "resolve_config", "train"]


def __getattr__(name: str) -> Any:
    if name != "train":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from interp_tasks.training.trainer import train

    globals()["train"] = train
    return train
