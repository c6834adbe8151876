"""Compresses the data of a page: deflated text, and arrays quantised to evenly spaced levels."""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Numbers of levels between the smallest and the largest value, tried in turn until the text is short enough.
LEVELS = (65534, 4094, 254)


def deflated(content: str | bytes) -> str:
    """Returns text for a script element, which the page inflates."""
    raw = content.encode() if isinstance(content, str) else content
    return base64.b64encode(zlib.compress(raw, 6)).decode()


@dataclass(frozen=True)
class Packed:
    """Numbers ``[frame row column]`` in a text.

    Attributes:
        low, unit: a number is ``low + unit * level``, exact to half a ``unit``; ``levels + 1`` stands for NaN.
        data: the low bytes of all levels, then the high bytes, deflated.
    """

    shape: tuple[int, int, int]
    low: float
    unit: float
    levels: int
    data: str

    def described(self) -> dict[str, Any]:
        return dict(vars(self))


def pack(values: NDArray[np.floating[Any]], budget: int | None = None) -> Packed:
    """Packs numbers ``[frame row column]``, NaN included, into at most ``budget`` characters where possible.

    Raises:
        ValueError: for another number of axes, or infinite values.
    """
    import numpy as np

    if values.ndim != 3 or np.isinf(values).any():
        raise ValueError(f"pack: finite numbers [frame row column], got {list(values.shape)}")
    known = values[~np.isnan(values)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    for levels in LEVELS:
        unit = (high - low) / levels
        scaled = np.rint((values - low) / (unit or 1.0))
        codes = np.where(np.isnan(scaled), levels + 1, scaled).astype("<u2").ravel()
        planes = codes.view(np.uint8).reshape(-1, 2).T.tobytes()
        packed = Packed(values.shape, low, unit, levels, deflated(planes))
        if budget is None or len(packed.data) <= budget:
            break
    return packed
