"""The main job on the shipped models: uniform attention before and after each learned abruptly.

What is said of the published claims follows from their rules, in ``interp_tasks/published/matrix_completion.toml``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints import resolve
from interp_tasks.checkpoints.meta import read_meta
from interp_tasks.experiments._demo.matrices import Filled, fill_in
from interp_tasks.experiments._demo.sums import Answered, Ring, answer, right_by_mirror
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.heads.edits import HeadEdit
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.run_logs import Run, find_runs, read_one
from interp_tasks.measurement.runner import Measured, measure, swept
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options, Progress
from interp_tasks.pages import number, with_interval

if TYPE_CHECKING:
    import pandas

    from interp_tasks.published import Claim

MATRIX_RUN = "zoo:matrix-completion-7x7"
MODULAR_RUN = "zoo:modular-addition-113"

#: The edits of each model, all of them in every head: (mode, keys). The paper on matrix completion says uniform
#: attention; its released code replaces a map by its mean over the batch.
MATRIX_EDITS: tuple[tuple[str, tuple[int, ...] | None], ...] = (("uniform", None), ("mean_pattern", None))
MODULAR_EDITS = (*MATRIX_EDITS, ("uniform", (0, 1)))
#: What the table calls the last of them.
OPERANDS = "uniform(keys=0,1)"

#: The published claims, by their names in the paper's file, and what they say of the error.
CLAIMS = {
    "uniform-before-hidden": "hardly changes",
    "uniform-before-observed": "stays small",
    "uniform-after-hidden": "goes back to the error of guessing 0",
    "uniform-after-observed": "stays small",
}
#: Shares of the accuracy above chance that count as kept, and as lost.
KEPT, LOST = 0.9, 0.5
#: What the table calls all heads.
ALL = "all"


@dataclass(frozen=True)
class Outcome:
    """A shipped run with its log, its task's settings, and what the edits do before and after its drop.

    Attributes:
        unedited: mark -> metric -> row of the unedited model on the same examples, with an interval of its own.
    """

    title: str
    log: Run
    config: dict[str, Any]
    result: Result
    unedited: Mapping[str, Mapping[str, Mapping[str, Any]]]

    def row(self, mark: str, metric: str, intervention: str = "uniform") -> dict[str, Any]:
        return row_of(self.result.frame, mark, metric, intervention)


@dataclass(frozen=True)
class Demo:
    """Both models: what uniform attention does to each, and what their pages' pictures show.

    Attributes:
        mirrored: the share of right answers of :func:`right_by_mirror` before the rise.
    """

    matrices: Outcome
    filled: Filled
    sums: Outcome
    answered: Answered
    ring: Ring
    mirrored: tuple[float, float]

    def results(self) -> list[Result]:
        return [self.matrices.result, self.sums.result]


def check_runs() -> None:
    """Refuse, before slow work, a demo whose checkpoints are not there."""
    for run in (MATRIX_RUN, MODULAR_RUN):
        for mark in ("pre", "post"):
            resolve(f"{run}@{mark}")


@experiment("Papers")
def demo(samples: int = 256, seed: int = 0, progress: Progress | None = None) -> Demo:
    """Ablate attention in shipped models before and after they learn abruptly: some twenty seconds."""
    total = sum(len(resolve(f"{run}@all")) for run in (MATRIX_RUN, MODULAR_RUN))
    reported: list[str] = []

    def report(name: str) -> None:
        if progress is not None:
            progress(len(reported), total, name)
        reported.append(name)

    filled = fill_in(MATRIX_RUN, samples, seed, report)
    answered, ring = answer(MODULAR_RUN, samples, seed, report)
    matrices = outcome("Matrix completion", MATRIX_RUN, MATRIX_EDITS, samples, seed)
    sums = outcome("Modular addition", MODULAR_RUN, MODULAR_EDITS, samples, seed)
    return Demo(matrices, filled, sums, answered, ring, right_by_mirror(f"{MODULAR_RUN}@pre"))


def outcome(title: str, run: str, edits: Any, samples: int, seed: int) -> Outcome:
    """Returns what edits of all heads do before and after a run's drop, as ``interp-run ablation`` measures it."""
    readings = [HeadEdit.read(mode, keys, "all") for mode, keys in edits]
    unedited: dict[str, dict[str, dict[str, Any]]] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        from circuits import heads
        from circuits import run as run_model
        from interp_tasks.measurement.paired import paired

        assert subject.task is not None
        assert subject.batch is not None
        metrics = subject.task.metrics(run_model(subject.model, subject.tokens), subject.batch)
        mark = str(subject.labels["ref"]).rpartition("@")[2]
        unedited[mark] = {row["metric"]: row for row in paired(metrics, None, subject.seed)}
        every = {ALL: heads("all", subject.model)}
        variants = {edit.name: edit.on(subject, every)[ALL] for edit in readings}
        measured = swept(subject, variants, {name: name for name in variants})
        return replace(measured, frame=measured.frame.assign(variant=ALL))

    config = {"heads": [ALL], "edits": [edit.describe() for edit in readings]}
    notes = dict.fromkeys(note for edit in readings for note in edit.notes)
    options: Options = {"samples": samples, "seed": seed}
    result = measure(
        "ablation", [f"{run}@pre", f"{run}@post"], options, measure_checkpoint, config=config, notes=[*notes]
    )
    ((name, path),) = find_runs(run).items()
    task = read_meta(resolve(f"{run}@post")[0].path)["task"]["config"]
    return Outcome(title, read_one(name, path), task, result, unedited)


