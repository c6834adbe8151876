"""What a model knows about positions: shuffle its position embeddings, many times, and see which metrics move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from interp_tasks.experiments.measuring import Found, measure, swept
from interp_tasks.experiments.results import Result
from interp_tasks.experiments.specifications import called, check_draws
from interp_tasks.experiments.subjects import Options, Subject

if TYPE_CHECKING:
    from typing_extensions import Unpack


def permute(
    refs: str | Sequence[str],
    draws: int = 20,
    **options: Unpack[Options],
) -> Result:
    """Permute the rows of the position table that are in use; the input stays as it is.

    Args:
        refs: one or several REFs; all see the same examples and the same permutations.
        draws: how many random permutations, each the same for every example.
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Options`.

    Returns:
        A :class:`Result`; per checkpoint and metric a row that pools the draws (``draw`` empty), then one for
        each. ``spread()`` says how the draws differ.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    check_draws(draws)

    def look(subject: Subject) -> Found:
        from circuits import permute as permutations

        variants = {"positions": permutations.draws(draws, subject.seed)}
        return swept(subject, variants, called("positions", {"draws": draws}))

    return measure(
        "permute",
        refs,
        options,
        look,
        config={"draws": draws},
        notes=(
            "Each draw is a random permutation of the positions in use, the same for every example and checkpoint.",
            "value: all draws pooled, its interval over examples. sd and range: of the values of single draws.",
        ),
    )
