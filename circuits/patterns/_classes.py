"""Classifies heads by the template that they attend to, under one stated rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from circuits.errors import CircuitsError
from circuits.model.heads import AnyHead, Head, parse_heads
from circuits.patterns._scores import Scores, bits
from circuits.statistics import LEVEL, interval
from circuits.tables import short_table

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
        from circuits.figures.results import classes_figure

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
