"""Experiments on checkpoints: each is a function that returns a :class:`Result`, and a command.

Those here work on checkpoints of any task; those of :mod:`interp_tasks.papers` serve one paper each. A new one is a
file ``_NAME.py`` and a line here; a function ``figures`` beside it draws its page, and ``view_rows`` and
``view_columns`` lay out the table that people see. The file's name has an underscore because ``experiments.ablation``
is the function.

Names load on first use: importing this package costs nothing, and running an experiment imports torch and pandas.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interp_tasks.experiments._ablation import ablation
    from interp_tasks.experiments._attention import attention
    from interp_tasks.experiments._circuit.measure import circuit
    from interp_tasks.experiments._curve import curve
    from interp_tasks.experiments._drops import drops
    from interp_tasks.experiments._fourier import fourier
    from interp_tasks.experiments._heads import heads
    from interp_tasks.experiments._lens import lens
    from interp_tasks.experiments._patch import patch
    from interp_tasks.experiments._permute import permute
    from interp_tasks.experiments._probe import probe
    from interp_tasks.experiments._transplant import transplant
    from interp_tasks.measurement.experiment import Experiment
    from interp_tasks.measurement.result import Result
    from interp_tasks.measurement.subjects import Examples, LoadedCheckpoint, Options, subjects
    from interp_tasks.measurement.table import COLUMNS
    from interp_tasks.papers.grokfast.generalisation import generalisation
    from interp_tasks.papers.matrix_completion.algorithm import algorithm
    from interp_tasks.papers.matrix_completion.baseline import baseline
    from interp_tasks.papers.matrix_completion.copying import copying
    from interp_tasks.papers.matrix_completion.decoding import decoding
    from interp_tasks.papers.matrix_completion.embeddings import embeddings
    from interp_tasks.papers.matrix_completion.influence import influence
    from interp_tasks.papers.matrix_completion.ood import ood
    from interp_tasks.papers.matrix_completion.order import order
    from interp_tasks.papers.miiii.data import data
    from interp_tasks.papers.miiii.detector import detector
    from interp_tasks.papers.miiii.gradients import gradients
    from interp_tasks.papers.miiii.neurons import neurons
    from interp_tasks.papers.miiii.prime_order import prime_order
    from interp_tasks.papers.miiii.primes import primes
    from interp_tasks.papers.miiii.weights import weights
    from interp_tasks.papers.nanda.progress import progress

#: Experiment -> its module, in this package.
_HOMES = {
    **{
        name: f"experiments._{name}"
        for name in ("ablation", "attention", "curve", "drops", "fourier", "heads")
    },
    **{name: f"experiments._{name}" for name in ("lens", "patch", "permute", "probe", "transplant")},
    "circuit": "experiments._circuit.measure",
    "generalisation": "papers.grokfast.generalisation",
    **{f: f"papers.matrix_completion.{f}" for f in ("algorithm", "baseline", "copying", "decoding")},
    **{f: f"papers.matrix_completion.{f}" for f in ("embeddings", "influence", "ood", "order")},
    **{f: f"papers.miiii.{f}" for f in ("data", "detector", "gradients", "neurons")},
    **{f: f"papers.miiii.{f}" for f in ("prime_order", "primes", "weights")},
    "progress": "papers.nanda.progress",
}
_OTHERS = {
    "Result": "measurement.result",
    **dict.fromkeys(("Examples", "LoadedCheckpoint", "Options", "subjects"), "measurement.subjects"),
    "COLUMNS": "measurement.table",
}

__all__ = [
    "COLUMNS",
    "Examples",
    "LoadedCheckpoint",
    "Options",
    "Result",
    "ablation",
    "algorithm",
    "attention",
    "baseline",
    "circuit",
    "copying",
    "curve",
    "data",
    "decoding",
    "detector",
    "drops",
    "embeddings",
    "fourier",
    "generalisation",
    "gradients",
    "heads",
    "influence",
    "lens",
    "neurons",
    "ood",
    "order",
    "patch",
    "permute",
    "prime_order",
    "primes",
    "probe",
    "progress",
    "subjects",
    "transplant",
    "weights",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES and name not in _OTHERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"interp_tasks.{(_HOMES | _OTHERS)[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def experiment_named(name: str) -> Experiment:
    """Returns the experiment of a command, ``prime-order``."""
    from interp_tasks.measurement.experiment import EXPERIMENTS

    __getattr__(name.replace("-", "_"))
    return EXPERIMENTS[name]


def every_experiment() -> dict[str, Experiment]:
    """Returns all experiments by the name of their command."""
    return {name: experiment_named(name) for name in (home.replace("_", "-") for home in _HOMES)}
