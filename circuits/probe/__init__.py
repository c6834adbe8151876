"""Linear probes: how well a linear map predicts targets from activations, compared with controls.

    result = probe.linear(model, tokens, {"digit": digits}, "resid_post", kind="classification")
    result.frame

All sites, targets and controls of a model are fitted in one pass over the examples, from sums whose size does not grow
with the number of examples, and scored in a second pass.
"""

from circuits.probe._fit import LinearMap
from circuits.probe._linear import linear
from circuits.probe._result import ProbeResult

__all__ = ["LinearMap", "ProbeResult", "linear"]
