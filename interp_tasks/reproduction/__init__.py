"""Tests a paper's claims: ``measure`` runs its studies and keeps records, ``reproduce`` judges the records.

Importing this package imports neither torch nor pandas; judging imports pandas, measuring both.
"""

from interp_tasks.reproduction.judge_paper import Reproduction, reproduce
from interp_tasks.reproduction.runs_and_records import train_missing
from interp_tasks.reproduction.study_jobs import compare_records_with_runs, measure

__all__ = ["Reproduction", "compare_records_with_runs", "measure", "reproduce", "train_missing"]
