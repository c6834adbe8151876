"""The tables of the results pages, made from docs/results/PAPER.json.

`python docs/scripts/results.py PAPER FOLDER` writes that file from what `interp-run reproduce PAPER --out FOLDER`
wrote: the numbers and verdicts that the tables show; tables.py puts them into the pages. With names of claims after it,
these alone are written, of a run with `--rows`. What a claim says stands in interp_tasks/published.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from interp_tasks.published import Paper, read_paper
from interp_tasks.reproduction.page import paper_markdown

RESULTS = Path(__file__).parents[1] / "results"
#: What of an outcome the tables show; entries that are empty are left out of the file.
NUMBERS = (
    "value",
    "value_ci_low",
    "value_ci_high",
    "at_least",
    "at_most",
    "untrained",
    "memorised",
    "shuffled",
    "p_holm",
    "hours",
)
EMPTY: dict[str, Any] = {**dict.fromkeys(NUMBERS, math.nan), "reason": "", "command": "", "runs": []}


def tables(name: str) -> str:
    """All claims of a paper, under headings of the third level."""
    paper = read_paper(name)
    outcomes = outcomes_of(paper, (RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return paper_markdown(paper, outcomes, paper.row, level=3)


def outcomes_of(paper: Paper, text: str) -> list[dict[str, Any]]:
    """What `compact` has stored, as rows of `Reproduction.frame()`."""
    what = {claim.id: claim.what for claim in paper.claim}
    return [
        {
            **EMPTY,
            **outcome,
            "claim": key,
            "what": what[key],
            "runs": [{"value": value} for value in outcome.get("runs", [])],
        }
        for key, entry in json.loads(text).items()
        for outcome in entry["outcomes"]
    ]


def compact(rows: list[dict[str, Any]]) -> str:
    """What is stored of the rows of claims.json: of each claim the rule that decided it, and its outcomes."""
    claims: dict[str, Any] = {}
    for row in rows:
        claims.setdefault(row["claim"], {"rule": row["rule"], "outcomes": []})["outcomes"].append(shown(row))
    return written(claims)


def written(claims: dict[str, Any]) -> str:
    """Returns the file's text: a line for each outcome."""
    entries = []
    for key, entry in claims.items():
        outcomes = ",\n".join(json.dumps(outcome, ensure_ascii=False) for outcome in entry["outcomes"])
        entries.append(
            f'"{key}": {{"rule": {json.dumps(entry["rule"], ensure_ascii=False)}, "outcomes": [\n{outcomes}]}}'
        )
    return "{\n" + ",\n".join(entries) + "\n}\n"


def shown(row: dict[str, Any]) -> dict[str, Any]:
    numbers = {name: rounded(row[name]) for name in NUMBERS}
    kept = {**numbers, "runs": [rounded(each["value"]) for each in row["runs"]], "reason": row["reason"]}
    filled = {name: value for name, value in kept.items() if value not in (None, "", [])}
    return {"run": row["run"], "n_runs": row["n_runs"], "verdict": row["verdict"], **filled}


def rounded(value: float | None) -> float | None:
    """Three digits more than are shown."""
    return None if value is None else float(f"{value:.7g}")


def replaced(stored: str, made: str, names: list[str], paper: Paper) -> str:
    """Returns what is stored with these claims as they were made anew.

    Raises:
        SystemExit: if one is a headline, as Holm's correction is over all of them, or was not made anew.
    """
    held, new = json.loads(stored), json.loads(made)
    if headlines := [claim.id for claim in paper.claim if claim.headline and claim.id in names]:
        sys.exit(
            f"{', '.join(headlines)}: headlines are corrected together; reproduce the paper without --rows"
        )
    if lacking := [name for name in names if name not in new]:
        sys.exit(f"{', '.join(lacking)}: not among the claims of that folder")
    return written(held | {name: new[name] for name in names})


if __name__ == "__main__":
    of, folder, *only = sys.argv[1:]
    file = RESULTS / f"{of}.json"
    text = compact(json.loads((Path(folder) / "claims.json").read_text(encoding="utf-8")))
    if only:
        text = replaced(file.read_text(encoding="utf-8"), text, only, read_paper(of))
    file.write_text(text, encoding="utf-8")
