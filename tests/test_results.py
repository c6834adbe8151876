"""The tables of the results pages: their JSON is of the published claims, or of circuits, and every row is drawn."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import re
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest

from interp_tasks.checkpoints import resolve
from interp_tasks.cli.commands.reproduce import print_claims
from interp_tasks.errors import UserError
from interp_tasks.published import papers, read_paper
from interp_tasks.published.paper import parse_paper
from interp_tasks.reproduction import reproduce
from interp_tasks.reproduction.page import claims_markdown, headlines, headlines_markdown, our_number
from interp_tasks.reproduction.reproduction import check
from interp_tasks.reproduction.studies import jobs_of

DOCS = Path(__file__).parents[1] / "docs"
CIRCUITS = DOCS / "results" / "circuits.md"
PAGES = sorted({*(DOCS / "results").glob("*.md")} - {CIRCUITS})


sys.path.insert(0, str(DOCS / "scripts"))
results, circuits, tables = map(importlib.import_module, ("results", "circuit_tables", "tables"))
sys.path.pop(0)


def places(kind, *pages):
    """Returns what stands after `kind` in the names of tables on these pages."""
    return [
        place[3]
        for page in pages
        for place in tables.PLACE.finditer(page.read_text(encoding="utf-8"))
        if place[2] == kind
    ]


@pytest.mark.parametrize(
    "page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.relative_to(DOCS).as_posix()
)
def test_no_table_of_a_page_is_behind(page):
    written = page.read_text(encoding="utf-8")
    assert tables.filled(written) == written, "python docs/scripts/tables.py"
    assert len(re.findall(r"^<!-- .*:(?:begin|end) -->$", written, re.MULTILINE)) == 2 * (
        len(tables.PLACE.findall(written)) + written.count("<!-- sites:begin -->")
    )


def text_of(name):
    return (DOCS / "results" / f"{name}.json").read_text(encoding="utf-8")


def held(name):
    return json.loads(text_of(name))


def test_each_paper_has_its_file_and_its_place_on_one_page():
    assert sorted(places("claims of", *PAGES)) == papers()
    files = sorted(file.stem for file in (DOCS / "results").glob("*.json") if file.stem != CIRCUITS.stem)
    assert files == papers()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "study"), [("matrix-completion", "curve"), ("nanda", "progress"), ("miiii", "mechanism")]
)
def test_the_stored_numbers_are_those_of_the_shipped_runs(name, study):
    """Of one run and one study of each paper: what is stored is made anew when rules or experiments change."""
    paper = read_paper(name)
    (asked,) = (each for each in paper.study if each.id == study)
    first = next(run for run in paper.run if run.role == asked.role and run.preset == "cpu")
    claims = tuple(claim for claim in paper.claim if claim.study == study)
    found = reproduce(paper.model_copy(update={"claim": claims, "study": (asked,), "run": (first,)}))
    stored = held(name)
    for outcome in found.records():
        assert outcome["verdict"] != "error", outcome
        (before,) = (each for each in stored[outcome["claim"]]["outcomes"] if each["run"] == outcome["run"])
        ours = [each["value"] for each in outcome["runs"]]
        assert ours == pytest.approx(before.get("runs", [before["value"]])[: len(ours)], rel=1e-3), outcome[
            "claim"
        ]
    assert {outcome["claim"] for outcome in found.records()} == {claim.id for claim in claims}


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
            if outcome["verdict"] in ("held", "failed") and "value_ci_low" in outcome:
                inside = claims[key].holds.contains_between(outcome["value_ci_low"], outcome["value_ci_high"])
                assert inside is (outcome["verdict"] == "held"), f"{key} on {outcome['run']}"


@pytest.mark.parametrize("published", papers())
def test_a_stored_number_is_of_checkpoints_that_ship(published, tmp_path):
    """A step that shipped no more took seventeen numbers with it, and the pages did not say so."""
    paper, located = check(published, "cpu", tmp_path, ())
    ships = cache(lambda ref: bool(resolve(ref)) if "@" in ref else True)
    runs = {}
    for job in jobs_of(paper, located):
        name = job.name if job.study.together else job.on[0].run.name
        first = runs.setdefault((job.study.id, job.condition or name), {"name": name, "there": 0})
        with contextlib.suppress(UserError):
            if all(map(ships, job.refs())):
                first["there"] += sum(each.count for each in job.on)
    there = {(study, each["name"]): each["there"] for (study, _), each in runs.items()}
    stored = held(published)
    for claim in paper.claim:
        for outcome in stored[claim.id]["outcomes"]:
            assert outcome["n_runs"] <= there.get((claim.study, outcome["run"]), 0), (
                claim.id,
                outcome["run"],
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_site_has_a_row_for_every_outcome(page):
    names = places("claims of", page)
    made = "\n\n".join(map(results.tables, names))
    # A table's second line goes before its rows.
    bodies = re.findall(r"^\|[-|]+\|\n((?:\|.*\n)*)", made, re.MULTILINE)
    rows = [row for body in bodies for row in body.splitlines()]
    stored = [outcome for name in names for entry in held(name).values() for outcome in entry["outcomes"]]
    told = [
        outcome
        for name in names
        for _, outcomes in headlines(read_paper(name), results.outcomes_of(read_paper(name), text_of(name)))
        for outcome in outcomes
    ]
    assert len(rows) == len(stored) + len(told)
    columns = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert (columns.count(9), columns.count(8)) == (len(stored), len(told))
    for name in names:
        for claim in read_paper(name).claim:
            assert f"**{claim.says}** ({claim.source}) Rule: {claim.rule}." in made


def rounded_as(text, value):
    """Returns whether a page means this number: to its last decimal, or to its last digit before zeros."""
    shown = text.replace("−", "-").replace(",", "")
    last = len(shown.rpartition(".")[2]) if "." in shown else len(shown.rstrip("0")) - len(shown)
    return abs(float(shown) - value) <= 0.501 * 10.0**-last


def as_said(numbers, outcome):
    """Returns whether these are an outcome's number and interval: as they are, in per cent, or without the sign."""
    value, low, high = (outcome.get(name) for name in ("value", "value_ci_low", "value_ci_high"))
    if value is None or low is None:
        return False
    forms = ((value, low, high), (100 * value, 100 * low, 100 * high), (-value, -high, -low))
    return any(all(map(rounded_as, numbers, form)) for form in forms)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if places("claims of", page)], ids=lambda page: page.name
)
def test_what_a_page_says_in_short_is_what_came_out(page):
    """Each interval there is that of an outcome with the verdict that the words before it name."""
    outcomes = [
        outcome
        for name in places("claims of", page)
        for entry in held(name).values()
        for outcome in entry["outcomes"]
    ]
    short = page.read_text(encoding="utf-8").partition("## In short")[2].partition("\n## ")[0]
    number = r"(−?\d[\d,]*(?:\.\d+)?)"
    said = re.compile(rf"\b(Held|Failed|Undecided)\b|{number}[^\d\[\]()]{{0,40}}\[{number}, {number}\]")
    checked = 0
    for bullet in re.split(r"^- ", short, flags=re.MULTILINE):
        verdict = None
        for found in said.finditer(" ".join(bullet.split())):
            if found[1]:
                verdict = found[1].lower()
                continue
            meant = [outcome["verdict"] for outcome in outcomes if as_said(found.groups()[1:], outcome)]
            assert meant, found[0]
            assert verdict is None or verdict in meant, f"{found[0]}: {meant}, not {verdict}"
            checked += verdict is not None
    assert checked >= 10


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
                "headline": key == "falls",
                "where": {"metric": "accuracy"},
                "per": "baseline",
                "holds": {"below": 0.5},
            }
            for key in ("falls", "stays")
        ],
    },
    "small.toml",
)  # fmt: skip


