"""Classes of attention heads, by what they attend to on a checkpoint's examples, or on other examples of the task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from circuits.model.heads import Head
from interp_tasks.errors import UserError
from interp_tasks.measurement.head_options_and_edits import resolve_positions_or_mask
from interp_tasks.measurement.loaded_checkpoints import LoadedCheckpoint, declared_by_task
from interp_tasks.measurement.option_parsing import chosen_names
from interp_tasks.measurement.options_and_examples import DEFAULT_SAMPLES

if TYPE_CHECKING:
    from circuits.patterns import Classes, Following, Movement, Scores
    from tasks.base import Split

#: A template fits from this score on, corrected for chance.
THRESHOLD = 0.5
#: The most entries of attention patterns that are kept to be read again: some 170 MB, of two inputs at a time.
RECORDED_ENTRIES = 2**25
#: The word for the queries whose output the task reads.
READ = "read"
#: Heads that no template describes are, together, what people call uninterpretable.
UNINTERPRETABLE = "uninterpretable"
NO_CLASSES = "--by-class finds classes on other examples, and --tokens are all there are: give a task"


@dataclass(frozen=True)
class HeadClassesAndMovements:
    """The scores, classes, movements and relocations of the heads of one checkpoint.

    Attributes:
        recorded: the patterns that they are of, or the examples, as ``circuits`` takes them.
        possible: the templates that may be classes.
        positions: those looked at, as ``circuits`` takes them.
    """

    recorded: Any
    scores: Scores
    classes: Classes
    possible: tuple[str, ...]
    moves: Mapping[str, Movement]
    followed: Mapping[str, Following]
    positions: Any

    def least_patterned(self, number: int) -> tuple[Head, ...]:
        """Returns the ``number`` heads whose best template, corrected for chance, fits worst; no threshold is used."""
        frame = self.scores.frame
        possible = frame[frame["template"].isin(self.possible)]
        best = possible.groupby(["layer", "head"], sort=True)["corrected"].max()
        return tuple(sorted(sorted(self.scores.heads, key=lambda head: (best[head], head))[:number]))

    def heads_by_class(self, least: int = 0) -> dict[str, tuple[Head, ...]]:
        """Returns the heads of each class; heads without a class are in ``uninterpretable``, and so many that come
        least close to any template in a group more.
        """
        from circuits.patterns._template_scores_and_classes import OTHER, UNCLEAR

        groups: dict[str, Any] = dict(self.classes.groups)
        rest = sorted([*groups.pop(OTHER, ()), *groups.pop(UNCLEAR, ())])
        groups |= {UNINTERPRETABLE: tuple(rest)} if rest else {}
        return groups | ({f"least patterned {least}": self.least_patterned(least)} if least else {})


def classify_heads(
    subject: LoadedCheckpoint,
    template_names: Sequence[str] = (),
    positions: str | tuple[int, ...] | None = READ,
    moving: bool = True,
) -> HeadClassesAndMovements:
    """Scores and classifies the heads on a checkpoint's examples, and measures how their attention moves.

    A template that the task makes a class under a rule (``attention_rules()``) keeps it only among the templates asked
    for.

    Args:
        moving: whether to measure how attention moves; without it no head is in a class of heads that must not.
    """
    from circuits import patterns

    chosen = scored_positions(subject, positions)
    shared = {"positions": chosen, "seed": subject.seed}
    templates = chosen_templates(subject, template_names)
    own = patterns_or_tokens_if_too_large(subject, subject.tokens)
    scores = patterns.scores(subject.model, own, templates, batch=subject.batch, **shared)
    paired = declared_by_task(subject, "attention_moves", subject.batch, subject.seed) if moving else {}
    moves = {
        change: patterns.movement(
            subject.model, own, patterns_or_tokens_if_too_large(subject, other.tokens), **shared
        )
        for change, other in paired.items()
    }
    declared = declared_by_task(subject, "attention_rules")
    rules = {name: rule for name, rule in declared.items() if name in templates}
    unless = {name: rule.unless for name, rule in rules.items() if rule.unless in templates}
    among = {
        name: moves[rule.static].static() if rule.static in moves else ()
        for name, rule in rules.items()
        if rule.static in moves or (rule.static and not moving)
    }
    classes = patterns.classify(scores, THRESHOLD, unless=unless, among=among)
    possible = tuple(name for name in templates if name not in unless.values())
    pairs = declared_by_task(subject, "attention_relocations", subject.batch, subject.seed) if moving else {}
    followed = {}
    for name, each in pairs.items():
        before, after = each.before.tokens, each.after.tokens
        # A mask of queries is that before the move.
        where = {"positions": scored_positions(subject.shown(each.before), positions), "seed": subject.seed}
        followed[name] = patterns.follow(
            subject.model, before, after, each.groups, each.source, each.target, **where
        )
    return HeadClassesAndMovements(own, scores, classes, possible, moves, followed, chosen)


def patterns_or_tokens_if_too_large(subject: LoadedCheckpoint, tokens: Any) -> Any:
    """Returns the attention patterns on some examples, for several measurements; the examples where that takes much
    memory, so that each runs them anew.
    """
    from circuits import patterns

    sizes = subject.stored.model_config
    entries = sizes.n_layers * sizes.n_heads * tokens.shape[1] ** 2 * len(tokens)
    return patterns.record(subject.model, tokens) if entries <= RECORDED_ENTRIES else tokens


def head_classes_held_out(subject: LoadedCheckpoint) -> HeadClassesAndMovements:
    """Classifies heads on other examples of the task, so that selection and measurement are independent."""
    if subject.task is None:
        raise UserError(NO_CLASSES)
    split: Split = "validation" if subject.labels["split"] != "validation" else "test"
    size = max(DEFAULT_SAMPLES, len(subject.tokens))
    batch = subject.task.sample(size, seed=subject.seed, split=split).to(str(subject.tokens.device))
    return classify_heads(subject.shown(batch))


def chosen_templates(subject: LoadedCheckpoint, names: Sequence[str]) -> dict[str, Any]:
    """Returns the chosen templates by name; by default those of the task, or without a task five that need none."""
    from circuits import patterns

    def tokens_of(batch: Any) -> Any:
        tokens = getattr(batch, "tokens", batch)
        return getattr(tokens, "tokens", tokens)

    length = subject.tokens.shape[1]
    known: dict[str, Any] = {
        "identity": patterns.identity(length),
        "previous": patterns.previous(length),
        "first": patterns.constant(length, 0),
        "duplicate": lambda batch: patterns.duplicate(tokens_of(batch)),
        "induction": lambda batch: patterns.induction(tokens_of(batch)),
    }
    own = declared_by_task(subject, "attention_templates") or known
    known |= own
    return {name: known[name] for name in chosen_names(known, names or own, "--template", subject)}


def scored_positions(subject: LoadedCheckpoint, positions: str | tuple[int, ...] | None) -> Any:
    """Returns the queries to score, as ``circuits`` takes them."""
    if positions != READ:
        return resolve_positions_or_mask(subject, positions)
    return None if subject.task is None else list(subject.task.read_positions)
