"""Defines observers of a run, which log more than its loss, each at its own interval."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from safetensors.torch import save_file
from torch import Tensor

from interp_tasks.errors import UserError
from tasks.base import Batch

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer


@runtime_checkable
class Observer(Protocol):
    """Called after update ``step`` if ``step % every == 0``; what it returns is merged into that step's log line."""

    every: int

    def __call__(self, step: int, model: HookedTransformer, run: Path) -> Mapping[str, Any]: ...


def check_observed(names: Sequence[str], model: HookedTransformer) -> None:
    """Refuses names that the model has no hook for.

    Raises:
        UserError: naming some that it has.
    """
    for name in names:
        if name not in model.hook_dict:
            raise UserError(
                f"no activation {name!r} to observe: names are such as {', '.join(list(model.hook_dict)[:9])}"
            )


class Activations:
    """Named activations on one fixed batch, stored as ``RUN/activations/00000100.safetensors``.

    Raises:
        UserError: for a name that the model has no hook for.
    """

    def __init__(self, names: tuple[str, ...], every: int, batch: Batch, model: HookedTransformer) -> None:
        self.names, self.every, self.batch = names, every, batch
        check_observed(names, model)

    def __call__(self, step: int, model: HookedTransformer, run: Path) -> Mapping[str, Any]:
        with torch.no_grad():
            _, cache = model.run_with_cache(self.batch.tokens, names_filter=list(self.names))
        path = run / "activations" / f"{step:08d}.safetensors"
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_suffix(".partial")
        tensors = {name: cache[name].contiguous().cpu() for name in self.names}
        save_file({"tokens": self.batch.tokens.cpu(), **tensors}, temporary, {"step": json.dumps(step)})
        os.replace(temporary, path)
        return {}


class GradientNorms:
    """Frobenius norm of the gradient of every tensor, as the update saw it."""

    def __init__(self) -> None:
        self.line: dict[str, dict[str, float]] = {}

    def __call__(self, stage: str, gradients: Mapping[str, Tensor]) -> None:
        norms = [gradient.norm() for gradient in gradients.values()]
        self.line[stage] = dict(zip(gradients, torch.stack(norms).tolist() if norms else (), strict=True))
