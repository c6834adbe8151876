"""Matrix completion (Gopalani, Lubana, Hu 2024, arXiv 2410.22244)."""

from tasks.matrix_completion.attention_templates import mask_hiding_rows
from tasks.matrix_completion.autoregressive import AutoregressiveCompletion, AutoregressiveModelSettings
from tasks.matrix_completion.low_rank_fill_methods import unrecoverable_entries
from tasks.matrix_completion.task import (
    MatrixCompletion,
    MatrixCompletionSizes,
    MatrixModelSettings,
    freeze_mask_embedding,
)

__all__ = ["AutoregressiveCompletion", "AutoregressiveModelSettings", "MatrixCompletion"]
__all__ += ["MatrixCompletionSizes", "MatrixModelSettings", "freeze_mask_embedding", "mask_hiding_rows"]
__all__ += ["unrecoverable_entries"]
