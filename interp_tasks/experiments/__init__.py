"""Experiments on checkpoints: each is a function that returns a :class:`Result`, and a command.

Those here work on checkpoints of any task; those of :mod:`interp_tasks.papers` serve one paper each. A new one is a
file ``_NAME.py`` and a line here; a function ``figures`` beside it draws its page, and ``view_rows`` and
``view_columns`` lay out the table that people see. The file's name has an underscore because ``experiments.ablation``
is the function.

Importing this package imports neither torch nor pandas; running an experiment does.
"""

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

__all__ = sorted(name for name in globals() if not name.startswith("_"))
