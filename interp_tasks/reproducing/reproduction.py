"""A paper repeated: its studies run, its claims decided, what is missing named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.experiments.specifications import check_choice
from interp_tasks.published import Claim, Paper, read_paper
from interp_tasks.published.papers import PRESETS
from interp_tasks.reporting import versions, write_atomically
from interp_tasks.reproducing.judging import Outcome, judge
from interp_tasks.reproducing.locating import Located, as_text, locate_all
from interp_tasks.reproducing.studying import Done, Job, jobs_of, perform_all

if TYPE_CHECKING:
    import pandas

    from interp_tasks.reporting import Page

#: Called as progress(done, total, what is being done).
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Reproduction:
    """What was found.

    Attributes:
        outcomes: one for each claim and run (or role, where a study looks at its runs together).
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
        """Runs that studies lack, each once, whatever roles it plays."""
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
        """One row per outcome."""
        import pandas

        titles = {row.number: row.title for row in self.paper.row}
        return pandas.DataFrame(
            [
                {
                    "row": each.claim.row,
                    "experiment": titles[each.claim.row],
                    "claim": each.claim.id,
                    "says": each.claim.says,
                    "source": each.claim.source,
                    "published": each.claim.published,
                    "rule": each.claim.rule,
                    "run": each.run,
                    "n_runs": each.n_runs,
                    "value": each.value,
                    "ci_low": each.low,
                    "ci_high": each.high,
                    "verdict": each.verdict,
                    "reason": each.reason,
                    "departures": each.claim.departures,
                    "command": each.command,
                    "hours": each.hours,
                }
                for each in self.outcomes
            ],
            columns=list(COLUMNS),
        ).astype({"n_runs": "Int64", "value": float, "ci_low": float, "ci_high": float, "hours": float})

    def counts(self) -> dict[str, int]:
        """Verdict -> outcomes."""
        found: dict[str, int] = {}
        for outcome in self.outcomes:
            found[outcome.verdict] = found.get(outcome.verdict, 0) + 1
        return found

    def records(self) -> list[dict[str, Any]]:
        from interp_tasks.experiments.results import json_value

        return [
            {str(key): json_value(value) for key, value in row.items()}
            for row in self.frame().to_dict("records")
        ]

    def to_json(self) -> str:
        rows = (json.dumps(record, allow_nan=False, ensure_ascii=False) for record in self.records())
        return "[\n" + ",\n".join(rows) + "\n]\n"

    def to_csv(self) -> str:
        text: str = self.frame().to_csv(index=False, lineterminator="\n")
        return text

    def markdown(self) -> str:
        """The claims with their rules and verdicts, experiment by experiment."""
        from interp_tasks.reproducing.presenting import markdown

        return markdown(self)

    def page(self) -> Page:
        from interp_tasks.reproducing.presenting import page

        return page(self)

    def write(self, folder: str | Path) -> list[Path]:
        """``claims.csv``, ``.json`` and ``.md``, every study's tables under ``studies``, and a page, ``index.html``.

        Raises:
            UserError: if the file system refuses.
        """
        folder = Path(folder)
        written = [
            write_atomically(folder / "claims.csv", self.to_csv()),
            write_atomically(folder / "claims.json", self.to_json()),
            write_atomically(folder / "claims.md", self.markdown()),
        ]
        for done in self.done:
            if done.result is not None:
                place = folder / "studies" / done.job.study.id / done.job.name
                done.result.write(place)
        written.append(self.page().write(folder / "index.html"))
        return written


