"""Scores heads against templates, in shares of attention and in bits, and classifies heads by their scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Shaped
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.figures.results import classes_figure, scores_figure
from circuits.model.heads import AnyHead, Head, parse_heads
from circuits.patterns._read import PatternPass, parse_draws
from circuits.patterns._templates import parse_templates, template_keys
from circuits.statistics import LEVEL, bootstrap, interval, ratio
from circuits.tables import bounded, short_table
from circuits.validate import answers_former_names, check_batch_length, parse_batch, parse_seed


@dataclass(frozen=True)
class Scores:
    """Scores of heads against templates.

    Attributes:
        frame: one row per head and template. `score`: the share of attention on the template's keys, mean over examples
            and queries; `chance`: the share that uniform attention to the visible keys would put there; `effect` =
            score − chance; `corrected` = (score − chance) / (1 − chance), 1 where all attention is on the template and
            0 at chance; all with 95% intervals (`score_ci_low`, ...), bootstrap over examples. `bits`: how informative
            the template is, see `patterns.bits`. `queries`: the number scored; `n`: the number of examples.
        mass: [head template example], float64, the attention on the template's keys, summed over an example's queries.
        chance: [head template example], the same sum for uniform attention.
        queries: [head template example], the number of queries scored.
        heads: the heads of the first axis.
        templates: the names of the second axis.
    """

    frame: pd.DataFrame
    mass: np.ndarray = field(repr=False)
    chance: np.ndarray = field(repr=False)
    queries: np.ndarray = field(repr=False)
    heads: tuple[Head, ...]
    templates: tuple[str, ...]
    seed: int
    draws: int

    def __repr__(self) -> str:
        return short_table(self.frame, [*_KEYS, *bounded("score"), "chance", "corrected", "bits"])

    def plot(self, column: str = "score") -> Any:
        """Returns a plotly figure with a heatmap over layers and heads per template, of `score` or another column."""
        return scores_figure(self.frame, self.templates, column)

    def resampled(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns score and chance [draw head template], by resamples that are the same for all heads and templates."""
        return _resampled(self.mass, self.chance, self.queries, self.seed, self.draws)


@answers_former_names
def scores(
    model: Any,
    tokens: Shaped[Tensor, "batch pos *input"] | Any,
    templates: Mapping[str, Any],
    *,
    batch: Any = None,
    positions: Any = None,
    layers: Any = None,
    seed: int = 0,
    draws: int = 1000,
    batch_size: int | None = None,
) -> Scores:
    """Scores every head against every template, in one pass.

    Args:
        templates: name -> bool [query key] or [batch query key], true at the keys that count (`patterns.row` and so
            on), or a function that returns one, `fn(tokens[rows])`, or `fn(batch[rows])` where `batch` is given (it has
            len() and takes a slice). Where prompts have padding, [query key] count positions in each prompt's own
            tokens, and [batch query key] is over the padded batch.
        positions: score these queries only: numbers, or a boolean mask [batch pos]. One of these is scored against a
            template only if it may see a key of it.
        layers: only these.
        seed: the seed of the bootstrap.
        draws: the number of its resamples.
        batch_size: examples in a forward, by default as in `sweep`. Inside `intervene` the edits are in force.
    """
    caller = "patterns.scores"
    reading = PatternPass.read(caller, model, tokens, layers, positions)
    prompts, heads = reading.prompts, reading.heads
    tokens = prompts.tokens
    seed, draws = parse_seed(seed, caller), parse_draws(draws, caller)
    batch = parse_batch(batch, caller)
    if batch is not None:
        check_batch_length(batch, len(tokens), caller)
    by_name = parse_templates(templates, tokens, batch is not None)
    sums = np.zeros((3, len(reading.layers), reading.surface.n_heads, len(by_name), len(tokens)))
    for rows, query_mask in reading.chunks(batch_size):
        examples = tokens[rows] if batch is None else batch[rows]
        keys = [
            template_keys(name, template, examples, rows, prompts[rows]) for name, template in by_name.items()
        ]
        marked = torch.stack(torch.broadcast_tensors(*keys), dim=-1).to(query_mask.device)
        for at, pattern, seen in reading.patterns(rows):
            sums[:, at, ..., rows] = _sums(pattern, seen, marked.double(), query_mask)
    measured = sums.reshape(3, len(heads), len(by_name), len(tokens))
    mass, chance, counts = measured
    frame = _frame(heads, tuple(by_name), measured, _resampled(mass, chance, counts, seed, draws))
    return Scores(frame, mass, chance, counts, heads, tuple(by_name), seed, draws)


