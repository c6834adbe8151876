"""Checkpoint after checkpoint of a sweep; those of one model whose passes can be made together wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from circuits.checkpoints import Checkpoint, Turn, Weights
from circuits.errors import CircuitsError
from circuits.measuring import Found, Job, Question, Variant, measure_stacked
from circuits.modes import evaluating
from circuits.replaying import NotReplayed
from circuits.surface import Surface


def measure_in_turn(
    turns: Iterable[Turn], variants: Callable[[Surface], list[Variant]], question: Question, engine: str
) -> Iterator[tuple[str | None, Found]]:
    """(label, what was measured) of each, in their order.

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
                yield from waiting.measured()
            continue
        with checkpoint.held() as at:
            job = Job.of(at, variants(at), question, engine)
            found = job.run()
        if waiting is not None:
            yield from waiting.measured()
        yield label, found
        room = job.room() if checkpoint.values is not None else 1
        waiting = _Waiting(job, engine, room, Weights(checkpoint, room)) if room > 1 else None
    if waiting is not None:
        yield from waiting.measured()


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
    observed: list[dict[str, Tensor]] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return len(self.jobs) == self.room

    def take(self, label: str | None, checkpoint: Checkpoint) -> bool:
        """Run what has to be run with its own weights; false where it cannot wait."""
        assert self.like.engine is not None
        if checkpoint.values is None or checkpoint.surface is not self.like.surface:
            return False
        kept, job = self.weights.put(len(self.jobs), checkpoint), self.like.another()
        try:
            with kept.held() as at, evaluating(at.model), torch.no_grad():
                observed = self.like.engine.observed()
                job.fetch()
        except NotReplayed:
            return False
        self.labels.append(label)
        self.held.append(kept)
        self.jobs.append(job)
        self.observed.append(observed)
        return True

    def measured(self) -> Iterator[tuple[str | None, Found]]:
        if not self.jobs:
            return
        labels, held, jobs, observed = self.labels, self.held, self.jobs, self.observed
        self.labels, self.held, self.jobs, self.observed = [], [], [], []
        assert self.like.engine is not None
        try:
            with torch.no_grad():
                engine = self.like.engine.of(self.weights.first(len(jobs)), observed)
        except NotReplayed:
            # Of one at least: each by itself tells which.
            for label, checkpoint, job in zip(labels, held, jobs, strict=True):
                variants = [one for group in job.groups for one in group.variants]
                with checkpoint.held() as at:
                    yield label, Job.of(at, variants, job.question, self.engine).run()
            return
        with held[0].held():
            found = measure_stacked(engine, jobs, lambda at: held[at].take_on())
        yield from zip(labels, found, strict=True)
