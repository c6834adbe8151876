"""Published numbers as data: what papers claim, what was measured to claim it, and the rule that decides."""

from interp_tasks.published.papers import Bounds, Claim, Paper, Row, Study, TrainingRun, papers, read_paper

__all__ = ["Bounds", "Claim", "Paper", "Row", "Study", "TrainingRun", "papers", "read_paper"]
