"""Experiments on checkpoints: each is a function that returns a :class:`Result`, and a command.

Importing this package imports neither torch nor pandas; running an experiment does.
"""

from interp_tasks.experiments.ablating import ablation
from interp_tasks.experiments.agreeing import AlgorithmResult, algorithm
from interp_tasks.experiments.attending import AttentionResult, attention
from interp_tasks.experiments.baselining import baseline
from interp_tasks.experiments.columns import COLUMNS
from interp_tasks.experiments.comparing import ComparisonResult
from interp_tasks.experiments.copying_inputs import copying
from interp_tasks.experiments.curving import CurveResult, curve
from interp_tasks.experiments.demonstrating import demo
from interp_tasks.experiments.detecting import detector
from interp_tasks.experiments.displaying import DataResult, data
from interp_tasks.experiments.dropping import DropsResult, drops
from interp_tasks.experiments.embedding import EmbeddingsResult, embeddings
from interp_tasks.experiments.generalising import GeneralisationResult, generalisation
from interp_tasks.experiments.generating import decoding
from interp_tasks.experiments.gradient_logs import GradientsResult, gradients
from interp_tasks.experiments.imaging import NeuronsResult, neurons
from interp_tasks.experiments.influencing import InfluenceResult, influence
from interp_tasks.experiments.lensing import lens
from interp_tasks.experiments.ordering import OrderResult, order
from interp_tasks.experiments.patching import patch
from interp_tasks.experiments.permuting import permute
from interp_tasks.experiments.prime_ordering import PrimeOrderResult, prime_order
from interp_tasks.experiments.probing import ProbeResult, probe
from interp_tasks.experiments.progressing import ProgressResult, progress
from interp_tasks.experiments.results import Result
from interp_tasks.experiments.scanning import heads
from interp_tasks.experiments.sharing import PrimesResult, primes
from interp_tasks.experiments.shifting import ood
from interp_tasks.experiments.spectral import FourierResult, fourier
from interp_tasks.experiments.subjects import Examples, Options, Subject, subjects
from interp_tasks.experiments.transplanting import transplant
from interp_tasks.experiments.weighing import WeightsResult, weights

__all__ = [
    "COLUMNS",
    "AlgorithmResult",
    "AttentionResult",
    "ComparisonResult",
    "CurveResult",
    "DataResult",
    "DropsResult",
    "EmbeddingsResult",
    "Examples",
    "FourierResult",
    "GeneralisationResult",
    "GradientsResult",
    "InfluenceResult",
    "NeuronsResult",
    "Options",
    "OrderResult",
    "PrimeOrderResult",
    "PrimesResult",
    "ProbeResult",
    "ProgressResult",
    "Result",
    "Subject",
    "WeightsResult",
    "ablation",
    "algorithm",
    "attention",
    "baseline",
    "copying",
    "curve",
    "data",
    "decoding",
    "demo",
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
