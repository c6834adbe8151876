"""The demo in ten lines for a terminal, each at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from interp_tasks.experiments._demo.measure import OPERANDS, Demo, Outcome, guessing
from interp_tasks.pages import number, percent, with_interval

#: Characters of a curve, lowest first, and how many of them it takes.
BLOCKS, CURVE = "▁▂▃▄▅▆▇█", 24


def summary(found: Demo) -> list[str]:
    """Returns the lines."""
    return [*matrix_lines(found.matrices), *sum_lines(found.sums)]


def matrix_lines(outcome: Outcome) -> list[str]:
    """Returns the lines about matrix completion: the error over training, as trained, edited, and published."""
    from interp_tasks.published import read_paper

    published = {claim.id: claim.published for claim in read_paper("matrix-completion").claim}
    texts = [
        published[f"uniform-{when}-hidden"].removeprefix("L_mask ").partition(",")[0]
        for when in ("before", "after")
    ]
    count = outcome.row("post", "mse_masked")["n"]
    return [
        f"Matrix completion (Gopalani et al. 2024): error at the blanks of {count} matrices",
        history(outcome, "mse_masked", f"{number(guessing(outcome.config))} is guessing 0"),
        line("", "as trained", "uniform attention", "published"),
        *(
            moment(outcome, mark, "mse_masked", number, [text])
            for mark, text in zip(("pre", "post"), texts, strict=True)
        ),
    ]


def sum_lines(outcome: Outcome) -> list[str]:
    count, modulus = outcome.row("post", "accuracy")["n"], outcome.config["p"]
    return [
        f"Modular addition (Nanda et al. 2023): right answers to {count} sums mod {modulus}",
        history(outcome, "accuracy", f"chance is {1 / modulus:.1%}"),
        line("", "as trained", "uniform attention", "over the numbers only"),
        *(
            moment(
                outcome, mark, "accuracy", percent, [ours(outcome.row(mark, "accuracy", OPERANDS), percent)]
            )
            for mark in ("pre", "post")
        ),
    ]


def moment(outcome: Outcome, mark: str, metric: str, shown: Any, more: Sequence[str]) -> str:
    row = outcome.row(mark, metric)
    when = f"{'before' if mark == 'pre' else 'after'}, step {row['step']:,}"
    return line(when, shown(row["baseline"]), ours(row, shown), *more)


def line(when: str, *cells: str) -> str:
    trained, edited, more = cells
    return f"  {when:<19}{trained:<12}{edited:<25}{more}".rstrip()


def ours(row: dict[str, Any], shown: Any) -> str:
    ends = (percent,) if shown is percent else ()
    return with_interval(shown(row["value"]), row["value_ci_low"], row["value_ci_high"], *ends)


def history(outcome: Outcome, metric: str, says: str) -> str:
    """Returns a metric over training as a row of blocks, and where its drop begins."""
    curve = outcome.log.curve(metric)
    largest = max(curve.values)
    last = curve.steps[-1]
    # At each place the last value logged until there.
    logged = list(zip(curve.steps, curve.values, strict=True))
    ends = [last * (place + 1) / CURVE for place in range(CURVE)]
    heights = [[value for step, value in logged if step <= end][-1] for end in ends]
    blocks = "".join(BLOCKS[round(height / largest * (len(BLOCKS) - 1))] for height in heights)
    moves = "" if curve.drop is None else f", turns at {curve.drop.onset:,}"
    return f"  {says:<20} {blocks} {last:,} steps{moves}"
