"""Clusters neurons by the frequency that explains most of their variance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.fourier._spectrum import Label, Spectrum

#: The threshold in the code of Nanda et al. 2023.
THRESHOLD = 0.85


@dataclass(frozen=True, repr=False)
class Clusters:
    """Neurons, each with the frequency that explains most of its variance.

    Attributes:
        labels: the frequencies.
        best: the index in `labels` of the frequency that explains most, -1 for a neuron that does not vary.
        share: the share of the neuron's variance that this frequency explains.
        threshold: a neuron with a share up to this is in no cluster.
    """

    labels: tuple[Label, ...]
    best: Int[Tensor, " neuron"]
    share: Float[Tensor, " neuron"]
    threshold: float

    def __repr__(self) -> str:
        return f"Clusters({self.sizes} of {len(self.best)} neurons, threshold {self.threshold:g})"

    @property
    def assigned(self) -> Int[Tensor, " neuron"]:
        """Returns the index in `labels` of each neuron's frequency, -1 for a neuron in no cluster."""
        return torch.where(self.share > self.threshold, self.best, -1)

    @property
    def sizes(self) -> dict[Label, int]:
        """Returns the number of neurons of each frequency that has any."""
        counts = torch.bincount(self.assigned[self.assigned >= 0], minlength=len(self.labels)).tolist()
        return {label: count for label, count in zip(self.labels, counts, strict=True) if count}

    def neurons(self, label: Label) -> Tensor:
        """Returns the neurons of one frequency, as `ablate.neurons` takes them."""
        if label not in self.labels:
            raise CircuitsError(f"fourier: no frequency {label!r} in these clusters; got {self.labels}")
        return (self.assigned == self.labels.index(label)).nonzero().flatten()

    @property
    def frame(self) -> pd.DataFrame:
        """Returns a row per neuron: `neuron`, its first `frequency` (None if it does not vary), `share`, `assigned`."""
        return pd.DataFrame(
            {
                "neuron": range(len(self.best)),
                "frequency": pd.Series(
                    [None if at < 0 else self.labels[at] for at in self.best.tolist()], dtype=object
                ),
                "share": self.share.tolist(),
                "assigned": (self.assigned >= 0).tolist(),
            }
        )

    def plot(self) -> Any:
        """Returns a plotly figure of each neuron's share by its first frequency, with the threshold."""
        from circuits.figures.spectra import clusters_figure

        return clusters_figure(self.frame, self.labels, self.threshold)


def clusters(spectrum: Spectrum, threshold: float | int = THRESHOLD, by: str = "block") -> Clusters:
    """Clusters neurons by the frequency that explains most of their variance over the grid.

    Args:
        spectrum: that of activations with one feature axis, the neurons.
        by: as in `Spectrum.bands`; "block" and 0.85 are those of Nanda et al. 2023 (code), whose search leaves out the
            highest frequency. A tie goes to the lower frequency.
    """
    bands = spectrum.bands(by)
    if bands.power.ndim != 2:
        shape = list(bands.power.shape[1:])
        raise CircuitsError(f"fourier.clusters: needs one axis of neurons beside the grid; got {shape}")
    check_threshold(threshold)
    best = bands.share.cpu().max(0)
    return Clusters(
        bands.labels, torch.where(best.values > 0, best.indices, -1), best.values, float(threshold)
    )


def check_threshold(threshold: Any) -> None:
    """Raises `CircuitsError` unless the threshold is a number from 0 to 1."""
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
        raise CircuitsError(
            f"fourier.clusters: threshold={threshold!r}; give a share of the variance, 0 to 1"
        )
