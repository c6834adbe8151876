"""Neurons by the frequency that explains most of their variance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.fourier._spectrum import Label, Spectrum

#: Nanda et al. 2023, code.
THRESHOLD = 0.85


@dataclass(frozen=True)
class Clusters:
    """Which frequency each neuron follows.

    Attributes:
        labels: the frequencies.
        best: the index of each neuron's first one, -1 for a neuron that does not vary.
        share: of the neuron's variance that it explains.
        threshold: a neuron below it is in no cluster.
    """

    labels: tuple[Label, ...]
    best: Int[Tensor, " neuron"]
    share: Float[Tensor, " neuron"]
    threshold: float

    @property
    def assigned(self) -> Int[Tensor, " neuron"]:
        """The index of each neuron's frequency in `labels`, -1 for a neuron in no cluster."""
        return torch.where(self.share > self.threshold, self.best, -1)

    @property
    def sizes(self) -> dict[Label, int]:
        """Neurons of each frequency that has any."""
        counts = torch.bincount(self.assigned[self.assigned >= 0], minlength=len(self.labels)).tolist()
        return {label: count for label, count in zip(self.labels, counts, strict=True) if count}

    def neurons(self, label: Label) -> Tensor:
        """The neurons of one frequency, as `ablate.neurons` takes them."""
        if label not in self.labels:
            raise CircuitsError(f"fourier: no frequency {label!r} in these clusters; got {self.labels}")
        return (self.assigned == self.labels.index(label)).nonzero().flatten()

    @property
    def frame(self) -> pd.DataFrame:
        """A row per neuron: `neuron`, its first `frequency` (None for one that does not vary), `share`, `assigned`."""
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
        """A plotly figure: each neuron's share by its first frequency, and the threshold."""
        from circuits.figures.spectra import clusters_figure

        return clusters_figure(self.frame, self.labels, self.threshold)


def clusters(spectrum: Spectrum, threshold: float | int = THRESHOLD, by: str = "block") -> Clusters:
    """Each neuron with the frequency that explains most of its variance over the grid.

    Args:
        spectrum: of activations with one feature axis, the neurons.
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
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
        raise CircuitsError(
            f"fourier.clusters: threshold={threshold!r}; give a share of the variance, 0 to 1"
        )
