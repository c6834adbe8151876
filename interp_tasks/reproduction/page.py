"""A reproduction for people: one page, and the lines that the terminal prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from interp_tasks.pages import Column, Figure, Page, Section, Table, Text, number, with_interval
from interp_tasks.published import Paper, Row
from interp_tasks.reproduction.runs import Located
from interp_tasks.reproduction.studies import Done

if TYPE_CHECKING:
    import pandas


def ours(row: Mapping[str, Any]) -> str:
    """Our number with its interval and what it is; never a number where nothing was run."""
    if row["value"] is None or row["value"] != row["value"]:
        if row["ci_low"] is None or row["ci_low"] != row["ci_low"]:
            return "–"
        # Of numbers that are known between bounds alone.
        return f"[{number(row['ci_low'])}, {number(row['ci_high'])}] {row['what']}".rstrip()
    shown = with_interval(number(row["value"]), row["ci_low"], row["ci_high"])
    return f"{shown} {row['what']}".rstrip()


def short(row: Mapping[str, Any]) -> str:
    """Our number with what it is, for one line."""
    if row["value"] is None or row["value"] != row["value"]:
        return "–"
    return f"{number(row['value'])} {row['what']}".rstrip()


def own(row: Mapping[str, Any]) -> str:
    """Each run's own number."""
    shown = (each["value"] for each in row["runs"])
    return ", ".join("–" if value is None else number(value) for value in shown)


def controls(row: Mapping[str, Any]) -> str:
    """The number of models that should not pass."""
    known = [(name, row[name]) for name in ("untrained", "shuffled") if row[name] == row[name]]
    return ", ".join(f"{number(value)} {name}" for name, value in known if value is not None) or "–"


#: Of all claims, one line each.
SUMMARY = (
    Column("row", "row"),
    Column("claim", "says", sentences=True),
    Column("published", "published", sentences=True),
    Column("condition", "run"),
    Column("ours [95% CI]", "value", ours),
    Column("runs", "n_runs"),
    Column("controls", "untrained", controls),
    Column("verdict", "verdict", sentences=True),
)
#: Of the claims of one row, on each condition.
SHOWN = (
    Column("claim", "says", sentences=True),
    Column("published", "published", sentences=True),
    Column("condition", "run"),
    Column("runs", "n_runs"),
    Column("ours [95% CI]", "value", ours),
    Column("each run", "runs", own),
    Column("interval", "interval", sentences=True),
    Column("controls", "untrained", controls),
    Column("p", "p"),
    Column("verdict", "verdict", sentences=True),
    Column("note", "reason", sentences=True),
)


def page(
    paper: Paper,
    preset: str,
    frame: pandas.DataFrame,
    summary: str,
    *,
    done: Sequence[Done],
    located: Sequence[Located],
    missing: Sequence[Located],
    rows: Sequence[int],
    folder: str,
    versions: Mapping[str, str],
) -> Page:
    """Returns a page of the claims, experiment by experiment, with every table's rule and every figure.

    Args:
        frame: a row per outcome, as ``Reproduction.frame`` gives it.
        summary: a sentence or two on all verdicts.
        done: each study's result, or why there is none.
        located, missing: every run of the scale; those that studies lack.
        rows: experiments of the paper to show; none: all.
        folder: where missing runs would be trained.
    """
    sections: list[Section] = [
        Text(introduction(paper, preset, summary, done, missing)),
        Table(
            frame.sort_values("headline", ascending=False, kind="stable").sort_values("row", kind="stable"),
            "Claims",
            "A verdict is what the rule says of the whole 95% interval: held, failed, or undecided where it reaches "
            "across. Rules and each run's own number stand below, by experiment.",
            SUMMARY,
            name=f"{paper.name}-claims",
            download=frame,
        ),
    ]
    if missing:
        sections.append(missing_table(missing, folder))
    for row in paper.row:
        if not rows or row.number in rows:
            sections += of_row(row, frame, done, f"{paper.name}-{row.number}")
    config = {
        "paper": paper.name,
        "preset": preset,
        "runs": {each.run.name: each.base for each in located},
    }
    return Page(f"{paper.title}: published and ours", sections, config, versions)


def introduction(
    paper: Paper, preset: str, summary: str, done: Sequence[Done], missing: Sequence[Located]
) -> str:
    """Returns the head of the page: what was repeated at which scale, and how our models differ."""
    used = (each for study in done if study.result is not None for each in study.job.on)
    there = {base for each in used for base in each.bases.values()}
    departures = "\n".join(f"- {line}" for line in paper.departures)
    return (
        f"{paper.citation}, repeated at the scale {preset}. {summary}\n\n"
        f"Measured on {len(there)} training runs; {len(missing)} more are described but "
        "not trained. Our models differ from theirs:\n\n"
        f"{departures}"
    )


