"""The number of rows (examples × variants) in one forward: one bound for every verb that runs a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from circuits.arguments import is_whole
from circuits.errors import CircuitsError
from circuits.model.hooked_model import HookedModel

Result = TypeVar("Result")

#: Tokens in one forward, and numbers that it and its caller hold at one time, on a processor.
TOKENS, NUMBERS = 2**13, 2**27
#: Numbers that one layer holds in a forward on a processor: with more, its caches serve it less well.
IN_CACHE = 2**25
# On an accelerator calls are what costs, and its memory is larger: so many times as much.
_ON_DEVICE = 16
# Tensors of the size of the output at one time: logits, their differences from the clean ones, the metric's own.
_OUTPUTS = 6


def choose_batch_size(
    hooked: HookedModel,
    length: int,
    given: Any,
    caller: str,
    *,
    held_layers: int = 1,
    kept: int = 0,
    read: int | None = None,
) -> int:
    """Returns how many rows of `length` tokens run in one forward.

    By default as many as keep to `TOKENS` and to `NUMBERS`: what a token takes in its largest layer, its logits at the
    `read` positions (None: all), and what the caller has `kept`; 16 times as many on an accelerator. On a processor a
    layer also keeps to `IN_CACHE`.

    Args:
        given: the user's `batch_size=`, which is used as it is; None: the default.
        held_layers: layers whose activations are held at one time; all of them where gradients are taken.
    """
    if given is not None:
        if not is_whole(given, 1):
            raise CircuitsError(f"{caller}: batch_size={given!r}; give the rows in a forward, at least 1")
        return int(given)
    cfg: Any = hooked.model.cfg
    sizes = (getattr(cfg, name, 0) for name in ("d_vocab_out", "d_vocab"))
    width = next((int(size) for size in sizes if size and size > 0), 1)
    outputs = _OUTPUTS * width * (length if read is None else read) // length
    # What a layer holds for each token, with the gradients where these are taken.
    stream, heads = hooked.sizes["d_model"] or 1, hooked.n_heads * (hooked.sizes["d_head"] or 1)
    mlp = (hooked.sizes["d_mlp"] or 4 * stream) * (6 if getattr(cfg, "gated_mlp", False) else 4)
    layer = 12 * stream + 12 * heads + mlp + 5 * hooked.n_heads * length
    tokens = min(TOKENS, NUMBERS // max(1, held_layers * layer + outputs + kept))
    is_on_processor = hooked.device.type == "cpu"
    return max(1, (min(tokens, IN_CACHE // layer) if is_on_processor else _ON_DEVICE * tokens) // length)


def run_within_memory(size: int, run: Callable[[int], Result]) -> Result:
    """Returns `run(size)`; where an accelerator runs out of memory, `run` of half the size, down to 1."""
    while True:
        try:
            return run(size)
        except torch.OutOfMemoryError:
            if size == 1:
                raise
        # Outside of `except`, whose traceback holds the tensors.
        size //= 2
        torch.cuda.empty_cache()
