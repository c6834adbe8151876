"""Activation patching: what a model computes on another input, put in its place; and estimates for all places at once.

patch.activations("z.1", source)                   # an edit, for `run`, `intervene` and `sweep`
patch.path("0.1", ("q", "2.0"), source)            # one path alone
patch.screen(model, base, source, metric)          # gradient estimates of all nodes, the largest measured exactly
patch.edges(model, base, source, metric)           # the same of all edges
patch.attribution(model, base, source, metric)     # estimates alone, at one site
"""

from circuits.patch._activations import activations, path
from circuits.patch._attribution import attribution
from circuits.patch._edges import edges
from circuits.patch._screen import screen

__all__ = ["activations", "attribution", "edges", "path", "screen"]
