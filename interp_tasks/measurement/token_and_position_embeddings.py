"""Embeddings of tokens and positions as tables of numpy, and those of an untrained model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.measurement.loaded_checkpoints import LoadedCheckpoint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

#: What stands in the column ``split`` where no example plays a part.
WEIGHTS = "weights"


@dataclass(frozen=True)
class Embeddings:
    """Embeddings of tokens ``[id d]`` and positions ``[position d]``, float64."""

    tokens: Array
    positions: Array | None

    @classmethod
    def of(cls, model: Any) -> Embeddings:
        parameters = dict(model.named_parameters())
        positions = parameters.get("pos_embed.W_pos")
        tokens = model.W_E.detach().double().cpu().numpy()
        return cls(tokens, None if positions is None else positions.detach().double().cpu().numpy())

    def rows_of_tokens(self, token_ids: Mapping[int, float]) -> Array:
        return self.tokens[list(token_ids)]


def untrained_embeddings(subject: LoadedCheckpoint, draw: int = 0) -> Embeddings | None:
    """Returns the embeddings of an untrained model; ``None`` for an architecture that the task cannot build."""
    from interp_tasks.measurement.untrained_models import build_untrained

    try:
        return Embeddings.of(build_untrained(subject, draw))
    except UserError:
        return None
