"""Scores heads against templates, in shares of attention and in bits, and classifies heads by their scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from circuits.arguments import check_renamed_args, parse_choice, parse_count, parse_metric_batch, parse_seed
from circuits.errors import CircuitsError, format_value, prefix_circuits_errors
from circuits.figures.panel_grid import Figure
from circuits.figures.results import SIGNED, heads_figure, pivot_by_head
from circuits.model.heads import AnyHead, Head, parse_heads
from circuits.model.types import BatchLike, HeadsLike, PositionsLike, TemplateLike, TokensLike
from circuits.patterns._patterns_and_means import PatternPass, Recorded
from circuits.patterns._templates import parse_templates, template_for_rows
from circuits.statistics import LEVEL, bootstrap_ratios, percentile_bounds, ratio
from circuits.table_printing import ci_names, interval_columns, short_table_text


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
        return short_table_text(self.frame, [*_KEYS, *ci_names("score"), "chance", "corrected", "bits"])

    def plot(self, column: str = "score") -> Figure:
        """Returns a plotly figure with a heatmap over layers and heads per template, of `score` or another column."""
        parse_choice(column, ("score", "chance", "effect", "corrected", "bits"), "plot", "column")
        of = self.frame.groupby("template", sort=False)
        maps = {str(name): pivot_by_head(rows, column) for name, rows in of}
        subtitle, signed = f"Of each head: {column}.", column in SIGNED
        return heads_figure(maps, column, "Attention heads against templates", subtitle, signed=signed)

    def resampled(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns score and chance [draw head template], by resamples that are the same for all heads and templates."""
        shape, examples = (self.draws, *self.mass.shape[:2]), self.mass.shape[-1]
        counts = self.queries.reshape(-1, examples)
        score, chance = (
            bootstrap_ratios(sums.reshape(-1, examples), counts, self.seed, self.draws).reshape(shape)
            for sums in (self.mass, self.chance)
        )
        return score, chance


