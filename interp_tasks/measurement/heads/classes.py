"""Classifies the attention heads of a checkpoint by what they attend to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.measurement.heads.edits import check_within, select_positions
from interp_tasks.measurement.subjects import DEFAULT_SAMPLES, LoadedCheckpoint, PendingCheckpoint

if TYPE_CHECKING:
    import numpy
    from jaxtyping import Float
    from torch import Tensor

    from circuits.patterns import Classes, Following, Movement, Scores
    from tasks.base import Split

THRESHOLD = 0.5
#: The most entries of attention patterns that are kept to be read again: some 170 MB, of two inputs at a time.
RECORDED_ENTRIES = 2**25
#: The word for the queries whose output the task reads.
READ = "read"
#: Heads that no template describes are, together, what people call uninterpretable.
UNINTERPRETABLE = "uninterpretable"
NO_CLASSES = "--by-class finds classes on other examples, and --tokens are all there are: give a task"

#: Classes that were found in this process, of the latest checkpoints: several studies of one ask for them.
FOUND: dict[Any, HeadClasses] = {}
MOST_FOUND = 4


@dataclass(frozen=True)
class HeadClasses:
    """The scores, classes, movements and relocations of the heads of one checkpoint.

    Attributes:
        possible: the templates that may be classes.
        positions: those looked at, as ``circuits`` takes them.
    """

    scores: Scores
    classes: Classes
    possible: tuple[str, ...]
    moves: Mapping[str, Movement]
    followed: Mapping[str, Following]
    positions: Any

    def best(self) -> Float[numpy.ndarray, " head"]:
        """Returns each head's score, corrected for chance, for its best template; no threshold is used."""
        import numpy as np

        frame = self.scores.frame
        possible = frame[frame["template"].isin(self.possible)]
        best_scores = possible.groupby(["layer", "head"], sort=True)["corrected"].max()
        return np.array([best_scores[head.layer, head.head] for head in self.scores.heads])

    def least(self, number: int) -> tuple[Any, ...]:
        """Returns the ``number`` heads whose best template fits worst."""
        order = sorted(zip(self.best().tolist(), self.scores.heads, strict=True))
        return tuple(sorted(head for _, head in order[:number]))

    def groups(self) -> dict[str, tuple[Any, ...]]:
        """Returns the heads of each class; heads without a class are in ``uninterpretable``."""
        from circuits.patterns._scores import OTHER, UNCLEAR

        groups = {name: heads for name, heads in self.classes.groups.items() if name not in (OTHER, UNCLEAR)}
        rest = [head for name in (OTHER, UNCLEAR) for head in self.classes.groups.get(name, ())]
        return groups | ({UNINTERPRETABLE: tuple(sorted(rest))} if rest else {})


def classify_heads(
    subject: LoadedCheckpoint,
    names: Sequence[str] = (),
    positions: str | tuple[int, ...] | None = READ,
    threshold: float = THRESHOLD,
    recorded: Any = None,
    moving: bool = True,
) -> HeadClasses:
    """Scores and classifies the heads on a subject's examples, and measures how their attention moves.

    A template that the task makes a class under a rule (``attention_rules()``) keeps it only among the templates asked
    for.

    Args:
        recorded: what :func:`run_once` returns of the subject's examples.
        moving: whether to measure how attention moves; without it no head is in a class of heads that must not.
    """
    from circuits import patterns

    chosen = scored_positions(subject, positions)
    shared = {"positions": chosen, "seed": subject.seed}
    templates = chosen_templates(subject, names)
    own = run_once(subject, subject.tokens) if recorded is None else recorded
    scores = patterns.scores(subject.model, own, templates, batch=subject.batch, **shared)
    moves = {
        change: patterns.movement(subject.model, own, run_once(subject, other.tokens), **shared)
        for change, other in (changed_examples(subject) if moving else {}).items()
    }
    rules = {name: rule for name, rule in declared_rules(subject).items() if name in templates}
    unless = {name: rule.unless for name, rule in rules.items() if rule.unless in templates}
    among = {name: moves[rule.static].static() for name, rule in rules.items() if rule.static in moves}
    if not moving:
        among = {name: () for name, rule in rules.items() if rule.static}
    classes = patterns.classify(scores, threshold, unless=unless, among=among)
    possible = tuple(name for name in templates if name not in unless.values())
    followed = measure_relocations(subject, positions) if moving else {}
    return HeadClasses(scores, classes, possible, moves, followed, chosen)


