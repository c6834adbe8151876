"""Classifies the attention heads of a checkpoint by what they attend to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.measurement.heads.edits import positions
from interp_tasks.measurement.subjects import DEFAULT_SAMPLES, Subject

if TYPE_CHECKING:
    import numpy
    from jaxtyping import Float
    from torch import Tensor

    from circuits.patterns import Classes, Following, Movement, Scores
    from tasks.base import Split

THRESHOLD = 0.5
#: The word for the queries whose output the task reads.
READ = "read"
#: Heads that no template describes are, together, what people call uninterpretable.
UNINTERPRETABLE = "uninterpretable"
NO_CLASSES = "--by-class finds classes on other examples, and --tokens are all there are: give a task"


@dataclass(frozen=True)
class HeadClasses:
    """The scores, classes, movements and relocations of the heads of one checkpoint.

    Attributes:
        possible: the templates that may be classes.
        queries: those looked at, as ``circuits`` takes them.
    """

    scores: Scores
    classes: Classes
    possible: tuple[str, ...]
    moves: Mapping[str, Movement]
    followed: Mapping[str, Following]
    queries: Any

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
        from circuits.patterns._classes import OTHER, UNCLEAR

        groups = {name: heads for name, heads in self.classes.groups.items() if name not in (OTHER, UNCLEAR)}
        rest = [head for name in (OTHER, UNCLEAR) for head in self.classes.groups.get(name, ())]
        return groups | ({UNINTERPRETABLE: tuple(sorted(rest))} if rest else {})


def classify_heads(
    subject: Subject,
    names: Sequence[str] = (),
    queries: str | tuple[int, ...] | None = READ,
    threshold: float = THRESHOLD,
) -> HeadClasses:
    """Scores and classifies the heads on a subject's examples, and measures how their attention moves.

    A template that the task makes a class under a rule (``attention_rules()``) keeps it only among the templates asked
    for.
    """
    from circuits import patterns

    chosen = chosen_queries(subject, queries)
    shared = {"queries": chosen, "seed": subject.seed}
    templates = chosen_templates(subject, names)
    scores = patterns.scores(subject.model, subject.tokens, templates, batch=subject.batch, **shared)
    moves = {
        change: patterns.movement(subject.model, subject.tokens, other.tokens, **shared)
        for change, other in changed_examples(subject).items()
    }
    rules = {name: rule for name, rule in declared_rules(subject).items() if name in templates}
    unless = {name: rule.unless for name, rule in rules.items() if rule.unless in templates}
    classes = patterns.classify(
        scores,
        threshold,
        unless=unless,
        among={name: moves[rule.static].static() for name, rule in rules.items() if rule.static in moves},
    )
    possible = tuple(name for name in templates if name not in unless.values())
    return HeadClasses(scores, classes, possible, moves, measure_relocations(subject, queries), chosen)


def head_classes_held_out(subject: Subject, threshold: float = THRESHOLD) -> HeadClasses:
    """Classifies heads on other examples of the task, so that selection and measurement are independent.

    Raises:
        UserError: for bare tokens, of which there are no others.
    """
    if subject.task is None:
        raise UserError(NO_CLASSES)
    split: Split = "validation" if subject.labels["split"] != "validation" else "test"
    size = max(DEFAULT_SAMPLES, len(subject.tokens))
    batch = subject.task.sample(size, seed=subject.seed, split=split).to(str(subject.tokens.device))
    return classify_heads(replace(subject, batch=batch, tokens=batch.tokens), threshold=threshold)


def declared_rules(subject: Subject) -> dict[str, Any]:
    declare = getattr(subject.task, "attention_rules", None)
    return {} if declare is None else dict(declare())


def chosen_templates(subject: Subject, names: Sequence[str]) -> dict[str, Tensor | Callable[[Any], Tensor]]:
    """Returns the chosen templates by name."""
    from circuits import patterns

    length = subject.tokens.shape[1]
    known: dict[str, Any] = {
        "identity": patterns.identity(length),
        "previous": patterns.previous(length),
        "first": patterns.constant(length, 0),
    }
    declare = getattr(subject.task, "attention_templates", None)
    declared: dict[str, Any] = known if declare is None else dict(declare())
    known |= declared
    for name in names:
        if name not in known:
            raise UserError(
                f"--template {name!r}: {subject.checkpoint.ref} has no such template; write {', '.join(known)}"
            )
    return {name: known[name] for name in dict.fromkeys(names or declared)}


def chosen_queries(subject: Subject, queries: str | tuple[int, ...] | None) -> Any:
    """Returns the queries to score, as ``circuits`` takes them."""
    if queries != READ:
        return positions(subject, queries)
    return None if subject.task is None else list(subject.task.read_positions)


def changed_examples(subject: Subject) -> dict[str, Any]:
    """Returns the named changes that the task declares: examples paired with the subject's, one thing changed."""
    declare = getattr(subject.task, "attention_moves", None)
    if declare is None or len(subject.tokens) < 2:
        return {}
    return dict(declare(subject.batch, subject.seed))


def measure_relocations(subject: Subject, queries: str | tuple[int, ...] | None) -> dict[str, Following]:
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
            queries=chosen_queries(before, queries),
            seed=subject.seed,
        )
    return shares