def guessing(config: dict[str, Any]) -> float:
    """Returns the variance of an entry, the error of guessing 0.

    Entries are sums of r products of two uniforms on [-scale, scale], whose variance is scale² / 3 each.
    """
    return float(config["rank"] * config["scale"] ** 4 / 9)


def judged_claims(frame: pandas.DataFrame, config: dict[str, Any]) -> list[dict[str, str]]:
    """Returns the claims of Gopalani, Lubana, Hu 2024, sections 3.1.2 and 3.2.1, on this model, each by its rule."""
    from interp_tasks.published import read_paper

    claims = {claim.id: claim for claim in read_paper("matrix-completion").claim}
    return [
        judged(claims[claim], what, frame, name, guessing(config))
        for name in dict.fromkeys(frame["intervention"])
        for claim, what in CLAIMS.items()
    ]


def judged(claim: Claim, what: str, frame: pandas.DataFrame, name: str, guess: float) -> dict[str, str]:
    """Returns one claim: our numbers, the published ones, and whether the whole interval keeps the rule."""
    mark, metric = claim.where["ref"], claim.where["metric"]
    row = row_of(frame, mark, metric, name)
    ends = (
        ("effect_ci_low", "effect_ci_high") if claim.column == "effect" else ("value_ci_low", "value_ci_high")
    )
    share, low, high = (row[column] / guess for column in (claim.column, *ends))
    ours = with_interval(number(row["value"]), row["value_ci_low"], row["value_ci_high"])
    return {
        "claim": f"{'before' if mark == 'pre' else 'after'} the drop {metric} {what}",
        "edit": name,
        "published": claim.published,
        "ours": f"{number(row['baseline'])} -> {ours}",
        "rule": f"{claim.column} {claim.holds} of the variance {number(guess)}",
        "judged": f"{claim.column} / variance: {with_interval(number(share), low, high)}",
        "verdict": verdict(claim.holds.contains_between(low, high)),
    }


def reading(frame: pandas.DataFrame, config: dict[str, Any]) -> str:
    """Returns a sentence on the accuracy that uniform attention leaves; nothing is published on these edits."""
    chance = 1 / config["p"]
    plain = row_of(frame, "post", "accuracy")["baseline"]
    if plain < 0.5:
        return "It has not learned the task, so there is nothing for an ablation to take away."
    left = {
        name: row_of(frame, "post", "accuracy", name)["value"]
        for name in dict.fromkeys(frame["intervention"])
    }
    shares = {name: (value - chance) / (plain - chance) for name, value in left.items()}
    operands = shares[OPERANDS]
    if operands >= KEPT:
        meaning = "so this model does not need its heads to weigh the two numbers differently"
    elif operands < LOST:
        meaning = (
            "so this model needs its heads to weigh the two numbers differently, head by head or sum by sum"
        )
    else:
        meaning = "so part of what it does rests on heads that weigh the two numbers differently"
    return (
        f"With uniform attention in every head, {left['uniform']:.1%} of the sums are right instead of {plain:.1%}; "
        f"with attention uniform over the two numbers alone, {left[OPERANDS]:.1%}, {meaning}."
    )


def verdict(holds: bool | None) -> str:
    return {True: "holds", False: "does not hold", None: "undecided"}[holds]


def row_of(frame: pandas.DataFrame, mark: str, metric: str, intervention: str = "uniform") -> dict[str, Any]:
    """Returns the one row of a checkpoint (``pre`` or ``post``), metric and edit."""
    chosen = frame[
        frame["ref"].str.endswith(f"@{mark}")
        & (frame["metric"] == metric)
        & (frame["intervention"] == intervention)
    ]
    row: dict[str, Any] = chosen.to_dict("records")[0]
    return row
