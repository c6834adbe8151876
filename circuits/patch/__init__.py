"""Activation patching: replaces activations by those of another input; and gradient estimates of many patches at once.

patch.activations("z.1", source)                   # an edit, for `run`, `intervene` and `sweep`
patch.path("0.1", ("q", "2.0"), source)            # one path alone
patch.screen(model, base, source, metric)          # gradient estimates for all nodes; the largest are measured exactly
patch.edges(model, base, source, metric)           # the same for all edges
patch.attribution(model, base, source, metric)     # only estimates, at one site
"""

from circuits.patch._activation_and_path import activations, path
from circuits.patch._attribution_patching import attribution, screen
from circuits.patch._edge_attribution import edges
from circuits.patch._screen_result import ScreenResult

__all__ = ["ScreenResult", "activations", "attribution", "edges", "path", "screen"]
__dir__ = __all__.copy
