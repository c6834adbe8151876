"""Matrix completion (Gopalani, Lubana, Hu 2024, arXiv 2410.22244)."""

from tasks.matrix_completion.autoregressive import AutoregressiveCompletion, AutoregressiveModelSettings
from tasks.matrix_completion.recoverability import expected_unrecoverable_share, unrecoverable
from tasks.matrix_completion.sizes import MatrixCompletionSizes
from tasks.matrix_completion.task import (
    MatrixCompletion,
    MatrixModelSettings,
    freeze_mask_embedding,
    hide_columns,
    hide_rows,
)

__all__ = [
    "AutoregressiveCompletion",
    "AutoregressiveModelSettings",
    "MatrixCompletion",
    "MatrixCompletionSizes",
    "MatrixModelSettings",
    "expected_unrecoverable_share",
    "freeze_mask_embedding",
    "hide_columns",
    "hide_rows",
    "unrecoverable",
]
