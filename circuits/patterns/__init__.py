"""What attention heads attend to: mean maps, scores against templates, classes, how far attention moves, and whether it
follows.

    maps = patterns.attention(model, tokens)                          # maps.mean [layer head query key]
    templates = {"row": patterns.row(7, 7, itself=False), "identity": patterns.identity(49)}
    scores = patterns.scores(model, tokens, templates)                # scores.frame, a row per head and template
    classes = patterns.classify(scores)
    ablate.uniform(classes.groups["row"])
    patterns.movement(model, tokens, other_tokens).frame              # between two inputs, row by row
    patterns.follow(model, tokens, other_tokens, column, here, there)  # does attention go along from here to there?

A template says which keys of a query count: bool [query key] or [batch query key], or a function of the batch. Here are
the usual ones; `&`, `|` and `~` make others. All of it runs in eval mode without gradients, chunk by chunk, on any
model that `circuits` serves, and sees the edits of open `intervene` blocks.
"""

from circuits.patterns._classes import Classes, classify
from circuits.patterns._mean_maps import Maps, attention
from circuits.patterns._movement import Movement, movement
from circuits.patterns._scores import Scores, bits, scores
from circuits.patterns._shift import Following, follow
from circuits.patterns._templates import column, constant, identity, marked, previous, row

__all__ = [
    "Classes",
    "Following",
    "Maps",
    "Movement",
    "Scores",
    "attention",
    "bits",
    "classify",
    "column",
    "constant",
    "follow",
    "identity",
    "marked",
    "movement",
    "previous",
    "row",
    "scores",
]
