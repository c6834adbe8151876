"""Reproduces a paper: runs its studies, judges its claims, and lists missing runs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.disk import atomic_write
from interp_tasks.errors import UserError
from interp_tasks.measurement.intervals import ALPHA
from interp_tasks.measurement.options import check_choice
from interp_tasks.measurement.subjects import Progress
from interp_tasks.pages import versions
from interp_tasks.published import Claim, Paper, read_paper
from interp_tasks.published.paper import PRESETS, as_typed
from interp_tasks.recipes.spec import seed_numbers
from interp_tasks.reproduction.claim_rows import Seed, Seeds, has_ending
from interp_tasks.reproduction.page import page, paper_markdown, summary_of
from interp_tasks.reproduction.runs import Located, locate_all
from interp_tasks.reproduction.studies import (
    OF_THE_RUN,
    Done,
    Job,
    control_jobs,
    jobs_of,
    perform_all,
    under_every_mark,
    untestable,
)
from interp_tasks.reproduction.verdicts import CONTROLS, Outcome, judge

if TYPE_CHECKING:
    import pandas

    from interp_tasks.pages import Page


@dataclass(frozen=True)
class Reproduction:
    """A paper's claims with their verdicts, and the studies behind them.

    Attributes:
        outcomes: one for each claim and condition (runs of a role that differ in their seed alone), or role, where a
            study looks at its runs together.
        done: each study's result, or why there is none.
        located: every run of the scale, and where it is.
        rows: what it was limited to; empty: everything.
    """

    paper: Paper
    preset: str
    outcomes: tuple[Outcome, ...]
    done: tuple[Done, ...] = field(repr=False)
    located: tuple[Located, ...] = field(repr=False)
    rows: tuple[int, ...] = ()
    folder: str = "runs"
    versions: Mapping[str, str] = field(default_factory=versions, repr=False)

    @property
    def missing(self) -> tuple[Located, ...]:
        """Runs that studies lack, each once, however many studies need it."""
        lacking = {each.run.name: each for done in self.done for each in done.job.missing}
        return tuple(lacking.values())

    @property
    def crashed(self) -> tuple[str, ...]:
        """Faults of ours, one line each: studies that crashed, claims whose number is not in the table."""
        studies = [
            f"study {done.job.study.id} on {done.job.name}: {done.reason}"
            for done in self.done
            if done.crashed
        ]
        claims = [
            f"claim {each.claim.id} on {each.run}: {each.reason}"
            for each in self.outcomes
            if each.verdict == "error" and not any(each.reason in line for line in studies)
        ]
        return (*studies, *claims)

    def frame(self) -> pandas.DataFrame:
        """Returns one row per outcome."""
        import pandas

        titles = {row.number: row.title for row in self.paper.row}
        rows = []
        for each in self.outcomes:
            controls = dict(each.controls)
            at_least, at_most = each.bounds or (-math.inf, math.inf)
            rows.append(
                {
                    "row": each.claim.row,
                    "experiment": titles[each.claim.row],
                    "claim": each.claim.id,
                    "headline": each.claim.headline,
                    "says": each.claim.says,
                    "source": each.claim.source,
                    "published": each.claim.published,
                    "published_number": each.claim.number,
                    "rule": each.claim.rule,
                    "run": each.run,
                    "n_runs": each.n_runs,
                    "value": each.value,
                    "value_ci_low": each.low,
                    "value_ci_high": each.high,
                    "at_least": at_least if math.isfinite(at_least) else None,
                    "at_most": at_most if math.isfinite(at_most) else None,
                    "what": each.claim.what,
                    "interval": each.interval,
                    "runs": [{"run": name, "value": value} for name, value in each.runs],
                    **{name: controls.get(name) for name in CONTROLS},
                    "p": each.p,
                    "p_holm": each.p_holm,
                    "verdict": each.verdict,
                    "reason": each.reason,
                    "departures": each.claim.departures,
                    "uncontrolled": each.claim.uncontrolled,
                    "command": each.command,
                    "hours": each.hours,
                }
            )
        return pandas.DataFrame(rows, columns=list(COLUMNS)).astype(
            {"n_runs": "Int64", **dict.fromkeys(NUMBERS, float)}
        )

    def records(self) -> list[dict[str, Any]]:
        from interp_tasks.measurement.result import json_value

        return [
            {str(key): json_value(value) for key, value in row.items()}
            for row in self.frame().to_dict("records")
        ]

    def to_json(self) -> str:
        rows = (json.dumps(record, allow_nan=False, ensure_ascii=False) for record in self.records())
        return "[\n" + ",\n".join(rows) + "\n]\n"

    def to_csv(self) -> str:
        frame = self.frame()
        # A cell holds one text: the runs' own numbers, in their order.
        run_values = ["; ".join(f"{each['run']}: {each['value']}" for each in runs) for runs in frame["runs"]]
        text: str = frame.assign(runs=run_values).to_csv(index=False, lineterminator="\n")
        return text

    def markdown(self) -> str:
        """Returns the claims with their rules and verdicts, experiment by experiment."""
        outcomes: list[Any] = self.frame().to_dict("records")
        rows = [row for row in self.paper.row if not self.rows or row.number in self.rows]
        return paper_markdown(self.paper, outcomes, rows)

    def page(self) -> Page:
        return page(
            self.paper,
            self.preset,
            self.frame(),
            summary(self),
            done=self.done,
            located=self.located,
            missing=self.missing,
            rows=self.rows,
            folder=self.folder,
            versions=self.versions,
        )

    def write(self, folder: str | Path) -> list[Path]:
        """Writes ``claims.csv``, ``.json`` and ``.md``, every study's tables under ``studies``, and ``index.html``.

        Raises:
            UserError: if the file system refuses.
        """
        folder = Path(folder)
        written = [
            atomic_write(folder / "claims.csv", self.to_csv()),
            atomic_write(folder / "claims.json", self.to_json()),
            atomic_write(folder / "claims.md", self.markdown()),
        ]
        for done in self.done:
            if done.result is not None:
                study_folder = folder / "studies" / done.job.study.id / done.job.name
                if done.job.control is not None:
                    study_folder = study_folder / done.job.control
                done.result.write(study_folder)
        written.append(self.page().write(folder / "index.html"))
        return written


def summary(reproduction: Reproduction) -> str:
    """Returns how many claims there are and which are corrected."""
    return summary_of(reproduction.frame().to_dict("records"))


COLUMNS = (
    *("row", "experiment", "claim", "headline", "says", "source", "published", "published_number", "rule"),
    *(
        "run",
        "n_runs",
        "value",
        "value_ci_low",
        "value_ci_high",
        "at_least",
        "at_most",
        "what",
        "interval",
        "runs",
    ),
    *(
        *CONTROLS,
        "p",
        "p_holm",
        "verdict",
        "reason",
        "departures",
        "uncontrolled",
        "command",
        "hours",
    ),
)
#: Columns of numbers, NaN where there is none.
NUMBERS = (
    *("published_number", "value", "value_ci_low", "value_ci_high", "at_least", "at_most", *CONTROLS),
    *("p", "p_holm", "hours"),
)


def reproduce(
    paper: str | Paper,
    preset: str = "cpu",
    *,
    runs: str | Path = "runs",
    rows: Sequence[int] = (),
    processes: int = 1,
    progress: Progress | None = None,
) -> Reproduction:
    """Repeat a paper's experiments on the runs that are there, and decide its claims.

    Args:
        paper: a name (``interp_tasks.published.papers()``), or a paper of your own.
        preset: the scale: ``cpu``, ``reference`` or ``paper``.
        runs: where to look for runs that are not shipped, and for your own in place of those.
        rows: only these experiments of the paper.
        processes: studies at a time, in processes of one thread each.

    Raises:
        UserError: for a paper, preset or row there is not; for a folder that holds another run than the paper's.
    """
    paper, located = check(paper, preset, runs, rows)
    jobs = [*jobs_of(paper, located, rows), *control_jobs(paper, located, rows)]
    done: dict[int, Done] = {}
    order = {id_of(job): index for index, job in enumerate(jobs)}
    runnable = [job for job in jobs if job.refs() and not untestable(job)]
    for one in perform_all(runnable, processes):
        done[order[id_of(one.job)]] = one
        if progress is not None:
            on = f"{one.job.name}, {one.job.control}" if one.job.control else one.job.name
            progress(len(done), len(runnable), f"{one.job.study.id} on {on}")
    for index, job in enumerate(jobs):
        done.setdefault(index, Done(job, None, untestable(job) or "not trained"))
    finished = tuple(done[index] for index in range(len(jobs)))
    seeds = {
        base: Seed(condition, seed)
        for each in located
        for condition in ([each.condition] if each.bases else [])
        for seed, base in each.bases.items()
    }
    outcomes = [
        outcome
        for claim in sorted(paper.claim, key=lambda claim: claim.row)
        if not rows or claim.row in rows
        for outcome in decide(claim, paper, finished, preset, Path(runs).as_posix(), seeds)
    ]
    folder = Path(runs).as_posix()
    return Reproduction(paper, preset, corrected(outcomes), finished, tuple(located), tuple(rows), folder)


def check(
    paper: str | Paper, preset: str, runs: str | Path, rows: Sequence[int]
) -> tuple[Paper, list[Located]]:
    """Returns the paper and its located runs; refuses, before slow work, what cannot be reproduced."""
    paper = read_paper(paper) if isinstance(paper, str) else paper
    check_choice("--preset", preset, PRESETS)
    numbers = [row.number for row in paper.row]
    for row in rows:
        if row not in numbers:
            raise UserError(f"--rows {row}: {paper.name} has rows {min(numbers)} to {max(numbers)}")
    return paper, locate_all(paper, preset, Path(runs))


def id_of(job: Job) -> tuple[str, str, str]:
    return job.study.id, job.name, job.control or ""


def about(claim: Claim, lacking: Sequence[Located]) -> bool:
    """Returns whether a claim is about one of these runs by name."""
    ends = runs_named(claim)
    called = (
        f"{each.run.name}{seed}"
        for each in lacking
        for seed in ([f"/seed-{seed}" for seed in seed_numbers(each.run.seeds)] if each.run.seeds else [""])
    )
    return any(has_ending(name, ends) for name in called)


def reads(claim: Claim, run: Located) -> bool:
    """Returns whether a claim is about this run: by name, or as one of all that its study has."""
    from interp_tasks.experiments._drops.table import AGAINST

    # A row against a setting is of all of them.
    is_of_all = "run" not in claim.where or any(name.startswith(AGAINST) for name in runs_named(claim))
    return is_of_all or about(claim, [run])


def runs_named(claim: Claim) -> list[str]:
    """Returns the endings of the names of runs, globs among them, that a claim is about."""
    filters = [claim.where, *([claim.per] if isinstance(claim.per, dict) else [])]
    given = [each["run"] for each in filters if "run" in each]
    return [name for one in given for name in (one if isinstance(one, list) else [str(one)])]


def decide(
    claim: Claim, paper: Paper, done: Sequence[Done], preset: str, folder: str, seeds: Seeds
) -> list[Outcome]:
    """Returns the outcome of a claim on each condition of its study."""
    study = next(each for each in paper.study if each.id == claim.study)
    study_runs = [one for one in done if one.job.study.id == claim.study and one.job.control is None]
    control_runs = [one for one in done if one.job.study.id == claim.study and one.job.control is not None]
    conditions: dict[str, list[Done]] = {}
    for one in study_runs:
        conditions.setdefault(one.job.condition, []).append(one)
    if not study.together and "run" in claim.where and len(conditions) > 1:
        conditions = {
            key: condition_runs
            for key, condition_runs in conditions.items()
            if about(claim, runs_of(condition_runs))
        }
    names = {key: condition_runs[0].job.on[0].run.name for key, condition_runs in conditions.items()}
    if study.together and study_runs:
        names = {"": study_runs[0].job.name}
    if preset in claim.scale:
        name = next(iter(names.values()), preset)
        return [Outcome(claim, name, 0, "not testable", reason=claim.scale[preset])]
    if not conditions:
        return [Outcome(claim, preset, 0, "not run", reason=f"no run is planned at the scale {preset}")]
    controls = claim.control_names(study)
    return [
        decide_on(
            claim,
            condition_runs,
            names[key],
            folder,
            with_shuffled(seeds, condition_runs, control_runs),
            controls_of(claim, controls, key, condition_runs, control_runs),
        )
        for key, condition_runs in conditions.items()
    ]


def runs_of(done: Sequence[Done]) -> list[Located]:
    return [each for one in done for each in one.job.on]


def with_shuffled(seeds: Seeds, done: Sequence[Done], control_runs: Sequence[Done]) -> Seeds:
    """Returns the identities of runs, where those on shuffled labels are seeds of the condition they stand for."""
    bases = [base for each in runs_of(done) for base in each.bases.values()]
    if not bases:
        return seeds
    condition = seeds[bases[0]].condition
    shuffled = runs_of([one for one in control_runs if one.job.control == "shuffled"])
    others = [base for each in shuffled for base in each.bases.values() if base not in bases]
    return {**seeds, **{base: Seed(condition, seeds[base].seed) for base in others}}


def joined(frames: Sequence[pandas.DataFrame]) -> pandas.DataFrame:
    """Returns tables of several runs as one; what each of them has of one other model stands in it once."""
    import pandas

    return frames[0] if len(frames) == 1 else pandas.concat(frames, ignore_index=True).drop_duplicates()


def decide_on(
    claim: Claim,
    done: Sequence[Done],
    name: str,
    folder: str,
    seeds: Seeds,
    controls: Mapping[str, pandas.DataFrame | str],
) -> Outcome:
    """Returns a claim on the runs of one condition."""
    succeeded = [one for one in done if one.result is not None]
    lacking = [each for one in done for each in one.job.missing]
    together = len(done) == 1 and done[0].job.study.together
    if succeeded and not (together and about(claim, lacking)):
        frames = [under_every_mark(one.job, one.result.frame) for one in succeeded if one.result is not None]
        frame = joined(frames)
        tables = {key: table for key, table in controls.items() if not isinstance(table, str)}
        outcome = judge(claim, frame, name, seeds, tables)
        without = ", ".join(each.run.name.rpartition("/")[2] for each in lacking if reads(claim, each))
        parts = [
            outcome.reason,
            f"without runs that are not trained: {without}" if without else "",
            *(f"without {refused}" for refused in refusals(done)),
            *(table for table in controls.values() if isinstance(table, str)),
        ]
        return replace(outcome, reason="; ".join(filter(None, parts)))
    crashed = [one.reason for one in done if one.crashed]
    if crashed:
        return Outcome(claim, name, 0, "error", reason=crashed[0])
    if not lacking:
        # It is there, and the study cannot be done on it.
        return Outcome(claim, name, 0, "not testable", reason=done[0].reason)
    return Outcome(
        claim,
        name,
        0,
        "not run",
        reason="; ".join(["not trained", *refusals(done)]),
        command="; ".join(each.run.command(folder) for each in lacking),
        hours=sum(each.run.hours for each in lacking) or None,
    )


def refusals(done: Sequence[Done]) -> list[str]:
    """Returns on which runs a study cannot be done, and why: those together that lack the same."""
    names: dict[str, list[str]] = {}
    for one in done:
        if one.result is None and one.job.refs():
            # What each of them has instead, and where its drop lies, is its own.
            reason = re.split(r": the nearest are| \(steps ", one.reason)[0].removeprefix(
                f"{one.job.on[0].base} "
            )
            names.setdefault(reason, []).append(one.job.name)
    return [f"{', '.join(runs)}: {reason}" for reason, runs in names.items()]


def controls_of(
    claim: Claim, names: Sequence[str], condition: str, done: Sequence[Done], control_runs: Sequence[Done]
) -> dict[str, pandas.DataFrame | str]:
    """Returns the table of each control beside the runs of a condition, or the line that says why there is none."""
    tables: dict[str, pandas.DataFrame | str] = {}
    bases = [base for one in done for each in one.job.on for base in each.bases.values()]
    for control in names:
        runs_of_control = [one for one in control_runs if one.job.control == control]
        if control in OF_THE_RUN:
            runs_of_control = [one for one in runs_of_control if one.job.condition == condition]
        frames = [one.result.frame for one in runs_of_control if one.result is not None]
        if control == "shuffled":
            # They stand for the runs themselves, whose names claims and their divisors may ask for.
            # Where fewer runs are there, the others keep their names, as further seeds (`with_shuffled`).
            runs = [one.job.on[0].base for one in runs_of_control if one.result is not None]
            stand_in = dict(zip(runs, bases, strict=False))
            frames = [frame.assign(run=frame["run"].replace(stand_in)) for frame in frames]
        if frames:
            tables[control] = joined(frames)
        else:
            why = runs_of_control[0].reason if runs_of_control else "no such run is there"
            tables[control] = f"not judged on its control, {control}: {why}"
    return tables


def corrected(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Adjusts the headline p-values by Holm; a verdict that is not significant then becomes undecided."""
    import numpy

    from circuits.statistics import holm

    tested = [index for index, each in enumerate(outcomes) if each.claim.headline and each.p is not None]
    adjusted = list(outcomes)
    p_values = numpy.array([outcomes[each].p for each in tested], float)
    for index, p in zip(tested, holm(p_values).tolist(), strict=True):
        one = replace(adjusted[index], p_holm=p)
        if p >= ALPHA and one.verdict in ("held", "failed"):
            reason = f"not after Holm's correction over {len(tested)} headline verdicts: {one.verdict} alone"
            one = replace(one, verdict="undecided", reason="; ".join(filter(None, (reason, one.reason))))
        adjusted[index] = one
    return tuple(adjusted)


