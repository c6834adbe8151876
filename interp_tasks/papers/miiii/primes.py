"""Finds which parts of a model belong to which modular answer, and how far answers share them.

Shares: ``value``, with the mean over shuffled digits as ``baseline`` and the range of 95% of the draws in the
interval of ``effect``; what an answer adds to all others; of neurons how many serve an answer, and several, beside
the same number drawn for each answer at random. Removals: accuracy and loss of every answer without each, and with as
much taken away at random; ``damage``: the share of the accuracy above chance that is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
from interp_tasks.papers.miiii.remainders import (
    ANSWER,
    BEST,
    DIGIT,
    DIGITS,
    NEURONS,
    OTHER_FORMS,
    OTHERS,
    OWN,
    SERVING,
    SEVERAL,
    SHARE,
    SIZE,
    TOGETHER,
    UNIQUE,
)

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
    from typing_extensions import Unpack

    from interp_tasks.papers.miiii.removal import Damage

SAMPLES = 2048
SAME = "primes: what these checkpoints compute is the same for every input: no variance to share out"
DRAWS = 20
#: Head of the column by what a row is about (nothing: of any) and its metric; the format of its numbers.
SHOWN: Mapping[tuple[str, str], tuple[str, str]] = {
    (DIGIT, SHARE): ("digits", ".3f"),
    (DIGITS, SHARE): ("digits", ".3f"),
    (ANSWER, SHARE): ("answer", ".3f"),
    (OTHER_FORMS, SHARE): ("other forms", ".3f"),
    ("", UNIQUE): ("beyond", ".3f"),
    ("", SERVING): ("neurons", ".0f"),
    ("", BEST): ("most", ".0f"),
    ("", SEVERAL): ("several", ".0f"),
    ("", SIZE): ("taken", ".0f"),
    ("", OWN): ("itself", ".3f"),
    ("", OTHERS): ("the others", ".3f"),
}
#: Title -> the share of the accuracy above chance that is lost, and the same under the control: a row per answer that
#: was removed, a column per answer that was judged.
Maps = Mapping[str, "tuple[pandas.DataFrame, pandas.DataFrame]"]
#: Of embeddings there is one digit, of activations all of them: the same in one colour.
NAMES = {DIGIT: "digits mod q", DIGITS: "digits mod q", ANSWER: "the answer"}
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

    Shares of the variance of embeddings, attention and MLP; every answer judged with each one taken away. Controls:
    shuffled digits, other linear forms, as much taken away at random.

    An answer r = Σ coefficient · digit mod q is looked for through its own waves cos, sin(2πjr/q), j = 1..(q−1)/2,
    which with a constant are all functions of r: their share of a variance is that between the means of inputs with
    the same r, whether or not q divides the number of digits. All shares are over the complete grid of inputs.

    Args:
        refs: one or several REFs.
        draws: how often digits are shuffled for the controls.
        ablate: take each answer away as well: all functions of the digits mod q from the embedding; from the last
            layer's neurons all functions of the answer, the directions of its means, the neurons that serve it most.
        options: as :class:`Options` has them; accuracies are of 2048 samples by default.

    Raises:
        UserError, TaskError, CircuitsError: in one line; a UserError for a task without modular answers.
    """
    check_draws(draws)
    check_has_task("primes", options)
    damages: dict[str, list[Damage]] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        """Measures what the tensors of one checkpoint hold of each prime's remainder, and what its removal does."""
        import pandas

        from interp_tasks.papers.miiii.remainders import read_inputs
        from interp_tasks.papers.miiii.removal import measure_removals
        from interp_tasks.papers.miiii.shares import embedding_rows, grid_rows, tensors_of

        inputs, last = read_inputs(subject, "primes"), None
        rows = list(embedding_rows(subject, inputs, draws))
        for place in tensors_of(subject, inputs):
            new_rows, best = grid_rows(subject, inputs, place, draws)
            rows += new_rows
            if place.site == "mlp_post" and best:
                last = place, best
        frames = [pandas.DataFrame(rows)]
        done: dict[str, Any] = {}
        if ablate and last is not None:
            frame, matrices, done = measure_removals(subject, inputs, *last)
            damages[str(subject.labels["ref"])] = matrices
            frames.append(frame)
        return Measured(pandas.concat(frames, ignore_index=True), done)

    options = {**options, "samples": options.get("samples") or SAMPLES}
    result = measure("primes", refs, options, measure_checkpoint, config={"draws": draws, "ablate": ablate})
    frame = result.frame
    if frame.empty:
        raise UserError(SAME)
    frame.loc[frame["variant"].notna() & frame["site"].notna() & is_share(frame), "split"] = "grid"
    return replace(result, frame=frame, notes=tuple(notes(draws, ablate)), data={"damages": damages})


def is_share(frame: Any) -> Any:
    """Returns rows of shares and neurons, not of removals."""
    return frame["intervention"].str.contains(": ", regex=False)


