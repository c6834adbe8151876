"""Experiments on checkpoints: each is a function that returns a :class:`Result`, and a command.

Those here work on checkpoints of any task; those of :mod:`interp_tasks.papers` serve one paper each. A new one is a
file ``_NAME.py`` and a line here; a function ``figures`` beside it draws its page, and ``view_rows`` and
``view_columns`` lay out the table that people see; in a file of several, ``NAME_figures`` and so on.

Names load on first use: importing this package costs nothing, and running an experiment imports torch and pandas.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interp_tasks.experiments._activations import ablation as ablation
    from interp_tasks.experiments._activations import heads as heads
    from interp_tasks.experiments._activations import patch as patch
    from interp_tasks.experiments._attention import attention as attention
    from interp_tasks.experiments._circuit import circuit as circuit
    from interp_tasks.experiments._fourier import fourier as fourier
    from interp_tasks.experiments._lens import lens as lens
    from interp_tasks.experiments._probe import probe as probe
    from interp_tasks.experiments._runs import curve as curve
    from interp_tasks.experiments._runs import drops as drops
    from interp_tasks.experiments._weights import permute as permute
    from interp_tasks.experiments._weights import transplant as transplant
    from interp_tasks.measurement.experiment import Experiment as Experiment
    from interp_tasks.measurement.result import Result as Result
    from interp_tasks.measurement.subjects import Examples as Examples
    from interp_tasks.measurement.subjects import LoadedCheckpoint as LoadedCheckpoint
    from interp_tasks.measurement.subjects import Options as Options
    from interp_tasks.measurement.subjects import subjects as subjects
    from interp_tasks.measurement.table import COLUMNS as COLUMNS
    from interp_tasks.papers.grokfast.generalisation import generalisation as generalisation
    from interp_tasks.papers.matrix_completion.answers import copying as copying
    from interp_tasks.papers.matrix_completion.answers import decoding as decoding
    from interp_tasks.papers.matrix_completion.answers import influence as influence
    from interp_tasks.papers.matrix_completion.embeddings import embeddings as embeddings
    from interp_tasks.papers.matrix_completion.methods import algorithm as algorithm
    from interp_tasks.papers.matrix_completion.methods import baseline as baseline
    from interp_tasks.papers.matrix_completion.methods import ood as ood
    from interp_tasks.papers.matrix_completion.order import order as order
    from interp_tasks.papers.miiii.data import data as data
    from interp_tasks.papers.miiii.detector import detector as detector
    from interp_tasks.papers.miiii.gradients import gradients as gradients
    from interp_tasks.papers.miiii.neurons import neurons as neurons
    from interp_tasks.papers.miiii.prime_order import prime_order as prime_order
    from interp_tasks.papers.miiii.primes import primes as primes
    from interp_tasks.papers.miiii.weights import weights as weights
    from interp_tasks.papers.nanda.progress import progress as progress

#: Experiment -> its module, in this package.
_HOMES = {
    **dict.fromkeys(("ablation", "heads", "patch"), "experiments._activations"),
    **dict.fromkeys(("curve", "drops"), "experiments._runs"),
    **dict.fromkeys(("permute", "transplant"), "experiments._weights"),
    **{name: f"experiments._{name}" for name in ("attention", "circuit", "fourier", "lens", "probe")},
    "generalisation": "papers.grokfast.generalisation",
    **dict.fromkeys(("algorithm", "baseline", "ood"), "papers.matrix_completion.methods"),
    **dict.fromkeys(("copying", "decoding", "influence"), "papers.matrix_completion.answers"),
    **{f: f"papers.matrix_completion.{f}" for f in ("embeddings", "order")},
    **{f: f"papers.miiii.{f}" for f in ("data", "detector", "gradients", "neurons")},
    **{f: f"papers.miiii.{f}" for f in ("prime_order", "primes", "weights")},
    "progress": "papers.nanda.progress",
}
_OTHERS = {
    "Result": "measurement.result",
    **dict.fromkeys(("Examples", "LoadedCheckpoint", "Options", "subjects"), "measurement.subjects"),
    "COLUMNS": "measurement.table",
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
    from interp_tasks.measurement.experiment import EXPERIMENTS as EXPERIMENTS

    __getattr__(name.replace("-", "_"))
    return EXPERIMENTS[name]


def every_experiment() -> dict[str, Experiment]:
    """Returns all experiments by the name of their command."""
    return {name: experiment_named(name) for name in (home.replace("_", "-") for home in _HOMES)}