def bits(score: np.ndarray | float, chance: np.ndarray | float) -> np.ndarray:
    """Returns how informative a template is about attention, in bits; 0 where the score is at chance or below.

    This is the Kullback-Leibler divergence of (score, 1 − score) from (chance, 1 − chance): the gain per query of
    describing attention as "score on these keys, the rest elsewhere, uniform within each" over describing it as
    uniform. All attention on 1 of 16 keys gains 4 bits, and on the row of 4 that holds it 2: among nested templates the
    narrower one wins only where it is more informative.
    """
    score, chance = np.asarray(score), np.asarray(chance)
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = [
            np.where(x > 0, x * np.log2(x / y), 0.0) for x, y in ((score, chance), (1 - score, 1 - chance))
        ]
    return np.where(np.isnan(score), np.nan, np.where(score > chance, sum(parts), 0.0))


def _sums(pattern: Tensor, seen: Tensor, marked: Tensor, query_mask: Tensor) -> np.ndarray:
    """Returns sums over queries [3 head template example]: the attention on the keys of each template, that of uniform
    attention there, and the number of queries.

    Args:
        pattern: [batch head query key], in double precision; `seen` likewise, the keys that queries may see.
        marked: [batch or 1, query, key, template], 1 at the keys of a template, in double precision.
        query_mask: [batch 1 query], the queries that count.
    """
    # One product over keys for each example and query serves all heads and templates: [batch query head template].
    mass = pattern.transpose(1, 2) @ marked
    visible_keys = seen.transpose(1, 2).double() @ marked
    scored = (visible_keys > 0) & query_mask.transpose(1, 2)[..., None]
    uniform = visible_keys / seen.sum(-1).clamp(min=1).transpose(1, 2)[..., None]
    measured = torch.stack([mass, uniform, torch.ones_like(mass)]) * scored
    return measured.sum(2).permute(0, 2, 3, 1).cpu().numpy()


def _resampled(
    mass: np.ndarray, chance: np.ndarray, queries: np.ndarray, seed: int, draws: int
) -> tuple[np.ndarray, np.ndarray]:
    """Resamples score and chance [draw head template]; the seed gives both the same resamples."""
    shape, examples = (draws, *mass.shape[:2]), mass.shape[-1]
    counts = queries.reshape(-1, examples)
    score, by_chance = (
        bootstrap(sums.reshape(-1, examples), counts, seed, draws).reshape(shape) for sums in (mass, chance)
    )
    return score, by_chance