def train_missing(
    paper: str | Paper,
    preset: str = "cpu",
    *,
    runs: str | Path = "runs",
    rows: Sequence[int] = (),
    device: str = "cpu",
    progress: Callable[[str], Any] | None = None,
) -> list[Path]:
    """Train what is missing, in the paper's order; what was interrupted goes on where it stopped.

    Args:
        progress: called with each run's name; returns what ``train`` calls as progress(step, steps, line), or ``None``.

    Returns:
        The run folders.
    """
    from interp_tasks.training.config import resolve_config
    from interp_tasks.training.trainer import train_resolved

    paper, located = check(paper, preset, runs, rows)
    wanted = {each.run.name for job in jobs_of(paper, located, rows) for each in job.missing}
    trained = []
    for each in located:
        run = each.run
        if each.base is not None or run.name not in wanted:
            continue
        settings = {key: as_typed(value) for key, value in run.settings.items()}
        resolved = resolve_config(run.task, run.train_preset, settings)
        folder = Path(runs) / run.name
        folders = {resolved.train.seed: folder}
        if run.seeds is not None:
            folders = {seed: folder / f"seed-{seed}" for seed in seed_numbers(run.seeds)}
        for seed, out in folders.items():
            line = None if progress is None else progress(out.as_posix())
            trained.append(train_resolved(resolved, out, seed=seed, device=device, progress=line))
    return trained
