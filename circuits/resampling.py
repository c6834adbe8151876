"""What the bootstrap and the sign-flip test draw: the same for all series of one seed and number of examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

# Drawn, and multiplied with series, in blocks of at most this many numbers, which bounds the memory.
_BLOCK = 8_000_000
# Draws of no more numbers are kept: they take longer than what is computed from them.
_KEPT = 4_000_000

Draw = Callable[[np.random.Generator, int, int], np.ndarray]


@dataclass
class Resampling:
    """The draws of one table. What is drawn depends on seed and number of examples alone, not on what it is for."""

    seed: int
    draws: int = 1
    flips: int = 1
    _kept: dict[tuple[int, int], np.ndarray] = field(default_factory=dict, repr=False)

    def weights(self, examples: int, series: int) -> Iterator[np.ndarray]:
        """Blocks [draw example]: how often an example is in a resample."""
        return self._blocks(_weights, 1, self.draws, examples, series)

    def flips_are_all(self, examples: int) -> bool:
        """Whether all 2^n flips are no more than `flips`."""
        return examples < 63 and 2**examples <= self.flips

    def swaps(self, examples: int, series: int) -> Iterator[np.ndarray]:
        """Blocks [flip example]: 1 where the pair of an example is swapped, else 0."""
        if self.flips_are_all(examples):
            numbers = np.arange(2**examples)[:, None]
            return iter([((numbers >> np.arange(examples)) & 1).astype(float)])
        return self._blocks(_swaps, 2, self.flips, examples, series)

    def _blocks(
        self, draw: Draw, stream: int, count: int, examples: int, series: int
    ) -> Iterator[np.ndarray]:
        """Row after row from one generator: neither the size of blocks nor keeping them changes a number."""
        rng = np.random.default_rng([self.seed, stream])
        step = max(1, _BLOCK // max(1, examples, series))
        if count * examples > _KEPT:
            for start in range(0, count, step):
                yield draw(rng, min(step, count - start), examples)
            return
        if (stream, examples) not in self._kept:
            self._kept[stream, examples] = draw(rng, count, examples)
        for start in range(0, count, step):
            yield self._kept[stream, examples][start : start + step]


def _weights(rng: np.random.Generator, count: int, examples: int) -> np.ndarray:
    return rng.multinomial(examples, np.full(examples, 1 / examples), size=count).astype(float)


def _swaps(rng: np.random.Generator, count: int, examples: int) -> np.ndarray:
    return rng.integers(0, 2, size=(count, examples)).astype(float)
