"""Verdicts as people read them: cells of the page's tables, and of the terminal's lines."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from interp_tasks.pages import Column, Text, number, with_interval
from interp_tasks.published import Claim, Paper, PaperExperiment

#: A row of ``Reproduction.frame``.
Verdict = Mapping[Any, Any]


def our_number(row: Verdict, formatted: Callable[[float], str] = number) -> str:
    """Returns our number with what it is of, or its bounds, where runs end too soon; a dash where there is neither."""
    least, most = row["at_least"], row["at_most"]
    if is_known(row["value"]):
        shown = formatted(row["value"])
    elif is_known(most):
        is_range = is_known(least) and least > 0
        shown = f"{formatted(least)} to {formatted(most)}" if is_range else f"< {formatted(most)}"
    elif is_known(least) and least > 0:
        shown = f"> {formatted(least)}"
    else:
        return "–"
    return f"{shown} {row['what']}".rstrip()


def is_known(value: float | None) -> bool:
    """Returns whether there is a number: NaN stands for none in tables, None in files."""
    return value is not None and value == value


def our_number_and_median(row: Verdict) -> str:
    """Returns our number; of a largest or smallest one with the median beside it."""
    return our_number(row) + (f" (median {number(row['median'])})" if is_known(row["median"]) else "")


def published_number(row: Verdict) -> str:
    """Returns the published number in the unit of ours; where there is no single one, the published words."""
    return number(row["published_number"]) if is_known(row["published_number"]) else str(row["published"])


def n_runs_text(row: Verdict) -> str:
    """Returns the number of training runs; a dash where none is behind the number."""
    return str(row["n_runs"]) if row["n_runs"] else "–"


def interval_text(row: Verdict) -> str:
    return with_interval("", row["value_ci_low"], row["value_ci_high"]) or "–"


def control_numbers(row: Verdict) -> str:
    """Returns the number of the untrained model, and those of one that has memorised and one on shuffled labels."""
    named = {"untrained": "", "memorised": " memorised", "shuffled": " shuffled"}
    return ", ".join(number(row[key]) + name for key, name in named.items() if is_known(row[key])) or "–"


#: Of every claim: what was published beside what came out.
RESULT = (
    Column("published", "published", sentences=True),
    Column("condition", "run"),
    Column("ours", "value", our_number_and_median),
    Column("seeds", "n_runs", n_runs_text),
    Column("95% interval", "value_ci_low", interval_text),
    Column("verdict", "verdict", sentences=True),
    Column("untrained", "untrained", control_numbers),
)
HEADLINES = (Column("finding", "says", sentences=True), *RESULT)
CLAIMS = (
    Column("row", "row"),
    Column("claim", "says", sentences=True),
    *RESULT,
    Column("each seed", "runs", lambda row: ", ".join(number(each["value"]) for each in row["runs"])),
    Column("interval", "interval", sentences=True),
    Column("note", "reason", sentences=True),
)
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


def claim_count_and_correction(verdicts: Sequence[Verdict]) -> str:
    """Says how many claims there are and which p-values are corrected; there is no score."""
    claims = len({each["claim"] for each in verdicts})
    tested = sum(is_known(each["p_holm"]) for each in verdicts)
    family = (
        f" Holm's correction is over the {tested} headline verdicts that have a p-value; the others stand uncorrected,"
        f" and one in twenty of their intervals misses."
        if tested
        else " No verdict is corrected for how many there are: one in twenty intervals misses."
    )
    return f"{claims} claims.{family}"


def rules_section(paper: Paper, row: PaperExperiment, decided: Container[str]) -> Text:
    """Returns the claims of an experiment with their rules, or why nothing of it is decided."""
    lines = []
    for claim in paper.claim:
        if claim.row == row.number and claim.id in decided:
            lines.append(
                f"- {claim.says} ({claim.source}) Rule: {claim.rule}.{' A headline.' * claim.headline}"
            )
            if claim.departures:
                lines[-1] += f" Departs: {claim.departures.rstrip('.')}."
            if claim.uncontrolled:
                because = claim.uncontrolled.rstrip(".")
                lines[-1] += f" A control that passes too says nothing against it: {because}."
    body = "\n".join(lines) or row.note or "Nothing of it is decided here."
    return Text(body, f"{row.number}. {row.title}" + (f" ({row.where})" if row.where else ""))


def headline_verdicts(paper: Paper, verdicts: Sequence[Verdict]) -> Iterator[tuple[Claim, Sequence[Verdict]]]:
    """Yields each headline claim with its verdicts, in the order of the paper's experiments.

    Conditions that are not trained are left out, where the claim has others: they stand among all claims.
    """
    for claim in sorted(paper.claim, key=lambda claim: claim.row):
        of_claim = [each for each in verdicts if each["claim"] == claim.id and each["headline"]]
        if of_claim:
            yield claim, [each for each in of_claim if each["verdict"] != "not run"] or of_claim