#: Of an outcome, as `Reproduction.frame` has them.
NUMBERS = (*results.NUMBERS, "p", "published_number")


def row(**changes):
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
        **dict.fromkeys(NUMBERS),
        **changes,
    }


ROWS = [
    row(value=0.123456789, value_ci_low=-1 / 3, value_ci_high=2e-9, verdict="held", p_holm=0.04321, untrained=1.5),
    row(run="b", at_least=0.25, at_most=0.75, reason="a|b", runs=[{"run": "b", "value": None}], n_runs=1),
    row(claim="stays", value=123456.7, shuffled=0.0, runs=[{"run": "a", "value": 0.1}, {"run": "b", "value": 2.0}]),
    row(claim="stays", run="c", verdict="not run", n_runs=0, hours=2.5, reason="not trained"),
]  # fmt: skip


def test_what_is_stored_makes_the_tables_that_reproduce_writes():
    frame = [
        {**each, **{name: math.nan for name in NUMBERS if each[name] is None}}  # as in a table of pandas
        for each in ROWS
    ]
    written = claims_markdown(PAPER, frame, PAPER.row)
    assert claims_markdown(PAPER, results.outcomes_of(PAPER, results.compact(ROWS)), PAPER.row) == written
    assert written.count("\n| ") == len(ROWS) + 2
    cells = (
        "a \\| b | 0.1235 of the unedited | 3 | [-0.333, 2.00e-09] | **held** (p 0.043 after Holm) | 1.5 |"
    )
    assert f"| a | {cells} – |" in written
    assert "| b | a \\| b | 0.25 to 0.75 of the unedited | 1 | – | undecided | – | – |" in written
    assert "\n- `b`: a|b\n" in written
    assert "| c | a \\| b | – | – | – | not run, 2.5 h | – | – |" in written
    assert "0 shuffled | 0.1, 2 |" in written
    assert "## 2. Second\n\nNo.\n" in written
    # Both conditions of the one headline, each named.
    told = headlines_markdown(PAPER, frame)
    assert f"| It falls. (`a`) | {cells}" in told
    assert told.count("\n| ") == 3
    untrained = [{**each, "verdict": "not run"} if each["run"] == "b" else each for each in frame]
    assert f"| It falls. | {cells}" in headlines_markdown(PAPER, untrained)
    assert headlines_markdown(PAPER, frame[2:]) == ""


