"""Interventions on hooked transformers: ablate, patch, edit, and measure what changes.

    from circuits import ablate, heads, intervene, run, sweep

    with intervene(model, ablate.uniform("all")):
        output = model(tokens)
    result = sweep(model, tokens, ablate.each(ablate.uniform, heads("all", model)))
    result.frame

Layers and heads count from 0 everywhere.
"""

from circuits import ablate, patch
from circuits.applying import intervene
from circuits.editing import edit
from circuits.errors import CircuitsError
from circuits.interventions import Intervention
from circuits.results import SweepResult
from circuits.running import Activations, cache, run
from circuits.selection import Head, heads
from circuits.sites import Site
from circuits.sweeping import sweep

__all__ = [
    "Activations",
    "CircuitsError",
    "Head",
    "Intervention",
    "Site",
    "SweepResult",
    "ablate",
    "cache",
    "edit",
    "heads",
    "intervene",
    "patch",
    "run",
    "sweep",
]
