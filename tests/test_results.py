"""The pages of results: their tables are those of the records and circuits that ship."""

import importlib
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from interp_tasks.cli.commands.reproduce import print_claims
from interp_tasks.published import paper_names, read_paper
from interp_tasks.reproduction import compare_records_with_runs
from interp_tasks.reproduction.judge_paper import NUMBERS
from interp_tasks.reproduction.runs_and_records import (
    read_own_and_shipped_records,
    read_records_file,
    shipped_records_file,
    study_digest,
)
from interp_tasks.reproduction.study_jobs import all_jobs
from interp_tasks.reproduction.verdict_text import our_number

DOCS = Path(__file__).parents[1] / "docs"
CIRCUITS = DOCS / "results" / "circuits.md"

sys.path.insert(0, str(DOCS / "scripts"))
names = ("results", "circuit_tables", "tables", "checked_numbers", "learning_coefficient")
results, circuits, tables, checked_numbers, learning = map(importlib.import_module, names)
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


@pytest.mark.parametrize("page", checked_numbers.PAGES, ids=lambda page: page.stem)
def test_every_number_of_a_page_has_a_source(page):
    assert checked_numbers.missing(page.read_text(encoding="utf-8")) == []


def test_a_number_without_a_source_is_seen():
    """Of a claim, of a log, by arithmetic, in words, and one of many that a digest stands for."""
    sources = "curve-sudden; zoo:matrix-completion-7x7; 0.37 = 7800 / 21200; 7,800, 21,200, 20: a test; sum 234d0e: x"
    page = f"# A page\n\n1.76 times, 11,800 steps, 0.37,\n20 and 12%.\n\n<!-- numbers: {sources} -->"
    assert checked_numbers.missing(page) == []
    right, wrong = ("1.76", "11,800", "0.37", "20", "12%"), ("1.75", "11,801", "0.38", "21", "13%")
    for line, *change in zip((3, 3, 3, 4, 4), right, wrong, strict=True):
        assert checked_numbers.missing(page.replace(*change, 1))[0][:2] == (line, change[1])


def test_half_of_the_way_is_made_for_good_and_between_checkpoints():
    steps = {0: 8.0, 10: 2.0, 20: 6.0, 30: 2.0, 40: 0.0}
    # From 8 to 0: at 4 between 6 at step 20 and 2 at step 30.
    assert learning.half_way([{"step": step, "x": x} for step, x in steps.items()], "x", False) == 25


def test_the_headlines_of_each_paper_stand_on_one_page():
    assert sorted(places("headlines of", *sorted((DOCS / "results").glob("*.md")))) == paper_names()


@pytest.mark.parametrize("name", paper_names())
def test_every_claim_is_decided_from_measurements_that_ship(name):
    found = results.judged(name)
    assert found.errors == ()
    assert set(found.frame["claim"]) == {claim.id for claim in found.paper.claim}
    stored = read_records_file(shipped_records_file(name))
    methods = {study.id: study_digest(study) for study in found.paper.study}
    assert {key: record.method for key, record in stored.items()} == {key: methods[key[0]] for key in stored}


