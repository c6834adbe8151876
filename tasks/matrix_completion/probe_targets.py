"""The targets of probes in models of matrix completion."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tasks.base import ProbeTarget, ProbeTargets


def matrix_targets(values: Float[Tensor, "batch n m"], hidden: Bool[Tensor, "batch n m"]) -> ProbeTargets:
    """Returns the targets of Gopalani, Lubana, Hu 2024, figure 6 and appendix K, with splits ``hidden`` and
    ``observed``.

    ``true_element``: the entry itself. ``masked_row``: the entry's row of X with hidden entries 0. ``left_vector``,
    ``right_vector``: the first singular vectors of X, with the sign that the solver gives them, as published.
    ``left_vector_fixed``, ``right_vector_fixed``: with the sign that makes the sum of their entries positive.
    ``left_projector``, ``right_projector``: u uᵀ and v vᵀ, which do not depend on the sign.
    """
    left, _, right = torch.linalg.svd(values.double(), full_matrices=False)
    u, v = left[:, :, 0], right[:, 0]
    rows = values.masked_fill(hidden, 0).repeat_interleave(values.shape[2], 1)
    targets = {
        "true_element": values.flatten(1),
        "masked_row": rows,
        "left_vector": u[:, None],
        "right_vector": v[:, None],
        "left_vector_fixed": sign_fixed(u)[:, None],
        "right_vector_fixed": sign_fixed(v)[:, None],
        "left_projector": (u[:, :, None] * u[:, None]).flatten(1)[:, None],
        "right_projector": (v[:, :, None] * v[:, None]).flatten(1)[:, None],
    }
    flat = hidden.flatten(1)
    return ProbeTargets(
        {name: ProbeTarget(target, "regression") for name, target in targets.items()},
        {"hidden": flat, "observed": ~flat},
    )


def sign_fixed(vectors: Float[Tensor, "batch entry"]) -> Float[Tensor, "batch entry"]:
    """Returns each vector, or its negative: the one whose entries have a positive sum."""
    return torch.where(vectors.sum(1, keepdim=True) < 0, -vectors, vectors)
