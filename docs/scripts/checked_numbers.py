"""Checks numbers in prose and hand-written tables against their sources: README, results, pages about shipped models.

`python docs/scripts/checked_numbers.py` prints page and line of each number without a source, and how many wrong last
digits would pass; with `--stated` also the numbers that rest on words. A comment after a paragraph, list or table names
its sources: `<!-- numbers: SOURCE; SOURCE -->`; one after the title is of the whole page. A number passes if one of the
numbers of a source, rounded, is printed like it. A source is

- a claim, such as `curve-sudden`: its numbers in every verdict, and those in the words of the paper and of the rule;
- `PAPER/STUDY`, `PAPER/STUDY/RUN`, `PAPER/STUDY/RUN/untrained`: measurements that ship, `*` as in a shell;
- `zoo:RUN`: the steps of its drop; `zoo:RUN@STEP`: what is logged there; `generalisation zoo:RUN`: steps to 95%;
  `settings zoo:RUN`;
- `circuits NAME`; the name of a CSV beside the page; `output of PAGE`: what its blocks print, and its generated tables;
- `0.31 = 7800 / 25200`: arithmetic on numbers of the other sources;
- `12, 0.5: where from`: a statement; `sum 1a2b3c: where from`: one on all that is left, by a digest of its numbers.

Whole numbers below ten, and what is a name (code, figure 3, seed 2, 7×7, a year), are not checked.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas
import results

from interp_tasks import experiments
from interp_tasks.checkpoints.run_reader import read_metrics, read_run
from interp_tasks.checkpoints.steps_around_drop import theoretical_plateau
from interp_tasks.measurement.logged_runs import run_folders_by_name
from interp_tasks.published import paper_names
from interp_tasks.reproduction import reproduce
from interp_tasks.reproduction.runs_and_records import read_records_file, shipped_records_file

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
ABOUT_MODELS = ("grokfast", "index", "matrix-completion", "modular-arithmetic", "shipped-models")
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ABOUT_MODELS),
    *sorted(RESULTS.glob("*.md")),
]
COMMENT = re.compile(r"<!-- numbers: (.*?) -->", re.DOTALL)
GENERATED = re.compile(r"^<!-- (.*):begin -->\n.*?^<!-- \1:end -->$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"^```(\w*).*?^```$", re.DOTALL | re.MULTILINE)
NAMES = re.compile(
    r"`[^`\n]+`|\]\([^)]*\)|\d+×\d+|\b(?:Python|TransformerLens|torch) [\d.]+|\b[A-Za-z]+-?\d[\w.]*"
    r"|(?<![\w.,])(?:19|20)\d\d(?:-\d\d-\d\d)?\b(?!,\d)"
    r"|\b(?:[Ff]igures?|[Ss]ections?|[Tt]ables?|[Aa]ppendix|[Ll]ayers?|[Ss]eeds?|[Hh]eads?|arXiv:?)\s?\d[\w.]*"
    r"(?:(?:,| and| to)\s\d[\w.]*)*"
)
#: Of "44 to 83%" the first is a percentage, too.
NUMBER = re.compile(r"(?<![\w.,/])[-−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?: to (?=[\d.]+%)|%?(?!\w))")
FOUND, STATED, MISSING = "found", "stated", "missing"
STEPS = ("onset", "crossing", "end", "length", "plateau until")


class Checked(NamedTuple):
    """A number of a page: how it came out, and the share of its other last digits that would pass."""

    line: int
    number: str
    outcome: str
    chance: float


def value_and_unit(printed: str) -> tuple[float, float]:
    """Returns a printed number and the unit of its last digit."""
    scale = 0.01 if printed.endswith(("%", " to ")) else 1
    digits = printed.removesuffix(" to ").rstrip("%").replace(",", "").replace("−", "-")
    mantissa, _, exponent = digits.partition("e")
    return float(digits) * scale, 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2])) * scale


def numbers_in(text: str) -> set[float]:
    return {value_and_unit(found)[0] for found in NUMBER.findall(NAMES.sub(" ", text))}


def leaves(value: Any) -> set[float]:
    """Returns the finite numbers in what JSON holds."""
    if isinstance(value, (dict, list, tuple)):
        return set().union(*map(leaves, value.values() if isinstance(value, dict) else value))
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {float(value)} if is_number and math.isfinite(value) else set()


@cache
def claims() -> dict[str, set[float]]:
    """Returns the numbers of every claim, by its name."""
    found: dict[str, set[float]] = {}
    for paper in paper_names():
        for reproduction in (results.judged(paper), reproduce(paper, preset="paper")):
            for row in reproduction.frame.to_dict("records"):
                words = numbers_in(f"{row['published']} {row['rule']}")
                measured = {name: row[name] for name in row.keys() - {"row", "p", "p_holm", "hours"}}
                found.setdefault(row["claim"], set()).update(leaves(measured) | words)
    return found


def steps_of(runs: str) -> set[float]:
    """Returns the steps of the drops of runs, their last ones, and the last above 0.9 of a plateau by theory."""
    frame = experiments.drops(runs).frame
    found = leaves(frame.loc[frame["metric"].isin(STEPS), "value"].tolist())
    for run in run_folders_by_name(runs).values():
        logged, described = read_metrics(run), read_run(run)
        level = 0.9 * (theoretical_plateau(described) or math.inf)
        metric = described["drop_metric"]["name"]
        above = [line["step"] for line in logged if line["validation"][metric] > level]
        found |= {float(step) for step in (*above[-1:], logged[-1]["step"])}
    return found


def logged_at(runs: str, step: str) -> set[float]:
    """Returns what runs have logged at a step; of an error whose plateau theory gives also as a fraction of that."""
    found: set[float] = set()
    for run in run_folders_by_name(runs).values():
        (line,) = (line for line in read_metrics(run) if line["step"] == int(step))
        described = read_run(run)
        if plateau := theoretical_plateau(described):
            level = line["validation"][described["drop_metric"]["name"]]
            found |= {level, level / plateau}
        else:
            every = line.get("train", {}).items() | line["validation"].items()
            found |= leaves([value for name, value in every if not name[-1].isdigit()])
    return found


@cache
def numbers_of(source: str) -> set[float]:
    """Returns the numbers that a source has."""
    kind, _, name = source.partition(" ")
    if source in claims():
        return claims()[source]
    if kind == "circuits":
        return leaves(json.loads((RESULTS / "circuits.json").read_text(encoding="utf-8"))[name])
    if kind == "settings":
        return set().union(*(leaves(read_run(run)["config"]) for run in run_folders_by_name(name).values()))
    if kind == "generalisation":
        rows = experiments.generalisation(name).frame
        return leaves(rows.loc[rows["metric"].str.startswith("step at"), "value"].tolist())
    if source.endswith(".csv"):
        table = pandas.read_csv(RESULTS / source).select_dtypes("number")
        return leaves(table.stack().tolist())
    if source.startswith("output of "):
        page = (ROOT / source.removeprefix("output of ")).read_text(encoding="utf-8")
        shown = [*GENERATED.finditer(page), *(block for block in CODE.finditer(page) if block[1] == "text")]
        return numbers_in("\n".join(block[0] for block in shown))
    if source.startswith("zoo:"):
        return logged_at(*source.split("@")) if "@" in source else steps_of(source)
    paper, study, run = [*source.split("/", 2), "*", "*"][:3]
    records = read_records_file(shipped_records_file(paper)).values()
    named = {f"{one.on}/{one.control}".removesuffix("/"): one for one in records if one.study == study}
    kept = [one.row_dicts() for name, one in named.items() if fnmatchcase(name, run)]
    if not kept:
        raise ValueError(f"no source: {source!r}")
    return leaves(kept)


def is_known(value: float, unit: float, pool: set[float]) -> bool:
    """Whether some number, rounded, is printed like this. A minus may be left out, but not put in."""
    return any(
        abs((one if value < 0 else abs(one)) - value) <= unit * 0.5 + 1e-9 * max(1, abs(value)) * unit
        for one in pool
    )


def blocks(page: str) -> Iterator[tuple[int, str]]:
    """Yields paragraphs, lists, tables and comments with their first line, but no code and nothing generated."""
    for hidden in (GENERATED, CODE):
        page = hidden.sub(lambda found: "\n" * found[0].count("\n"), page)
    for found in re.finditer(r"(?:^.*\S.*$\n?)+", page, re.MULTILINE):
        yield page.count("\n", 0, found.start()) + 1, found[0].strip("\n")


def checked(page: str) -> Iterator[Checked]:
    """Yields every number of a page."""
    parts, of_page = list(blocks(page)), ""
    for (line, block), (_, after) in zip(parts, [*parts[1:], (0, "")], strict=True):
        comment = COMMENT.fullmatch(after)
        if comment and block.startswith("# "):
            of_page = comment[1]
        elif not COMMENT.fullmatch(block):
            yield from checked_block(line, block, f"{comment[1] if comment else ''}; {of_page}")


def checked_block(start: int, block: str, comment: str) -> Iterator[Checked]:
    sources = [" ".join(source.split()) for source in comment.split(";") if source.strip()]
    in_words = [source.split(": ")[0] for source in sources if ": " in source]
    stated = {value_and_unit(number)[0] for words in in_words for number in NUMBER.findall(words)}
    pool = set().union(*(numbers_of(one) for one in sources if ": " not in one and " = " not in one))
    for arithmetic in (source.split(" = ")[1] for source in sources if " = " in source):
        operands = [value_and_unit(number) for number in re.findall(r"\d[\d.]*", arithmetic)]
        if all(is_known(*one, pool | stated) for one in operands if one[0] >= 10 or one[1] < 1):
            pool.add(float(eval(arithmetic, {"__builtins__": {}})))
    rows = []
    prose = NAMES.sub(lambda found: re.sub(r"\S", " ", found[0]), block)
    for found in NUMBER.finditer(prose):
        value, unit = value_and_unit(found[0])
        if unit == 1 and abs(value) < 10:
            continue
        line, last = start + prose.count("\n", 0, found.start()), round(abs(value) / unit) % 10
        others = [value + math.copysign((digit - last) * unit, value) for digit in range(10) if digit != last]
        chance = sum(is_known(one, unit, pool) or is_known(one, 0, stated) for one in others) / len(others)
        outcome = FOUND if is_known(value, unit, pool) else STATED if is_known(value, 0, stated) else MISSING
        rows.append(Checked(line, found[0].strip(), outcome, chance))
    digest = hashlib.sha256(
        " ".join(row.number for row in rows if row.outcome == MISSING).encode()
    ).hexdigest()[:6]
    for row in rows:
        if row.outcome == MISSING and f"sum {digest}" in in_words:
            row = row._replace(outcome=STATED, chance=0.0)
        yield row if row.outcome != MISSING else row._replace(outcome=f"{MISSING}, sum {digest}")


def missing(page: str) -> list[Checked]:
    """Returns the numbers of a page that have no source."""
    return [row for row in checked(page) if row.outcome not in (FOUND, STATED)]


def main() -> int:
    """Prints what no source has, and how sharp the check is, page by page."""
    is_shown = {FOUND: False, STATED: "--stated" in sys.argv}
    lacking = 0
    for page in PAGES:
        name, rows = page.relative_to(ROOT), list(checked(page.read_text(encoding="utf-8")))
        for row in rows:
            if is_shown.get(row.outcome, True):
                print(f"{name}:{row.line}: {row.number} {row.outcome}")
        found, stated = (sum(row.outcome == outcome for row in rows) for outcome in is_shown)
        chance = sum(row.chance for row in rows) / max(1, len(rows))
        print(f"{name}: {found} found, {stated} stated; a wrong last digit passes in {chance:.0%}")
        lacking += len(rows) - found - stated
    return int(lacking > 0)


if __name__ == "__main__":
    sys.exit(main())
