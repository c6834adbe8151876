"""Finds which parts of a model belong to which modular answer, and how far answers share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.options import check_draws
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options, check_has_task

if TYPE_CHECKING:
    import plotly.graph_objects
    from typing_extensions import Unpack

    from interp_tasks.experiments._primes.removal import Damage

SAMPLES = 2048
DRAWS = 20


@dataclass(frozen=True, repr=False)
class PrimesResult(Result):
    """A :class:`Result` with the matrices behind it, by REF."""

    damages: Mapping[str, Sequence[Damage]] = field(default_factory=dict)

    def plot(self) -> plotly.graph_objects.Figure:
        """Returns the share of each answer in every tensor, and what every removal does to every answer."""
        from interp_tasks.experiments._primes.figure import figure

        maps = {
            ref: {f"{one.kind} taken away at {one.place}": one.maps() for one in of_ref}
            for ref, of_ref in self.damages.items()
        }
        return self.titled(figure(self.frame, maps), self.heading())

    def heading(self) -> str:
        return "What belongs to each modular answer"

    def caption(self) -> str:
        return (
            "Bars: the share of each tensor's variance that is a function of the answer; open bars: the same of "
            "shuffled digits. Maps: rows are taken away, columns judged: the share of the accuracy above chance that "
            "is lost, 1 where none is left; the same scale in all."
        )


@experiment("modular", says={"draws": DRAWS, "ablate": True}, samples=SAMPLES)
def primes(
    refs: str | Sequence[str],
    *,
    draws: Annotated[
        int, typer.Option("--draws", metavar="N", help="Shuffles of the digits for controls.")
    ] = DRAWS,
    ablate: Annotated[
        bool, typer.Option("--ablate/--no-ablate", help="Take each answer away, and judge the others.")
    ] = True,
    **options: Unpack[Options],
) -> PrimesResult:
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
        options: samples (default 2048, what accuracies are read on), seed, split, task, task_config, device,
            progress: see :class:`Options`.

    Returns:
        A :class:`PrimesResult`. Shares: ``value``, with the mean over shuffled digits as ``baseline`` and the range of
        95% of the draws in the interval of ``effect``; what an answer adds to all others; of neurons how many serve
        an answer, and several, beside the same number drawn for each answer at random. Removals: accuracy and loss
        of every answer without each, and with as much taken away at random; ``damage``: the share of the accuracy
        above chance that is lost.

    Raises:
        UserError, TaskError, CircuitsError: in one line; a UserError for a task without modular answers.
    """
    check_draws(draws)
    check_has_task("primes", options)
    damages: dict[str, list[Damage]] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        """Measures what the tensors of one checkpoint hold of each prime's remainder, and what its removal does."""
        import pandas

        from interp_tasks.experiments._primes.remainders import read_inputs
        from interp_tasks.experiments._primes.removal import measure_removals
        from interp_tasks.experiments._primes.shares import embedding_rows, grid_rows, tensors_of

        inputs = read_inputs(subject, "primes")
        rows = list(embedding_rows(subject, inputs, draws))
        last = None
        for place in tensors_of(subject, inputs):
            new_rows, best = grid_rows(subject, inputs, place, draws)
            rows += new_rows
            if place.site == "mlp_post" and best:
                last = place, best
        # Shares are of the complete grid.
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
        raise UserError(
            "primes: what these checkpoints compute is the same for every input: no variance to share out"
        )
    frame.loc[frame["variant"].notna() & frame["site"].notna() & is_share(frame), "split"] = "grid"
    return PrimesResult.of(result, frame=frame, notes=tuple(notes(draws, ablate)), damages=damages)


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
