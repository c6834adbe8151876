"""Holds published numbers as data: claims of papers, how each is measured, and the rule of its verdict."""

from interp_tasks.published.paper_schema import (
    Bounds,
    Claim,
    Paper,
    PaperExperiment,
    Study,
    TrainingRun,
    paper_names,
    read_paper,
)

__all__ = ["Bounds", "Claim", "Paper", "PaperExperiment", "Study", "TrainingRun", "paper_names", "read_paper"]