@pytest.mark.parametrize("name", papers())
def test_a_claim_is_one_whole_line_of_80_columns(name, monkeypatch, capsys):
    """Of what is stored: no name, number or unit is cut, and no two claims of an experiment are called the same."""
    paper = read_paper(name)
    claims = {claim.id: claim for claim in paper.claim}
    rows = [
        {
            **outcome,
            "row": (claim := claims[outcome["claim"]]).row,
            "headline": claim.headline,
            "says": claim.says,
            "rule": claim.rule,
            "published": claim.published,
            "published_number": math.nan if claim.number is None else claim.number,
        }
        for outcome in results.outcomes_of(paper, text_of(name))
    ]
    shown = SimpleNamespace(paper=paper, frame=lambda: pandas.DataFrame(rows), missing=())
    monkeypatch.setenv("COLUMNS", "80")
    print_claims(shown, verbose=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) == 80
    assert "…" not in "".join(lines)
    told = "".join(lines)
    for key, claim in claims.items():
        assert (key if len(key) + 2 * claim.headline <= 26 else claim.short) in told


def test_bounds_stand_for_a_number_that_runs_end_too_soon_to_have():
    for bounds, shown in (
        ((None, 0.5), "< 0.5 of it"),
        ((0.0, 0.5), "< 0.5 of it"),
        ((2000.0, None), "> 2000 of it"),
        ((0.0, None), "–"),
        ((None, None), "–"),
    ):
        at_least, at_most = bounds
        assert our_number(row(at_least=at_least, at_most=at_most, what="of it")) == shown
    assert our_number(row(value=0.1, at_least=0.0, at_most=0.5, what="")) == "0.1"


