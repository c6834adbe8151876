"""Checkpoint after checkpoint of a sweep; those of one model whose passes can be made together wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from circuits.engine.check import side_by_side
from circuits.engine.engine import Engine
from circuits.engine.replay import NotReplayed
from circuits.errors import CircuitsError
from circuits.model.modes import evaluating
from circuits.model.surface import Surface
from circuits.sweeps.checkpoints import Checkpoint, Turn, Weights
from circuits.sweeps.measure import Found, Job, Question, Variant, measure_stacked


def measure_in_turn(
    turns: Iterable[Turn], variants: Callable[[Surface], list[Variant]], question: Question, engine: str
) -> Iterator[list[tuple[str | None, Found]]]:
    """(label, what was measured) of each, in their order; those that were measured together in one list.

    Each is compared with its own replay, and those that are its model with other parameters are stacked, as many as
    fit. The first runs alone: what is wrong with the metric shows before the second is asked for.
    """
    seen: set[str | None] = set()
    waiting: _Waiting | None = None
    for label, turn in turns:
        if label in seen:
            raise CircuitsError(f"sweep, checkpoints: two checkpoints are called {label!r}")
        seen.add(label)
        checkpoint = turn()
        if waiting is not None and waiting.take(label, checkpoint):
            if waiting.full:
                yield waiting.measured()
            continue
        with checkpoint.held() as at:
            job = Job.of(at, variants(at), question, engine)
            found = job.run()
        if waiting is not None and waiting.jobs:
            yield waiting.measured()
        yield [(label, found)]
        room = job.room() if checkpoint.values is not None else 1
        waiting = _Waiting(job, engine, room, Weights(checkpoint, room)) if room > 1 else None
    if waiting is not None and waiting.jobs:
        yield waiting.measured()


@dataclass
class _Waiting:
    """Checkpoints of one model that are yet to be measured, together."""

    like: Job  # of one that was measured alone
    engine: str  # as it was asked for
    room: int
    weights: Weights
    labels: list[str | None] = field(default_factory=list)
    held: list[Checkpoint] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return len(self.jobs) == self.room

    def take(self, label: str | None, checkpoint: Checkpoint) -> bool:
        """False where it cannot wait."""
        if checkpoint.values is None or checkpoint.surface is not self.like.surface:
            return False
        kept, job = self.weights.put(len(self.jobs), checkpoint), self.like.another()
        self.labels.append(label)
        self.held.append(kept)
        self.jobs.append(job)
        return True

    def measured(self) -> list[tuple[str | None, Found]]:
        labels, held, jobs = self.labels, self.held, self.jobs
        self.labels, self.held, self.jobs = [], [], []
        try:
            engine = self._engine(held, jobs)
            with held[0].held():
                found = measure_stacked(engine, jobs, lambda at: held[at].take_on())
        except NotReplayed:
            # Of one at least: each by itself tells which.
            each = zip(labels, held, jobs, strict=True)
            return [(label, self._alone(checkpoint, job)) for label, checkpoint, job in each]
        return list(zip(labels, found, strict=True))

    def _engine(self, held: list[Checkpoint], jobs: list[Job]) -> Engine:
        """That of all their weights, each compared with the model itself; clean passes are run on the way."""
        like, together = self.like.engine, self.weights.first(len(held))
        assert like is not None
        with evaluating(self.like.surface.model), torch.no_grad():
            seen = like.observed_together(self.weights.parameters(len(held)))
            apart = []
            for checkpoint, job in zip(held, jobs, strict=True):
                if seen is not None and not job.needs_clean_passes:
                    continue
                with checkpoint.held():
                    if seen is None:
                        apart.append(like.observed())
                    job.fetch()
            if seen is None:
                seen = side_by_side(apart)
            return like.of(together, seen)

    def _alone(self, checkpoint: Checkpoint, job: Job) -> Found:
        variants = [one for group in job.groups for one in group.variants]
        with checkpoint.held() as at:
            return Job.of(at, variants, job.question, self.engine).run()
