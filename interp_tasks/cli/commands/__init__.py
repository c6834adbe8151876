"""Every command of ``interp-run``, by name. A new one is a file here and a line below."""

from interp_tasks.cli.base import Command
from interp_tasks.cli.commands.cost import CostCommand
from interp_tasks.cli.commands.grid import GridCommand
from interp_tasks.cli.commands.lists import Checkpoints, Schema, Tasks
from interp_tasks.cli.commands.report import Report
from interp_tasks.cli.commands.reproduce import Reproduce
from interp_tasks.cli.commands.search import Search
from interp_tasks.cli.commands.train import Train
from interp_tasks.cli.commands.zoo import Zoo
from interp_tasks.experiments.ablation.command import Ablation
from interp_tasks.experiments.algorithm.command import Algorithm
from interp_tasks.experiments.attention.command import Attention
from interp_tasks.experiments.baseline.command import Baseline, Ood
from interp_tasks.experiments.copying.command import Copying
from interp_tasks.experiments.curve.command import Curve
from interp_tasks.experiments.data.command import Data
from interp_tasks.experiments.decoding.command import Decoding
from interp_tasks.experiments.demo.command import Demo
from interp_tasks.experiments.detector.command import Detector
from interp_tasks.experiments.drops.command import Drops
from interp_tasks.experiments.embeddings.command import Embeddings
from interp_tasks.experiments.fourier.command import Fourier
from interp_tasks.experiments.generalisation.command import Generalisation
from interp_tasks.experiments.gradients.command import Gradients
from interp_tasks.experiments.heads.command import Heads
from interp_tasks.experiments.influence.command import Influence
from interp_tasks.experiments.lens.command import Lens
from interp_tasks.experiments.neurons.command import Neurons
from interp_tasks.experiments.order.command import Order
from interp_tasks.experiments.patch.command import Patch
from interp_tasks.experiments.permute.command import Permute
from interp_tasks.experiments.prime_order.command import PrimeOrder
from interp_tasks.experiments.primes.command import Primes
from interp_tasks.experiments.probe.command import Probe
from interp_tasks.experiments.progress.command import Progress
from interp_tasks.experiments.transplant.command import Transplant
from interp_tasks.experiments.weights.command import Weights

COMMANDS: dict[str, type[Command]] = {
    "train": Train,
    "cost": CostCommand,
    "grid": GridCommand,
    "search": Search,
    "tasks": Tasks,
    "zoo": Zoo,
    "data": Data,
    "checkpoints": Checkpoints,
    "curve": Curve,
    "drops": Drops,
    "generalisation": Generalisation,
    "ablation": Ablation,
    "heads": Heads,
    "transplant": Transplant,
    "patch": Patch,
    "permute": Permute,
    "lens": Lens,
    "probe": Probe,
    "attention": Attention,
    "fourier": Fourier,
    "neurons": Neurons,
    "gradients": Gradients,
    "progress": Progress,
    "embeddings": Embeddings,
    "weights": Weights,
    "influence": Influence,
    "order": Order,
    "detector": Detector,
    "primes": Primes,
    "prime-order": PrimeOrder,
    "decoding": Decoding,
    "copying": Copying,
    "baseline": Baseline,
    "ood": Ood,
    "algorithm": Algorithm,
    "report": Report,
    "demo": Demo,
    "reproduce": Reproduce,
    "schema": Schema,
}
