"""Makes the page of a reproduction, and the lines that the terminal prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from interp_tasks.pages import Column, Figure, Page, Section, Table, Text, number, with_interval
from interp_tasks.published import Claim, Paper, Row
from interp_tasks.reproduction.runs import Located
from interp_tasks.reproduction.studies import Done

if TYPE_CHECKING:
    import pandas


def our_number(row: Mapping[str, Any]) -> str:
    """Returns our number with its interval and a note on it; never a number where nothing was run."""
    if row["value"] is None or row["value"] != row["value"]:
        if row["ci_low"] is None or row["ci_low"] != row["ci_low"]:
            return "–"
        # Of numbers that are known between bounds alone.
        return f"[{number(row['ci_low'])}, {number(row['ci_high'])}] {row['what']}".rstrip()
    shown = with_interval(number(row["value"]), row["ci_low"], row["ci_high"])
    return f"{shown} {row['what']}".rstrip()


def our_number_short(row: Mapping[str, Any]) -> str:
    """Returns our number for one line of the terminal, with what it is over."""
    if row["value"] is None or row["value"] != row["value"]:
        return "–"
    return f"{number(row['value'])} {row['what']}".rstrip()


def summary_of(outcomes: Sequence[Mapping[Any, Any]]) -> str:
    """Says how many claims there are and which p-values are corrected; there is no score.

    Args:
        outcomes: rows of ``Reproduction.frame()``.
    """
    claims = len({each["claim"] for each in outcomes})
    tested = sum(each["p_holm"] == each["p_holm"] for each in outcomes)
    family = (
        f" Holm's correction is over the {tested} headline verdicts that have a p-value; the others stand uncorrected,"
        f" and one in twenty of their intervals misses."
        if tested
        else " No verdict is corrected for how many there are: one in twenty intervals misses."
    )
    return f"{claims} claims.{family}"


def run_numbers(row: Mapping[str, Any]) -> str:
    """Returns each run's own number."""
    shown = (each["value"] for each in row["runs"])
    return ", ".join("–" if value is None else number(value) for value in shown)


def controls(row: Mapping[str, Any]) -> str:
    """Returns the numbers of the models that should not pass."""
    known = [(name, row[name]) for name in ("untrained", "shuffled") if row[name] == row[name]]
    return ", ".join(f"{number(value)} {name}" for name, value in known if value is not None) or "–"


#: Of all claims, one line each.
SUMMARY = (
    Column("row", "row"),
    Column("claim", "says", sentences=True),
    Column("published", "published", sentences=True),
    Column("condition", "run"),
    Column("ours [95% CI]", "value", our_number),
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
    Column("ours [95% CI]", "value", our_number),
    Column("each run", "runs", run_numbers),
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
            sections += row_sections(paper, row, frame, done, f"{paper.name}-{row.number}")
    config = {
        "paper": paper.name,
        "preset": preset,
        "runs": {each.run.name: each.base for each in located},
    }
    return Page(f"{paper.title}: published and ours", sections, config, versions)


def introduction(
    paper: Paper, preset: str, summary: str, done: Sequence[Done], missing: Sequence[Located]
) -> str:
    """Returns the head of the page: the paper, the scale of the runs, and how our models differ from theirs."""
    used = (each for study in done if study.result is not None for each in study.job.on)
    bases = {base for each in used for base in each.bases.values()}
    departures = "\n".join(f"- {line}" for line in paper.departures)
    return (
        f"{paper.citation}, repeated at the scale {preset}. {summary}\n\n"
        f"Measured on {len(bases)} training runs; {len(missing)} more are described but "
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


def row_sections(
    paper: Paper, row: Row, frame: pandas.DataFrame, studies: Sequence[Done], name: str
) -> list[Section]:
    """Returns an experiment of the paper: its claims with their rules, then a figure for each study and run."""
    of_experiment = frame[frame["row"] == row.number]
    lines = [
        f"- {claim.says} ({claim.source}) Rule: {claim.rule}.{claim_remarks(claim)}"
        for claim in paper.claim
        if claim.id in set(of_experiment["claim"])
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


def claims_markdown(
    paper: Paper, outcomes: Sequence[Mapping[str, Any]], rows: Sequence[Row], level: int = 2
) -> str:
    """Returns a section for each experiment of a paper, in Markdown: its claims with their rules, a table below each.

    Args:
        outcomes: rows of ``Reproduction.frame()``, or of what was stored of it.
        rows: the experiments to write about; those without a claim are written about if they say why there is none.
        level: of the sections' headings.
    """
    lines = []
    for row in rows:
        claims = {claim.id: claim for claim in paper.claim if claim.row == row.number}
        by_claim = {key: [each for each in outcomes if each["claim"] == key] for key in claims}
        if not any(by_claim.values()) and not row.note:
            continue
        where = f" ({row.where})" if row.where else ""
        lines += [f"{'#' * level} {row.number}. {row.title}{where}", ""]
        if not any(by_claim.values()):
            lines += [row.note, ""]
        for key, claim_outcomes in by_claim.items():
            if not claim_outcomes:
                continue
            claim = claims[key]
            lines += [
                f"**{claim.says}** ({claim.source}) Rule: {claim.rule}.{claim_remarks(claim)}",
                "",
                "| condition | published | ours [95% CI] | runs | each run | controls | verdict |",
                "|---|---|---|---|---|---|---|",
                *(
                    f"| {each['run']} | {markdown_cell(claim.published)} | {our_number(each)} | {each['n_runs']} "
                    f"| {run_numbers(each)} | {controls(each)} | {verdict(each)} |"
                    for each in claim_outcomes
                ),
                "",
            ]
    return "\n".join(lines)


def verdict(row: Mapping[str, Any]) -> str:
    """Returns the verdict with its reason, or the training that it still needs."""
    text = f"**{row['verdict']}**" if row["verdict"] in ("held", "failed") else row["verdict"]
    if row["p_holm"] == row["p_holm"]:
        text += f" (p {number(row['p_holm'])} after Holm)"
    if row["hours"] == row["hours"]:
        return f"{text}, {row['hours']:g} h" + (
            f": `{markdown_cell(row['command'])}`" if row["command"] else ""
        )
    return f"{text}: {markdown_cell(row['reason'])}" if row["reason"] else text


def markdown_cell(text: str) -> str:
    """Returns text that does not end a cell of a Markdown table."""
    return text.replace("|", "\\|")


def claim_remarks(claim: Claim) -> str:
    """Returns how a claim departs from the paper and why it has no control, as sentences to go on with."""
    departures = f" Departs: {claim.departures.rstrip('.')}." if claim.departures else ""
    uncontrolled = f" No control: {claim.uncontrolled.rstrip('.')}." if claim.uncontrolled else ""
    return f"{' A headline.' if claim.headline else ''}{departures}{uncontrolled}"