def test_the_page_of_circuits_has_a_row_for_every_circuit_and_a_table_for_every_place():
    stored = held("circuits")
    names = [name for place in places("circuits of", CIRCUITS) for name in place.split()]
    assert sorted(names) == sorted(stored)
    page = CIRCUITS.read_text(encoding="utf-8")
    for place in places("circuits of", CIRCUITS):
        every = [circuit for name in place.split() for circuit in stored[name]["circuits"]]
        assert f"\n\n{circuits.table(every)}\n\n" in page
    rows = [line for line in page.splitlines() if re.match(r"\| `[^`]+@", line)]
    assert len(rows) == sum(len(stored[name]["circuits"]) for name in names)
    assert {row.count("|") for row in rows} == {circuits.HEADER.count("|")}


def test_circuits_of_seeds_have_the_t_interval_of_their_mean():
    found = [[circuit(size=size, faithfulness=0.9)] for size in (1.0, 2.0, 6.0)]
    # 3 ± 4.3027 · √(7/3): by hand.
    assert circuits.over_seeds(found).splitlines()[2:] == [
        "| edges | 1, 2, 6 | 3 [-4, 10] |",
        "| faithfulness | 0.900, 0.900, 0.900 | 0.900 [0.900, 0.900] |",
    ]
    page = CIRCUITS.read_text(encoding="utf-8")
    of_seeds = places("seeds of", CIRCUITS)
    assert len(of_seeds) == 2
    for place in of_seeds:
        table = circuits.over_seeds([held("circuits")[name]["circuits"] for name in place.split()])
        assert f"\n\n{table}\n\n" in page


def circuit(**changes):
    about = {"ref": "zoo:a@1", "step": 1, "n": 8, "metric": "accuracy", "clean": 0.5, "gap": [0.5, 0.4, 0.6]}
    return {**about, "size": 3.0, "of": 23.0, "faithfulness": 0.8, "ci": [0.7, 0.9], "best": 0.79, **changes}


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True),
        ({"faithfulness": 0.799}, False),
        ({"best": 0.8}, False),
        ({"faithfulness": 1.2, "best": 1.1}, True),
        ({"size": None, "faithfulness": None}, False),
    ],
)
def test_a_circuit_holds_by_the_rule_of_its_page(changes, holds):
    assert circuits.holds(circuit(**changes)) is holds
    assert circuits.line(circuit(**changes)).endswith(
        "| yes |" if holds else "| no |" if changes.get("size", 1) else "| – |"
    )


@pytest.mark.parametrize("name", papers())
def test_some_claims_made_anew_leave_the_others(name):
    stored, paper = text_of(name), read_paper(name)
    assert results.replaced(stored, stored, [], paper) == stored
    one = next(claim.id for claim in paper.claim if not claim.headline)
    anew = json.dumps({one: {"rule": "r", "outcomes": [{"run": "new"}]}})
    found = json.loads(results.replaced(stored, anew, [one], paper))
    assert found == held(name) | json.loads(anew)
    headline = next(claim.id for claim in paper.claim if claim.headline)
    for asked, why in ((headline, "headlines are corrected together"), ("none", "not among the claims")):
        with pytest.raises(SystemExit, match=why):
            results.replaced(stored, anew, [asked], paper)


def test_what_a_command_wrote_is_what_the_page_shows(tmp_path):
    from interp_tasks import experiments

    found = experiments.circuit("zoo:modular-addition-113@0,3000", samples=64, random=2, curve=False)
    found.write(tmp_path)
    none, one = circuits.compact(tmp_path)["circuits"]
    assert none["size"] is None
    assert circuits.line(none).endswith("| no gap | – | – | – |")
    rows = found.frame[(found.frame["variant"] == "circuit") & (found.frame["step"] == 3000)].set_index(
        "metric"
    )
    (c,) = found.circuits.values()
    assert one["size"] == len(c)
    for key, metric, column in (
        ("faithfulness", "faithfulness", "value"),
        ("random", "faithfulness", "baseline"),
        ("best", "faithfulness, best of random", "value"),
        ("finding", "faithfulness, finding half", "value"),
        ("clean", "accuracy", "baseline"),
    ):
        assert one[key] == pytest.approx(rows.loc[metric, column], rel=1e-5)
    assert one["ci"] == pytest.approx(
        rows.loc["faithfulness", ["value_ci_low", "value_ci_high"]].tolist(), rel=1e-5
    )
