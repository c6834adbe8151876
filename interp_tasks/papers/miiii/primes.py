"""Finds which parts of a model belong to which modular answer, and how far answers share them.

Shares of variance have the mean over shuffled digits as ``baseline``, and the range of 95% of the draws in the interval
of ``effect``. Counts of neurons that serve an answer, and several, stand beside the same number drawn for each answer
at random. Removals: the accuracy of every answer without each one and with as much taken away at random; ``damage``
is the share of the accuracy above chance that is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.layout import COLOURS, Panel, draw
from circuits.figures.panels import Series, bars, heat
from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.options import check_draws
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options, check_has_task
from interp_tasks.pages import Column, Figure

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

SAMPLES = 2048
SAME = "primes: what these checkpoints compute is the same for every input: no variance to share out"
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

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        """Measures what the tensors of one checkpoint hold of each prime's remainder, and what its removal does."""
        import pandas

        from interp_tasks.papers.miiii.removal import lost, measure_removals
        from interp_tasks.papers.miiii.shares import embedding_rows, grid_rows, read_inputs, tensors_of

        inputs, last = read_inputs(subject), None
        rows = list(embedding_rows(subject, inputs, draws))
        for place in tensors_of(subject, inputs):
            new_rows, best = grid_rows(subject, inputs, place, draws)
            rows += new_rows
            if place.site == "mlp_post" and best:
                last = place, best
        frames = [pandas.DataFrame(rows)]
        if ablate and last is not None:
            frames.append(measure_removals(subject, inputs, *last))
            accuracies = frames[1][frames[1]["metric"].str.startswith("accuracy")]
            damages[str(subject.labels["ref"])] = {
                str(label): lost(part, inputs)
                for label, part in accuracies.groupby("intervention", sort=False)
            }
        return Measured(pandas.concat(frames, ignore_index=True), {})

    options = {**options, "samples": options.get("samples") or SAMPLES}
    result = measure("primes", refs, options, measure_checkpoint, config={"draws": draws, "ablate": ablate})
    frame = result.frame
    if frame.empty:
        raise UserError(SAME)
    frame.loc[frame["intervention"].str.contains(": ", regex=False), "split"] = "grid"
    return replace(result, frame=frame, notes=tuple(notes(draws, ablate)), data={"damages": damages})


def notes(draws: int, ablate: bool) -> list[str]:
    """Returns the notes below the table."""
    texts = [
        "In brackets the control. share: of the variance over all inputs, by functions of the answer (of W_E: of the "
        f"digit modulo q); control: the mean over {draws} draws of shuffled digits.",
        "neurons: their share exceeds that of every neuron in every control; most: and none of another answer is "
        "larger; several: those of more than one answer, control: if each answer had drawn its neurons.",
    ]
    if ablate:
        texts.append(
            "− taken away: functions of each digit modulo q; neurons. itself, the others: the share of the accuracy "
            "above chance that is lost, of answers given more often than halfway between chance and always. Control: "
            "as much taken away at random."
        )
    return texts


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Makes columns of an answer's measures in one tensor; accuracies are in the files alone."""
    import pandas

    rows: dict[tuple[str, str, str], dict[Any, Any]] = {}
    for row in frame[frame["metric"].isin(list(SHOWN))].to_dict("records"):
        taken, at, place = row["intervention"].partition(" at ")
        tensor = f"{place} − {taken}" if at else taken.partition(": ")[2]
        shown = rows.setdefault((row["ref"], tensor, row["variant"]), {**row, "where": tensor})
        head, digits = SHOWN[row["metric"]]
        control = "" if math.isnan(row["baseline"]) else f" ({row['baseline']:{digits}})"
        shown[head] = "" if math.isnan(row["value"]) else f"{row['value']:{digits}}{control}"
    return pandas.DataFrame(list(rows.values())).fillna({head: "" for head, _ in SHOWN.values()})


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns of ``view_rows``; only those that some row has."""
    heads = [Column(head, head) for head, _ in SHOWN.values() if head in frame]
    return [Column("tensor", "where"), Column("q", "variant"), *heads]


def figures(result: Result) -> list[Figure]:
    """Returns the share of each answer in every tensor, and what every removal does to every answer."""
    frame, panels = result.frame, []
    shares = frame[(frame["metric"] == "share of variance") & (frame["variant"] != "all answers")]
    for ref in dict.fromkeys(frame["ref"]):
        for place, part in shares[shares["ref"] == ref].groupby("intervention", sort=False):
            panels.append(bars_panel(part, f"{str(place).replace(': ', ' in ')}<br>{ref}"))
        for title, (lost, at_random) in result.data["damages"].get(ref, {}).items():
            for table, says in ((lost, title), (at_random, f"{title}: as much at random")):
                named = table.rename(index=modulus, columns=modulus)
                axes: dict[str, Any] = {
                    "across": "answer judged, modulo",
                    "down": "answer taken away, modulo",
                }
                unit = "share of accuracy above chance lost"
                panels.append(heat(named, f"{says}<br>{ref}", unit=unit, end=1.0, **axes))
    caption = (
        "Bars: the share of each tensor's variance that is a function of the answer, of W_E of the digit modulo q; "
        "open: the same of shuffled digits. Maps: rows are taken away, columns judged: the share of the accuracy above "
        "chance that is lost, 1 where none is left; the same scale in all."
    )
    return [Figure(draw(panels, barmode="group"), "What belongs to each modular answer", caption)]


def bars_panel(part: pandas.DataFrame, title: str) -> Panel:
    """Returns a bar per answer of one tensor, with that of shuffled digits."""
    answers = [modulus(each) for each in part["variant"]]
    opened = {"marker": {"color": "rgba(0,0,0,0)", "line": {"color": COLOURS["light"][0], "width": 1.5}}}
    series = {
        "share": Series(answers, part["value"].tolist(), look=0),
        "digits shuffled": Series(answers, part["baseline"].tolist(), style=opened, look=0),
    }
    return bars(series, title, x="answer modulo", y="share of variance", x_axis={"type": "category"})


def modulus(answer: str) -> str:
    """Returns what stands for an answer on an axis whose title says "modulo"."""
    return answer.removeprefix("mod_")
