"""The main job on the shipped models: uniform attention before and after each learned abruptly.

Every verdict rule below was written before the first run on a shipped model; what is said follows from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints import resolve
from interp_tasks.checkpoints.meta import read_meta
from interp_tasks.experiments.ablation import ablation
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.result import Result, join
from interp_tasks.measurement.runner import HOLM
from interp_tasks.measurement.subjects import Progress
from interp_tasks.measurement.table import shown_columns, value_text
from interp_tasks.pages import Column, Figure, Page, Section, Table, Text, number, signed

if TYPE_CHECKING:
    import pandas

MATRIX_RUN = "zoo:matrix-completion-4x4"
MODULAR_RUN = "zoo:modular-addition-113"

#: "Hardly changes": by less than this share. Published: 0.2236 -> 0.2236 (Gopalani et al. 2024, 3.1.2).
HARDLY = 0.05
#: "Back to about r/9": between these multiples of it. Published: 0.2183 of 0.2222, 0.98 (same, 3.2.1).
ABOUT = (0.8, 1.25)
#: "Stays small": below this share of r/9, the error of guessing 0. Published: 0.0037 of 0.2222, 0.017 (same).
SMALL = 0.05
#: Shares of the accuracy above chance that count as kept, and as lost.
KEPT, LOST = 0.9, 0.5
#: Each edit of a study is measured on its own.
HOLM_OF_AN_EDIT = HOLM.replace("command", "intervention")


@dataclass(frozen=True)
class Study:
    """One shipped run, what is done to it, and what to say about the outcome."""

    title: str
    run: str
    #: (mode, keys) of each edit, all of them in every head.
    edits: tuple[tuple[str, tuple[int, ...] | None], ...]
    conclude: Callable[[pandas.DataFrame, dict[str, Any]], list[str]]


@dataclass(frozen=True)
class Outcome:
    study: Study
    result: Result
    sentences: tuple[str, ...]


def studies() -> list[Study]:
    return [
        # The paper's text says uniform attention; its released code replaces a map by its mean over the batch.
        Study(
            "Matrix completion",
            MATRIX_RUN,
            (("uniform", None), ("mean_pattern", None)),
            conclude_matrix_completion,
        ),
        Study(
            "Modular addition",
            MODULAR_RUN,
            (("uniform", None), ("mean_pattern", None), ("uniform", (0, 1))),
            conclude_modular_addition,
        ),
    ]


def check_studies() -> None:
    """Refuse, before slow work, a demo whose checkpoints are not there."""
    for study in studies():
        for mark in ("pre", "post"):
            resolve(f"{study.run}@{mark}")


@experiment("Papers")
def demo(samples: int = 256, seed: int = 0, progress: Progress | None = None) -> list[Outcome]:
    """The main job on the models that come with the package, in some ten seconds."""
    outcomes = []
    for study in studies():
        refs = [f"{study.run}@pre", f"{study.run}@post"]
        result = join(
            [
                ablation(refs, "all", mode, keys, samples=samples, seed=seed, progress=progress)
                for mode, keys in study.edits
            ]
        )
        result = replace(
            result, notes=tuple(HOLM_OF_AN_EDIT if note == HOLM else note for note in result.notes)
        )
        config = read_meta(resolve(refs[1])[0].path)["task"]["config"]
        outcomes.append(Outcome(study, result, tuple(study.conclude(result.frame, config))))
    return outcomes


def demo_page(outcomes: list[Outcome]) -> Page:
    """One page: for each task what it shows, the figure, the table."""
    sections: list[Section] = [
        Text(
            "Two small transformers learn abruptly: one to fill in the hidden entries of a low-rank matrix, "
            "one to add modulo a prime. Here the attention of every head is made uniform, before and after "
            "that drop, and each metric is compared with the unedited model on the same examples."
        )
    ]
    for outcome in outcomes:
        title, frame = outcome.study.title, outcome.result.frame
        figure = outcome.result.plot()
        columns = [Column("checkpoint", "ref"), Column("step", "step"), *shown_columns(frame)]
        name = f"demo-{title.lower().replace(' ', '-')}"
        sections += [
            Text("\n".join(f"- {sentence}" for sentence in outcome.sentences), title),
            Figure(
                figure,
                caption="Filled: under the edit, with its 95% interval. Open: the unedited model.",
                alt=f"{title}: every metric before and after the drop, edited and unedited",
                height=int(figure.layout.height),
            ),
            Table(frame, caption=" ".join(outcome.result.notes), columns=columns, name=name),
        ]
    config = {outcome.study.title: outcome.result.config for outcome in outcomes}
    return Page("Uniform attention, before and after the sudden drop", sections, config)


def conclude_matrix_completion(frame: pandas.DataFrame, config: dict[str, Any]) -> list[str]:
    """The claims of Gopalani, Lubana, Hu 2024, sections 3.1.2 and 3.2.1, on this model."""
    # Entries are sums of r products of two uniforms on [-scale, scale], whose variance is scale² / 3 each.
    guess = config["rank"] * config["scale"] ** 4 / 9
    sentences = []
    for name in dict.fromkeys(frame["intervention"]):
        before, after = (row_of(frame, mark, "mse_masked", name) for mark in ("pre", "post"))
        change = before["effect"] / before["baseline"]
        ratio = after["value"] / guess
        sentences += [
            f"Before the drop (step {before['step']}), {name} in all heads takes mse_masked from "
            f"{number(before['baseline'])} to {number(before['value'])}, a change of {change:+.2%}. The "
            f"published claim that it hardly changes {verdict(abs(change) < HARDLY)} "
            f"(rule: by less than {HARDLY:.0%}).",
            still_copies(row_of(frame, "pre", "mse_observed", name), guess, published=0.0014),
            f"After it (step {after['step']}), {name} takes mse_masked from {number(after['baseline'])} to "
            f"{value_text(after)}, which is {ratio:.2f} of r/9 = {number(guess)}, the error of guessing 0. The "
            f"published claim that it goes back to about r/9 {verdict(ABOUT[0] <= ratio <= ABOUT[1])} "
            f"(rule: {ABOUT[0]} to {ABOUT[1]} of it; published 0.98).",
            still_copies(row_of(frame, "post", "mse_observed", name), guess, published=0.017),
        ]
    return sentences


def still_copies(row: dict[str, Any], guess: float, published: float) -> str:
    share = row["value"] / guess
    return (
        f"Observed entries: mse_observed from {number(row['baseline'])} to {number(row['value'])}, {share:.3f} "
        f"of r/9. The published claim that it stays small {verdict(share < SMALL)} "
        f"(rule: below {SMALL} of r/9; published {published})."
    )


def conclude_modular_addition(frame: pandas.DataFrame, config: dict[str, Any]) -> list[str]:
    """Nothing is published on these edits: what each leaves of the accuracy, and what that is evidence of."""
    chance = 1 / config["p"]
    plain = {mark: row_of(frame, mark, "accuracy", "uniform") for mark in ("pre", "post")}
    sentences = [
        f"Unedited, the model answers {plain['pre']['baseline']:.1%} of the test examples at step "
        f"{plain['pre']['step']} and {plain['post']['baseline']:.1%} at step {plain['post']['step']} "
        f"(chance: {chance:.1%})."
    ]
    if plain["post"]["baseline"] < 0.5:
        return [*sentences, "It has not learned the task, so there is nothing for an ablation to take away."]
    shares = {}
    for name in dict.fromkeys(frame["intervention"]):
        row = row_of(frame, "post", "accuracy", name)
        loss = row_of(frame, "post", "loss", name)
        left = f"{row['value']:.1%} [{row['ci_low']:.1%}, {row['ci_high']:.1%}]"
        shares[name] = (row["value"] - chance) / (row["baseline"] - chance)
        sentences.append(
            f"{name} in all heads leaves {left} correct at step "
            f"{row['step']}, {shares[name]:.0%} of what was above chance (loss {signed(loss['effect'])})."
        )
    operands, everywhere = shares["uniform(keys=0,1)"], shares["uniform"]
    if operands >= KEPT:
        reading = "so this model does not need its heads to weigh the operands differently"
    elif operands < LOST:
        reading = (
            "so this model needs its heads to weigh the operands differently, head by head or input by input"
        )
    else:
        reading = "so part of what it does rests on heads that weigh the operands differently"
    sentences.append(
        f"With attention uniform over the two operands alone, {operands:.0%} is kept, {reading}; when '=' "
        f"receives its third as well, {everywhere:.0%}."
    )
    return sentences


def verdict(holds: bool) -> str:
    return "holds here" if holds else "does not hold here"


def row_of(frame: pandas.DataFrame, mark: str, metric: str, intervention: str = "uniform") -> dict[str, Any]:
    """The one row of a checkpoint (``pre`` or ``post``), metric and edit."""
    chosen = frame[
        frame["ref"].str.endswith(f"@{mark}")
        & (frame["metric"] == metric)
        & (frame["intervention"] == intervention)
    ]
    row: dict[str, Any] = chosen.to_dict("records")[0]
    return row
