"""Measures which metrics move when position embeddings are shuffled, many times.

Per checkpoint, choice and metric a row that pools the draws (``draw`` empty), then one for each. ``spread()`` says
how the draws differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.options import called, check_draws
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure, run_sweep
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options, Refs

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from circuits.permute import PermutedPositions

ALL = "all"
DRAWS = typer.Option("--draws", metavar="N", help="Random permutations.")
WHAT_OPTION = typer.Option(
    "--what",
    metavar="NAME",
    help="all; of a grid of positions rows, within-rows, columns, ... Repeat for rows.",
)


@experiment("Intervene", says={"draws": None, "what": [ALL]}, judged_by_task=True)
def permute(
    refs: Refs,
    draws: Annotated[int, DRAWS] = 20,
    what: Annotated[str | Sequence[str], WHAT_OPTION, list[str]] = ALL,
    **options: Unpack[Options],
) -> Result:
    """Permute the position embeddings, many times, and see which metrics move.

    The table shows the draws pooled, and how they differ; files, JSON and CSV have a row for each draw too.

    Args:
        refs: one or several REFs; all see the same examples and the same permutations.
        draws: how many random permutations, each the same for every example.
        what: ``"all"`` positions; or, where the task declares positions that are a grid (``grid_axes()``), by the
            names of its axes, ``"rows"``: whole rows change places; ``"within-rows"``: entries inside each row, each
            row by its own permutation. A list: a row each.
        options: samples, seed, split, task, task_config, tokens, device, progress: see :class:`Examples`.

    Raises:
        UserError, TaskError, CircuitsError: in one line.
    """
    check_draws(draws)
    chosen = [what] if isinstance(what, str) else list(dict.fromkeys(what))
    if not chosen:
        raise UserError(f"--what: write {ALL}, or of a grid rows, within-rows, ...")

    def check(subject: LoadedCheckpoint) -> None:
        for name in chosen:
            maker(subject, name)

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        from circuits import draws as drawn

        makers = {name: maker(subject, name) for name in chosen}
        variants = {
            "positions" if name == ALL else name: drawn(make, draws, subject.seed)
            for name, make in makers.items()
        }
        names = {variant: called(variant, {"draws": draws}) for variant in variants}
        return run_sweep(subject, variants, names)

    return measure(
        "permute",
        refs,
        options,
        measure_checkpoint,
        config={"draws": draws, "what": chosen},
        notes=(
            "Each draw is a random permutation of the positions in use, the same for every example and checkpoint.",
            "value: all draws pooled, its interval over examples. sd and range: of the values of single draws.",
        ),
        check=check,
    )


def maker(subject: LoadedCheckpoint, name: str) -> Callable[[int], PermutedPositions]:
    """Returns a function that draws such a permutation from a seed.

    Raises:
        UserError: for positions that the task's grid does not have.
    """
    from circuits import permute as permutations

    if name == ALL:
        return permutations.positions
    axes = () if subject.task is None else subject.task.grid_axes()
    # Those of the inputs are no grid of positions.
    axes = tuple(axis for axis in axes if axis.position is None)
    shape = tuple(len(axis.values) for axis in axes)
    known: dict[str, Callable[[int], Any]] = {}
    for index, axis in enumerate(axes):
        known |= {
            f"{axis.name}s": partial(permutations.slices, shape, index),
            f"within-{axis.name}s": partial(permutations.within, shape, index),
        }
    if name not in known:
        has = f"the grid has {', '.join(known)}" if known else "its task declares no grid of positions"
        raise UserError(
            f"--what {name}: no such positions in {subject.name}: {has}; write {ALL}, or one of those"
        )
    return known[name]
