"""Interventions on hooked transformers: ablate, patch, transplant, permute, edit, and measure what changes.

    from circuits import ablate, heads, intervene, run, sweep

    with intervene(model, ablate.uniform("all")):
        output = model(tokens)
    result = sweep(model, tokens, ablate.each(ablate.uniform, heads("all", model)))
    result.frame

Layers and heads count from 0 everywhere.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from circuits import (
        ablate,
        circuit,
        fourier,
        patch,
        patterns,
        permute,
        plots,
        probe,
        transplant,
        variance,
    )
    from circuits.errors import CircuitsError
    from circuits.interventions.apply import Activations, cache, intervene, run
    from circuits.interventions.base import Intervention
    from circuits.interventions.edits import edit
    from circuits.interventions.grids import Draws, draws, grid
    from circuits.logit_lens import DirectAttribution, Lens, lens
    from circuits.model.check import check
    from circuits.model.heads import Head, KeyValueGroup, heads
    from circuits.model.prompts import Prompts, prompts
    from circuits.model.sites import Site
    from circuits.model.supported import unchecked
    from circuits.sae import splice
    from circuits.sweeps.logit_difference import logit_difference
    from circuits.sweeps.sweep import compare, sweep
    from circuits.sweeps.table import SweepResult

#: Of `interp-tasks` and of `interp-circuits`.
__version__ = "0.2.0"

__all__ = [
    "Activations",
    "CircuitsError",
    "DirectAttribution",
    "Draws",
    "Head",
    "Intervention",
    "KeyValueGroup",
    "Lens",
    "Prompts",
    "Site",
    "SweepResult",
    "ablate",
    "cache",
    "check",
    "circuit",
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
    "prompts",
    "run",
    "splice",
    "sweep",
    "transplant",
    "unchecked",
    "variance",
]

# What is read without a model, such as the names of sites and heads, is read without importing torch.
_MODULES = frozenset(
    {
        "ablate",
        "circuit",
        "fourier",
        "patch",
        "patterns",
        "permute",
        "plots",
        "probe",
        "transplant",
        "variance",
    }
)
_HOMES = {
    "Activations": "circuits.interventions.apply",
    "CircuitsError": "circuits.errors",
    "DirectAttribution": "circuits.logit_lens",
    "Draws": "circuits.interventions.grids",
    "Head": "circuits.model.heads",
    "Intervention": "circuits.interventions.base",
    "KeyValueGroup": "circuits.model.heads",
    "Lens": "circuits.logit_lens",
    "Prompts": "circuits.model.prompts",
    "Site": "circuits.model.sites",
    "SweepResult": "circuits.sweeps.table",
    "cache": "circuits.interventions.apply",
    "check": "circuits.model.check",
    "compare": "circuits.sweeps.sweep",
    "draws": "circuits.interventions.grids",
    "edit": "circuits.interventions.edits",
    "grid": "circuits.interventions.grids",
    "heads": "circuits.model.heads",
    "intervene": "circuits.interventions.apply",
    "lens": "circuits.logit_lens",
    "logit_difference": "circuits.sweeps.logit_difference",
    "prompts": "circuits.model.prompts",
    "run": "circuits.interventions.apply",
    "splice": "circuits.sae",
    "sweep": "circuits.sweeps.sweep",
    "unchecked": "circuits.model.supported",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"circuits.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
