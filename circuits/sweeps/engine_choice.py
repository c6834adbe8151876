"""The choice of the engine that runs each variant of a sweep, and for the others the reasons why they do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from circuits.engine.branches import Branch, branch_of
from circuits.engine.engine import Engine
from circuits.engine.replay import NotReplayed
from circuits.engine.resume import Resume, resuming_pays
from circuits.engine.tails import NotResumed, Tail
from circuits.errors import CircuitsError
from circuits.model.surface import Surface
from circuits.sweeps.inputs import SweepInputs, Variant
from circuits.sweeps.measurements import Measurements

NAIVE, FAST, RESUMED = "naive", "fast", "resumed"
_SLOWER = "to resume would take no fewer blocks"


class EngineRefused(CircuitsError):
    """The engine that was asked for cannot run the sweep."""


def refusal(engine: str, reason: str) -> EngineRefused:
    return EngineRefused(f"sweep, engine={engine!r}: {reason}; use engine='auto'")


@dataclass(frozen=True)
class Part:
    """The variants that one engine runs, and what it has measured; without an engine each is a forward of its own."""

    engine: Engine | Resume | None
    variants: Sequence[Variant]
    branches: Sequence[Branch | Tail]
    measurements: Measurements


def assign_engines(
    surface: Surface,
    variants: Sequence[Variant],
    inputs: SweepInputs,
    asked: str,
    checkpoint: str | None,
    failed: Mapping[str, str] | None = None,
) -> list[Part]:
    """Returns the variants divided among the engines, each to the fastest that can run it.

    Args:
        asked: the caller's choice.
        failed: by engine, why it cannot be used after all.
    """
    failed = {} if failed is None else failed
    fast: Engine | None = None
    resume: Resume | None = None
    # By engine and variant, why the one does not run the other. All draws of a variant run on one, as they are pooled.
    reasons: dict[str, dict[str, str]] = {
        engine: dict.fromkeys((one.name for one in variants), f'engine="{asked}"')
        for engine in (FAST, RESUMED)
    }
    left = variants
    if asked in ("auto", FAST):
        fast, reasons[FAST] = _fast_engine(surface, variants, inputs, failed)
        left = [one for one in variants if one.name in reasons[FAST]]
        _refuse(FAST, asked, reasons)
    if asked in ("auto", RESUMED):
        resume, reasons[RESUMED] = _resuming_engine(surface, left, inputs, failed, least=asked == "auto")
        _refuse(RESUMED, asked, reasons)
    chosen = {
        one.name: next((each for each, why in reasons.items() if one.name not in why), NAIVE)
        for one in variants
    }
    parts = []
    for name, engine in ((FAST, fast), (RESUMED, resume), (NAIVE, None)):
        kept = [one for one in variants if chosen[one.name] == name]
        if kept:
            refused = {
                one.name: {each: why[one.name] for each, why in reasons.items() if one.name in why}
                for one in kept
            }
            naive = {one: why[FAST] for one, why in refused.items()} if name == NAIVE else {}
            measurements = Measurements([one.run for one in kept], name, checkpoint, naive, refused)
            parts.append(Part(engine, kept, _branches(name, kept, surface), measurements))
    return parts


def _branches(engine: str, variants: Sequence[Variant], surface: Surface) -> list[Branch | Tail]:
    if engine == FAST:
        n_layers, parallel = surface.n_layers, surface.parallel
        return [branch_of(index, one.plan, n_layers, parallel) for index, one in enumerate(variants)]
    if engine == RESUMED:
        return [Tail.of(index, one.plan, surface) for index, one in enumerate(variants)]
    return []


def _refuse(engine: str, asked: str, reasons: Mapping[str, Mapping[str, str]]) -> None:
    if asked == engine and reasons[engine]:
        name, reason = next(iter(reasons[engine].items()))
        raise refusal(engine, f"variant {name!r}: {reason}")


def _fast_engine(
    surface: Surface, variants: Sequence[Variant], inputs: SweepInputs, failed: Mapping[str, str]
) -> tuple[Engine | None, dict[str, str]]:
    """Returns the fast engine, if it can be used; and by variant, why it does not run it."""
    reasons: dict[str, str] = {}
    for one in variants:
        try:
            branch_of(0, one.plan, surface.n_layers, surface.parallel)
        except NotReplayed as reason:
            reasons[one.name] = str(reason)
    reason_of_all = failed.get(FAST, inputs.not_replayed)
    if reason_of_all is not None:
        return None, {one.name: reasons.get(one.name, reason_of_all) for one in variants}
    if len(reasons) < len({one.name for one in variants}):
        try:
            return Engine(surface, inputs.prompts, inputs.metric.positions, inputs.first), reasons
        except NotReplayed as reason:
            reasons = {one.name: str(reason) for one in variants}
    return None, reasons


def _resuming_engine(
    surface: Surface,
    variants: Sequence[Variant],
    inputs: SweepInputs,
    failed: Mapping[str, str],
    least: bool,
) -> tuple[Resume | None, dict[str, str]]:
    """Returns the engine that resumes, if it can be used; and by variant, why it does not run it.

    Args:
        least: use it only where that takes fewer blocks than whole runs.
    """
    reasons: dict[str, str] = {}
    tails: list[Tail] = []
    for one in variants:
        try:
            tails.append(Tail.of(0, one.plan, surface))
        except NotResumed as reason:
            reasons[one.name] = str(reason)
    starts = [tail.start for tail in tails]
    rest = failed.get(RESUMED, "")
    if not rest and starts and least and not resuming_pays(starts, surface.n_layers, len(inputs.prompts)):
        rest = _SLOWER
    if not rest and starts:
        try:
            return Resume(surface, inputs.prompts[inputs.first], min(starts)), reasons
        except NotResumed as reason:
            rest = str(reason)
    return None, {one.name: reasons.get(one.name, rest) for one in variants}