def notes(draws: int, ablate: bool) -> list[str]:
    """Returns the notes below the table."""
    texts = [
        "In brackets the control. Shares of the variance over all inputs: functions of the digits modulo q, and of the "
        f"answer; control: the mean over {draws} draws of shuffled digits. Other forms: as the answer, with another "
        "coefficient, mean. Beyond: what the answer adds to all others, by least squares.",
        "neurons: their share exceeds that of every neuron in every control; most: and none of another answer is "
        "larger; several: those of more than one answer, control: if each answer had drawn its neurons.",
    ]
    if ablate:
        texts += [
            "− taken away: digits, functions of each digit modulo q; answer, functions of the answer; directions of "
            "its means; neurons. itself, the others: the share of the accuracy above chance that is lost, of answers "
            "given more often than halfway between chance and always. Control: as much taken away at random.",
            "After the neurons all is linear: without the functions of one answer there, no other can lose much, by "
            "construction.",
        ]
    return texts


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Makes columns of an answer's measures in one tensor; matrices of accuracies are in the files alone."""
    import pandas

    rows: dict[tuple[str, str, str], dict[Any, Any]] = {}
    for row in frame.to_dict("records"):
        part, divided, tensor = row["intervention"].partition(": ")
        key = (part if divided and part != NEURONS else "", row["metric"])
        head, digits = SHOWN.get(key, SHOWN.get(("", row["metric"]), ("", "")))
        if not head:
            continue
        tensor_name = tensor if divided else shortened(part)
        table_row = rows.setdefault((row["ref"], tensor_name, row["variant"]), {**row, "where": tensor_name})
        control = "" if math.isnan(row["baseline"]) else f" ({row['baseline']:{digits}})"
        table_row[head] = "" if math.isnan(row["value"]) else f"{row['value']:{digits}}{control}"
    return pandas.DataFrame(list(rows.values()))


def shortened(removal: str) -> str:
    """Shortens ``neurons at mlp_post.0`` to ``mlp_post.0 − neurons``."""
    what, _, where = removal.partition(" at ")
    return f"{where} − {what.replace('waves of the ', '')}"


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns of ``view_rows``; only those that some row has."""
    heads = dict.fromkeys(head for head, _ in SHOWN.values())
    columns = [Column("tensor", "where"), Column("q", "variant")]
    return columns + [Column(head, head, text(head)) for head in heads if head in frame]


def text(head: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: row[head] if isinstance(row[head], str) else ""


def figure(frame: pandas.DataFrame, maps: Mapping[str, Maps]) -> plotly.graph_objects.Figure:
    """Draws for every checkpoint its shares, then maps of accuracy lost, without each answer and under the control.

    Args:
        frame: the tidy table.
        maps: REF -> its maps.
    """
    shares = frame[(frame["metric"] == SHARE) & (frame["variant"] != TOGETHER)]
    parts = shares["intervention"].str.partition(": ")
    shares = shares.assign(kind=parts[0], tensor=parts[2])
    shares = shares[shares["kind"].isin(NAMES)]
    panels: list[Panel] = []
    for ref in dict.fromkeys(frame["ref"]):
        for tensor, part in shares[shares["ref"] == ref].groupby("tensor", sort=False):
            panels.append(bars_panel(part, f"functions of the answer and of the digits in {tensor}<br>{ref}"))
        for title, (lost, at_random) in maps.get(ref, {}).items():
            for table, says in ((lost, title), (at_random, f"{title}: as much at random")):
                named = table.rename(index=modulus, columns=modulus)
                axes: dict[str, Any] = {
                    "across": "answer judged, modulo",
                    "down": "answer taken away, modulo",
                }
                unit = "share of accuracy above chance lost"
                panels.append(heat(named, f"{says}<br>{ref}", unit=unit, end=1.0, **axes))
    return draw(panels, barmode="group")


def bars_panel(part: pandas.DataFrame, title: str) -> Panel:
    """Returns a bar per answer of one tensor, for functions of the digits and of the answer, with their controls."""
    series: dict[str, Series] = {}
    for kind, rows in part.groupby("kind", sort=False):
        look, name = (0 if kind == ANSWER else 1), NAMES[str(kind)]
        answers = [modulus(each) for each in rows["variant"]]
        opened: dict[str, Any] = {
            "marker": {"color": "rgba(0,0,0,0)", "line": {"color": COLOURS["light"][look], "width": 1.5}}
        }
        series[name] = Series(answers, rows["value"].tolist(), look=look)
        series[f"{name}, digits shuffled"] = Series(
            answers, rows["baseline"].tolist(), style=opened, look=look
        )
    axis = {"type": "category"}
    return bars(series, title, x="answer modulo", y="share of variance", x_axis=axis)


def modulus(answer: str) -> str:
    """Returns what stands for an answer on an axis whose title says "modulo"."""
    return answer.removeprefix("mod_")


def figures(result: Result) -> list[Figure]:
    """Returns the share of each answer in every tensor, and what every removal does to every answer."""
    maps = {
        ref: {f"{one.kind} taken away at {one.place}": one.maps() for one in of_ref}
        for ref, of_ref in result.data["damages"].items()
    }
    caption = (
        "Bars: the share of each tensor's variance that is a function of the answer; open bars: the same of "
        "shuffled digits. Maps: rows are taken away, columns judged: the share of the accuracy above chance that "
        "is lost, 1 where none is left; the same scale in all."
    )
    return [Figure(figure(result.frame, maps), "What belongs to each modular answer", caption)]
