"""Says how CUDA devices multiply float32 matrices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def float32_products(*, rounded: bool) -> Iterator[None]:
    """Has CUDA devices round the factors of float32 products to tf32, or compute them as they are; restores what was
    set.
    """
    matmul = torch.backends.cuda.matmul
    # Torch before 2.9 has the other; reading that one, where this one has been set, is an error.
    name, values = (
        ("fp32_precision", ("ieee", "tf32"))
        if hasattr(matmul, "fp32_precision")
        else ("allow_tf32", (False, True))
    )
    before = getattr(matmul, name)
    setattr(matmul, name, values[rounded])
    try:
        yield
    finally:
        setattr(matmul, name, before)
