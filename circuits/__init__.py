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
    from circuits.interventions.base import Intervention
    from circuits.interventions.intervene_run_cache import Activations, cache, intervene, run
    from circuits.interventions.places_and_edits import edit
    from circuits.interventions.variant_grids_and_draws import Draws, draws, grid
    from circuits.logit_lens import DirectAttribution, Lens, lens
    from circuits.model.heads import Head, KeyValueGroup, heads
    from circuits.model.prompt_parsing import prompts
    from circuits.model.prompts_with_mask import Prompts
    from circuits.model.sae import splice
    from circuits.model.sites import Site
    from circuits.model.supported_models import unchecked
    from circuits.model.torch_hook_comparison import check
    from circuits.sweeps.logit_difference import logit_difference
    from circuits.sweeps.prompt_pairs_from_file import PromptPairs, read_prompts
    from circuits.sweeps.sweep import compare, sweep
    from circuits.sweeps.sweep_result import SweepResult

#: Of `interp-tasks` and of `interp-circuits`.
__version__ = "0.3.0"

# fmt: off
__all__ = [
    "Activations", "CircuitsError", "DirectAttribution", "Draws", "Head", "Intervention", "KeyValueGroup", "Lens",
    "PromptPairs", "Prompts", "Site", "SweepResult", "ablate", "cache", "check", "circuit", "compare", "draws", "edit",
    "fourier", "grid", "heads", "intervene", "lens", "logit_difference", "patch", "patterns", "permute", "plots",
    "probe", "prompts", "read_prompts", "run", "splice", "sweep", "transplant", "unchecked", "variance",
]
# fmt: on
__dir__ = __all__.copy

# By module, the names that it has. What is read without a model, such as the names of sites and heads, is read without
# importing torch; names that stand nowhere here are modules.
_NAMES = {
    "errors": "CircuitsError",
    "interventions.intervene_run_cache": "Activations cache intervene run",
    "interventions.base": "Intervention",
    "interventions.places_and_edits": "edit",
    "interventions.variant_grids_and_draws": "Draws draws grid",
    "logit_lens": "DirectAttribution Lens lens",
    "model.torch_hook_comparison": "check",
    "model.heads": "Head KeyValueGroup heads",
    "model.prompt_parsing": "prompts",
    "model.prompts_with_mask": "Prompts",
    "model.sae": "splice",
    "model.sites": "Site",
    "model.supported_models": "unchecked",
    "sweeps.logit_difference": "logit_difference",
    "sweeps.prompt_pairs_from_file": "PromptPairs read_prompts",
    "sweeps.sweep": "compare sweep",
    "sweeps.sweep_result": "SweepResult",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((module for module, names in _NAMES.items() if name in names.split()), None)
    module = importlib.import_module(f"circuits.{home or name}")
    value = globals()[name] = module if home is None else getattr(module, name)
    return value