COLUMNS = (
    *(
        "row",
        "experiment",
        "claim",
        "says",
        "source",
        "published",
        "rule",
        "run",
        "n_runs",
        "value",
        "ci_low",
    ),
    *("ci_high", "verdict", "reason", "departures", "command", "hours"),
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
    jobs = jobs_of(paper, located, rows)
    done: dict[int, Done] = {}
    order = {id_of(job): index for index, job in enumerate(jobs)}
    there = [job for job in jobs if job.refs()]
    for one in perform_all(there, processes):
        done[order[id_of(one.job)]] = one
        if progress is not None:
            progress(len(done), len(there), f"{one.job.study.id} on {one.job.name}")
    for index, job in enumerate(jobs):
        done.setdefault(index, Done(job, None, "not trained"))
    finished = tuple(done[index] for index in range(len(jobs)))
    outcomes = tuple(
        outcome
        for claim in sorted(paper.claim, key=lambda claim: claim.row)
        if not rows or claim.row in rows
        for outcome in decide(claim, finished, preset, Path(runs).as_posix())
    )
    return Reproduction(paper, preset, outcomes, finished, tuple(located), tuple(rows), Path(runs).as_posix())


def check(
    paper: str | Paper, preset: str, runs: str | Path, rows: Sequence[int]
) -> tuple[Paper, list[Located]]:
    """What can be refused before slow work."""
    paper = read_paper(paper) if isinstance(paper, str) else paper
    check_choice("--preset", preset, PRESETS)
    numbers = [row.number for row in paper.row]
    for row in rows:
        if row not in numbers:
            raise UserError(f"--rows {row}: {paper.name} has rows {min(numbers)} to {max(numbers)}")
    return paper, locate_all(paper, preset, Path(runs))


def id_of(job: Job) -> tuple[str, str]:
    return job.study.id, job.name


def about(claim: Claim, lacking: Sequence[Located]) -> bool:
    """Whether a claim is about one of these runs by name."""
    filters = [claim.where, *([claim.per] if isinstance(claim.per, dict) else [])]
    given = [each["run"] for each in filters if "run" in each]
    names = tuple(name for one in given for name in (one if isinstance(one, list) else [str(one)]))
    called = (each.run.name + ("/seed-*" if each.run.seeds else "") for each in lacking)
    return any(name.endswith(names) for name in called)


def decide(claim: Claim, done: Sequence[Done], preset: str, folder: str) -> list[Outcome]:
    """A claim on every run that its study was to be done on."""
    mine = [one for one in done if one.job.study.id == claim.study]
    if preset in claim.scale:
        names = [one.job.name for one in mine] or [preset]
        reason = claim.scale[preset]
        return [Outcome(claim, name, 0, "not testable at this scale", reason=reason) for name in names]
    if not mine:
        return [Outcome(claim, preset, 0, "not run", reason=f"no run is planned at the scale {preset}")]
    outcomes = []
    for one in mine:
        lacking = one.job.missing
        if one.result is not None and not about(claim, lacking):
            outcome = judge(claim, one.result.frame, one.job.name)
            without = ", ".join(each.run.name.rpartition("/")[2] for each in lacking)
            parts = [outcome.reason, f"without runs that are not trained: {without}" if lacking else ""]
            outcomes.append(replace(outcome, reason="; ".join(filter(None, parts))))
        elif one.crashed:
            outcomes.append(Outcome(claim, one.job.name, 0, "error", reason=one.reason))
        else:
            outcomes.append(
                Outcome(
                    claim,
                    one.job.name,
                    0,
                    "not run",
                    reason=one.reason or "not trained",
                    command="; ".join(each.run.command(folder) for each in lacking),
                    hours=sum(each.run.hours for each in lacking) or None,
                )
            )
    return outcomes


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
    from interp_tasks.training.trainer import train
    from tasks import get

    paper, located = check(paper, preset, runs, rows)
    wanted = {each.run.name for job in jobs_of(paper, located, rows) for each in job.missing}
    trained = []
    for each in located:
        run = each.run
        if each.base is not None or run.name not in wanted:
            continue
        settings = {key: as_text(value) for key, value in run.settings.items()}
        resolved = resolve_config(run.task, run.train_preset, settings)
        folder = Path(runs) / run.name
        folders = {resolved.train.seed: folder}
        if run.seeds is not None:
            first, last = map(int, run.seeds.split(":"))
            folders = {seed: folder / f"seed-{seed}" for seed in range(first, last)}
        for seed, out in folders.items():
            trained.append(
                train(
                    get(resolved.task_name, **resolved.task),
                    out=out,
                    preset=resolved.preset,
                    settings=resolved.model,
                    config=resolved.train.model_copy(update={"seed": seed}),
                    device=device,
                    progress=None if progress is None else progress(out.as_posix()),
                )
            )
    return trained
