"""The main job on the shipped models: uniform attention before and after each learned abruptly.

What is said of the published claims follows from their rules, in ``interp_tasks/published/matrix_completion.toml``.
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

    from interp_tasks.published import Claim

MATRIX_RUN = "zoo:matrix-completion-7x7"
MODULAR_RUN = "zoo:modular-addition-113"

#: The published claims, by their names in the paper's file, and what they say of the error.
CLAIMS = {
    "uniform-before-hidden": "hardly changes",
    "uniform-before-observed": "stays small",
    "uniform-after-hidden": "goes back to the error of guessing 0",
    "uniform-after-observed": "stays small",
}
#: Shares of the accuracy above chance that count as kept, and as lost.
KEPT, LOST = 0.9, 0.5
#: Each edit of a study is measured on its own.
HOLM_OF_AN_EDIT = HOLM.replace("command", "intervention")


@dataclass(frozen=True)
class Study:
    """A shipped run, the edits applied to it, and the function that concludes from the outcome."""

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
    """Ablate attention in shipped models before and after they learn abruptly: some ten seconds."""
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
    """Returns a page with a conclusion, a figure and a table for each task."""
    sections: list[Section] = [
        Text(
            "Two small transformers stay on a plateau before they learn: one to fill in the hidden entries of a "
            "low-rank matrix, one to add modulo a prime. Here the attention of every head is made uniform, before "
            "and after their error drops, and each metric is compared with the unedited model on the same examples."
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
    return Page("Uniform attention, before and after the drop", sections, config)


def conclude_matrix_completion(frame: pandas.DataFrame, config: dict[str, Any]) -> list[str]:
    """Returns the claims of Gopalani, Lubana, Hu 2024, sections 3.1.2 and 3.2.1, on this model, each by its rule."""
    from interp_tasks.published import read_paper

    # Entries are sums of r products of two uniforms on [-scale, scale], whose variance is scale² / 3 each.
    guess = config["rank"] * config["scale"] ** 4 / 9
    claims = {claim.id: claim for claim in read_paper("matrix-completion").claim}
    return [
        claim_sentence(claims[claim], what, frame, name, guess)
        for name in dict.fromkeys(frame["intervention"])
        for claim, what in CLAIMS.items()
    ]


def claim_sentence(claim: Claim, what: str, frame: pandas.DataFrame, name: str, guess: float) -> str:
    """Returns a sentence on one claim: our numbers, the published ones, and whether the interval keeps the rule."""
    mark, metric = claim.where["ref"], claim.where["metric"]
    row = row_of(frame, mark, metric, name)
    ends = ("effect_ci_low", "effect_ci_high") if claim.column == "effect" else ("ci_low", "ci_high")
    low, high = (row[end] / guess for end in ends)
    when = f"{'Before' if mark == 'pre' else 'After'} the drop (step {row['step']})"
    return (
        f"{when}, {name}: {metric} {number(row['baseline'])} -> {value_text(row)}; published {claim.published}. "
        f"That it {what} {verdict(claim.holds.hold_between(low, high))} "
        f"(rule: {claim.column} {claim.holds} of the variance {number(guess)})."
    )


def conclude_modular_addition(frame: pandas.DataFrame, config: dict[str, Any]) -> list[str]:
    """Returns sentences on the accuracy that each edit leaves; nothing is published on these edits."""
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


def verdict(holds: bool | None) -> str:
    return {True: "holds here", False: "does not hold here", None: "is undecided here"}[holds]


def row_of(frame: pandas.DataFrame, mark: str, metric: str, intervention: str = "uniform") -> dict[str, Any]:
    """Returns the one row of a checkpoint (``pre`` or ``post``), metric and edit."""
    chosen = frame[
        frame["ref"].str.endswith(f"@{mark}")
        & (frame["metric"] == metric)
        & (frame["intervention"] == intervention)
    ]
    row: dict[str, Any] = chosen.to_dict("records")[0]
    return row
