"""Interventions on hooked transformers: ablate, patch, transplant, permute, edit, and measure what changes.

    from circuits import ablate, heads, intervene, run, sweep

    with intervene(model, ablate.uniform("all")):
        output = model(tokens)
    result = sweep(model, tokens, ablate.each(ablate.uniform, heads("all", model)))
    result.frame

Layers and heads count from 0 everywhere.
"""

from circuits import ablate, fourier, patch, patterns, permute, plots, probe, transplant, variance
from circuits.applying import intervene
from circuits.comparing import compare
from circuits.drawing import Draws, draws
from circuits.editing import edit
from circuits.errors import CircuitsError
from circuits.grids import grid
from circuits.interventions import Intervention
from circuits.lensing import Lens, lens
from circuits.metrics import logit_difference
from circuits.results import SweepResult
from circuits.running import Activations, cache, run
from circuits.selection import Head, heads
from circuits.sites import Site
from circuits.sweeping import sweep

__all__ = [
    "Activations",
    "CircuitsError",
    "Draws",
    "Head",
    "Intervention",
    "Lens",
    "Site",
    "SweepResult",
    "ablate",
    "cache",
    "compare",
    "draws",
    "edit",
    "fourier",
    "grid",
    "heads",
    "intervene",
    "lens",
    "logit_difference",
    "patch",
    "patterns",
    "permute",
    "plots",
    "probe",
    "run",
    "sweep",
    "transplant",
    "variance",
]