@check_renamed_args
def scores(
    model: nn.Module,
    tokens: TokensLike | Recorded,
    templates: Mapping[str, TemplateLike],
    *,
    batch: BatchLike = None,
    positions: PositionsLike = None,
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
        seed: the seed of the bootstrap.
        draws: the number of its resamples.
        batch_size: examples in a forward; by default by the model's size. Inside `intervene` the edits are in force.
    """
    caller = "patterns.scores"
    reading = PatternPass.parse(caller, model, tokens, positions)
    prompts, heads, hooked = reading.prompts, reading.heads, reading.hooked
    tokens, given = prompts.tokens, parse_metric_batch(batch, caller, len(prompts))
    seed, draws = parse_seed(seed, caller), parse_count(draws, caller)
    named = parse_templates(templates, tokens, given is not None)
    sums = np.zeros((3, hooked.n_layers, hooked.n_heads, len(named), len(tokens)))
    for rows, query_mask in reading.rows_and_query_masks(batch_size):
        examples = tokens[rows] if given is None else given[rows]
        keys = [template_for_rows(name, one, examples, rows, prompts[rows]) for name, one in named.items()]
        marked = torch.stack(torch.broadcast_tensors(*keys), dim=-1).to(query_mask.device)
        for at, pattern, seen in reading.patterns_and_visible_keys(rows):
            sums[:, at, ..., rows] = _sum_over_queries(pattern, seen, marked.double(), query_mask)
    mass, chance, queries = sums.reshape(3, len(heads), len(named), len(tokens))
    found = Scores(pd.DataFrame(), mass, chance, queries, heads, tuple(named), seed, draws)
    return replace(found, frame=_tabulate_scores(found))


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


def _sum_over_queries(pattern: Tensor, seen: Tensor, marked: Tensor, query_mask: Tensor) -> np.ndarray:
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


def _tabulate_scores(found: Scores) -> pd.DataFrame:
    """Returns a row for each head and template: score, chance, their difference, and intervals over examples."""
    mass, by_chance, queries = (part.sum(-1) for part in (found.mass, found.chance, found.queries))
    score, chance = ratio(mass, queries), ratio(by_chance, queries)
    drawn, at_chance = found.resampled()
    columns = interval_columns("score", score, drawn) | {"chance": chance, "bits": bits(score, chance)}
    columns |= interval_columns("effect", score - chance, drawn - at_chance)
    columns["queries"] = queries.astype(int)
    corrected = ratio(score - chance, 1 - chance), ratio(drawn - at_chance, 1 - at_chance)
    columns |= interval_columns("corrected", *corrected)
    places = [(*head, name) for head in found.heads for name in found.templates]
    keys = dict(zip(_KEYS, zip(*places, strict=True), strict=True))
    return pd.DataFrame(keys | {name: columns[name].ravel() for name in _ORDER} | {"n": found.mass.shape[-1]})


_KEYS = ("layer", "head", "template")
_ORDER = (*ci_names("score"), "chance", *ci_names("effect"), *ci_names("corrected"), "bits", "queries")
#: Classes that are no templates, and what is said of a head's best template.
OTHER, UNCLEAR = "other", "unclear"
_BEST = ("score", "chance", "corrected", "bits")


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
        return short_table_text(self.frame, list(self.frame.columns))

    def plot(self) -> Figure:
        """Returns a plotly figure of the class of each head, layers down, heads across, coloured by corrected score."""
        scored = self.frame if "corrected" in self.frame else self.frame.assign(corrected=np.nan)
        maps = {"": pivot_by_head(scored, "corrected")}
        text = pivot_by_head(self.frame, "class")
        return heads_figure(maps, "corrected", "What each head attends to", self.rule, signed=True, text=text)

    def __getitem__(self, head: tuple[int, int]) -> str:
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
    among: Mapping[str, HeadsLike] | None = None,
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
    if not isinstance(scores, Scores):
        got = type(scores).__name__
        raise CircuitsError(f"patterns.classify: give the result of patterns.scores, got {got}")
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold <= 1:
        raise CircuitsError(f"patterns.classify: threshold is above 0 and at most 1; got {threshold!r}")
    for given in (unless, among):
        if given is not None and not isinstance(given, Mapping):
            got = format_value(given)
            raise CircuitsError(f"patterns.classify: unless= and among= are dicts by template; got {got}")
    if reserved := {OTHER, UNCLEAR}.intersection(scores.templates):
        raise CircuitsError(f"patterns.classify: {reserved.pop()!r} is no name for a template here")
    unless = dict(unless or {})
    only = {name: _parse_allowed_heads(heads) for name, heads in (among or {}).items()}
    for name in (*unless, *unless.values(), *only):
        if name not in scores.templates:
            raise CircuitsError(
                f"patterns.classify: no template {name!r}; there are {', '.join(scores.templates)}"
            )
    of_class = {name: () if name in unless.values() else only.get(name) for name in scores.templates}
    excluded = [[of is not None and head not in of for of in of_class.values()] for head in scores.heads]
    rows = _classify_each_head(scores, threshold, unless, np.array(excluded))
    keys = [{"layer": head.layer, "head": head.head} for head in scores.heads]
    frame = pd.DataFrame([key | row for key, row in zip(keys, rows, strict=True)])
    groups: dict[str, tuple[Head, ...]] = {}
    for name in (*scores.templates, UNCLEAR, OTHER):
        members = [head for head, label in zip(scores.heads, frame["class"], strict=True) if label == name]
        groups |= {name: tuple(members)} if members else {}
    exceptions = "".join(f" {name}: only where {other} does not fit." for name, other in unless.items())
    rule = (
        f"Class: of the templates whose score, corrected for chance, is at least {threshold:g}, the one that tells "
        f'most (in bits); "{UNCLEAR}" where the interval of that score goes below {threshold:g} or that of the lead '
        f'over another such template includes 0; "{OTHER}" where no template fits.{exceptions}'
    )
    return Classes(frame, groups, rule)


def _parse_allowed_heads(given: Any) -> tuple[AnyHead, ...] | None:
    """Returns the heads that a class is left to, of which there may be none, as a measure may find none; None: all."""
    given = list(given) if isinstance(given, Iterator | Set) else given
    with prefix_circuits_errors("patterns.classify, among"):
        return () if isinstance(given, tuple | list) and not given else parse_heads(given).heads


def _classify_each_head(
    scores: Scores, threshold: float, unless: Mapping[str, str], excluded: np.ndarray
) -> Iterator[dict[str, Any]]:
    """Yields the class of each head, and what is known of its best template and the rival of that.

    Args:
        excluded: bool [head template], the templates that cannot be a head's class.
    """
    names, shape = scores.templates, excluded.shape
    columns = {
        name: scores.frame[name].to_numpy().reshape(shape) for name in (*_BEST, *ci_names("corrected")[1:])
    }
    corrected, told = columns["corrected"], columns["bits"]
    above, sure = corrected >= threshold, columns["corrected_ci_low"] >= threshold
    fits = above & ~excluded
    for name, other in unless.items():
        at, against = names.index(name), names.index(other)
        fits[:, at] &= ~above[:, against]
        # If no query has a key in the other template, its score is NaN and it cannot fit.
        sure[:, at] &= np.isnan(corrected[:, against]) | (
            columns["corrected_ci_high"][:, against] < threshold
        )
    drawn = bits(*scores.resampled())
    for head in range(len(excluded)):
        fitting = bool(fits[head].any())
        by, possible = (told, fits) if fitting else (corrected, ~excluded & ~np.isnan(corrected))
        ranking = [int(at) for at in np.argsort(-by[head], kind="stable") if possible[head, at]]
        if not ranking:
            yield {"class": OTHER}
            continue
        best, *rivals = ranking
        row = {"template": names[best]} | {name: columns[name][head, best] for name in _BEST}
        lead = drawn[:, head, [best]] - drawn[:, head, rivals]
        lows, highs = percentile_bounds(lead, LEVEL) if fitting and rivals else (np.ones(0), np.ones(0))
        if len(lows):
            row |= {"rival": names[rivals[0]], "lead": told[head, best] - told[head, rivals[0]]}
            row |= {"lead_ci_low": lows[0], "lead_ci_high": highs[0]}
        clear = sure[head, best] and bool((lows > 0).all())
        yield {"class": OTHER if not fitting else names[best] if clear else UNCLEAR} | row
