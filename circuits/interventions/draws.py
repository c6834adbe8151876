"""Several random draws of one intervention, swept as one variant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from circuits.errors import CircuitsError
from circuits.interventions.arguments import made_by, read_seed
from circuits.interventions.base import Intervention


@dataclass(frozen=True)
class Draws:
    """The draws of one variant, in order. In a sweep's table each has a row, and one row pools all of them."""

    interventions: tuple[Intervention, ...]

    def __len__(self) -> int:
        return len(self.interventions)


def draws(make: Callable[[int], Intervention], count: int, seed: int = 0) -> Draws:
    """`count` draws of `make(seed)`.

        draws(permute.positions, 20)
        draws(lambda seed: ablate.resample("all", source=tokens, seed=seed), 20)

    Seeds of different draws, and of the same draw under different `seed`, are unrelated (numpy's SeedSequence).
    """
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
        raise CircuitsError(f"draws: count={count!r}; give the number of draws, at least 1")
    children = np.random.SeedSequence(read_seed(seed, "draws")).generate_state(int(count), np.uint64) >> 1
    made = tuple(made_by(make, "draws", (int(child),)) for child in children)
    if not all(isinstance(one, Intervention) for one in made):
        raise CircuitsError(f"draws: make(seed) must return an intervention, got {type(made[0]).__name__}")
    return Draws(made)
