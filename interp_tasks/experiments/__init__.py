"""Experiments on checkpoints: each is a function that returns a :class:`Result`, and a command.

Those here work on checkpoints of any task; those of :mod:`interp_tasks.papers` serve one paper each. A new one is a
file ``_NAME.py`` and a line here; a function ``figures`` beside it draws its page, and ``view_rows`` and
``view_columns`` lay out the table that people see; in a file of several, ``NAME_figures`` and so on.

What cannot be measured is refused in one line, also a task that does not declare what an experiment asks of it: a
``UserError``, a ``TaskError`` or a ``CircuitsError``.

Names load on first use: importing this package costs nothing, and running an experiment imports torch and pandas.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interp_tasks.experiments._activations import ablation, heads, patch
    from interp_tasks.experiments._attention import attention
    from interp_tasks.experiments._circuit import circuit
    from interp_tasks.experiments._fourier import fourier
    from interp_tasks.experiments._llc import llc
    from interp_tasks.experiments._probe import lens, probe
    from interp_tasks.experiments._runs import curve, drops
    from interp_tasks.experiments._weights import permute, transplant
    from interp_tasks.measurement.loaded_checkpoints import Examples, LoadedCheckpoint, Options, subjects
    from interp_tasks.measurement.result import COLUMNS, Experiment, Result
    from interp_tasks.papers.grokfast.generalisation import generalisation
    from interp_tasks.papers.matrix_completion.answers import copying, decoding, influence
    from interp_tasks.papers.matrix_completion.embeddings import embeddings
    from interp_tasks.papers.matrix_completion.methods import algorithm, baseline, ood
    from interp_tasks.papers.matrix_completion.order import order
    from interp_tasks.papers.miiii.data import data
    from interp_tasks.papers.miiii.detector import detector
    from interp_tasks.papers.miiii.gradients import gradients
    from interp_tasks.papers.miiii.neurons import neurons
    from interp_tasks.papers.miiii.prime_order import prime_order
    from interp_tasks.papers.miiii.primes import primes
    from interp_tasks.papers.miiii.weights import weights
    from interp_tasks.papers.nanda.progress import progress

__all__ = ["COLUMNS", "Examples", "Experiment", "LoadedCheckpoint", "Options", "Result", "ablation"]
__all__ += ["algorithm", "attention", "baseline", "circuit", "copying", "curve", "data", "decoding"]
__all__ += ["detector", "drops", "embeddings", "every_experiment", "experiment_named", "fourier"]
__all__ += ["generalisation", "gradients", "heads", "influence", "lens", "llc", "neurons", "ood", "order"]
__all__ += ["patch", "permute", "prime_order", "primes", "probe", "progress", "subjects", "transplant"]
__all__ += ["weights"]

#: Experiment -> its module, in this package.
_HOMES = {
    **dict.fromkeys(("ablation", "heads", "patch"), "experiments._activations"),
    **dict.fromkeys(("curve", "drops"), "experiments._runs"),
    **dict.fromkeys(("permute", "transplant"), "experiments._weights"),
    **{name: f"experiments._{name}" for name in ("attention", "circuit", "fourier", "llc", "probe")},
    "lens": "experiments._probe",
    "generalisation": "papers.grokfast.generalisation",
    **dict.fromkeys(("algorithm", "baseline", "ood"), "papers.matrix_completion.methods"),
    **dict.fromkeys(("copying", "decoding", "influence"), "papers.matrix_completion.answers"),
    **{f: f"papers.matrix_completion.{f}" for f in ("embeddings", "order")},
    **{f: f"papers.miiii.{f}" for f in ("data", "detector", "gradients", "neurons")},
    **{f: f"papers.miiii.{f}" for f in ("prime_order", "primes", "weights")},
    "progress": "papers.nanda.progress",
}
_OTHERS = {
    **dict.fromkeys(("COLUMNS", "Experiment", "Result"), "measurement.result"),
    **dict.fromkeys(
        ("Examples", "LoadedCheckpoint", "Options", "subjects"), "measurement.loaded_checkpoints"
    ),
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
