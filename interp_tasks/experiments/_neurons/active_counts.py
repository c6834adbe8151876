"""Active frequencies over training as MIIII counts them (Syrkis & Søgaard 2024, figure 16, table 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

#: Standard deviations above the mean: of the code, which drew the figure, and of the text.
DEVIATIONS = (1, 2)
#: Fewer time points have no spread to speak of.
MIN_CHECKPOINTS = 3


def amplitudes(arranged: Tensor) -> NDArray[np.float64]:
    """Returns amplitudes [frequency feature] of activations [p p feature]: the mean over the first axis of |rfft2|,
    without row and column 0.

    Frequency 0 is among them, and the FFT is of length p − 1, both as in their code.
    """
    import torch

    spectrum = torch.fft.rfft2(arranged[1:, 1:].double(), dim=(0, 1)).abs()
    mean_spectrum: NDArray[np.float64] = spectrum.mean(0).cpu().numpy()
    return mean_spectrum


def active_counts(over_time: NDArray[np.float64], deviations: int) -> NDArray[np.int64]:
    """Counts the frequencies that are active, [time feature], of amplitudes [time frequency feature].

    Each frequency is divided by its sum over the times; active is what lies above mean + deviations · s.d. of all
    frequencies and times of the feature. The numbers depend on which times there are.
    """
    import numpy as np

    sums = over_time.sum(0)
    shares = np.divide(over_time, sums, out=np.zeros_like(over_time), where=sums > 0)
    level = shares.mean((0, 1)) + deviations * shares.std((0, 1))
    counts: NDArray[np.int64] = (shares > level).sum(1)
    return counts


def of_equal_size(over_time: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divides amplitudes [time frequency feature] by their sum over the frequencies other than 0, at each time.

    Frequency 0 stays among them, as in the published count.

    A feature that only grows and shrinks has all its frequencies above the mean at once, and none otherwise; the count
    of these tells that from a change of its frequencies.
    """
    import numpy as np

    sums = over_time[:, 1:].sum(1, keepdims=True)
    return np.divide(over_time, sums, out=np.zeros_like(over_time), where=sums > 0)
