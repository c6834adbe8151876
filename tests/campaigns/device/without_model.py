"""Fourier transforms and shares of variance on two devices: they take values and no model."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from circuits import fourier, variance
from tests.campaigns.device.agreement import Check
from tests.campaigns.device.models import Given, check_of


def grid_of_sums(given: Given) -> tuple[Tensor, Tensor]:
    """Returns the cells of a grid of 13 by 13, and values of which the first follow frequency 3 of a + b."""
    p = 13
    cells = torch.cartesian_prod(torch.arange(p), torch.arange(p))
    values = torch.randn(p * p, p, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[:, 0] += 5 * (2 * math.pi * 3 * cells.sum(1) / p).cos()
    return given.place(cells), values.to(given.device)


def spectra(given: Given) -> Any:
    cells, values = grid_of_sums(given)
    grid = fourier.Grid.of_inputs(cells, {"a": 0, "b": 1}, values=13)
    spectrum = fourier.spectrum(values, grid)
    rules = ("noise", "of-largest", "above-mean", "preferred")
    return {
        "power": spectrum.power,
        "share": spectrum.share,
        "bands": spectrum.bands("component").share,
        "keys": {rule: str(fourier.key_frequencies(spectrum, rule).keys) for rule in rules},
        "clusters": fourier.clusters(spectrum).share,
        "table": fourier.spectrum(values[:13]).total().power,
        "inverse": fourier.inverse(fourier.transform(values[:13])),
        "gini": fourier.gini(values[:, 0].abs()),
        "active": fourier.active(values[:, :3].contiguous(), grid, draws=3).bound,
        "arranged": grid.arrange(values),
        "part": fourier.share(values, fourier.components(grid, [3])),
    }


def modular_sums(given: Given) -> Any:
    cells, logits = grid_of_sums(given)
    sums = fourier.ModularSum(cells, (1, 1), 13)
    cosines = sums.cosines(logits)
    return {
        "remainders": sums.remainders,
        "by difference": cosines.by_difference,
        "coefficients": cosines.coefficients,
        "restricted": sums.restricted(logits, [1, 3]),
        "excluded": sums.excluded(logits, [1]),
        "share": fourier.share(logits, sums.directions([3])),
        "explained": fourier.variance_explained(logits, logits.roll(1, 1)),
    }


def variances(given: Given) -> Any:
    cells, values = grid_of_sums(given)
    part = variance.partition(values, {"a": cells[:, 0] % 5, "b": cells[:, 1] % 3})
    return {
        "alone": part.alone,
        "unique": part.unique,
        "together": part.together,
        "explained": variance.explained(values, cells[:, 0]),
        "total": variance.total(values, cells[:, 0]),
    }


def checks() -> list[Check]:
    functions = {"spectra": spectra, "modular sums": modular_sums, "variances": variances}
    return [check_of(function, name) for name, function in functions.items()]
