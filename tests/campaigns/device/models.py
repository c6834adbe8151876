"""Models on two devices, what verbs of ``circuits`` are called with, and the check of a verb."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache as cached
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.campaigns.device.agreement import Check, Tolerance
from tests.circuits.conftest import HOOKED, SHAPES, build
from tests.circuits.families import CONFIGS, WORDS, boot, save

#: Rotary tables and RMS norms of Hugging Face's models are in single precision whatever the model is.
DOUBLE, SINGLE = Tolerance(1e-8, 1e-9, 1e-12), Tolerance(1e-3, 1e-4, 1e-7)
KINDS = {"causal": DOUBLE, "post-norm": DOUBLE, "gpt2": DOUBLE, "llama": SINGLE, "pythia": SINGLE}
LENGTH = 6
FEW: dict[str, Any] = {"draws": 50, "flips": 99}


class Models:
    """Models of each kind by device and seed, and the folders that bridges are made of."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch

    @cached  # noqa: B019
    def __call__(self, kind: str, device: str, seed: int) -> Any:
        said = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            warnings.simplefilter("ignore")
            if kind not in CONFIGS:
                return build(seed, HOOKED, **SHAPES[kind], d_mlp=32).to(device)
            folder = self.scratch / f"{kind}-{seed}"
            return boot(folder if folder.exists() else save(kind, folder, seed), device=device)


@dataclass(frozen=True)
class Given:
    """What verbs are called with: models on ``device``, and tokens and masks where ``place`` puts them."""

    kind: str
    device: str
    model: Any
    donor: Any
    place: Callable[[Tensor], Tensor]

    def tokens(self, seed: int, n: int = 12) -> Tensor:
        low, high = (3, WORDS) if self.kind in CONFIGS else (0, 11)
        drawn = torch.randint(low, high, (n, LENGTH), generator=torch.Generator().manual_seed(seed))
        return self.place(drawn)

    @property
    def here(self) -> Tensor:
        return self.tokens(1)

    @property
    def other(self) -> Tensor:
        return self.tokens(2)

    @property
    def batch(self) -> dict[str, Any]:
        return {"batch": self.here, **FEW}

    @property
    def bridge(self) -> bool:
        return self.kind in CONFIGS

    @property
    def parallel(self) -> bool:
        return self.kind == "pythia"


Verb = Callable[[Given], Any]


def loss(output: Tensor, batch: Tensor) -> Tensor:
    """As users write it: ``batch`` must come on the device of the output."""
    return nn.functional.cross_entropy(output[:, -3:].mT, batch[:, -3:], reduction="none").mean(1)


def measures(output: Tensor, batch: Tensor) -> dict[str, Tensor]:
    right = (output[:, -3:].argmax(-1) == batch[:, -3:]).double().mean(1)
    return {"loss": loss(output, batch), "right": right}


def check_of(function: Verb, name: str, models: Models | None = None, kind: str = "") -> Check:
    def called(device: str, place: str) -> Any:
        donor, model = (models(kind, device, seed) if models else None for seed in (7, 0))
        torch.manual_seed(0)
        return function(Given(kind, device, model, donor, lambda tensor: tensor.to(place)))

    def there(device: str) -> Iterator[tuple[str, Any]]:
        for place in dict.fromkeys(("cpu", device)):
            yield f"tokens on {place}", called(device, place)

    of = f"{name}, {kind}" if kind else name
    return Check(
        f"circuits, {kind or 'no model'}", of, KINDS.get(kind, DOUBLE), lambda: called("cpu", "cpu"), there
    )
