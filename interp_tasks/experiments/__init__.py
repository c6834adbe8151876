"""Experiments on checkpoints: each is a function that returns a :class:`Result`, and a command.

Those here work on checkpoints of any task; those of :mod:`interp_tasks.papers` serve one paper each. A new one is a
file ``NAME_experiment.py`` and a line here; a function ``figures`` beside it draws its page, and ``view_rows`` and
``view_columns`` lay out the table that people see; in a file of several, ``NAME_figures`` and so on.

What cannot be measured is refused in one line, also a task that does not declare what an experiment asks of it: a
``UserError``, a ``TaskError`` or a ``CircuitsError``.

Names load on first use: importing this package costs nothing, and running an experiment imports torch and pandas.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interp_tasks.experiments.ablation_heads_patch import ablation, heads, patch
    from interp_tasks.experiments.attention_experiment import attention
    from interp_tasks.experiments.circuit_experiment import circuit
    from interp_tasks.experiments.drops_and_curve import curve, drops
    from interp_tasks.experiments.fourier_experiment import fourier
    from interp_tasks.experiments.llc_experiment import llc
    from interp_tasks.experiments.probe_and_lens import lens, probe
    from interp_tasks.experiments.transplant_and_permute import permute, transplant
    from interp_tasks.measurement.loaded_checkpoints import LoadedCheckpoint, subjects
    from interp_tasks.measurement.options_and_examples import Examples, Options
    from interp_tasks.measurement.result import COLUMNS, Experiment, Result
    from interp_tasks.papers.grokfast.generalisation import generalisation
    from interp_tasks.papers.matrix_completion.copying_decoding_influence import copying, decoding, influence
    from interp_tasks.papers.matrix_completion.embeddings_experiment import embeddings
    from interp_tasks.papers.matrix_completion.model_versus_methods import algorithm, baseline, ood
    from interp_tasks.papers.matrix_completion.what_moves_first import order
    from interp_tasks.papers.miiii.answers_and_chance import data
    from interp_tasks.papers.miiii.embedding_svd_and_frequencies import weights
    from interp_tasks.papers.miiii.logged_gradient_norms import gradients
    from interp_tasks.papers.miiii.neuron_and_attention_images import neurons
    from interp_tasks.papers.miiii.order_correlations import prime_order
    from interp_tasks.papers.miiii.parts_by_prime import primes
    from interp_tasks.papers.miiii.primality_by_remainders import detector
    from interp_tasks.papers.nanda.progress_experiment import progress

__all__ = ["COLUMNS", "Examples", "Experiment", "LoadedCheckpoint", "Options", "Result", "ablation"]
__all__ += ["algorithm", "attention", "baseline", "circuit", "copying", "curve", "data", "decoding"]
__all__ += ["detector", "drops", "embeddings", "every_experiment", "experiment_named", "fourier"]
__all__ += ["generalisation", "gradients", "heads", "influence", "lens", "llc", "neurons", "ood", "order"]
__all__ += ["patch", "permute", "prime_order", "primes", "probe", "progress", "subjects", "transplant"]
__all__ += ["weights"]

#: Experiment -> its module, in this package.
_HOMES = {
    **dict.fromkeys(("ablation", "heads", "patch"), "experiments.ablation_heads_patch"),
    **dict.fromkeys(("curve", "drops"), "experiments.drops_and_curve"),
    **dict.fromkeys(("permute", "transplant"), "experiments.transplant_and_permute"),
    **{name: f"experiments.{name}_experiment" for name in ("attention", "circuit", "fourier", "llc")},
    **dict.fromkeys(("probe", "lens"), "experiments.probe_and_lens"),
    "generalisation": "papers.grokfast.generalisation",
    **dict.fromkeys(("algorithm", "baseline", "ood"), "papers.matrix_completion.model_versus_methods"),
    **dict.fromkeys(
        ("copying", "decoding", "influence"), "papers.matrix_completion.copying_decoding_influence"
    ),
    "embeddings": "papers.matrix_completion.embeddings_experiment",
    "order": "papers.matrix_completion.what_moves_first",
    "data": "papers.miiii.answers_and_chance",
    "detector": "papers.miiii.primality_by_remainders",
    "gradients": "papers.miiii.logged_gradient_norms",
    "neurons": "papers.miiii.neuron_and_attention_images",
    "prime_order": "papers.miiii.order_correlations",
    "primes": "papers.miiii.parts_by_prime",
    "weights": "papers.miiii.embedding_svd_and_frequencies",
    "progress": "papers.nanda.progress_experiment",
}
_OTHERS = {
    **dict.fromkeys(("COLUMNS", "Experiment", "Result"), "measurement.result"),
    **dict.fromkeys(("Examples", "Options"), "measurement.options_and_examples"),
    **dict.fromkeys(("LoadedCheckpoint", "subjects"), "measurement.loaded_checkpoints"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES and name not in _OTHERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"interp_tasks.{(_HOMES | _OTHERS)[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_OTHERS})


def experiment_named(name: str) -> Experiment:
    """Returns the experiment of a command, ``prime-order``."""
    from interp_tasks.measurement.result import EXPERIMENTS as EXPERIMENTS

    __getattr__(name.replace("-", "_"))
    return EXPERIMENTS[name]


def every_experiment() -> dict[str, Experiment]:
    """Returns all experiments by the name of their command."""
    return {name: experiment_named(name) for name in (home.replace("_", "-") for home in _HOMES)}
