"""Experiments on checkpoints: each is a function that returns a :class:`Result`, and a command.

A new one is a file ``_NAME.py``, or a folder ``_NAME`` with ``measure.py``, ``table.py`` and ``figure.py``, and a line
here. Its place has an underscore because one attribute cannot be a module and the function: ``experiments.ablation`` is
the function, ``experiments._ablation`` its file.

Importing this package imports neither torch nor pandas; running an experiment does.
"""

from interp_tasks.experiments._ablation import ablation
from interp_tasks.experiments._algorithm.measure import AlgorithmResult, algorithm
from interp_tasks.experiments._attention.measure import AttentionResult, attention
from interp_tasks.experiments._baseline.measure import baseline
from interp_tasks.experiments._circuit.measure import CircuitResult, circuit
from interp_tasks.experiments._copying import copying
from interp_tasks.experiments._curve.measure import CurveResult, curve
from interp_tasks.experiments._data.measure import DataResult, data
from interp_tasks.experiments._decoding import decoding
from interp_tasks.experiments._demo.measure import demo
from interp_tasks.experiments._detector import detector
from interp_tasks.experiments._drops.measure import DropsResult, drops
from interp_tasks.experiments._embeddings.measure import EmbeddingsResult, embeddings
from interp_tasks.experiments._fourier.measure import FourierResult, fourier
from interp_tasks.experiments._generalisation.measure import GeneralisationResult, generalisation
from interp_tasks.experiments._gradients.measure import GradientsResult, gradients
from interp_tasks.experiments._heads import heads
from interp_tasks.experiments._influence.measure import InfluenceResult, influence
from interp_tasks.experiments._lens import lens
from interp_tasks.experiments._neurons.measure import NeuronsResult, neurons
from interp_tasks.experiments._ood.measure import ood
from interp_tasks.experiments._order.measure import OrderResult, order
from interp_tasks.experiments._patch import patch
from interp_tasks.experiments._permute import permute
from interp_tasks.experiments._prime_order.measure import PrimeOrderResult, prime_order
from interp_tasks.experiments._primes.measure import PrimesResult, primes
from interp_tasks.experiments._probe.measure import ProbeResult, probe
from interp_tasks.experiments._progress.measure import ProgressResult, progress
from interp_tasks.experiments._transplant.measure import transplant
from interp_tasks.experiments._weights.measure import WeightsResult, weights
from interp_tasks.measurement.baselines.comparison import ComparisonResult
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.subjects import Examples, LoadedCheckpoint, Options, subjects
from interp_tasks.measurement.table import COLUMNS

__all__ = sorted(name for name in globals() if not name.startswith("_"))
