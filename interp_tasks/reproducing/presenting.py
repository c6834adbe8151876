"""A reproduction for people: one page, and the lines that the terminal prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from interp_tasks.published import Row
from interp_tasks.reporting import Column, Figure, Page, Section, Table, Text, number, with_interval

if TYPE_CHECKING:
    import pandas

    from interp_tasks.reproducing.judging import Outcome
    from interp_tasks.reproducing.reproduction import Reproduction

VERDICTS = ("held", "failed", "not testable at this scale", "not run", "error")


def ours(row: Mapping[str, Any]) -> str:
    """Our number with its interval; never a number where nothing was run."""
    if row["value"] is None or row["value"] != row["value"]:
        return "–"
    return with_interval(number(row["value"]), row["ci_low"], row["ci_high"])


def summary(found: Reproduction) -> str:
    """How many verdicts of each kind."""
    counts = found.counts()
    parts = [f"{counts[name]} {name}" for name in VERDICTS if counts.get(name)]
    claims = len({outcome.claim.id for outcome in found.outcomes})
    return f"{claims} claims, {len(found.outcomes)} verdicts: {', '.join(parts) or 'none'}."


def tally(outcomes: Sequence[Outcome]) -> str:
    """``held on 2 of 3 runs`` for one claim."""
    decided = [each for each in outcomes if each.verdict in ("held", "failed")]
    if not decided:
        return outcomes[0].verdict
    held = sum(each.verdict == "held" for each in decided)
    if len(decided) == 1:
        return decided[0].verdict
    return f"held on {held} of {len(decided)}"


#: Of all claims, one line each.
SUMMARY = (
    Column("row", "row"),
    Column("claim", "says", sentences=True),
    Column("published", "published", sentences=True),
    Column("verdict", "verdict", sentences=True),
)
#: Of the claims of one row, on each run.
SHOWN = (
    Column("claim", "says", sentences=True),
    Column("published", "published", sentences=True),
    Column("run", "run"),
    Column("runs", "n_runs"),
    Column("ours [95% CI]", "value", ours),
    Column("verdict", "verdict", sentences=True),
    Column("note", "reason", sentences=True),
)


def page(found: Reproduction) -> Page:
    """What was found, experiment by experiment, with every table's rule and every figure."""
    frame = found.frame()
    sections: list[Section] = [
        Text(introduction(found)),
        Table(
            tallies(found),
            "Claims",
            "A verdict is what the rule says of our number. Rule, number and interval stand below, by experiment.",
            SUMMARY,
            name=f"{found.paper.name}-claims",
            download=frame,
        ),
    ]
    if found.missing:
        sections.append(missing_table(found))
    for row in found.paper.row:
        if not found.rows or row.number in found.rows:
            sections += of_row(found, row)
    config = {
        "paper": found.paper.name,
        "preset": found.preset,
        "runs": {each.run.name: each.base for each in found.located},
    }
    return Page(f"{found.paper.title}: published and ours", sections, config, found.versions)


def tallies(found: Reproduction) -> pandas.DataFrame:
    """One row per claim, with what became of it on all runs."""
    frame = found.frame().drop_duplicates("claim").reset_index(drop=True)
    of = {name: tally([each for each in found.outcomes if each.claim.id == name]) for name in frame["claim"]}
    return frame.assign(verdict=frame["claim"].map(of))


def introduction(found: Reproduction) -> str:
    used = (each for done in found.done if done.result is not None for each in done.job.on)
    there = {each.run.name: each for each in used if each.base is not None}.values()
    departures = "\n".join(f"- {line}" for line in found.paper.departures)
    return (
        f"{found.paper.citation}, repeated at the scale {found.preset}. {summary(found)}\n\n"
        f"Measured on {sum(each.count for each in there)} training runs; {len(found.missing)} more are described but "
        "not trained. Our models differ from theirs:\n\n"
        f"{departures}"
    )