def test_judging_needs_neither_torch_nor_weights(tmp_path):
    """No verdict depends on which runs ship, as no run is opened. A paper takes 4 s of a processor, of a busy one 7."""
    told = """
import sys, time
from interp_tasks.checkpoints import run_reader
run_reader.read_run = run_reader.read_metrics = run_reader.stored_steps = run_reader.is_run = None
from interp_tasks.cli import main
failed = main(["reproduce", "matrix-completion", "--out", sys.argv[1]])
print(failed, "torch" in sys.modules, time.process_time(), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", told, str(tmp_path)], capture_output=True, text=True, check=True
    )
    failed, has_torch, seconds = done.stderr.splitlines()[-1].split()
    assert (failed, has_torch) == ("0", "False")
    assert float(seconds) < 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "study"), [("matrix-completion", "curve"), ("nanda", "progress"), ("miiii", "mechanism")]
)
def test_the_records_are_of_the_shipped_runs(name, study):
    """Of one run and one study of each paper, as on any machine: within rounding."""
    paper = read_paper(name)
    (asked,) = (each for each in paper.study if each.id == study)
    first = next(run for run in paper.run if run.role == asked.role and run.preset == "cpu")
    claims = tuple(claim for claim in paper.claim if claim.study == study)
    one = paper.model_copy(update={"claim": claims, "study": (asked,), "run": (first,)})
    jobs = all_jobs(one, "cpu", "runs", ())
    assert jobs
    assert all(job.is_recorded(read_own_and_shipped_records(paper)) for job in jobs)
    assert compare_records_with_runs(one) == []


@pytest.mark.parametrize("name", paper_names())
def test_claims_stand_in_80_columns(name, monkeypatch, capsys):
    """No name, number or unit is cut."""
    found = results.judged(name)
    monkeypatch.setenv("COLUMNS", "80")
    print_claims(replace(found, missing=()))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) == 80
    assert "…" not in "".join(lines)
    # Of a name that is too long its rest stands in the next line.
    names = "".join(line[13:39].strip() for line in lines)
    for claim in found.paper.claim:
        assert claim.id in names, claim.id


FALLS, STAYS, *_ = (claim for claim in read_paper("nanda").claim if claim.headline)


def row(**changes):
    """A row of a table of verdicts, on the first headline of a paper."""
    about = {
        "claim": FALLS.id,
        "run": "a",
        "n_runs": 3,
        "verdict": "undecided",
        "what": "of it",
        "headline": True,
    }
    return {**about, **dict.fromkeys(NUMBERS, math.nan), **changes}


def test_headlines_have_every_kind_of_cell():
    one = row(
        value=0.123456789,
        value_ci_low=-1 / 3,
        value_ci_high=2e-9,
        verdict="held",
        p_holm=0.04321,
        untrained=1.5,
    )
    other = row(run="b", at_least=0.25, at_most=0.75, n_runs=1, shuffled=0.0)
    lacking = row(claim=STAYS.id, run="c|d", verdict="not run", n_runs=0, hours=2.5)
    paper = read_paper("nanda")
    said = f"| {FALLS.says} (`a`) | {FALLS.published} |"
    cells = f"0.1235 of it | 3 | [-0.333, 2.00e-09] | {FALLS.holds} | ●\u00a0**held** | 0.043 | 1.5 |"
    told = results.headlines_markdown(paper, [one, other, lacking]).splitlines()
    # Both conditions of the one headline, each named.
    assert told[2:] == [
        f"{said} {cells}",
        f"{said.replace('`a`', '`b`')} 0.25 to 0.75 of it | 1 | – | {FALLS.holds} | ○\u00a0undecided | – | "
        "0 shuffled |",
        f"| {STAYS.says} | {STAYS.published} | – | – | – | {STAYS.holds} | not run, 2.5 h | – | – |",
    ]
    assert told[0].count("|") == told[1].count("|") == told[2].count("|")
    # What is not trained stands among all claims, where the headline has another condition.
    untrained = {**other, "verdict": "not run"}
    assert f"{said.replace(' (`a`)', '')} {cells}" in results.headlines_markdown(paper, [one, untrained])
    sized = results.headlines_markdown(paper, [one], {FALLS.id: {**one, "value": 7.0}})
    assert f"{FALLS.published} | 7 of it (3) | 0.1235 of it |" in sized
    assert results.headlines_markdown(paper, [{**one, "headline": False}]) == ""


def test_bounds_stand_for_a_number_that_runs_end_too_soon_to_have():
    for bounds, shown in (
        ((math.nan, 0.5), "< 0.5 of it"),
        ((0.0, 0.5), "< 0.5 of it"),
        ((2000.0, None), "> 2000 of it"),
        ((0.0, None), "–"),
        ((None, math.nan), "–"),
    ):
        at_least, at_most = bounds
        assert our_number(row(at_least=at_least, at_most=at_most)) == shown
    assert our_number(row(value=0.1, at_least=0.0, at_most=0.5, what="")) == "0.1"


def test_the_page_of_circuits_shows_every_stored_circuit():
    shown = {*" ".join([*places("circuits of", CIRCUITS), *places("seeds of", CIRCUITS)]).split()}
    assert sorted(shown) == sorted(json.loads(CIRCUITS.with_suffix(".json").read_text(encoding="utf-8")))


def test_circuits_of_seeds_have_the_t_interval_of_their_mean():
    found = [[circuit(size=size, faithfulness=0.9)] for size in (1.0, 2.0, 6.0)]
    # 3 ± 4.3027 · √(7/3): by hand.
    assert circuits.over_seeds(found).splitlines()[2:] == [
        "| edges | 1, 2, 6 | 3 [-4, 10] |",
        "| faithfulness | 0.900, 0.900, 0.900 | 0.900 [0.900, 0.900] |",
    ]


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
