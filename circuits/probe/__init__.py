"""Linear probes: what can be read off activations by a linear map, and whether that is more than chance.

    found = probe.linear(model, tokens, {"digit": digits}, "resid_post", kind="classification")
    found.frame

All sites, targets and controls of a model are fitted in one pass over the examples, by sums that do not grow with their
number, and scored in a second one.
"""

from circuits.probe._fit import LinearMap
from circuits.probe._linear import linear
from circuits.probe._result import ProbeResult

__all__ = ["LinearMap", "ProbeResult", "linear"]
