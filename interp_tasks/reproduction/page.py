"""Makes the page of a reproduction, and the lines that the terminal prints."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from interp_tasks.pages import Column, Text, number, p_value
from interp_tasks.pages.numbers import interval
from interp_tasks.published import Claim, Paper, Row


def our_number(row: Mapping[str, Any], formatted: Callable[[float], str] = number) -> str:
    """Returns our number with what it is of, or its bounds, where runs end too soon; a dash where there is neither."""
    if known(row["value"]):
        return f"{formatted(row['value'])} {row['what']}".rstrip()
    least, most = row["at_least"], row["at_most"]
    if known(least) and known(most) and least > 0:
        shown = f"{formatted(least)} to {formatted(most)}"
    elif known(most):
        shown = f"< {formatted(most)}"
    elif known(least) and least > 0:
        shown = f"> {formatted(least)}"
    else:
        return "–"
    return f"{shown} {row['what']}".rstrip()


def with_median(row: Mapping[str, Any]) -> str:
    """Returns our number; of a largest or smallest one with the median beside it."""
    return our_number(row) + (f" (median {number(row['median'])})" if known(row["median"]) else "")


def known(value: float | None) -> bool:
    """Returns whether there is a number: NaN stands for none in tables, None in files."""
    return value is not None and value == value


def published_number(row: Mapping[str, Any]) -> str:
    """Returns the published number in the unit of ours; where there is no single one, the published words."""
    return number(row["published_number"]) if known(row["published_number"]) else str(row["published"])


def seeds(row: Mapping[str, Any]) -> str:
    """Returns the number of training runs; a dash where none is behind the number."""
    return str(row["n_runs"]) if row["n_runs"] else "–"


def interval_text(row: Mapping[str, Any]) -> str:
    return interval(row["value_ci_low"], row["value_ci_high"]) or "–"


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
    """Returns the number of the untrained model, and those of one that has memorised and one on shuffled labels."""
    shown = [number(row["untrained"])] if known(row["untrained"]) else []
    shown += [f"{number(row[name])} {name}" for name in ("memorised", "shuffled") if known(row[name])]
    return ", ".join(shown) or "–"


#: Of every claim: what was published beside what came out.
RESULT = (
    Column("published", "published", sentences=True),
    Column("condition", "run"),
    Column("ours", "value", with_median),
    Column("seeds", "n_runs", seeds),
    Column("95% interval", "value_ci_low", interval_text),
    Column("verdict", "verdict", sentences=True),
    Column("untrained", "untrained", controls),
)
#: Of the headlines.
HEADLINES = (Column("finding", "says", sentences=True), *RESULT)
#: Of all claims.
CLAIMS = (
    Column("row", "row"),
    Column("claim", "says", sentences=True),
    *RESULT,
    Column("each seed", "runs", run_numbers),
    Column("interval", "interval", sentences=True),
    Column("note", "reason", sentences=True),
)

#: Of runs that are not measured.
MISSING = (
    *(Column(name, name) for name in ("run", "role", "hours")),
    Column("command", "command", sentences=True),
)
HEADLINES_NOTE = (
    "What the paper stands on. Numbers and intervals are of training runs (their mean); beside them the same number of "
    "the model before its first step."
)
CLAIMS_NOTE = (
    "A verdict is what the rule says of the whole 95% interval: held, failed, or undecided where it reaches across. "
    "Intervals are over training runs (a mean with Student's t), or as the table says. Rules stand below."
)
MISSING_NOTE = "Estimated hours are of the machine that the scale is meant for."


def rules(paper: Paper, row: Row, decided: Container[str]) -> Text:
    """Returns the claims of an experiment with their rules, or why nothing of it is decided."""
    lines = [
        f"- {claim.says} ({claim.source}) Rule: {claim.rule}.{claim_remarks(claim)}"
        for claim in paper.claim
        if claim.row == row.number and claim.id in decided
    ]
    where = f" ({row.where})" if row.where else ""
    body = "\n".join(lines) or row.note or "Nothing of it is decided here."
    return Text(body, f"{row.number}. {row.title}{where}")


def headlines(
    paper: Paper, outcomes: Sequence[Mapping[Any, Any]]
) -> Iterator[tuple[Claim, Sequence[Mapping[Any, Any]]]]:
    """Yields each headline claim with its outcomes, in the order of the paper's experiments.

    Conditions that are not trained are left out, where the claim has others: they stand among all claims.
    """
    for claim in sorted(paper.claim, key=lambda claim: claim.row):
        of_claim = [each for each in outcomes if each["claim"] == claim.id and each["headline"]]
        if of_claim:
            yield claim, [each for each in of_claim if each["verdict"] != "not run"] or of_claim


def headlines_markdown(
    paper: Paper,
    outcomes: Sequence[Mapping[str, Any]],
    published_size: Mapping[str, Mapping[str, Any]] | None = None,
) -> str:
    """Returns a table of what the paper stands on; nothing where no headline was asked for.

    Args:
        published_size: by claim, the outcome on the published configuration, for a column of its own.
    """
    head = ["finding", "published", "ours", "seeds", "95% interval", "verdict", "untrained"]
    head[2:2] = ["published size (runs)"] if published_size else []
    lines = []
    for claim, shown in headlines(paper, outcomes):
        for row in shown:
            condition = f" (`{row['run']}`)" if len(shown) > 1 else ""
            cells = [
                markdown_cell(claim.says) + condition,
                markdown_cell(claim.published) or "–",
                with_median(row),
                seeds(row),
                interval_text(row),
                verdict(row),
                controls(row),
            ]
            if published_size:
                there = published_size.get(claim.id)
                cells[2:2] = [f"{with_median(there)} ({seeds(there)})" if there else "–"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines]) if lines else ""


def verdict(row: Mapping[str, Any]) -> str:
    """Returns the verdict with its corrected p-value, or the hours of training that it still needs."""
    text = f"**{row['verdict']}**" if row["verdict"] in ("held", "failed") else str(row["verdict"])
    if known(row["p_holm"]):
        text += f" (p {p_value(row['p_holm'])} after Holm)"
    return f"{text}, {row['hours']:g} h" if known(row["hours"]) else text


def markdown_cell(text: str) -> str:
    """Returns text that does not end a cell of a Markdown table."""
    return text.replace("|", "\\|")


def claim_remarks(claim: Claim) -> str:
    """Returns how a claim departs from the paper and why no control decides it, as sentences to go on with."""
    departures = f" Departs: {claim.departures.rstrip('.')}." if claim.departures else ""
    because = f" A control that passes too says nothing against it: {claim.uncontrolled.rstrip('.')}."
    uncontrolled = because if claim.uncontrolled else ""
    return f"{' A headline.' if claim.headline else ''}{departures}{uncontrolled}"
