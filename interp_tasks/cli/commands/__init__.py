"""Every command of ``interp-run``, by name. A new one is a file here and a line below."""

from interp_tasks.cli.commands.ablating import Ablation
from interp_tasks.cli.commands.agreeing import Algorithm
from interp_tasks.cli.commands.attending import Attention
from interp_tasks.cli.commands.baselining import Baseline, Ood
from interp_tasks.cli.commands.copying_inputs import Copying
from interp_tasks.cli.commands.costing import CostCommand
from interp_tasks.cli.commands.curving import Curve
from interp_tasks.cli.commands.demonstrating import Demo
from interp_tasks.cli.commands.detecting import Detector
from interp_tasks.cli.commands.displaying import Data
from interp_tasks.cli.commands.dropping import Drops
from interp_tasks.cli.commands.embedding import Embeddings
from interp_tasks.cli.commands.generalising import Generalisation
from interp_tasks.cli.commands.generating import Decoding
from interp_tasks.cli.commands.gradient_logs import Gradients
from interp_tasks.cli.commands.gridding import GridCommand
from interp_tasks.cli.commands.imaging import Neurons
from interp_tasks.cli.commands.influencing import Influence
from interp_tasks.cli.commands.lensing import Lens
from interp_tasks.cli.commands.listing import Checkpoints, Schema, Tasks
from interp_tasks.cli.commands.ordering import Order
from interp_tasks.cli.commands.patching import Patch
from interp_tasks.cli.commands.permuting import Permute
from interp_tasks.cli.commands.prime_ordering import PrimeOrder
from interp_tasks.cli.commands.probing import Probe
from interp_tasks.cli.commands.progressing import Progress
from interp_tasks.cli.commands.reproducing import Reproduce
from interp_tasks.cli.commands.scanning import Heads
from interp_tasks.cli.commands.searching import Search
from interp_tasks.cli.commands.sharing import Primes
from interp_tasks.cli.commands.spectral import Fourier
from interp_tasks.cli.commands.surveying import Report
from interp_tasks.cli.commands.training import Train
from interp_tasks.cli.commands.transplanting import Transplant
from interp_tasks.cli.commands.weighing import Weights
from interp_tasks.cli.commands.zoo import Zoo
from interp_tasks.cli.declaring import Command

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
