"""The tables of the results pages: their JSON is of the published claims, and every row of it is drawn."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from pathlib import Path

import pytest

from interp_tasks.published import papers, read_paper
from interp_tasks.published.papers import parse_paper
from interp_tasks.reproduction.page import claims_markdown

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted((DOCS / "results").glob("*.md"))


def hook():
    spec = importlib.util.spec_from_file_location("results_hook", DOCS / "scripts" / "results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


results = hook()


def held(name):
    return json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))


def test_each_paper_has_its_file_and_its_place_on_one_page():
    places = [name for page in PAGES for name in results.PLACE.findall(page.read_text(encoding="utf-8"))]
    assert sorted(places) == papers()
    assert sorted(file.stem for file in (DOCS / "results").glob("*.json")) == papers()


@pytest.mark.parametrize("name", papers())
def test_the_stored_claims_are_the_published_ones(name):
    claims = {claim.id: claim for claim in read_paper(name).claim}
    stored = held(name)
    assert {key: entry["rule"] for key, entry in stored.items()} == {
        key: claim.rule for key, claim in claims.items()
    }
    for key, entry in stored.items():
        assert entry["outcomes"]
        for outcome in entry["outcomes"]:
            if outcome["verdict"] in ("held", "failed") and "ci_low" in outcome:
                inside = claims[key].holds.hold_between(outcome["ci_low"], outcome["ci_high"])
                assert inside is (outcome["verdict"] == "held"), f"{key} on {outcome['run']}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_site_has_a_row_for_every_outcome(page):
    written = page.read_text(encoding="utf-8")
    made = results.on_page_markdown(written)
    names = results.PLACE.findall(written)
    assert not results.PLACE.findall(made)
    # A table's second line goes before its rows.
    bodies = re.findall(r"^\|[-|]+\|\n((?:\|.*\n)*)", made, re.MULTILINE)
    rows = [row for body in bodies for row in body.splitlines()]
    stored = [outcome for name in names for entry in held(name).values() for outcome in entry["outcomes"]]
    assert len(rows) == len(stored)
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {8}
    for name in names:
        for claim in read_paper(name).claim:
            assert f"**{claim.says}** ({claim.source}) Rule: {claim.rule}." in made


#: A paper of two claims, and what became of them: every kind of cell.
PAPER = parse_paper(
    {
        "paper": {"name": "small", "title": "Small", "citation": "Nobody 2020"},
        "row": [{"number": 1, "title": "First", "where": "figure 1"}, {"number": 2, "title": "Second", "note": "No."}],
        "run": [{"name": "a", "role": "core", "preset": "cpu", "task": "modular-addition", "hours": 0.1}],
        "study": [{"id": "s", "rows": [1], "experiment": "ablation", "at": ["post"]}],
        "claim": [
            {
                "id": key,
                "row": 1,
                "study": "s",
                "source": "section 1",
                "says": f"It {key}.",
                "published": "a | b",
                "where": {"metric": "accuracy"},
                "per": "baseline",
                "holds": {"below": 0.5},
            }
            for key in ("falls", "stays")
        ],
    },
    "small.toml",
)  # fmt: skip


def row(**changes):
    numbers = ("value", "ci_low", "ci_high", "untrained", "shuffled", "p", "p_holm", "hours")
    return {
        "claim": "falls",
        "rule": PAPER.claim[0].rule,
        "run": "a",
        "n_runs": 3,
        "verdict": "undecided",
        "what": "of the unedited",
        "reason": "",
        "command": "",
        "runs": [],
        **dict.fromkeys(numbers),
        **changes,
    }


ROWS = [
    row(value=0.123456789, ci_low=-1 / 3, ci_high=2e-9, verdict="held", p_holm=0.04321, untrained=1.5),
    row(run="b", ci_low=0.25, ci_high=0.75, reason="a|b", runs=[{"run": "b", "value": None}], n_runs=1),
    row(claim="stays", value=123456.7, shuffled=0.0, runs=[{"run": "a", "value": 0.1}, {"run": "b", "value": 2.0}]),
    row(claim="stays", run="c", verdict="not run", n_runs=0, hours=2.5, reason="not trained"),
]  # fmt: skip


def test_what_is_stored_makes_the_tables_that_reproduce_writes():
    numbers = ("value", "ci_low", "ci_high", "untrained", "shuffled", "p_holm", "hours")
    frame = [
        {**each, **{name: math.nan for name in numbers if each[name] is None}}  # as in a table of pandas
        for each in ROWS
    ]
    written = claims_markdown(PAPER, frame, PAPER.row)
    assert claims_markdown(PAPER, results.outcomes_of(PAPER, results.compact(ROWS)), PAPER.row) == written
    assert written.count("\n| ") == len(ROWS) + 2
    assert (
        "| a | a \\| b | 0.1235 [-0.333, 2e-09] of the unedited | 3 |  | 1.5 untrained | **held**" in written
    )
    assert "| b | a \\| b | [0.25, 0.75] of the unedited | 1 | – | – | undecided: a\\|b |" in written
    assert "| c | a \\| b | – | 0 |  | – | not run, 2.5 h |" in written
    assert "## 2. Second\n\nNo.\n" in written
