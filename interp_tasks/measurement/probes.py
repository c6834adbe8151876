"""Linear probes of a checkpoint: their settings, checked before anything slow is imported, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from circuits.model.sites import Site
from interp_tasks.errors import UserError
from interp_tasks.measurement.heads.edits import HeadChoice, check_within
from interp_tasks.measurement.model_parts import ModelParts
from interp_tasks.measurement.options import (
    MAX_DRAWS,
    check_positions,
    has_heads,
)
from interp_tasks.measurement.subjects import LoadedCheckpoint, PendingCheckpoint
from interp_tasks.measurement.untrained import untrained

if TYPE_CHECKING:
    import pandas

    from tasks import ProbeTarget, ProbeTargets

#: A probe of d numbers takes more examples than d: more than other experiments ask for.
SAMPLES = 2048
#: Two to fit a line, two to score it.
FEWEST = 4


@dataclass(frozen=True)
class ProbeSettings:
    """The settings of the probes, checked."""

    sites: tuple[str, ...]
    targets: tuple[str, ...]
    heads: HeadChoice | None
    positions: tuple[int, ...] | None
    each_position: bool
    intercept: bool
    ridge: tuple[float, ...] | None
    folds: int
    held_out: float | int
    shuffles: int
    untrained: bool

    @property
    def method(self) -> str:
        return (
            "least squares" if self.ridge is None else f"ridge({','.join(f'{one:g}' for one in self.ridge)})"
        )

    @classmethod
    def read(cls, *, sites: str | Sequence[str], targets: str | Sequence[str], **given: Any) -> ProbeSettings:
        """Returns the settings as users write them.

        Raises:
            UserError: in one line.
        """
        sites = [sites] if isinstance(sites, str) else sites
        targets = [targets] if isinstance(targets, str) else targets
        heads, positions, ridge = given["heads"], given["positions"], given["ridge"]
        if not sites:
            raise UserError("no site: give --site resid_post, or another")
        checked = tuple(str(Site.parse(site)) for site in sites)
        without = [site for site in checked if heads is not None and not has_heads(site)]
        if without:
            raise UserError(
                f"--heads: site {without[0]} has no heads; they are at q, k, v, z, scores and pattern"
            )
        read: dict[str, Any] = {
            **given,
            "heads": None if heads is None else HeadChoice.read(heads, words=("all",)),
            "positions": check_positions("--positions", positions)
            if isinstance(positions, str)
            else positions,
            "ridge": read_penalties(ridge) if isinstance(ridge, str) else ridge,
        }
        for option, value, least in (("--folds", given["folds"], 2), ("--shuffles", given["shuffles"], 1)):
            if value < least:
                raise UserError(f"{option} {value}: at least {least}")
            if value > MAX_DRAWS:
                raise UserError(f"{option} {value}: at most {MAX_DRAWS}")
        held_out = given["held_out"]
        if not (0 < held_out < 1 or (held_out >= 2 and held_out == int(held_out))):
            raise UserError(
                f"--held-out {held_out:g}: give a fraction below 1, or a number of examples from 2"
            )
        read["held_out"] = int(held_out) if held_out >= 2 else held_out
        return cls(sites=checked, targets=tuple(targets), **read)

    def describe(self) -> dict[str, Any]:
        return {
            name: list(value)
            if isinstance(value, tuple)
            else str(value)
            if isinstance(value, HeadChoice)
            else value
            for name, value in vars(self).items()
        }

    def parts(self) -> ModelParts:
        """Returns the parts that a model must have."""
        heads = [] if self.heads is None else [self.heads]
        return ModelParts(heads, self.sites, positions={"--positions": self.positions})

    def check(self, planned: PendingCheckpoint) -> None:
        """Refuses targets that a checkpoint's task does not declare, and positions that its examples do not have.

        Raises:
            UserError: in one line.
        """
        if len(planned.tokens) < FEWEST:
            raise UserError(
                f"--samples {len(planned.tokens)}: some examples are fitted and others scored; give {FEWEST} or more"
            )
        choose(planned, declared_by(planned), self.targets)
        check_within(planned, "--positions", self.positions)


def read_penalties(text: str) -> tuple[float, ...]:
    """Parses penalties such as ``0.1,1,10``.

    Raises:
        UserError: for what are no numbers from 0.
    """
    try:
        penalties = tuple(float(part) for part in text.split(","))
    except ValueError:
        penalties = (-1.0,)
    if not all(0 <= one < 1e300 for one in penalties):
        raise UserError(
            f"--ridge {text}: write a penalty from 0, or several to choose from, such as 0.1,1,10"
        )
    return penalties


def probed(subject: LoadedCheckpoint, settings: ProbeSettings) -> pandas.DataFrame:
    """Returns the table of ``circuits.probe`` of one checkpoint."""
    from circuits import probe as probes

    declared = declared_by(subject)
    chosen = choose(subject, declared, settings.targets)
    result = probes.linear(
        subject.model,
        subject.tokens,
        {name: target.values for name, target in chosen.items()},
        settings.sites,
        kind={name: target.kind for name, target in chosen.items()},
        heads=None if settings.heads is None else settings.heads.spec,
        positions=declared.positions if settings.positions is None else settings.positions,
        per_position=settings.each_position,
        splits=declared.splits,
        test=settings.held_out,
        intercept=settings.intercept,
        ridge=settings.ridge,
        folds=settings.folds,
        untrained=untrained(subject) if settings.untrained else None,
        shuffles=settings.shuffles,
        seed=subject.seed,
    )
    return result.frame


def declared_by(subject: LoadedCheckpoint | PendingCheckpoint) -> ProbeTargets:
    """Returns the targets that the checkpoint's task declares."""
    task, batch = subject.task, subject.batch
    assert task is not None
    assert batch is not None
    # Where a sign is the solver's, as of singular vectors, targets are the same for every device of the model.
    declared = task.probe_targets(batch.to("cpu"))
    if not declared.targets:
        raise UserError(
            f"task {task.name!r} declares no targets for probes: give it a method probe_targets(batch)"
        )
    return declared


def choose(
    subject: LoadedCheckpoint | PendingCheckpoint, declared: ProbeTargets, names: Sequence[str]
) -> dict[str, ProbeTarget]:
    """Returns the chosen targets, in the given order; all where none are named."""
    for name in names:
        if name not in declared.targets:
            assert subject.task is not None
            raise UserError(
                f"--target {name}: task {subject.task.name!r} declares {', '.join(declared.targets)}"
            )
    return {name: declared.targets[name] for name in names or declared.targets}
