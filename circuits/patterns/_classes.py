"""Which template a head attends by: classes of heads, under one stated rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from circuits.errors import CircuitsError
from circuits.model.heads import Head
from circuits.patterns._scores import Scores, bits
from circuits.statistics import LEVEL, interval

OTHER, UNCLEAR = "other", "unclear"


@dataclass(frozen=True)
class Classes:
    """The class of every head.

    Attributes:
        frame: one row per head: `class`; of the template that decided it (of those that fit the one that tells most,
            where none does the one with the highest corrected score) `template`, `score`, `chance`, `corrected` and
            `bits`; `rival`, the next template that fits, and by how many bits it is led, `lead` with its interval.
        groups: class -> its heads, for classes that have any; `ablate.uniform(classes.groups["row"])`.
        rule: the rule, in a sentence.
    """

    frame: pd.DataFrame
    groups: dict[str, tuple[Head, ...]] = field(repr=False)
    rule: str

    def plot(self) -> Any:
        """A plotly figure: the class of each head, layers down, heads across; colours are its corrected score."""
        from circuits.figures.patterns import classes_figure

        return classes_figure(self.frame, self.rule)

    def __getitem__(self, head: Any) -> str:
        """The class of a head (layer, head)."""
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
    """Give each head the template it attends by, or "other", or "unclear".

    A template fits where the corrected score is at least `threshold`: half of the way from uniform attention to all
    attention on its keys. Of the templates that fit the class is the one that tells most, in bits (see `bits`), so
    that a head on its own position is not taken for one on its row. "unclear": the 95% interval of the corrected
    score goes below the threshold, or that of the lead in bits over another template that fits includes 0 (paired:
    the same resamples of examples for both), or there is no interval, with one example. "other": nothing fits.

    Args:
        unless: template -> another one, which must not fit: what a head does at some queries only, such as attending to
            its own position where that is observed, unless it does so everywhere. "unclear" too where the interval of
            the other's corrected score reaches the threshold. What stands on the right only serves this and is no
            class.
        among: template -> heads: it is a class of these only, such as those that another measure finds static.
    """
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold <= 1:
        raise CircuitsError(f"patterns.classify: threshold is above 0 and at most 1; got {threshold!r}")
    reserved = [name for name in (OTHER, UNCLEAR) if name in scores.templates]
    if reserved:
        raise CircuitsError(f"patterns.classify: {reserved[0]!r} is no name for a template here")
    unless, among = dict(unless or {}), dict(among or {})
    for name in (*unless, *unless.values(), *among):
        if name not in scores.templates:
            raise CircuitsError(
                f"patterns.classify: no template {name!r}; there are {', '.join(scores.templates)}"
            )
    drawn = bits(*scores.resampled())
    rows = []
    for index, head in enumerate(scores.heads):
        of_head = scores.frame.iloc[index * len(scores.templates) : (index + 1) * len(scores.templates)]
        barred = {name for name, heads in among.items() if head not in heads} | set(unless.values())
        found = _row(of_head.reset_index(drop=True), drawn[:, index], threshold, unless, barred)
        rows.append({"layer": head.layer, "head": head.head} | found)
    frame = pd.DataFrame(rows)
    groups: dict[str, tuple[Head, ...]] = {}
    for name in (*scores.templates, UNCLEAR, OTHER):
        mine = tuple(head for head, found in zip(scores.heads, frame["class"], strict=True) if found == name)
        if mine:
            groups[name] = mine
    return Classes(frame, groups, _rule(threshold, unless))


def _row(
    of_head: pd.DataFrame, drawn: np.ndarray, threshold: float, unless: Mapping[str, str], barred: set[str]
) -> dict[str, object]:
    """What becomes of one head; its rows of scores, and resampled bits [draw template]."""
    names = of_head["template"].tolist()
    told, corrected = of_head["bits"].to_numpy(), of_head["corrected"].to_numpy()
    scored = corrected >= threshold
    possible = np.array([name not in barred for name in names])
    fits = scored & possible
    for name, other in unless.items():
        fits[names.index(name)] &= not scored[names.index(other)]
    order = [int(at) for at in np.argsort(-told, kind="stable") if fits[at]]
    if not fits.any():
        ranked = np.argsort(-corrected, kind="stable")
        order = [int(at) for at in ranked if possible[at] and not np.isnan(corrected[at])]
    if not order:
        return {"class": OTHER}
    best, rivals = order[0], order[1:]
    row: dict[str, object] = {name: of_head[name].iloc[best] for name in _SHOWN}
    if not fits.any():
        return {"class": OTHER} | row
    clear = of_head["corrected_ci_low"].iloc[best] >= threshold
    if names[best] in unless:
        at = names.index(unless[names[best]])
        # Where no query has a key in the other template there is nothing that could fit.
        clear &= bool(np.isnan(corrected[at]) or of_head["corrected_ci_high"].iloc[at] < threshold)
    for rival in rivals:
        low, high = interval((drawn[:, best] - drawn[:, rival])[:, None], LEVEL)
        clear &= low[0] > 0
        if rival == rivals[0]:
            row |= {"rival": of_head["template"].iloc[rival], "lead": told[best] - told[rival]}
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