def _frame(
    heads: tuple[Head, ...],
    templates: tuple[str, ...],
    measured: np.ndarray,
    resampled: tuple[np.ndarray, np.ndarray],
) -> pd.DataFrame:
    """Returns a row for each head and template: score, chance, their difference, and intervals over examples."""
    mass, by_chance, queries = measured.sum(-1)
    score, chance = ratio(mass, queries), ratio(by_chance, queries)
    score_resamples, chance_resamples = resampled
    columns: dict[str, np.ndarray] = {"score": score, "chance": chance, "effect": score - chance}
    columns |= {"corrected": ratio(score - chance, 1 - chance), "bits": bits(score, chance)}
    columns["queries"] = queries.astype(int)
    for name, values in (
        ("score", score_resamples),
        ("effect", score_resamples - chance_resamples),
        ("corrected", ratio(score_resamples - chance_resamples, 1 - chance_resamples)),
    ):
        bounds = interval(values.reshape(len(values), -1), LEVEL)
        for end, bound in zip(("low", "high"), bounds, strict=True):
            # With one example there is no estimate of how much examples differ.
            shown = bound if measured.shape[-1] > 1 else np.full_like(bound, np.nan)
            columns[f"{name}_ci_{end}"] = shown.reshape(score.shape)
    keys = {
        "layer": np.repeat([head.layer for head in heads], len(templates)),
        "head": np.repeat([head.head for head in heads], len(templates)),
        "template": list(templates) * len(heads),
    }
    return pd.DataFrame(keys | {name: columns[name].ravel() for name in _ORDER} | {"n": measured.shape[-1]})


_KEYS = ("layer", "head", "template")
_ORDER = (*bounded("score"), "chance", *bounded("effect"), *bounded("corrected"), "bits", "queries")


OTHER, UNCLEAR = "other", "unclear"


@dataclass(frozen=True)
class Classes:
    """The class of every head.

    Attributes:
        frame: one row per head: `class`; `template`, `score`, `chance`, `corrected` and `bits` of the best template
            (most bits among those that fit; where none fits, the one with the highest corrected score); `rival`,
            the next template that fits, and `lead`, the difference in bits to it, with its interval.
        groups: class -> its heads, for classes that have any, as in `ablate.uniform(classes.groups["row"])`.
        rule: the rule, in a sentence.
    """

    frame: pd.DataFrame
    groups: dict[str, tuple[Head, ...]] = field(repr=False)
    rule: str

    def __repr__(self) -> str:
        return short_table(self.frame, list(self.frame.columns))

    def plot(self) -> Any:
        """Returns a plotly figure of the class of each head, layers down, heads across, coloured by corrected score."""
        return classes_figure(self.frame, self.rule)

    def __getitem__(self, head: Any) -> str:
        """Returns the class of a head (layer, head)."""
        for name, heads in self.groups.items():
            if head in heads:
                return name
        raise KeyError(f"no head {head}")


def classify(
    scores: Scores,
    threshold: float = 0.5,
    *,
    unless: Mapping[str, str] | None = None,
    among: Mapping[str, Any] | None = None,
) -> Classes:
    """Assigns each head the template that it attends to, or "other", or "unclear".

    A template fits where the corrected score is at least `threshold`: 0.5 is half of the way from uniform attention to
    all attention on its keys. The class is the fitting template that is most informative, in bits (see `bits`), so
    that a head on its own position is not classified as one on its row. "unclear": the 95% interval of the corrected
    score goes below the threshold, or that of the lead in bits over another template that fits includes 0 (paired:
    the same resamples of examples for both), or there is no interval, with one example. "other": no template fits.

    Args:
        unless: template -> another one, which must not fit. It serves classes of heads that do something at some
            queries only, such as attending to their own position where that is observed but not elsewhere. A head is
            "unclear" too where the interval of the other's corrected score reaches the threshold. The templates on the
            right are no classes themselves.
        among: template -> heads: the only heads that can be in this class, such as those that another measure finds
            static.
    """
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold <= 1:
        raise CircuitsError(f"patterns.classify: threshold is above 0 and at most 1; got {threshold!r}")
    reserved = [name for name in (OTHER, UNCLEAR) if name in scores.templates]
    if reserved:
        raise CircuitsError(f"patterns.classify: {reserved[0]!r} is no name for a template here")
    unless, among = dict(unless or {}), {name: _heads(heads) for name, heads in (among or {}).items()}
    for name in (*unless, *unless.values(), *among):
        if name not in scores.templates:
            raise CircuitsError(
                f"patterns.classify: no template {name!r}; there are {', '.join(scores.templates)}"
            )
    resampled_bits = bits(*scores.resampled())
    rows = []
    for index, head in enumerate(scores.heads):
        head_scores = scores.frame.iloc[index * len(scores.templates) : (index + 1) * len(scores.templates)]
        excluded = {name for name, heads in among.items() if heads is not None and head not in heads}
        excluded |= set(unless.values())
        row = _row(head_scores.reset_index(drop=True), resampled_bits[:, index], threshold, unless, excluded)
        rows.append({"layer": head.layer, "head": head.head} | row)
    frame = pd.DataFrame(rows)
    groups: dict[str, tuple[Head, ...]] = {}
    for name in (*scores.templates, UNCLEAR, OTHER):
        members = tuple(
            head for head, label in zip(scores.heads, frame["class"], strict=True) if label == name
        )
        if members:
            groups[name] = members
    return Classes(frame, groups, _rule(threshold, unless))