def missing_table(missing: Sequence[Located], folder: str) -> Table:
    """Returns a table of the runs that are not trained, each with its command."""
    import pandas

    rows = [
        {
            "run": each.run.name,
            "role": each.run.role,
            "hours": each.run.hours,
            "command": each.run.command(folder),
        }
        for each in missing
    ]
    return Table(
        pandas.DataFrame(rows),
        "Not trained",
        "Estimated hours are of the machine that the scale is meant for.",
        [
            Column("run", "run"),
            Column("role", "role"),
            Column("hours", "hours"),
            Column("command", "command", sentences=True),
        ],
        name="not-trained",
    )


def of_row(row: Row, frame: pandas.DataFrame, studies: Sequence[Done], name: str) -> list[Section]:
    """Returns an experiment of the paper: its claims with their rules, then a figure for each study and run."""
    of_experiment = frame[frame["row"] == row.number]
    lines = [
        f"- {claim['says']} ({claim['source']}) Rule: {claim['rule']}.{beside(claim)}"
        for claim in claims_of(of_experiment)
    ]
    where = f" ({row.where})" if row.where else ""
    body = "\n".join(lines) or (row.note or "Nothing of it is decided here.")
    sections: list[Section] = [Text(body, f"{row.number}. {row.title}{where}")]
    if lines:
        sections.append(
            Table(
                of_experiment,
                caption="Intervals: 95%, over training runs (a mean with Student's t), or as the table says.",
                columns=SHOWN,
                name=name,
            )
        )
    for done in studies:
        # A study that several rows read is drawn with the first of them.
        if done.result is None or done.job.control or done.job.study.rows[0] != row.number:
            continue
        sections.append(
            Figure(
                done.result.plot(),
                caption=f"{done.job.study.id}, {done.job.name}. {done.result.caption()}",
                alt=f"{row.title}, {done.job.name}",
            )
        )
    return sections


def claims_of(frame: pandas.DataFrame) -> list[dict[Any, Any]]:
    """Returns one row for each claim, in order."""
    return frame.drop_duplicates("claim").to_dict("records")


def markdown(paper: Paper, frame: pandas.DataFrame, summary: str, rows: Sequence[int]) -> str:
    """Returns the claims as Markdown, experiment by experiment, each with its rule.

    Args:
        frame: a row per outcome, as ``Reproduction.frame`` gives it.
        rows: the experiments that the reproduction was limited to; none: all.
    """
    lines = [summary, ""]
    for row in paper.row:
        of_experiment = frame[frame["row"] == row.number]
        if of_experiment.empty and not (row.note and not rows):
            continue
        where = f" ({row.where})" if row.where else ""
        lines += [f"## {row.number}. {row.title}{where}", ""]
        if of_experiment.empty:
            lines += [row.note, ""]
            continue
        for claim in claims_of(of_experiment):
            lines += [f"**{claim['says']}** ({claim['source']}) Rule: {claim['rule']}.{beside(claim)}", ""]
            lines += [
                "| condition | published | ours [95% CI] | runs | each run | controls | verdict |",
                "|---|---|---|---|---|---|---|",
            ]
            lines += [
                f"| {row_of['run']} | {cell(claim['published'])} | {ours(row_of)} | {row_of['n_runs']} | {own(row_of)} "
                f"| {controls(row_of)} | {verdict(row_of)} |"
                for row_of in of_experiment[of_experiment["claim"] == claim["claim"]].to_dict("records")
            ]
            lines.append("")
    return "\n".join(lines)


def verdict(row: Mapping[str, Any]) -> str:
    """The verdict with its reason, or what would have to be trained."""
    said = f"**{row['verdict']}**" if row["verdict"] in ("held", "failed") else row["verdict"]
    if row["p_holm"] == row["p_holm"]:
        said += f" (p {number(row['p_holm'])} after Holm)"
    if row["command"]:
        return f"{said}, {row['hours']:g} h: `{cell(row['command'])}`"
    return f"{said}: {cell(row['reason'])}" if row["reason"] else said


def cell(text: str) -> str:
    """Text that does not end a cell of a table."""
    return text.replace("|", "\\|")


def beside(claim: Mapping[Any, Any]) -> str:
    """Returns how a claim departs from the paper and why it has no control, as sentences to go on with."""
    departures = f" Departs: {claim['departures'].rstrip('.')}." if claim["departures"] else ""
    uncontrolled = f" No control: {claim['uncontrolled'].rstrip('.')}." if claim["uncontrolled"] else ""
    return f"{' A headline.' if claim['headline'] else ''}{departures}{uncontrolled}"
