"""Defines the rules by which frequencies are called key frequencies, each stated with its number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.fourier._spectrum import ROUNDING, Bands, Label, Spectrum
from circuits.validate import read_choice


class Rule(ABC):
    """A rule by which `key_frequencies` selects bands of a spectrum."""

    @abstractmethod
    def selects(self, bands: Bands) -> Tensor:
        """Marks the key bands, bool [band]."""

    @property
    @abstractmethod
    def statement(self) -> str:
        """States the rule with its number, in one sentence."""


class _Numbered(Rule):
    """A rule that has one number, which must be at least 0."""

    def __post_init__(self) -> None:
        (number,) = vars(self).values()
        if isinstance(number, bool) or not 0 <= number < 1e9:
            raise CircuitsError(f"fourier: {type(self).__name__}({number!r}): give a number from 0")


@dataclass(frozen=True)
class Noise(_Numbered):
    """Selects frequencies with more power than the strongest would have in white noise, but for a chance of `level`.

    The noise level is that of the median frequency. The power of a frequency with ν basis functions is compared with
    a χ² of ν degrees of freedom, at `level` divided by the number of frequencies (Bonferroni). This distribution
    is that of one feature, or of copies of one. Where features differ, their sum varies less and the rule selects too
    few rather than too many; so it does where half of the frequencies or more are signal. But the median of few
    frequencies tells the noise level badly: one feature of white noise has a key frequency more often than `level`
    says (docs/circuits/fourier.md: 0.30 of samples at 5 values, 0.17 at 113, for 0.05).

    The rule tests whether a frequency is present, however small its share, not whether the model needs it.
    """

    level: float | int = 0.05
    name: ClassVar[str] = "noise"

    def selects(self, bands: Bands) -> Tensor:
        power = bands.total().power.cpu()
        degrees = torch.tensor(bands.degrees, dtype=torch.float64)
        level = (power / _median_of_chi_squared(degrees)).median()
        tail = torch.special.gammaincc(degrees / 2, power / (2 * level.clamp(min=1e-300)))
        return (tail * len(power) <= self.level) & _above_rounding(bands)

    @property
    def statement(self) -> str:
        return (
            "key: more power than the strongest of as many frequencies of white noise at the level of the median one "
            f"would have with probability {self.level:g} (χ², Bonferroni)"
        )


@dataclass(frozen=True)
class OfLargest(_Numbered):
    """Selects frequencies with a norm above this share of the largest frequency's.

    With 1/4 it is the rule of TransformerLens' grokking demo for W_E, which takes the norms of cos and sin separately;
    here a norm is over both.
    """

    share: float | int = 0.25
    name: ClassVar[str] = "of-largest"

    def selects(self, bands: Bands) -> Tensor:
        norms = bands.total().power.cpu().sqrt()
        return (norms > self.share * norms.max()) & _above_rounding(bands)

    @property
    def statement(self) -> str:
        return f"key: a norm above {self.share:g} of the largest"


@dataclass(frozen=True)
class AboveMean(_Numbered):
    """Selects amplitudes that exceed the mean over all frequencies, 0 included, by this many standard deviations.

    The deviation has n in the denominator. Amplitudes are those of the Fourier transform, |Σ x exp(−2πikj/p)|; relative
    to a norm of cos and sin together, that of frequency 0 is √2 times as large. Syrkis & Søgaard 2024 (MIIII) use 1 in
    their code for W_E; their text says 2 for active frequencies.
    """

    deviations: float | int = 1.0
    name: ClassVar[str] = "above-mean"

    def selects(self, bands: Bands) -> Tensor:
        total = bands.total()
        # A wave has a coefficient in each of its basis functions, so its power is divided by their number.
        power = total.power / torch.tensor(total.degrees, device=total.power.device)
        sizes = torch.cat([total.constant[None], power]).cpu().sqrt()
        return (sizes > sizes.mean() + self.deviations * sizes.std(correction=0))[1:] & _above_rounding(bands)

    @property
    def statement(self) -> str:
        return f"key: an amplitude above the mean over frequencies, with 0, by {self.deviations:g} standard deviations"


@dataclass(frozen=True)
class Preferred(_Numbered):
    """Selects the first frequency of every neuron, where it carries at least this share of the neuron's variance.

    With 0 it is the rule of Nanda et al.'s released code, except that their code leaves out the highest frequency.
    """

    share: float | int = 0.0
    name: ClassVar[str] = "preferred"

    def selects(self, bands: Bands) -> Tensor:
        share = bands.share.reshape(len(bands.labels), -1).cpu()
        best = share.max(0)
        preferred = torch.zeros(len(bands.labels), dtype=torch.bool)
        preferred[best.indices[(best.values > 0) & (best.values >= self.share)]] = True
        return preferred

    @property
    def statement(self) -> str:
        least = f", with at least {self.share:g} of its variance" if self.share else ""
        return f"key: the first frequency of at least one neuron{least}"


RULES: dict[str, type[Noise | OfLargest | AboveMean | Preferred]] = {
    rule.name: rule for rule in (Noise, OfLargest, AboveMean, Preferred)
}


@dataclass(frozen=True)
class KeyFrequencies:
    """The frequencies selected by a rule, and the rule in words."""

    keys: tuple[Label, ...]
    rule: str

    def __iter__(self) -> Any:
        return iter(self.keys)

    def __len__(self) -> int:
        return len(self.keys)


def key_frequencies(spectrum: Spectrum, rule: str | Rule = "noise", by: str = "block") -> KeyFrequencies:
    """Selects the key frequencies of a spectrum, over all its features together, under a stated rule.

    Args:
        rule: "noise", "of-largest", "above-mean", "preferred", each with its published or usual number; a rule with
            another number, such as `fourier.AboveMean(2)`; or an instance of your subclass of `fourier.Rule`.
        by: as in `Spectrum.bands`.
    """
    if isinstance(rule, str):
        rule = RULES[read_choice(rule, RULES, "fourier.key_frequencies", "rule")]()
    bands = spectrum.bands(by)
    chosen = rule.selects(bands).tolist()
    keys = tuple(label for label, key in zip(bands.labels, chosen, strict=True) if key)
    return KeyFrequencies(keys, rule.statement)


def _above_rounding(bands: Bands) -> Tensor:
    total = bands.total()
    return (total.power > ROUNDING * (total.constant + total.variance)).cpu()


def _median_of_chi_squared(degrees: Tensor) -> Tensor:
    """Returns the median of χ² with these degrees of freedom, by bisection to float64's precision."""
    low, high = torch.zeros_like(degrees), degrees + 10
    for _ in range(80):
        middle = (low + high) / 2
        below = torch.special.gammainc(degrees / 2, middle / 2) < 0.5
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low
