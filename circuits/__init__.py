"""Interventions on hooked transformers: ablate, patch, transplant, permute, edit, and measure what changes.

    from circuits import ablate, heads, intervene, run, sweep

    with intervene(model, ablate.uniform("all")):
        output = model(tokens)
    result = sweep(model, tokens, ablate.each(ablate.uniform, heads("all", model)))
    result.frame

Layers and heads count from 0 everywhere.
"""

from circuits import ablate, fourier, patch, patterns, permute, plots, probe, transplant, variance
from circuits.errors import CircuitsError
from circuits.interventions.apply import Activations, cache, intervene, run
from circuits.interventions.base import Intervention
from circuits.interventions.custom import edit
from circuits.interventions.variants import Draws, draws, grid
from circuits.logit_lens import Lens, lens
from circuits.model.heads import Head, heads
from circuits.model.sites import Site
from circuits.sweeps.metrics import logit_difference
from circuits.sweeps.sweep import compare, sweep
from circuits.sweeps.table import SweepResult

#: Of `interp-tasks` and of `interp-circuits`.
__version__ = "0.1.0"

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