def _heads(given: Any) -> tuple[AnyHead, ...] | None:
    """Returns the heads that a class is left to, of which there may be none, as a measure may find none; None: all."""
    if isinstance(given, Iterator | Set):
        given = list(given)
    try:
        return () if isinstance(given, tuple | list) and not given else parse_heads(given).heads
    except CircuitsError as error:
        raise CircuitsError(f"patterns.classify, among: {error}") from error


def _row(
    head_scores: pd.DataFrame,
    resampled_bits: np.ndarray,
    threshold: float,
    unless: Mapping[str, str],
    excluded: set[str],
) -> dict[str, object]:
    """Classifies one head from its rows of scores and its resampled bits [draw template]."""
    names = head_scores["template"].tolist()
    template_bits, corrected = head_scores["bits"].to_numpy(), head_scores["corrected"].to_numpy()
    above_threshold = corrected >= threshold
    allowed = np.array([name not in excluded for name in names])
    fits = above_threshold & allowed
    for name, other in unless.items():
        fits[names.index(name)] &= not above_threshold[names.index(other)]
    ranking = [int(at) for at in np.argsort(-template_bits, kind="stable") if fits[at]]
    if not fits.any():
        ranked = np.argsort(-corrected, kind="stable")
        ranking = [int(at) for at in ranked if allowed[at] and not np.isnan(corrected[at])]
    if not ranking:
        return {"class": OTHER}
    best, rivals = ranking[0], ranking[1:]
    row: dict[str, object] = {name: head_scores[name].iloc[best] for name in _SHOWN}
    if not fits.any():
        return {"class": OTHER} | row
    clear = head_scores["corrected_ci_low"].iloc[best] >= threshold
    if names[best] in unless:
        at = names.index(unless[names[best]])
        # If no query has a key in the other template, its score is NaN and it cannot fit.
        clear &= bool(np.isnan(corrected[at]) or head_scores["corrected_ci_high"].iloc[at] < threshold)
    for rival in rivals:
        low, high = interval((resampled_bits[:, best] - resampled_bits[:, rival])[:, None], LEVEL)
        clear &= low[0] > 0
        if rival == rivals[0]:
            row |= {
                "rival": head_scores["template"].iloc[rival],
                "lead": template_bits[best] - template_bits[rival],
            }
            row |= {"lead_ci_low": low[0], "lead_ci_high": high[0]}
    return {"class": row["template"] if clear else UNCLEAR} | row


_SHOWN = ("template", "score", "chance", "corrected", "bits")


def _rule(threshold: float, unless: Mapping[str, str]) -> str:
    exceptions = "".join(f" {name}: only where {other} does not fit." for name, other in unless.items())
    return (
        f"Class: of the templates whose score, corrected for chance, is at least {threshold:g}, the one that tells "
        f'most (in bits); "{UNCLEAR}" where the interval of that score goes below {threshold:g} or that of the lead '
        f'over another such template includes 0; "{OTHER}" where no template fits.{exceptions}'
    )
