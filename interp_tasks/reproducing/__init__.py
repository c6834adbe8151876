"""A paper's claims, on runs that are there: ``reproduce("matrix-completion")`` and ``interp-run reproduce``.

Importing this package imports neither torch nor pandas; reproducing does.
"""

from interp_tasks.reproducing.judging import Outcome, Verdict
from interp_tasks.reproducing.reproduction import Reproduction, reproduce, train_missing

__all__ = ["Outcome", "Reproduction", "Verdict", "reproduce", "train_missing"]
