"""Experiments on checkpoints: each is a function that returns a :class:`Result`, and a command.

A new one is a file ``NAME.py``, or a folder with ``measure.py``, ``table.py`` and ``figure.py``, and a line here. The
function has the name of its file, and wins over it: ``experiments.ablation`` is the function.

Importing this package imports neither torch nor pandas; running an experiment does.
"""

from inspect import ismodule as _ismodule

from interp_tasks.experiments.ablation import ablation
from interp_tasks.experiments.algorithm.measure import AlgorithmResult, algorithm
from interp_tasks.experiments.attention.measure import AttentionResult, attention
from interp_tasks.experiments.baseline.measure import baseline
from interp_tasks.experiments.copying import copying
from interp_tasks.experiments.curve.measure import CurveResult, curve
from interp_tasks.experiments.data.measure import DataResult, data
from interp_tasks.experiments.decoding import decoding
from interp_tasks.experiments.demo.measure import demo
from interp_tasks.experiments.detector import detector
from interp_tasks.experiments.drops.measure import DropsResult, drops
from interp_tasks.experiments.embeddings.measure import EmbeddingsResult, embeddings
from interp_tasks.experiments.fourier.measure import FourierResult, fourier
from interp_tasks.experiments.generalisation.measure import GeneralisationResult, generalisation
from interp_tasks.experiments.gradients.measure import GradientsResult, gradients
from interp_tasks.experiments.heads import heads
from interp_tasks.experiments.influence.measure import InfluenceResult, influence
from interp_tasks.experiments.lens import lens
from interp_tasks.experiments.neurons.measure import NeuronsResult, neurons
from interp_tasks.experiments.ood.measure import ood
from interp_tasks.experiments.order.measure import OrderResult, order
from interp_tasks.experiments.patch import patch
from interp_tasks.experiments.permute import permute
from interp_tasks.experiments.prime_order.measure import PrimeOrderResult, prime_order
from interp_tasks.experiments.primes.measure import PrimesResult, primes
from interp_tasks.experiments.probe.measure import ProbeResult, probe
from interp_tasks.experiments.progress.measure import ProgressResult, progress
from interp_tasks.experiments.transplant.measure import transplant
from interp_tasks.experiments.weights.measure import WeightsResult, weights
from interp_tasks.measurement.baselines.comparison import ComparisonResult
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.subjects import Examples, Options, Subject, subjects
from interp_tasks.measurement.table import COLUMNS

__all__ = sorted(name for name, held in globals().items() if not (name.startswith("_") or _ismodule(held)))