def run_once(subject: LoadedCheckpoint, tokens: Tensor) -> Any:
    """Returns the attention patterns on some examples, for several measurements; the examples where that takes much
    memory, so that each runs them anew.
    """
    from circuits import patterns

    entries = subject.sizes.n_layers * subject.sizes.n_heads * tokens.shape[1] ** 2 * len(tokens)
    return patterns.record(subject.model, tokens) if entries <= RECORDED_ENTRIES else tokens


def head_classes_held_out(subject: LoadedCheckpoint, threshold: float = THRESHOLD) -> HeadClasses:
    """Classifies heads on other examples of the task, so that selection and measurement are independent.

    Raises:
        UserError: for bare tokens, of which there are no others.
    """
    if subject.task is None:
        raise UserError(NO_CLASSES)
    split: Split = "validation" if subject.labels["split"] != "validation" else "test"
    size = max(DEFAULT_SAMPLES, len(subject.tokens))
    device = str(subject.tokens.device)
    files = tuple(sorted((file, file.stat().st_mtime_ns) for file in subject.checkpoint.path.iterdir()))
    key = (files, subject.task, size, subject.seed, split, device, threshold)
    if key not in FOUND:
        batch = subject.task.sample(size, seed=subject.seed, split=split).to(device)
        held_out = replace(subject, batch=batch, tokens=batch.tokens)
        while len(FOUND) >= MOST_FOUND:
            del FOUND[next(iter(FOUND))]
        FOUND[key] = classify_heads(held_out, threshold=threshold)
    return FOUND[key]


def declared_rules(subject: LoadedCheckpoint) -> dict[str, Any]:
    declare = getattr(subject.task, "attention_rules", None)
    return {} if declare is None else dict(declare())


def chosen_templates(
    subject: LoadedCheckpoint | PendingCheckpoint, names: Sequence[str]
) -> dict[str, Tensor | Callable[[Any], Tensor]]:
    """Returns the chosen templates by name."""
    from circuits import patterns

    length = subject.tokens.shape[1]
    known: dict[str, Any] = {
        "identity": patterns.identity(length),
        "previous": patterns.previous(length),
        "first": patterns.constant(length, 0),
        "duplicate": lambda rows: patterns.duplicate(getattr(rows, "tokens", rows)),
        "induction": lambda rows: patterns.induction(getattr(rows, "tokens", rows)),
    }
    declare = getattr(subject.task, "attention_templates", None)
    declared: dict[str, Any] = known if declare is None else dict(declare())
    known |= declared
    for name in names:
        if name not in known:
            raise UserError(
                f"--template {name!r}: {subject.name} has no such template; write {', '.join(known)}"
            )
    return {name: known[name] for name in dict.fromkeys(names or declared)}


def scored_positions(
    subject: LoadedCheckpoint | PendingCheckpoint, positions: str | tuple[int, ...] | None
) -> Any:
    """Returns the queries to score, as ``circuits`` takes them."""
    if positions != READ:
        return select_positions(subject, positions)
    return None if subject.task is None else list(subject.task.read_positions)


def check_scored(
    planned: PendingCheckpoint, names: Sequence[str], positions: str | tuple[int, ...] | None
) -> None:
    """Refuses templates and queries that a checkpoint's examples do not have.

    Raises:
        UserError: in one line.
    """
    chosen_templates(planned, names)
    scored_positions(planned, positions)
    check_within(planned, "--positions", positions)


def changed_examples(subject: LoadedCheckpoint) -> dict[str, Any]:
    """Returns the named changes that the task declares: examples paired with the subject's, one thing changed."""
    declare = getattr(subject.task, "attention_moves", None)
    if declare is None or len(subject.tokens) < 2:
        return {}
    return dict(declare(subject.batch, subject.seed))


def measure_relocations(
    subject: LoadedCheckpoint, positions: str | tuple[int, ...] | None
) -> dict[str, Following]:
    """Measures whether attention follows the things that the task moves; a mask of queries is that before the move."""
    from circuits import patterns

    declare = getattr(subject.task, "attention_relocations", None)
    if declare is None or len(subject.tokens) < 2:
        return {}
    shares = {}
    for name, pairs in declare(subject.batch, subject.seed).items():
        before = replace(subject, batch=pairs.before, tokens=pairs.before.tokens)
        shares[name] = patterns.follow(
            subject.model,
            pairs.before.tokens,
            pairs.after.tokens,
            pairs.groups,
            pairs.source,
            pairs.target,
            positions=scored_positions(before, positions),
            seed=subject.seed,
        )
    return shares
