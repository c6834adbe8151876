"""GIM's backward pass: gradients through attention and norms that do not vanish where a model corrects itself.

Edin et al. 2025, "GIM: Improved Interpretability for Large Language Models" (arXiv:2505.17630): the softmax's gradient
is that at temperature 2, the scale of a norm is a constant, and the gradient at a product is divided among its factors:
1/4 to queries, 1/4 to keys, 1/2 to values. The forward pass stays as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.model.hooked_model import HookedModel
from circuits.model.hooks import Function

TEMPERATURE = 2.0
SHARES = {"q": 0.25, "k": 0.25, "v": 0.5}


def gim_functions(surface: HookedModel, caller: str) -> list[tuple[str, Function]]:
    """Returns what to call at which hooks so that a backward pass through a run is GIM's.

    Raises:
        CircuitsError: for a bridge, in which the scale of a norm has no hook.
    """
    if surface.bridged:
        raise CircuitsError(
            f'{caller}: method "gim" needs a HookedTransformer: bridges do not say what a norm divides by'
        )
    functions: list[tuple[str, Function]] = [
        (hook, torch.Tensor.detach) for hook in surface.hooks if hook.endswith(".hook_scale")
    ]
    for layer in range(surface.n_layers):
        attention = f"blocks.{layer}.attn"
        functions += [(f"{attention}.hook_{name}", _share(part)) for name, part in SHARES.items()]
        keep, at_temperature = _softmax()
        functions += [(f"{attention}.hook_attn_scores", keep), (f"{attention}.hook_pattern", at_temperature)]
    return functions


def _share(part: float) -> Function:
    """Returns a function that passes an activation on, and that part of its gradient back."""
    return lambda x: with_gradient_of(x, part * x)


def _softmax() -> tuple[Function, Function]:
    """Returns what keeps a layer's scores, and what gives its pattern the gradient at another temperature."""
    seen: list[Tensor] = []

    def at_temperature(pattern: Tensor) -> Tensor:
        # Times the temperature, as the softmax at temperature T has 1/T of the gradient of that of scores/T.
        return with_gradient_of(pattern, TEMPERATURE * (seen.pop() / TEMPERATURE).softmax(-1))

    return seen.append, at_temperature


def with_gradient_of(value: Tensor, other: Tensor) -> Tensor:
    """Returns the value of one tensor with the gradient of another."""
    return value.detach() + (other - other.detach())
