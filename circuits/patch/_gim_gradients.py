"""GIM's backward pass: gradients through attention and norms that do not vanish where a model corrects itself.

Edin et al. 2025, "GIM: Improved Interpretability for Large Language Models" (arXiv:2505.17630): the softmax's gradient
is that at temperature 2, the scale of a norm is a constant, and the gradient at a product is divided among its factors:
1/4 to queries, 1/4 to keys, 1/2 to values. The forward pass stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from circuits.logit_lens._stream_parts_and_read_out import Norm
from circuits.model.hooked_model import HookedModel
from circuits.model.hooks import Function
from circuits.model.softmax_hooks import softmax_over_keys

TEMPERATURE = 2.0
SHARES = {"q": 0.25, "k": 0.25, "v": 0.5}
Hooked = tuple[str, Function]


def add_gim_hooks(recorders: Iterable[Hooked], hooked: HookedModel) -> list[Hooked]:
    """Returns what to call at which hooks so that a backward pass through a run, and to what is recorded, is GIM's."""
    before: list[Hooked] = []
    after: list[Hooked] = []
    for scale in (hook for hook in hooked.hooks if hook.endswith(".hook_scale")):
        path = scale.removesuffix(".hook_scale")
        if hooked.bridged:
            # It may call a norm of its own, which reads no scale at a hook. What is recorded may be a norm's output.
            keep, freeze = _frozen_scale_hooks(hooked, path)
            before.append((f"{path}.hook_out", freeze))
            after.append((f"{path}.hook_in", keep))
        else:
            after.append((scale, torch.Tensor.detach))
    for layer in range(hooked.n_layers):
        attention = f"blocks.{layer}.attn"
        after += [(f"{attention}.hook_{name}", _make_gradient_scaler(part)) for name, part in SHARES.items()]
        keep, at_temperature = _softmax_gradient_hooks()
        after += [(f"{attention}.hook_attn_scores", keep), (f"{attention}.hook_pattern", at_temperature)]
    return [*before, *recorders, *after]


def _frozen_scale_hooks(hooked: HookedModel, path: str) -> tuple[Function, Function]:
    """Returns what keeps the input of a norm, and what gives its output the gradient at a constant scale."""
    weight = next(hooked.model.get_submodule(path).parameters(), torch.ones(hooked.sizes["d_model"] or 1))
    random_input = torch.randn(1, *weight.shape, device=hooked.device).to(weight.dtype)[None]
    norm = Norm.fit(hooked, path, random_input)
    seen: list[Tensor] = []

    def freeze_scale(output: Tensor) -> Tensor:
        x = seen.pop()
        return with_gradient_of(output, norm.apply_at_scale(x, norm.scale(x.detach())))

    return seen.append, freeze_scale


def _make_gradient_scaler(share: float) -> Function:
    """Returns a function that passes an activation on, and that part of its gradient back."""
    return lambda x: with_gradient_of(x, share * x)


def _softmax_gradient_hooks() -> tuple[Function, Function]:
    """Returns what reads a layer's scores, and what gives its pattern the gradient at another temperature."""
    seen: list[Tensor] = []
    # Times the temperature, as the softmax at temperature T has 1/T of the gradient of that of scores/T.
    return (
        lambda scores: seen.append(TEMPERATURE * softmax_over_keys(scores / TEMPERATURE)),
        lambda pattern: with_gradient_of(pattern, seen.pop()),
    )


def with_gradient_of(value: Tensor, other: Tensor) -> Tensor:
    """Returns the value of one tensor with the gradient of another."""
    return value.detach() + (other - other.detach())