def missing_table(found: Reproduction) -> Table:
    import pandas

    rows = [
        {
            "run": each.run.name,
            "role": each.run.role,
            "hours": each.run.hours,
            "command": each.run.command(found.folder),
        }
        for each in found.missing
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


def of_row(found: Reproduction, row: Row) -> list[Section]:
    """An experiment of the paper: its claims with their rules, then a figure for each study and run."""
    outcomes = [each for each in found.outcomes if each.claim.row == row.number]
    lines = []
    for claim in {each.claim.id: each.claim for each in outcomes}.values():
        mine = [each for each in outcomes if each.claim.id == claim.id]
        departures = departs(claim.departures)
        lines.append(
            f"- {claim.says} ({claim.source}) Rule: {claim.rule}. {tally(mine).capitalize()}.{departures}"
        )
    where = f" ({row.where})" if row.where else ""
    body = "\n".join(lines) or (row.note or "Nothing of it is decided here.")
    sections: list[Section] = [Text(body, f"{row.number}. {row.title}{where}")]
    if outcomes:
        frame = found.frame()
        sections.append(
            Table(
                frame[frame["row"] == row.number],
                caption="Intervals: 95%, over examples, or over training runs where one number is of several.",
                columns=SHOWN,
                name=f"{found.paper.name}-{row.number}",
            )
        )
    for done in found.done:
        # A study that several rows read is drawn with the first of them.
        if done.result is None or done.job.study.rows[0] != row.number:
            continue
        figure = done.result.plot()
        height = figure.layout.height
        sections.append(
            Figure(
                figure,
                caption=f"{done.job.study.id}, {done.job.name}. {done.result.caption()}",
                alt=f"{row.title}, {done.job.name}",
                height=int(height) if height else 420,
            )
        )
    return sections


def markdown(found: Reproduction) -> str:
    """The claims as Markdown, experiment by experiment, each with its rule."""
    lines = [f"{summary(found)}", ""]
    for row in found.paper.row:
        outcomes = [each for each in found.outcomes if each.claim.row == row.number]
        if not outcomes and not (row.note and not found.rows):
            continue
        where = f" ({row.where})" if row.where else ""
        lines += [f"## {row.number}. {row.title}{where}", ""]
        if not outcomes:
            lines += [row.note, ""]
            continue
        for claim in {each.claim.id: each.claim for each in outcomes}.values():
            lines += [f"**{claim.says}** ({claim.source}) Rule: {claim.rule}.{departs(claim.departures)}", ""]
            lines += ["| run | published | ours [95% CI] | verdict |", "|---|---|---|---|"]
            lines += [
                f"| {line(each)} | {cell(claim.published)} | {ours(numbers(each))} | {verdict(each)} |"
                for each in outcomes
                if each.claim.id == claim.id
            ]
            lines.append("")
    return "\n".join(lines)


def line(outcome: Outcome) -> str:
    return f"{outcome.run} ({outcome.n_runs} runs)" if outcome.n_runs > 1 else outcome.run


def numbers(outcome: Outcome) -> dict[str, Any]:
    return {"value": outcome.value, "ci_low": outcome.low, "ci_high": outcome.high}


def verdict(outcome: Outcome) -> str:
    """The verdict with its reason, or what would have to be trained."""
    said = f"**{outcome.verdict}**" if outcome.verdict in ("held", "failed") else outcome.verdict
    if outcome.command:
        return f"{said}, {outcome.hours:g} h: `{cell(outcome.command)}`"
    return f"{said}: {cell(outcome.reason)}" if outcome.reason else said


def cell(text: str) -> str:
    """Text that does not end a cell of a table."""
    return text.replace("|", "\\|")


def departs(departures: str) -> str:
    """What of our setting differs, as a sentence to go on with."""
    return f" Departs: {departures.rstrip('.')}." if departures else ""


def shown_frame(found: Reproduction) -> pandas.DataFrame:
    """The claims for a terminal: what is said only once for all runs of a claim."""
    frame = found.frame()
    repeated = frame["claim"].duplicated()
    return frame.assign(
        row=frame["row"].astype(str).mask(repeated, ""),
        says=frame["says"].mask(repeated, ""),
        published=frame["published"].mask(repeated, ""),
    )
