"""Fourier analysis of weights and activations over a grid of coordinates, such as two operands or rows and columns.

    grid = fourier.Grid.of_inputs(tokens, {"a": 0, "b": 1}, values=113)
    post = cache(model, tokens, "mlp_post.0")["mlp_post.0"][:, -1]
    spectrum = fourier.spectrum(post, grid)                   # power per (k_a, k_b) and neuron
    fourier.key_frequencies(fourier.spectrum(model.W_E[:113])).keys
    fourier.clusters(spectrum).sizes

A spectrum holds sums of squared coefficients in the orthonormal real basis, so that shares of variance add up to 1
(Parseval).
"""

from circuits.fourier._basis_on_grid import Grid, basis, components, frequencies, transform
from circuits.fourier._modular_sum import CosineFit, ModularSum, regression, share, variance_explained
from circuits.fourier._spectra_and_key_frequencies import (
    Bands,
    Clusters,
    KeyFrequencies,
    Spectrum,
    clusters,
    gini,
    key_frequencies,
    spectrum,
)

__all__ = ["Bands", "Clusters", "CosineFit", "Grid", "KeyFrequencies", "ModularSum", "Spectrum", "basis"]
__all__ += ["clusters", "components", "frequencies", "gini", "key_frequencies", "regression", "share"]
__all__ += ["spectrum", "transform", "variance_explained"]
__dir__ = __all__.copy
