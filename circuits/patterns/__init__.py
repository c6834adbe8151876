"""Analyses attention patterns: mean maps, template scores, classes of heads, and changes between two inputs.

    maps = patterns.attention(model, tokens)                          # maps.mean [layer head query key]
    templates = {"row": patterns.row(7, 7, itself=False), "identity": patterns.identity(49)}
    scores = patterns.scores(model, tokens, templates)                # scores.frame, a row per head and template
    classes = patterns.classify(scores)
    ablate.uniform(classes.groups["row"])
    patterns.movement(model, tokens, other_tokens).frame              # total variation between two inputs, row by row
    patterns.follow(model, tokens, other_tokens, column, before, after)  # does attention follow a group that moves?

    seen = patterns.record(model, tokens)                             # several of these from one pass
    patterns.scores(model, seen, templates)

A template marks the keys that count for a query: bool [query key] or [batch query key], or a function of the batch. The
usual ones are defined here; `&`, `|` and `~` combine them. All functions run in eval mode without gradients, chunk by
chunk, on any model that `circuits` supports, with the edits of open `intervene` blocks in force.
"""

from circuits.patterns._changes_between_paired_inputs import Following, Movement, follow, movement
from circuits.patterns._patterns_and_means import Maps, Recorded, attention, record
from circuits.patterns._template_scores_and_classes import Classes, Scores, bits, classify, scores
from circuits.patterns._templates import (
    column,
    constant,
    duplicate,
    identity,
    induction,
    marked,
    previous,
    row,
)

__all__ = ["Classes", "Following", "Maps", "Movement", "Recorded", "Scores", "attention", "bits"]
__all__ += ["classify", "column", "constant", "duplicate", "follow", "identity", "induction", "marked"]
__all__ += ["movement", "previous", "record", "row", "scores"]
__dir__ = __all__.copy
