"""Attention heads: which to edit, and how, parsed from the words of a command; and classes by what they attend to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

import typer

from circuits.model.heads import Head, parse_heads
from interp_tasks.errors import UserError
from interp_tasks.measurement.loaded_checkpoints import DEFAULT_SAMPLES, LoadedCheckpoint, declared_or_empty
from interp_tasks.measurement.option_parsing import (
    check_choice,
    chosen_names,
    parse_numbers,
    parse_positions_or_mask,
)

if TYPE_CHECKING:
    from circuits import Intervention
    from circuits.patterns import Classes, Following, Movement, Scores
    from tasks.base import Split

#: What can be done to heads.
MODES = ("uniform", "mean_pattern", "edited_mean_pattern", "zero", "mean", "resample", "noise")
#: The words for all heads in one row, for one row per head, and for one row per layer, of all its heads.
ALL, EACH, EACH_LAYER = "all", "each", "each-layer"
#: Options of the experiments that edit heads.
HEADS_HELP = "all, each (a row per head), each-layer, or heads such as 0.1+2.3-5. Repeat for rows."
HEADS = typer.Option("--heads", metavar="SPEC", help=HEADS_HELP)
MODE = typer.Option("--mode", help=", ".join(MODES) + ".")
KEYS = typer.Option("--keys", metavar="0,1", help="With uniform: attend to these positions only.")
SCALE = typer.Option("--scale", metavar="SD", help="With noise: its standard deviation.")
POSITIONS = typer.Option(
    "--positions", metavar="WHERE", help="Edit at: all, hidden, observed, or positions such as 0,3."
)
#: Heads by the label of their row.
HeadGroups = Mapping[str, tuple[Head, ...]]
#: A template fits from this score on, corrected for chance.
THRESHOLD = 0.5
#: The most entries of attention patterns that are kept to be read again: some 170 MB, of two inputs at a time.
RECORDED_ENTRIES = 2**25
#: The word for the queries whose output the task reads.
READ = "read"
#: Heads that no template describes are, together, what people call uninterpretable.
UNINTERPRETABLE = "uninterpretable"
NO_CLASSES = "--by-class finds classes on other examples, and --tokens are all there are: give a task"


def parse_edit_options(
    mode: str, keys: Any = None, positions: Any = ALL, scale: float | None = None
) -> dict[str, Any]:
    """Returns where and how an edit of heads acts, as results record it: ``keys``, ``positions``, and ``scale`` of
    noise.
    """
    check_choice("--mode", mode, MODES)
    if (scale is None) == (mode == "noise") or not 0 < (1 if scale is None else scale) < float("inf"):
        raise UserError("--mode noise and --scale, its standard deviation above 0, go together")
    if keys is not None and mode != "uniform":
        raise UserError(f"--keys goes with --mode uniform only, not with {mode}")
    keys = None if keys is None else parse_numbers("--keys", keys)
    limits = {"keys": keys, "positions": parse_positions_or_mask(positions)}
    return limits if scale is None else {**limits, "scale": scale}


def make_head_edits(
    subject: LoadedCheckpoint, mode: str, limits: Mapping[str, Any], chosen: HeadGroups
) -> dict[str, Intervention]:
    """Returns the edit of each choice of heads, by its label; positions and keys that the examples lack are refused.

    Args:
        limits: as :func:`parse_edit_options` returns them.
    """
    from circuits import ablate

    tokens, seed = subject.tokens, subject.seed
    keys = resolve_positions_or_mask(subject, limits["keys"], "--keys")
    make: Mapping[str, Any] = {
        "uniform": partial(ablate.uniform, keys=keys),
        "mean_pattern": partial(ablate.mean_pattern, reference=tokens),
        "edited_mean_pattern": partial(ablate.mean_pattern, reference=tokens, of="edited"),
        "zero": ablate.zero,
        "mean": partial(ablate.mean, reference=tokens),
        "resample": partial(ablate.resample, source=tokens, seed=seed),
        "noise": partial(ablate.noise, scale=limits.get("scale", 0.0), seed=seed),
    }
    at = resolve_positions_or_mask(subject, limits["positions"])
    return {label: make[mode](heads, positions=at) for label, heads in chosen.items()}


def head_specs_to_labels(heads: Any) -> list[str]:
    """Returns head specs as the labels of their rows, each once; a list of (layer, head) is one spec."""
    if not len(heads):
        raise UserError("--heads: no heads given; write all, each, each-layer, or heads such as 0.1")
    is_one = isinstance(heads, str) or all(
        not isinstance(each, str) and all(isinstance(number, Integral) for number in each) for each in heads
    )
    labels = []
    for spec in [heads] if is_one else heads:
        text = spec if isinstance(spec, str) else "+".join(map(str, parse_heads(spec).heads or ()))
        labels.append(re.sub(r"\s+", "", text.lower()).replace(",", "+"))
    return list(dict.fromkeys(labels))


def heads_by_label(
    labels: Sequence[str], sizes: Any, layer: int | None = None
) -> dict[str, tuple[Head, ...]]:
    """Returns the heads of each row by its label, in the order asked for.

    Args:
        labels: as :func:`head_specs_to_labels` returns them.
        sizes: of the model, as its configuration has them.
        layer: where given, ``all``, ``each`` and ``each-layer`` are within it.
    """
    every = [Head(row, head) for row in range(sizes.n_layers) for head in range(sizes.n_heads)]
    every = [head for head in every if layer in (None, head.layer)]
    layers = dict.fromkeys(head.layer for head in every)
    rows: dict[str, dict[str, tuple[Head, ...]]] = {
        ALL: {ALL: tuple(every)},
        EACH: {str(head): (head,) for head in every},
        EACH_LAYER: {f"layer {row}": tuple(head for head in every if head.layer == row) for row in layers},
    }
    chosen: dict[str, tuple[Head, ...]] = {}
    for label in labels:
        chosen |= rows.get(label) or {label: parse_attention_heads(label, sizes)}
    return chosen


def parse_attention_heads(spec: str, sizes: Any, option: str = "--heads") -> tuple[Head, ...]:
    """Returns the heads that are named; ``circuits`` refuses those that a model of these sizes does not have."""
    found = parse_heads(spec).resolve(sizes)
    heads = tuple(head for head in found if isinstance(head, Head))
    if len(heads) < len(found):
        raise UserError(f"{option} {spec!r}: write all, or heads such as 0.1 (layer.head)")
    return heads


def resolve_positions_or_mask(
    subject: LoadedCheckpoint, positions: str | tuple[int, ...] | None, option: str = "--positions"
) -> Any:
    """Returns the positions to edit: as given, or for a name the boolean mask ``[batch pos]`` that the examples carry;
    ``None`` for all. ``observed`` is the complement of ``hidden``.
    """
    import torch

    shape = subject.tokens.shape
    if positions == ALL:
        return None
    if not isinstance(positions, str):
        if beyond := [at for at in positions or () if not -shape[1] <= at < shape[1]]:
            has = f"the examples of {subject.name} have positions 0-{shape[1] - 1}"
            raise UserError(f"{option}: no position {beyond[0]}: {has}")
        return positions
    extras = {} if subject.batch is None else subject.batch.extras
    masks = {key: mask for key, mask in extras.items() if mask.dtype == torch.bool and mask.shape == shape}
    if "hidden" in masks:
        masks.setdefault("observed", ~masks["hidden"])
    if positions not in masks:
        known = ", ".join(["all", *masks])
        raise UserError(
            f"{option} {positions!r}: the examples of {subject.name} have no such mask; write {known}, or positions "
            "such as 0,3"
        )
    return masks[positions]


@dataclass(frozen=True)
class HeadClasses:
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
        from circuits.patterns._template_scores import OTHER, UNCLEAR

        groups: dict[str, Any] = dict(self.classes.groups)
        rest = sorted([*groups.pop(OTHER, ()), *groups.pop(UNCLEAR, ())])
        groups |= {UNINTERPRETABLE: tuple(rest)} if rest else {}
        return groups | ({f"least patterned {least}": self.least_patterned(least)} if least else {})


def classify_heads(
    subject: LoadedCheckpoint,
    names: Sequence[str] = (),
    positions: str | tuple[int, ...] | None = READ,
    moving: bool = True,
) -> HeadClasses:
    """Scores and classifies the heads on a checkpoint's examples, and measures how their attention moves.

    A template that the task makes a class under a rule (``attention_rules()``) keeps it only among the templates asked
    for.

    Args:
        moving: whether to measure how attention moves; without it no head is in a class of heads that must not.
    """
    from circuits import patterns

    chosen = scored_positions(subject, positions)
    shared = {"positions": chosen, "seed": subject.seed}
    templates = chosen_templates(subject, names)
    own = record_if_small(subject, subject.tokens)
    scores = patterns.scores(subject.model, own, templates, batch=subject.batch, **shared)
    paired = declared_or_empty(subject, "attention_moves", subject.batch, subject.seed) if moving else {}
    moves = {
        change: patterns.movement(subject.model, own, record_if_small(subject, other.tokens), **shared)
        for change, other in paired.items()
    }
    declared = declared_or_empty(subject, "attention_rules")
    rules = {name: rule for name, rule in declared.items() if name in templates}
    unless = {name: rule.unless for name, rule in rules.items() if rule.unless in templates}
    among = {
        name: moves[rule.static].static() if rule.static in moves else ()
        for name, rule in rules.items()
        if rule.static in moves or (rule.static and not moving)
    }
    classes = patterns.classify(scores, THRESHOLD, unless=unless, among=among)
    possible = tuple(name for name in templates if name not in unless.values())
    pairs = declared_or_empty(subject, "attention_relocations", subject.batch, subject.seed) if moving else {}
    followed = {}
    for name, each in pairs.items():
        before, after = each.before.tokens, each.after.tokens
        # A mask of queries is that before the move.
        where = {"positions": scored_positions(subject.shown(each.before), positions), "seed": subject.seed}
        followed[name] = patterns.follow(
            subject.model, before, after, each.groups, each.source, each.target, **where
        )
    return HeadClasses(own, scores, classes, possible, moves, followed, chosen)


def record_if_small(subject: LoadedCheckpoint, tokens: Any) -> Any:
    """Returns the attention patterns on some examples, for several measurements; the examples where that takes much
    memory, so that each runs them anew.
    """
    from circuits import patterns

    sizes = subject.stored.model_config
    entries = sizes.n_layers * sizes.n_heads * tokens.shape[1] ** 2 * len(tokens)
    return patterns.record(subject.model, tokens) if entries <= RECORDED_ENTRIES else tokens


def head_classes_held_out(subject: LoadedCheckpoint) -> HeadClasses:
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
    own = declared_or_empty(subject, "attention_templates") or known
    known |= own
    return {name: known[name] for name in chosen_names(known, names or own, "--template", subject)}


def scored_positions(subject: LoadedCheckpoint, positions: str | tuple[int, ...] | None) -> Any:
    """Returns the queries to score, as ``circuits`` takes them."""
    if positions != READ:
        return resolve_positions_or_mask(subject, positions)
    return None if subject.task is None else list(subject.task.read_positions)
