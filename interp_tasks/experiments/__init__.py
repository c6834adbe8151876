"""Experiments on checkpoints: each is a function that returns a :class:`Result`, and a command.

Importing this package imports neither torch nor pandas; running an experiment does.
"""

from interp_tasks.experiments.ablating import ablation
from interp_tasks.experiments.columns import COLUMNS
from interp_tasks.experiments.demonstrating import demo
from interp_tasks.experiments.results import Result
from interp_tasks.experiments.subjects import Examples, Subject, subjects

__all__ = ["COLUMNS", "Examples", "Result", "Subject", "ablation", "demo", "subjects"]
