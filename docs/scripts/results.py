"""The tables of headlines on the pages of results, made from the measurements that ship."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from interp_tasks.pages import format_p_value
from interp_tasks.published import Paper
from interp_tasks.reproduction import Reproduction, reproduce
from interp_tasks.reproduction.verdict_text import (
    Verdict,
    control_numbers,
    headline_verdicts,
    interval_text,
    is_known,
    n_runs_text,
    our_number_and_median,
)


@cache
def judged(name: str) -> Reproduction:
    return reproduce(name)


def table(name: str) -> str:
    """Returns what a paper stands on: published, ours, seeds, interval, verdict, the untrained model's number.

    Where the runs of the published configuration are not those of our own table, they have a column of their own.
    """
    found = judged(name)
    outcomes = found.frame.to_dict("records")
    runs = {each["run"] for each in outcomes}
    published_size = {
        each["claim"]: each
        for each in reproduce(name, preset="paper").frame.to_dict("records")
        if each["headline"] and each["run"] not in runs and each["verdict"] != "not run"
    }
    return headlines_markdown(found.paper, outcomes, published_size)


#: Before a verdict: told apart without colour.
MARKS = {"held": "●\u00a0**held**", "failed": "✕\u00a0**failed**", "undecided": "○\u00a0undecided"}


def verdict(row: Verdict) -> str:
    """Returns the verdict with its mark, and the hours of training that it still needs."""
    text = MARKS.get(row["verdict"], row["verdict"])
    return f"{text}, {row['hours']:g} h" if is_known(row["hours"]) else text


def corrected_p(row: Verdict) -> str:
    """Returns the p-value after Holm's correction."""
    return format_p_value(row["p_holm"]) if is_known(row["p_holm"]) else "–"


def headlines_markdown(
    paper: Paper, verdicts: Sequence[Verdict], published_size: Mapping[str, Verdict] | None = None
) -> str:
    """Returns a table of what the paper stands on; nothing where no headline was asked for.

    Args:
        published_size: by claim, the verdict on the published configuration, for a column of its own.
    """
    head = [
        "finding",
        "published",
        "ours",
        "seeds",
        "95% interval",
        "rule",
        "verdict",
        "p (Holm)",
        "untrained",
    ]
    head[2:2] = ["published size (runs)"] if published_size else []
    lines = []
    for claim, shown in headline_verdicts(paper, verdicts):
        for row in shown:
            condition = f" (`{row['run']}`)" if len(shown) > 1 else ""
            ours = [cell(row) for cell in (our_number_and_median, n_runs_text, interval_text)]
            judged_by = [str(claim.holds), verdict(row), corrected_p(row), control_numbers(row)]
            cells = [f"{claim.says}{condition}", claim.published or "–", *ours, *judged_by]
            if published_size:
                there = published_size.get(claim.id)
                cells[2:2] = [f"{our_number_and_median(there)} ({n_runs_text(there)})" if there else "–"]
            lines.append([cell.replace("|", "\\|") for cell in cells])
    whole = [f"| {' | '.join(line)} |" for line in (head, *lines)]
    return "\n".join([whole[0], "|---" * len(head) + "|", *whole[1:]]) if lines else ""
