"""Finds which parts of a model belong to which modular answer, and how far answers share them.

Shares of variance have the mean over shuffled digits as ``baseline``, and the range of 95% of the draws in the interval
of ``effect``. Counts of neurons that serve an answer, and several, stand beside the same number drawn for each answer
at random. ``damage``: the share of the accuracy above chance that is lost without an answer; ``baseline``: with as much
taken away at random.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.layout import draw
from circuits.figures.panels import heat
from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.options import check_draws
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import measure
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options, check_has_task
from interp_tasks.measurement.table import Row, side_by_side
from interp_tasks.pages import Column, Figure

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

SAMPLES = 2048
DRAWS = 20
#: Title of the column and format of a metric's numbers.
SHOWN: Mapping[str, tuple[str, str]] = {
    "share of variance": ("share", ".3f"),
    "neurons serving it": ("neurons", ".0f"),
    "neurons serving it most": ("most", ".0f"),
    "neurons serving several": ("several", ".0f"),
    "damage to itself": ("itself", ".3f"),
    "damage to the others": ("the others", ".3f"),
}
DRAWS_OPTION = typer.Option("--draws", metavar="N", help="Shuffles of the digits for controls.")
ABLATE = typer.Option("--ablate/--no-ablate", help="Take each answer away, and judge the others.")


@experiment("modular", says={"draws": DRAWS, "ablate": True}, samples=SAMPLES)
def primes(
    refs: str | Sequence[str],
    *,
    draws: Annotated[int, DRAWS_OPTION] = DRAWS,
    ablate: Annotated[bool, ABLATE] = True,
    **options: Unpack[Options],
) -> Result:
    """Say which parts of a model belong to which modular answer, and how far answers share them.

    Shares of the variance of embeddings, attention and MLP; every answer judged with each one taken away.

    An answer r = Σ coefficient · digit mod q is looked for through its own waves cos, sin(2πjr/q), j = 1..(q−1)/2,
    which with a constant are all functions of r: their share of a variance is that between the means of inputs with
    the same r, whether or not q divides the number of digits. Shares are over all inputs.

    Args:
        refs: one or several REFs.
        draws: how often digits are shuffled for the controls.
        ablate: take each answer away as well: all functions of the digits mod q from the embedding; the neurons of
            the last layer that serve it most.
        options: as :class:`Options` has them; accuracies are of 2048 samples by default.

    Raises:
        UserError, TaskError, CircuitsError: in one line; a UserError for a task without modular answers.
    """
    check_draws(draws)
    check_has_task("primes", options)
    damages: dict[str, dict[str, Any]] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        """Measures what the tensors of one checkpoint hold of each prime's remainder, and what its removal does."""
        from interp_tasks.papers.miiii.removal import measure_removals
        from interp_tasks.papers.miiii.shares import embedding_rows, grid_rows, read_inputs, tensors_of

        inputs, last = read_inputs(subject), None
        rows = list(embedding_rows(subject, inputs, draws))
        for place in tensors_of(subject, inputs):
            new_rows, best = grid_rows(subject, inputs, place, draws)
            rows += new_rows
            if place.site == "mlp_post" and best:
                last = place, best
        if ablate and last is not None:
            removed, damages[str(subject.labels["ref"])] = measure_removals(subject, inputs, *last)
            rows += removed
        if not rows:
            raise UserError(
                "primes: what this model computes is the same for every input: no variance to share out"
            )
        return rows

    options = {**options, "samples": options.get("samples") or SAMPLES}
    result = measure("primes", refs, options, measure_checkpoint, config={"draws": draws, "ablate": ablate})
    return replace(result, notes=tuple(notes(draws, ablate)), data={"damages": damages})


def notes(draws: int, ablate: bool) -> Iterator[str]:
    """Yields the notes below the table."""
    yield (
        "In brackets the control. share: of the variance over all inputs, by functions of the answer (of W_E: of the "
        f"digit modulo q); control: the mean over {draws} draws of shuffled digits."
    )
    yield (
        "neurons: their share exceeds that of every neuron in every control; most: and none of another answer is "
        "larger; several: those of more than one answer, control: if each answer had drawn its neurons."
    )
    if ablate:
        yield (
            "− taken away: functions of each digit modulo q; neurons. itself, the others: the share of the accuracy "
            "above chance that is lost, of answers given more often than halfway between chance and always. Control: "
            "as much taken away at random."
        )


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Makes columns of an answer's measures in one tensor."""

    def tensor(row: Row) -> str:
        taken, at, place = row["intervention"].partition(" at ")
        return f"{place} − {taken}" if at else str(taken).partition(": ")[2]

    def cells(row: Row) -> Row:
        head, digits = SHOWN[row["metric"]]
        control = "" if math.isnan(row["baseline"]) else f" ({row['baseline']:{digits}})"
        return {
            "where": tensor(row),
            head: "" if math.isnan(row["value"]) else f"{row['value']:{digits}}{control}",
        }

    shown = frame[frame["metric"].isin(list(SHOWN))]
    rows = side_by_side(shown, lambda row: (row["ref"], tensor(row), row["variant"]), cells)
    return rows.fillna({head: "" for head, _ in SHOWN.values()})


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns of ``view_rows``; only those that some row has."""
    heads = [Column(head, head) for head, _ in SHOWN.values() if head in frame]
    return [Column("tensor", "where"), Column("q", "variant"), *heads]


def figures(result: Result) -> list[Figure]:
    """Returns what every removal does to every answer.

    Raises:
        UserError: where nothing was removed.
    """
    panels = []
    for ref, tables in result.data["damages"].items():
        for title, (lost, at_random) in tables.items():
            for table, says in ((lost, title), (at_random, f"{title}: as much at random")):
                named = table.rename(index=lambda name: name.removeprefix("mod_"))
                named = named.rename(columns=lambda name: name.removeprefix("mod_"))
                axes: dict[str, Any] = {
                    "across": "answer judged, modulo",
                    "down": "answer taken away, modulo",
                }
                unit = "share of accuracy above chance lost"
                panels.append(heat(named, f"{says}<br>{ref}", unit=unit, end=1.0, **axes))
    if not panels:
        raise UserError("--plot draws what removals do: leave --no-ablate out, or --plot")
    caption = (
        "Rows are taken away, columns judged: the share of the accuracy above chance that is lost, 1 where none is "
        "left; the same scale in all."
    )
    return [Figure(draw(panels), "What an answer loses with each one taken away", caption)]
