"""Everything that makes a search this one and no other. Imports neither torch nor Optuna."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, Literal

from interp_tasks.errors import UserError
from interp_tasks.search.space import Scalar, Space, as_text, read_space, read_vary
from interp_tasks.training.config import Resolved, resolve_config, typed

Direction = Literal["minimize", "maximize"]
#: The objective is a mean over so many of the last logged evaluations (Syrkis & Søgaard 2024).
LAST = 10
#: The most combinations of settings that are looked at to find one in which a value is valid.
MAX_COMBINATIONS = 500


@dataclass(frozen=True)
class Objective:
    """A logged validation metric, and the direction in which it improves.

    Attributes:
        key: ``None``: ``loss`` if it is logged, else the metric whose drop the task declares.
        direction: ``None``: ``maximize`` of accuracies and of what the task wants large, else ``minimize``.
    """

    key: str | None = None
    direction: Direction | None = None


@dataclass(frozen=True)
class Plan:
    """The plan of a search: the task, the space and the objective.

    Attributes:
        preset: of the task; the space's and the user's settings override it.
        seed: of the sampler. What trials are trained with is ``train.seed``, a setting like any other.
        prune: stop trials that are worse than the median of others at the same step.
    """

    task_name: str
    preset: str
    space: Space
    objective: Objective = Objective()
    seed: int = 42
    prune: bool = False

    def overrides(self, params: Mapping[str, Scalar]) -> dict[str, str]:
        return {**self.space.fixed, **{key: as_text(value) for key, value in params.items()}}

    def resolved(self, params: Mapping[str, Scalar]) -> Resolved:
        """Returns the configuration of a trial.

        Raises:
            UserError: if there is none with these values.
        """
        return resolve_config(self.task_name, self.preset, self.overrides(params))

    def identity(self, key: str, direction: Direction) -> dict[str, Any]:
        """Returns as JSON the settings that may not change between calls.

        ``key`` and ``direction`` are those of the objective.
        """
        return {
            "task": self.task_name,
            "preset": self.preset,
            "settings": {name: typed(text) for name, text in sorted(self.space.fixed.items())},
            "space": self.space.describe(),
            "objective": {"metric": key, "direction": direction, "last": LAST},
            "sampler": {"name": "TPE", "seed": self.seed},
            "pruner": "median" if self.prune else None,
        }

    def check_values(self, valid: Callable[[Resolved], Any]) -> None:
        """Refuses a value that is valid together with no value of the others.

        Args:
            valid: raises ``ValueError`` for a configuration that cannot be.

        Raises:
            UserError: naming the setting, the value and what is wrong.
        """
        for index, dimension in enumerate(self.space.dimensions):
            for value in dimension.samples():
                complaint: ValueError | None = None
                for params in islice(self._with(index, value), MAX_COMBINATIONS):
                    try:
                        valid(self.resolved(params))
                        break
                    except ValueError as error:
                        complaint = complaint or error
                else:
                    raise UserError(f"{dimension.key} = {as_text(value)}: {complaint}") from None

    def _with(self, index: int, value: Scalar) -> Iterator[dict[str, Scalar]]:
        """Returns the combinations in which one dimension has this value, the others' first values first."""
        values = [dimension.samples() for dimension in self.space.dimensions]
        values[index] = (value,)
        return (dict(zip(self.space.keys, combination, strict=True)) for combination in product(*values))


def make_plan(
    task_name: str,
    *,
    preset: str = "cpu",
    space: str | Space | None = None,
    vary: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
    objective: str | None = None,
    seed: int = 42,
    prune: bool = False,
) -> Plan:
    """Returns a plan, checked as far as that needs no torch.

    Args:
        space: name of a shipped space or a TOML file; ``None``: the shipped one, or with ``vary`` none.
        vary: dimensions as :func:`~interp_tasks.search.space.read_vary` takes them, beside those of ``space`` or
            in their place.
        settings: held for all trials, whatever the space says of them.
        objective: a validation metric, as in ``accuracy``; ``NAME:min`` and ``NAME:max`` say which way is better.

    Raises:
        UserError: in one line.
    """
    resolve_config(task_name, preset)
    dimensions, settings = read_vary(vary), dict(settings or {})
    if space is None and dimensions:
        chosen = Space(())
    else:
        chosen = space if isinstance(space, Space) else read_space(task_name, space)
    for one in dimensions:
        if one.key in settings:
            raise UserError(f"{one.key} is given with --vary and with --set: vary it, or hold it")
    chosen = chosen.varying(dimensions).holding(settings)
    if not chosen.dimensions:
        raise UserError("nothing is left to vary: --set holds every setting of the space")
    if seed < 0:
        raise UserError(f"--seed {seed}: from 0 on")
    plan = Plan(task_name, preset, chosen, read_objective(objective), seed, prune)
    plan.check_values(lambda resolved: resolved)
    return plan


def read_objective(text: str | None) -> Objective:
    """Parses ``accuracy`` or ``mse_masked:min``; ``None`` leaves it to the task."""
    if text is None:
        return Objective()
    key, colon, direction = text.partition(":")
    directions: dict[str, Direction] = {"min": "minimize", "max": "maximize"}
    if not key or (colon and direction not in directions):
        raise UserError(
            f"--objective {text!r}: write a validation metric, as in loss, accuracy or mse_masked:min"
        )
    return Objective(key, directions.get(direction))
