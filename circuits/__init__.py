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
    from circuits import ablate as ablate
    from circuits import circuit as circuit
    from circuits import fourier as fourier
    from circuits import patch as patch
    from circuits import patterns as patterns
    from circuits import permute as permute
    from circuits import plots as plots
    from circuits import probe as probe
    from circuits import transplant as transplant
    from circuits import variance as variance
    from circuits.errors import CircuitsError as CircuitsError
    from circuits.interventions.apply import Activations as Activations
    from circuits.interventions.apply import cache as cache
    from circuits.interventions.apply import intervene as intervene
    from circuits.interventions.apply import run as run
    from circuits.interventions.base import Intervention as Intervention
    from circuits.interventions.edits import edit as edit
    from circuits.interventions.grids import Draws as Draws
    from circuits.interventions.grids import draws as draws
    from circuits.interventions.grids import grid as grid
    from circuits.logit_lens import DirectAttribution as DirectAttribution
    from circuits.logit_lens import Lens as Lens
    from circuits.logit_lens import lens as lens
    from circuits.model.check import check as check
    from circuits.model.heads import Head as Head
    from circuits.model.heads import KeyValueGroup as KeyValueGroup
    from circuits.model.heads import heads as heads
    from circuits.model.inputs import prompts as prompts
    from circuits.model.prompts import Prompts as Prompts
    from circuits.model.sae import splice as splice
    from circuits.model.sites import Site as Site
    from circuits.model.supported import unchecked as unchecked
    from circuits.sweeps.logit_difference import logit_difference as logit_difference
    from circuits.sweeps.prompt_pairs import PromptPairs as PromptPairs
    from circuits.sweeps.prompt_pairs import read_prompts as read_prompts
    from circuits.sweeps.sweep import compare as compare
    from circuits.sweeps.sweep import sweep as sweep
    from circuits.sweeps.table import SweepResult as SweepResult

#: Of `interp-tasks` and of `interp-circuits`.
__version__ = "0.2.0"

# What is read without a model, such as the names of sites and heads, is read without importing torch.
_MODULES = (
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
    "PromptPairs": "circuits.sweeps.prompt_pairs",
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
    "prompts": "circuits.model.inputs",
    "read_prompts": "circuits.sweeps.prompt_pairs",
    "run": "circuits.interventions.apply",
    "splice": "circuits.model.sae",
    "sweep": "circuits.sweeps.sweep",
    "unchecked": "circuits.model.supported",
}

__all__ = sorted([*_MODULES, *_HOMES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"circuits.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
