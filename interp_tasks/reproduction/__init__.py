"""Tests a paper's claims on existing runs: ``reproduce("matrix-completion")`` and ``interp-run reproduce``.

Importing this package imports neither torch nor pandas; reproducing does.
"""

from interp_tasks.reproduction.reproduction import Reproduction, reproduce, train_missing
from interp_tasks.reproduction.verdicts import Outcome, Verdict

__all__ = ["Outcome", "Reproduction", "Verdict", "reproduce", "train_missing"]
