"""Linear probes: how well a linear map predicts targets from activations, compared with controls.

    result = probe.linear(model, tokens, {"digit": digits}, "resid_post", kind="classification")
    result.frame

The activations of all sites are read in one pass over the examples and kept, up to 2 GiB; sites beyond that are read in
further passes.
"""

from circuits.probe._linear_probe import LinearMap, ProbeResult, linear

__all__ = ["LinearMap", "ProbeResult", "linear"]
__dir__ = __all__.copy
