"""A paper of our own on tiny runs: every verdict against the table of the experiment called directly."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pandas
import pytest

import tasks
from interp_tasks import experiments, train
from interp_tasks.cli import main
from interp_tasks.errors import UserError
from interp_tasks.published import Claim, Paper
from interp_tasks.published.paper import as_typed
from interp_tasks.reproduction import check_records, measure, reproduce, train_missing, verdicts
from interp_tasks.reproduction import claim_numbers as of_rows
from interp_tasks.reproduction.claim_numbers import Seed, Unmeasured, rows_where, table_rows
from interp_tasks.reproduction.records import read_file, tables_of, write_records
from interp_tasks.reproduction.reproduction import corrected
from interp_tasks.reproduction.runs import locate_all
from interp_tasks.reproduction.verdicts import Outcome

SETTINGS = {
    "train.steps": 4,
    "train.batch_size": 8,
    "train.eval_samples": 8,
    "task.n": 3,
    "model.d_model": 8,
    "model.n_heads": 2,
    "model.n_layers": 1,
}
VALUE = {"id": "value", "row": 1, "study": "s", "source": "1", "says": "It stays.", "where": {"ref": "4"}}


def claim(**changes):
    entry = VALUE | {"where": {"ref": "4", "metric": "mse_masked"}, "holds": {"below": 1e9}} | changes
    return Claim(**entry)


def paper_of(content):
    return Paper(**content["paper"], **{key: value for key, value in content.items() if key != "paper"})


def content(*claims, **changes):
    """Two runs of one role, a study of each and one of both together."""
    run = {"role": "core", "preset": "cpu", "task": "matrix-completion", "settings": SETTINGS, "hours": 0.5}
    return {
        "paper": {"name": "small", "title": "Small", "citation": "Nobody 2020", "departures": ["Smaller."]},
        "row": [{"number": 1, "title": "First"}, {"number": 2, "title": "Second"}],
        "run": [{**run, "name": "a"}, {**run, "name": "b", "settings": SETTINGS | {"train.seed": 1}}],
        "study": [
            {"id": "s", "rows": [1], "experiment": "ablation", "at": ["0", "4"], "settings": {"samples": 8}},
            {
                "id": "t",
                "rows": [2],
                "experiment": "ablation",
                "at": ["4"],
                "together": True,
                "settings": {"samples": 8},
            },
        ],
        "claim": list(claims),
    } | changes


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of runs, with the first of the two in it."""
    folder = tmp_path_factory.mktemp("runs")
    paper = paper_of(content())
    (first, _) = paper.run
    settings = {key: as_typed(value) for key, value in first.settings.items()}
    from interp_tasks.training.config import resolve_config

    resolved = resolve_config(first.task, "cpu", settings)
    train(
        tasks.get(first.task, **resolved.task),
        out=folder / "a",
        preset="cpu",
        settings=resolved.model,
        config=resolved.train,
    )
    return folder


def rows_of(table):
    return [{**row, "variance": 2 / 9} for row in table_rows(table)]


def claim_numbers(claim, table, seeds=None):
    return of_rows.claim_numbers(claim, rows_of(table), seeds)


def judge(claim, table, run="x", controls=None):
    tables = {name: rows_of(control) for name, control in (controls or {}).items()}
    return verdicts.judge(claim, rows_of(table), run, controls=tables)


def reproduced(paper, *, runs, rows=(), **options):
    """A paper's verdicts on the runs of a folder, measured and judged."""
    with TemporaryDirectory() as folder:
        records = Path(folder) / "records.jsonl"
        measure(paper, file=records, runs=runs, rows=rows, **options)
        return reproduce(paper, records=records, runs=runs, rows=rows)


@pytest.fixture(scope="module")
def table(runs):
    return experiments.ablation([f"{runs}/a@0", f"{runs}/a@4"], samples=8).frame


def row_of(table, ref="4", metric="mse_masked"):
    return table[table["ref"].str.endswith(f"@{ref}") & (table["metric"] == metric)].iloc[0]


def number(table, **changes):
    """The number of the one run, and its interval over examples."""
    (found,) = claim_numbers(claim(**changes), table).numbers
    return found.value, found.over_examples


def test_a_number_is_the_tables_with_its_interval(table):
    row = row_of(table)
    value, ends = number(table)
    assert (value, *ends) == pytest.approx((row["value"], row["value_ci_low"], row["value_ci_high"]))
    other = row_of(table, "0")
    named = {"ref": "0", "metric": "mse_masked", "column": "baseline"}
    assert number(table, per=named)[0] == pytest.approx(row["value"] / other["baseline"])
    # The unedited number is no better known than both of those that it is the difference of.
    middle, (low, high) = number(table, column="baseline")
    wide = [row["value_ci_high"] - row["value_ci_low"], row["effect_ci_high"] - row["effect_ci_low"]]
    assert (middle, high - low) == pytest.approx((row["baseline"], sum(wide)))
    assert (low + high) / 2 == pytest.approx(middle)


def test_a_ratio_has_the_spread_of_its_divisor(table):
    """Numerator and divisor each with an interval that holds together with the other's: 97.5%, not 95%."""
    row, other = row_of(table), row_of(table, "0")
    value, (low, high) = number(table, per={"ref": "0", "metric": "mse_masked"})
    assert value == pytest.approx(row["value"] / other["value"])
    factor = 2.2414027 / 1.9599640
    ends = [
        [one["value"] + factor * (one[end] - one["value"]) for end in ("value_ci_low", "value_ci_high")]
        for one in (row, other)
    ]
    assert (low, high) == pytest.approx((ends[0][0] / ends[1][1], ends[0][1] / ends[1][0]))
    assert low < row["value_ci_low"] / other["value"] < row["value_ci_high"] / other["value"] < high
    # A variance is known, and its ratio as well as the number.
    value, (low, high) = number(table, per="variance")
    assert (high - low) / value == pytest.approx((row["value_ci_high"] - row["value_ci_low"]) / row["value"])


def test_several_rows_are_reduced_and_counted(table):
    both = {"metric": "mse_masked"}
    rows = [row_of(table, ref) for ref in ("0", "4")]
    values = [row["value"] for row in rows]
    mean, ends = number(table, where=both, reduce="mean")
    assert mean == pytest.approx(sum(values) / 2)
    # As if both went up and down as one.
    assert ends == pytest.approx(
        [sum(row[end] for row in rows) / 2 for end in ("value_ci_low", "value_ci_high")]
    )
    largest, (low, high) = number(table, where=both, reduce="max")
    assert largest == max(values)
    factor = 2.2414027 / 1.9599640  # two cells, which are to hold together
    for index, end in enumerate(("value_ci_low", "value_ci_high")):
        wide = max(row["value"] + factor * (row[end] - row["value"]) for row in rows)
        assert (low, high)[index] == pytest.approx(wide)
    spread, (low, high) = number(table, where=both, reduce="max / min")
    assert spread == max(values) / min(values)
    # The largest may be as small as its own interval says while the smallest is as large, and the reverse.
    wide = {
        end: [row["value"] + factor * (row[end] - row["value"]) for row in rows]
        for end in ("value_ci_low", "value_ci_high")
    }
    assert low == pytest.approx(max(wide["value_ci_low"]) / min(wide["value_ci_high"]))
    assert high == pytest.approx(max(wide["value_ci_high"]) / min(wide["value_ci_low"]))
    per_baseline = number(table, where=both, reduce="min", column="effect", per="baseline")[0]
    assert per_baseline == pytest.approx(min(row["effect"] / row["baseline"] for row in rows))


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"metric": "mse_masked"}, "2 rows have"),
        ({"metric": "accuracy"}, "no row has"),
        ({"colour": "red"}, "no column 'colour'"),
    ],
)
def test_a_number_that_is_not_one_is_an_error_and_no_verdict(table, where, said):
    with pytest.raises(Unmeasured, match=said):
        claim_numbers(claim(where=where), table)
    outcome = judge(claim(where=where), table, "a")
    assert (outcome.verdict, outcome.value) == ("error", None)


def test_seeds_that_lack_a_row_are_counted(table):
    import pandas

    three = pandas.concat([table.assign(run=f"r/seed-{seed}") for seed in range(3)], ignore_index=True)
    why = "no head of the model is of this class"
    assert "seeds have" not in judge(claim(absent=why), three, "r").reason
    lacking = three.copy()
    lacking.loc[lacking["run"] == "r/seed-2", "metric"] = "other"
    assert (
        f"2 of 3 seeds have such a row; of the others, {why}" in judge(claim(absent=why), lacking, "r").reason
    )
    assert "seeds have" not in judge(claim(), lacking, "r").reason


def test_rows_of_a_run_differ_where_it_has_two_of_them(table):
    """The run with one row of the three has nothing to compare, the one with two is compared on these."""
    import pandas

    names = ["first", "second", "third"]
    row = row_of(table)
    values = {0: (1.0, 1.2, 3.0), 1: (2.0, 1.0), 2: (5.0,)}
    frame = pandas.DataFrame(
        [
            {**row, "run": f"r/seed-{run}", "variant": name, "value": value}
            for run, of_run in values.items()
            for name, value in zip(names, of_run, strict=False)
        ]
    ).astype(table.dtypes.to_dict())
    spread = {"where": {"variant": names, "metric": "mse_masked"}, "reduce": "max / min"}
    found = claim_numbers(claim(**spread), frame).numbers
    assert [(each.run, each.value) for each in found] == [("r/seed-0", 3.0), ("r/seed-1", 2.0)]
    why = "it has fewer than two groups"
    assert (
        f"2 of 3 seeds have such a row; of the others, {why}"
        in judge(claim(**spread, absent=why), frame, "r").reason
    )
    only = frame[frame["run"] == "r/seed-2"]
    assert judge(claim(**spread, absent=why), only, "r").verdict == "not run"
    # Of a number that is not above 0 nothing is so many times another.
    below = frame.assign(value=frame["value"] - 1.0)
    assert judge(claim(**spread), below, "r").value is None


def test_a_row_that_may_be_absent_is_not_run_and_other_mistakes_are_errors(table):
    why = "no head is of this class"
    absent = judge(claim(where={"metric": "accuracy"}, absent=why), table, "a")
    assert (absent.verdict, absent.reason) == ("not run", why)
    assert judge(claim(where={"colour": "red"}, absent=why), table, "a").verdict == "error"


def test_what_no_model_was_trained_for_rests_on_no_run_and_is_judged_over_examples(table):
    assert claim_numbers(claim(), table).n_runs == 1
    method = table.assign(n_runs=0)
    assert claim_numbers(claim(), method).n_runs == 0
    outcome = judge(claim(), method, "a")
    assert (outcome.verdict, outcome.interval, outcome.n_runs) == ("held", "over examples", 0)
    # A row of several runs has the interval that its study made of them.
    pooled = judge(claim(), table.assign(n_runs=7), "a")
    assert (pooled.verdict, pooled.interval, pooled.n_runs) == ("held", "the study's, over 7 runs", 7)
    assert judge(claim(), table.assign(n_runs=2), "a").verdict == "undecided"
    without = table.assign(n_runs=7, value_ci_low=float("nan"))
    assert judge(claim(), without, "a").reason == "no interval: the study has none of this number"


def test_a_run_is_named_by_its_end_or_by_one_of_several(table):
    (run,) = table["run"].unique()
    for ends in (run[-1:], [run[-1:]], ["at no scale", run], run[-4:-1] + "*"):
        assert len(rows_where(rows_of(table), {"run": ends})) == len(table)
    assert rows_where(rows_of(table), {"run": ["at no scale"]}) == []


def test_draws_are_left_out_unless_asked_for(table):
    drawn = pandas.concat([table, table.assign(draw=0)], ignore_index=True).astype({"draw": "Int64"})
    assert claim_numbers(claim(), drawn) == claim_numbers(claim(), table)
    everything = claim(where={"metric": "mse_masked", "ref": "4", "draw": 0})
    assert claim_numbers(everything, drawn) == claim_numbers(claim(), table)


def seeds_of(table, *values):
    """The table as several seeds have it, each with its own number."""
    frames = [
        table.assign(run=f"x/seed-{seed}", value=value, effect=value / 10, baseline=2.0)
        for seed, value in enumerate(values)
    ]
    return pandas.concat(frames, ignore_index=True)


def test_a_verdict_is_of_the_whole_interval_over_runs(table):
    """1, 2, 3: 2 ± 4.303 · 1/√3, which is -0.484 to 4.484."""
    three = seeds_of(table, 1.0, 2.0, 3.0)
    cases = {
        (("below", 4.5),): "held",
        (("below", 4.4),): "undecided",
        (("above", 4.4),): "undecided",
        (("above", 4.5),): "failed",
        (("above", -0.5), ("below", 4.5)): "held",
        (("above", -0.4), ("below", 4.5)): "undecided",
        (("above", 5.0), ("below", 6.0)): "failed",
    }
    for bounds, verdict in cases.items():
        outcome = judge(claim(holds=dict(bounds)), three)
        assert outcome.verdict == verdict, bounds
        assert (outcome.value, outcome.n_runs, outcome.interval) == (2.0, 3, "t, over 3 runs")
        assert (outcome.low, outcome.high) == pytest.approx((-0.4841, 4.4841), abs=1e-4)
        assert outcome.runs == (("x/seed-0", 1.0), ("x/seed-1", 2.0), ("x/seed-2", 3.0))
        assert (outcome.p < 0.05) == (verdict != "undecided")
        assert ("reaches across" in outcome.reason) == (verdict == "undecided")


def test_runs_that_agree_have_a_verdict_and_no_p_value(table):
    """A t test of numbers without a spread would say p = 0, of three runs as of three hundred."""
    alike = judge(claim(holds={"below": 1.5}), seeds_of(table, 1.0, 1.0, 1.0))
    assert (alike.verdict, alike.low, alike.high, alike.p) == ("held", 1.0, 1.0, None)
    assert alike.reason == "all 3 runs give the same number: no spread, and no p-value"
    assert judge(claim(holds={"above": 1.5}), seeds_of(table, 1.0, 1.0, 1.0)).verdict == "failed"
    # The mean of three tenths is not a tenth, by 1e-17, and so their spread not 0.
    assert judge(claim(), seeds_of(table, 0.1, 0.1, 0.1)).p is None
    differ = judge(claim(holds={"below": 1.5}), seeds_of(table, 1.0, 1.0, 1.01))
    assert (differ.reason, differ.p is None) == ("", False)
    # Of a method, whose examples all give the same.
    exact = table.assign(n_runs=0, value_ci_low=table["value"], value_ci_high=table["value"])
    assert judge(claim(), exact, "a").p is None


def test_orders_of_magnitude_are_judged_on_their_logarithms(table):
    three = seeds_of(table, 10.0, 100.0, 1000.0)
    plain, logged = (judge(claim(holds={"above": 0.1}, log=log), three) for log in (False, True))
    assert plain.verdict == "undecided"
    assert (logged.verdict, logged.value) == ("held", pytest.approx(100))
    # 2 ± 4.303/√3 powers of ten
    assert (logged.low, logged.high) == pytest.approx((10**-0.4841, 10**4.4841), rel=1e-3)
    none = judge(claim(holds={"above": 0.1}, log=True), seeds_of(table, 1.0, 0.0, 2.0))
    assert (none.verdict, none.value) == ("undecided", None)
    assert "no logarithm" in none.reason


def test_a_share_of_runs_has_an_exact_interval(table):
    """Five of five: at least the fifth root of 0.025, and twice a half to the fifth."""
    every = claim(over="share of runs", holds={"above": 0.5})
    five = judge(every, seeds_of(table, *[1.0] * 5))
    assert (five.verdict, five.value, five.high) == ("undecided", 1.0, 1.0)
    assert (five.low, five.p) == pytest.approx((0.025**0.2, 2 * 0.5**5))
    assert judge(every, seeds_of(table, *[1.0] * 6)).verdict == "held"
    few = judge(every, seeds_of(table, 1.0, *[0.0] * 9))
    assert (few.verdict, few.interval) == ("failed", "exact binomial, over 10 runs")
    assert few.p == pytest.approx(2 * 11 * 0.5**10)


def test_an_extreme_has_its_median_beside_it(table):
    several = pandas.concat(
        [
            table.assign(run=f"x/seed-{seed}", variant=v, value=v + seed)
            for seed in (0, 1)
            for v in (1.0, 2.0, 9.0)
        ]
    )
    found = judge(claim(reduce="min"), several)
    assert (found.value, found.median) == (1.5, 2.5)
    assert judge(claim(), seeds_of(table, 1.0, 2.0)).median is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((1.0,), "one training run, of three at least; this one lies within the rule"),
        ((9.0,), "one training run, of three at least; this one does not"),
        ((1.0, 9.0), "2 training runs, of three at least; 1 of them within the rule"),
    ],
)
def test_fewer_than_three_runs_decide_nothing(table, values, said):
    outcome = judge(claim(holds={"below": 5.0}), seeds_of(table, *values))
    assert (outcome.verdict, outcome.reason) == ("undecided", said)
    assert (outcome.n_runs, outcome.value) == (len(values), sum(values) / len(values))


def test_a_claim_about_a_method_is_judged_over_examples_on_one_run(table):
    row = row_of(table)
    low, high = row["value_ci_low"], row["value_ci_high"]
    for bound, verdict in ((high * 1.01, "held"), ((low + high) / 2, "undecided"), (low * 0.99, "failed")):
        outcome = judge(claim(over="examples", holds={"below": bound}), table, "a")
        assert outcome.verdict == verdict
        assert (outcome.low, outcome.high) == pytest.approx((low, high))
    unknown = judge(claim(over="examples"), table.assign(value_ci_low=float("nan")), "a")
    assert (unknown.verdict, unknown.reason) == ("undecided", "the study has no interval of this number")


def test_runs_are_divided_by_those_of_the_same_seed(table):
    """2/1, 2/4, 9/3: not the ratio of the means, and not in another order."""
    mine, other = seeds_of(table, 2.0, 2.0, 9.0), seeds_of(table, 1.0, 4.0, 3.0)
    other = other.assign(run=other["run"].str.replace("x/", "y/")).iloc[::-1]
    both = pandas.concat([mine, other], ignore_index=True)
    metric = {"ref": "4", "metric": "mse_masked"}
    ratio = claim(where={**metric, "run": "x/seed-*"}, per={**metric, "run": "y/seed-*"})
    assert [each.value for each in claim_numbers(ratio, both).numbers] == [2.0, 0.5, 3.0]
    # Without one of the seeds they cannot be paired: Fieller's interval, over the smaller group.
    fewer = both[both["run"] != "y/seed-1"]
    found = claim_numbers(ratio, fewer)
    assert (len(found.numbers), found.against, found.n_runs) == (3, (3.0, 1.0), 2)
    assert judge(ratio, fewer).verdict == "undecided"
    four = pandas.concat([both, mine[mine["run"] == "x/seed-0"].assign(run="x/seed-3")], ignore_index=True)
    outcome = judge(ratio, four)
    assert (outcome.n_runs, outcome.value) == (3, pytest.approx((2 + 2 + 9 + 2) / 4 / (8 / 3)))
    # One of the other condition is one training run, and stands once in the tables of all that it is beside.
    single = both[~both["run"].isin(["y/seed-1", "y/seed-2"])]
    apart = [single[single["run"].isin([f"x/seed-{seed}", "y/seed-0"])] for seed in range(3)]
    once = tables_of(SimpleNamespace(table=table_rows(each)) for each in apart)
    for one in (single, pandas.DataFrame(once)):
        assert claim_numbers(ratio, one).n_runs == 1
        assert judge(ratio, one).reason == "one training run, of three at least; 3 are divided by it"


def test_what_is_said_of_several_conditions_is_measured_again_with_each_seed(table):
    """The largest over two conditions, seed by seed: 4, 5, 6; the fourth seed is of one condition alone."""
    mine, other = seeds_of(table, 4.0, 1.0, 6.0, 99.0), seeds_of(table, 3.0, 5.0, 2.0)
    both = pandas.concat([mine, other.assign(run=other["run"].str.replace("x/", "y/"))], ignore_index=True)
    found = claim_numbers(claim(reduce="max"), both)
    assert [each.value for each in found.numbers] == [4.0, 5.0, 6.0]
    with pytest.raises(Unmeasured, match="of 2 conditions"):
        claim_numbers(claim(), both)
    # Without seeds they are one measurement.
    named = both.assign(run=both["run"].str.replace("/seed-", "-"))
    assert [each.value for each in claim_numbers(claim(reduce="max"), named).numbers] == [99.0]
    # What the paper's file says of runs counts more than their names.
    same = {run: Seed("one", index) for index, run in enumerate(both["run"].unique())}
    assert claim_numbers(claim(), both, same).n_runs == 7


def test_a_claim_that_a_control_passes_is_not_held(table):
    three = seeds_of(table, 1.0, 1.1, 1.2)
    good, bad = table.assign(value=1.0), table.assign(value=9.0)
    below = claim(holds={"below": 5.0})
    passed = judge(below, three, "x", controls={"untrained": good, "shuffled": bad})
    assert (passed.verdict, passed.reason) == ("not testable", "an untrained model passes too")
    assert passed.controls == (("untrained", 1.0), ("shuffled", 9.0))
    assert passed.value == pytest.approx(1.1)
    held = judge(below, three, "x", controls={"untrained": bad})
    assert (held.verdict, held.controls) == ("held", (("untrained", 9.0),))
    # What fails stays failed, and what has no number on a control does not pass there.
    assert judge(claim(holds={"above": 5.0}), three, "x", controls={"untrained": bad}).verdict == "failed"
    empty = judge(below, three, "x", controls={"untrained": table.assign(value=float("nan"))})
    assert (empty.verdict, empty.controls) == ("held", (("untrained", None),))


def test_holms_correction_is_over_the_headlines_of_a_paper():
    def outcome(p, headline=True, verdict="held"):
        return Outcome(claim(headline=headline), "a", 3, verdict, p=p)

    given = [outcome(0.01), outcome(0.03), outcome(0.03, headline=False), outcome(None), outcome(0.02)]
    found = corrected(given)
    assert [each.p_holm for each in found] == [pytest.approx(0.03), pytest.approx(0.04), None, None, 0.04]
    assert {each.verdict for each in found} == {"held"}
    found = corrected([outcome(0.03), outcome(0.04), outcome(0.5, verdict="undecided")])
    assert [each.verdict for each in found] == ["undecided"] * 3
    assert found[0].reason == "not after Holm's correction over 3 headline verdicts: held alone"


def test_what_has_no_number_decides_nothing(table):
    empty = judge(claim(), table.assign(value=float("nan")), "a")
    assert (empty.verdict, empty.value) == ("undecided", None)
    outcome = judge(claim(column="effect", per="baseline"), table.assign(baseline=0.0), "a")
    assert (outcome.verdict, outcome.value, outcome.low) == ("undecided", None, None)
    assert "a share of 0" in outcome.reason


def test_a_paper_on_one_run_of_two(runs):
    scale = claim(id="scale", scale={"cpu": "too small"}).model_dump()
    together = claim(id="together", row=2, study="t").model_dump()
    of_b = claim(id="of b", row=2, study="t", where={"run": "b", "metric": "mse_masked"}).model_dump()
    crash = {"id": "x", "rows": [1], "experiment": "ablation", "at": ["4"], "settings": {"colour": "red"}}
    of_a = claim(id="of a", row=2, study="t", where={"run": "a", "metric": "mse_masked"}).model_dump()
    of_crash = claim(id="crash", study="x").model_dump()
    given = content(claim().model_dump(), scale, together, of_b, of_a, of_crash)
    paper = paper_of(given | {"study": [*given["study"], crash]})
    seen = []
    found = reproduced(paper, runs=runs, progress=lambda *state: seen.append(state))
    # Each study on the run that is there, and on its untrained model.
    assert [state[:2] for state in seen] == [(done, 6) for done in range(1, 7)]
    verdicts = {(each.claim.id, each.run): each for each in found.outcomes}
    alone = verdicts["value", "a"]
    assert (alone.verdict, alone.n_runs) == ("undecided", 1)
    assert alone.reason.endswith("within the rule; without runs that are not measured: b")
    assert verdicts["scale", "a"].verdict == "not testable"
    assert verdicts["scale", "a"].reason == "too small"
    assert verdicts["crash", "a"].verdict == "not run"
    # Together: what is there, and how many runs that is.
    assert (verdicts["together", "core"].verdict, verdicts["together", "core"].n_runs) == ("undecided", 1)
    assert verdicts["together", "core"].reason.endswith("; without runs that are not measured: b")
    # What is said of a run that is not there is not decided on those that are.
    missing = verdicts["of b", "core"]
    assert (missing.verdict, missing.value, missing.hours) == ("not run", None, 0.5)
    # What is said of the run that is there lacks none.
    assert verdicts["of a", "core"].reason.endswith("of three at least; this one lies within the rule")
    assert {each.name for each in found.missing} == {"a", "b"}
    assert found.measured == ("a",)
    only = reproduced(paper, runs=runs, rows=[2])
    assert [each.claim.id for each in only.outcomes] == ["together", "of b", "of a"]


@pytest.mark.parametrize("together", [False, True])
def test_a_step_that_two_marks_mean_counts_under_both(runs, together):
    """A run that stores few steps may have one alone before its drop."""
    where = {"metric": "mse_masked"}
    by_number = claim(id="number", where=where | {"ref": "4"})
    by_mark = claim(id="mark", where=where | {"ref": "last"}, per={"ref": "4", **where})
    before = claim(id="before", where=where | {"ref": "0"})
    given = content(*(one.model_dump() for one in (by_number, by_mark, before)))
    study = given["study"][0] | {"at": ["0", "4", "last"], "together": together}
    found = reproduced(paper_of(given | {"study": [study, given["study"][1]]}), runs=runs)
    number, mark, earlier = (
        {one.claim.id: one for one in found.outcomes}[name] for name in ("number", "mark", "before")
    )
    assert mark.value == 1
    assert number.value != earlier.value
    assert not found.errors


def test_runs_of_other_settings_are_other_conditions(runs):
    """Seeds of one setting are decided together; another setting, here the width, by itself."""
    given = content(claim().model_dump())
    wide = {**given["run"][1], "name": "wide", "settings": SETTINGS | {"model.d_model": 16}}
    longer = {**given["run"][1], "name": "longer", "settings": SETTINGS | {"train.steps": 9, "train.seed": 2}}
    paper = paper_of(given | {"run": [*given["run"], wide, longer]})
    found = reproduced(paper, runs=runs)
    assert [(each.run, each.verdict) for each in found.outcomes] == [("a", "undecided"), ("wide", "not run")]
    assert found.outcomes[0].reason.endswith("; without runs that are not measured: b, longer")


def test_a_run_that_nothing_can_be_tested_on_is_not_measured(runs):
    given = content(claim().model_dump())
    given["run"] = [given["run"][0] | {"untestable": "it has stalled"}]
    given["study"] = given["study"][:1]
    seen = []
    found = reproduced(paper_of(given), runs=runs, progress=lambda *state: seen.append(state))
    (outcome,) = found.outcomes
    assert (outcome.verdict, outcome.reason, outcome.n_runs, seen) == (
        "not testable",
        "it has stalled",
        0,
        [],
    )


def test_the_untrained_model_is_that_before_the_first_step(runs, table):
    """Its number is that of step 0, whatever mark the claim is about."""
    paper = paper_of(content(claim(holds={"above": 0.0}).model_dump()))
    found = reproduced(paper, runs=runs, rows=[1])
    (outcome,) = found.outcomes
    ((control, value),) = outcome.controls
    assert (control, value) == ("untrained", pytest.approx(row_of(table, "0")["value"]))
    assert outcome.reason.startswith("an untrained model passes too; one training run")
    none = claim(holds={"above": 0.0}, uncontrolled="it is so by definition").model_dump()
    (outcome,) = reproduced(paper_of(content(none)), runs=runs, rows=[1]).outcomes
    # Its number is shown, and nothing said against the claim.
    assert outcome.controls == (("untrained", pytest.approx(row_of(table, "0")["value"])),)
    assert outcome.reason.startswith("one training run")


def test_what_a_trained_run_gives_goes_into_the_control_too(runs, table):
    """Weights of the run's end in its untrained model: as in its own checkpoint of step 0."""
    given = content(
        claim(where={"ref": "0", "metric": "mse_masked", "variant": "qkv+mlp+unembed"}).model_dump()
    )
    given["study"][0] |= {
        "experiment": "transplant",
        "at": ["0"],
        "settings": {"source": "{trained}@4", "components": ["qkv+mlp+unembed"], "samples": 8},
    }
    (outcome,) = reproduced(paper_of(given), runs=runs, rows=[1]).outcomes
    assert outcome.controls == (("untrained", pytest.approx(outcome.runs[0][1])),)
    itself = json.loads(json.dumps(given).replace("{trained}", "{run}"))
    (outcome,) = reproduced(paper_of(itself), runs=runs, rows=[1]).outcomes
    assert outcome.controls[0][1] != pytest.approx(outcome.runs[0][1])


@pytest.mark.parametrize(("control", "step"), [("shuffled", "4"), ("memorised", "0")])
def test_another_model_stands_for_the_run_that_is_claimed_about(runs, table, control, step):
    """The same run plays the shuffled one, an earlier checkpoint of it the one that has memorised."""
    where = {"ref": "4", "metric": "mse_masked", "run": "a"}
    given = content(claim(controls=[control], where=where).model_dump())
    given["run"].append(given["run"][0] | {"role": "mixed"})
    given["study"][0] |= {"shuffled": "mixed", "memorised": "0"}
    (outcome,) = reproduced(paper_of(given), runs=runs, rows=[1]).outcomes
    assert outcome.controls == ((control, pytest.approx(row_of(table, step)["value"])),)


def test_every_shuffled_run_counts_where_fewer_runs_are_there(runs, table, tmp_path):
    given = content(claim(controls=["shuffled"]).model_dump())
    mixed = {"role": "mixed", "settings": SETTINGS | {"train.weight_decay": 0.1}}
    given["run"].append(given["run"][0] | mixed | {"name": "c", "seeds": "1,4"})
    given["study"][0] |= {"shuffled": "mixed"}
    shutil.copytree(runs / "a", tmp_path / "a")
    paper = paper_of(given)
    given["study"][0] |= {"role": "mixed"}
    train_missing(paper_of(given), runs=tmp_path, rows=[1])
    (outcome,) = reproduced(paper, runs=tmp_path, rows=[1]).outcomes
    shuffled = [f"{tmp_path}/c/seed-{seed}@4" for seed in (1, 4)]
    values = [row_of(experiments.ablation([ref], samples=8).frame)["value"] for ref in shuffled]
    assert values[0] != pytest.approx(values[1])
    assert outcome.controls == (("shuffled", pytest.approx(sum(values) / 2)),)


def of_small(monkeypatch, paper):
    """Lets the name of any paper stand for this one."""
    for function in (measure, reproduce):
        monkeypatch.setattr(sys.modules[function.__module__], "read_paper", lambda name: paper)


def test_what_is_written_and_shown(runs, tmp_path, monkeypatch, capsys):
    given = content(
        claim(
            says="It <b>stays</b>.", published="r/9 | 0.1", unit="of the norm", over="examples", headline=True
        ).model_dump(),
        claim(
            id="a-name-that-is-longer-than-its-column", row=2, study="t", holds={"above": 1e9}
        ).model_dump(),
    )
    paper = paper_of(given)
    found = reproduced(paper, runs=runs)
    found.write(tmp_path / "out")
    rows = json.loads((tmp_path / "out/claims.json").read_text())
    # An untrained model has an error below a billion, too.
    assert [row["verdict"] for row in rows] == ["not testable", "undecided"]
    assert [row["what"] for row in rows] == ["of the norm", ""]
    assert rows[0]["runs"] == [{"run": "a", "value": rows[0]["value"]}]
    assert rows[0]["untrained"] > 0
    assert pandas.read_csv(tmp_path / "out/claims.csv")["rule"].notna().all()
    page = (tmp_path / "out/index.html").read_text(encoding="utf-8")
    assert "It &lt;b&gt;stays" in page
    assert page.index("Headlines") < page.index("Claims")
    assert paper.run[1].command(str(runs)) in page.replace("&#x27;", "'")
    of_small(monkeypatch, paper)
    monkeypatch.setenv("COLUMNS", "80")
    out = str(tmp_path / "cli")
    arguments = ["reproduce", "small", "--runs", str(runs), "--out", out, "--measure"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(map(len, lines[:8])) <= 80
    (value,) = [each for each in lines if " value * " in each]
    assert value.split()[:2] == ["not", "testable"]
    assert " r/9 | 0.1 " in value
    assert "of the norm" in value
    assert " a-name-that-is-longer-than" in shown
    assert "Not measured: 1 run(s), 0.5 h of training; --train does both.\n0.5 h: interp-run train" in shown
    assert "It <b>stays</b>." not in shown
    assert "1 held" not in shown  # no score
    assert main([*arguments, "--verbose"]) == 0
    verbose = " ".join(capsys.readouterr().out.split())
    for said in ("It <b>stays</b>.", "Rule: value of @4, mse_masked", "(over examples).", "Untrained: "):
        assert said in verbose


def test_a_record_is_measured_once_and_checked_on_request(runs, tmp_path):
    """Verdicts need the file alone: the run may be gone. A number in it that is not the run's is found."""
    paper = paper_of(content(claim().model_dump()))
    records, folder = tmp_path / "records.jsonl", tmp_path / "runs"
    shutil.copytree(runs / "a", folder / "a")
    assert len(measure(paper, file=records, runs=folder, rows=[1]).records) == 2
    written = records.read_text()
    assert measure(paper, file=records, runs=folder, rows=[1]).records == ()
    assert records.read_text() == written
    assert check_records(paper, file=records, runs=folder) == []
    before = reproduce(paper, records=records, rows=[1]).frame()
    stored = read_file(records)
    key = ("s", "a", "")
    value = stored[key].columns.index("value")
    rows = [
        tuple(2 * cell if at == value else cell for at, cell in enumerate(row)) for row in stored[key].rows
    ]
    write_records(records, [*stored.values(), replace(stored[key], rows=tuple(rows))])
    found = check_records(paper, file=records, runs=folder)
    assert len(found) == len(rows)
    assert all(line.startswith("s on a: a ") and ": value was " in line for line in found)
    records.write_text(written)
    # A log alone, without weights to measure, is not said to differ.
    shutil.rmtree(folder / "a/checkpoints")
    assert check_records(paper, file=records, runs=folder) == []
    shutil.rmtree(folder)
    pandas.testing.assert_frame_equal(reproduce(paper, records=records, rows=[1]).frame(), before)
    # Of a study that measures otherwise, and of a run with other settings, it is no record.
    other = json.loads(json.dumps(content(claim().model_dump())))
    other["study"][0]["settings"]["samples"] = 4
    assert {each.verdict for each in reproduce(paper_of(other), records=records).outcomes} == {"not run"}
    other = content(claim().model_dump())
    other["run"] = [{**each, "settings": each["settings"] | {"model.d_model": 16}} for each in other["run"]]
    assert {each.verdict for each in reproduce(paper_of(other), records=records).outcomes} == {"not run"}
    records.write_text("nothing\n")
    with pytest.raises(UserError, match="line 1: no record of a measurement"):
        reproduce(paper, records=records)


def test_a_rule_that_is_changed_shows(runs):
    rules = [claim(), claim(holds={"below": 2.0}), claim(log=True), claim(says="It stays as it is.")]
    first, *others = [reproduced(paper_of(content(each.model_dump())), runs=runs) for each in rules]
    digests = [each.frame()["rule_digest"].tolist() for each in others]
    assert [each == first.frame()["rule_digest"].tolist() for each in digests] == [False, False, True]


def test_a_crash_is_told_after_everything_else_is_written(runs, tmp_path, monkeypatch, capsys):
    paper = paper_of(content(claim(where={"metric": "none"}).model_dump(), claim(id="u").model_dump()))
    of_small(monkeypatch, paper)
    assert main(["reproduce", "small", "--runs", str(runs), "--out", str(tmp_path), "--measure"]) == 2
    captured = capsys.readouterr()
    assert "claim value on a: no row has" in captured.err
    assert (tmp_path / "index.html").is_file()
    assert "undecided" in captured.out


@pytest.mark.parametrize(
    ("asked", "stored", "said"),
    [
        ({"model.d_model": 16}, {}, "its model.d_model is 8, not 16"),
        ({"train.seed": 3}, {}, "its train.seed is 0, not 3"),
        ({"train.train_parts": ["attn"]}, {}, "its train.train_parts is [], not ['attn']"),
        # What the paper's file leaves at its default tells runs apart too.
        ({}, {"task": {"name": "miiii"}}, "its task.name is miiii, not matrix-completion"),
        ({}, {"task": {"p_mask": 0.75}}, "its task.p_mask is 0.75, not "),
        ({}, {"model": {"own": {}}}, "its model.n_layers is None, not 1"),
        ({}, {"train": [1]}, "run.json is mangled: it has no config of task, model, train"),
        # What only says how a run was recorded does not, and a setting that is newer than it has its default.
        ({"train.log_every": 2, "train.checkpoint_every": 2}, {}, ""),
        ({}, {"task": {"p_mask": None}}, ""),
    ],
)
def test_a_folder_with_another_run_is_refused(runs, tmp_path, asked, stored, said):
    shutil.copytree(runs / "a", tmp_path / "a")
    whole = json.loads((tmp_path / "a/run.json").read_text())
    for section, values in stored.items():
        kept = {} if section == "model" else whole["config"][section]
        changed = {**kept, **values} if isinstance(values, dict) else values
        if isinstance(changed, dict):
            changed = {name: value for name, value in changed.items() if value is not None}
        whole["config"][section] = changed
    (tmp_path / "a/run.json").write_text(json.dumps(whole))
    given = content(claim().model_dump())
    given["run"][0]["settings"] = SETTINGS | asked
    if not said:
        assert locate_all(paper_of(given), "cpu", tmp_path)[0].base == f"{tmp_path}/a"
        return
    with pytest.raises(UserError) as raised:
        locate_all(paper_of(given), "cpu", tmp_path)
    assert said in str(raised.value)


def test_seeds_that_are_listed_are_trained_and_read_one_by_one(runs, tmp_path):
    given = content(claim().model_dump())
    given["run"] = [{**given["run"][0], "seeds": "0,2"}]
    paper = paper_of(given)
    assert train_missing(paper, runs=tmp_path, rows=[1]) == [tmp_path / "a/seed-0", tmp_path / "a/seed-2"]
    assert [each.names for each in locate_all(paper, "cpu", tmp_path)] == [{0: "a/seed-0", 2: "a/seed-2"}]
    shutil.rmtree(tmp_path / "a/seed-2")
    (lacking,) = reproduced(paper, runs=tmp_path, rows=[1]).missing
    assert (lacking.name, lacking.hours) == ("a/seed-2", 0.25)


def test_training_what_is_missing_gives_what_the_command_gives(runs, tmp_path):
    given = content(claim().model_dump())
    given["run"] = [{**given["run"][0], "seeds": "0:2"}]
    paper = paper_of(given)
    folders = train_missing(paper, runs=tmp_path)
    assert folders == [tmp_path / "a/seed-0", tmp_path / "a/seed-1"]
    # Seed 0 is the run that was trained for the other tests.
    weights = "checkpoints/00000004/model.safetensors"
    assert (folders[0] / weights).read_bytes() == (runs / "a" / weights).read_bytes()
    assert (folders[1] / weights).read_bytes() != (folders[0] / weights).read_bytes()
    assert train_missing(paper, runs=tmp_path) == []
    # Interrupted: nothing is decided on it, and it goes on where it stopped.
    trained = (folders[1] / weights).read_bytes()
    shutil.rmtree((folders[1] / weights).parent)
    assert {each.verdict for each in reproduced(paper, runs=tmp_path).outcomes} == {"not run"}
    assert train_missing(paper, runs=tmp_path) == folders
    assert (folders[1] / weights).read_bytes() == trained
    found = reproduced(
        paper_of(given | {"claim": [claim(id="u", row=2, study="t", reduce="mean").model_dump()]}),
        runs=tmp_path,
    )
    (outcome,) = found.outcomes
    assert (outcome.verdict, outcome.n_runs) == ("undecided", 2)
    assert [run.rpartition("/")[2] for run, _ in outcome.runs] == ["seed-0", "seed-1"]
    # One of the seeds alone: it is read, and the other is named and trained by itself.
    shutil.rmtree(folders[1])
    (outcome,) = reproduced(found.paper, runs=tmp_path).outcomes
    assert (outcome.n_runs, outcome.value) == (1, found.outcomes[0].runs[0][1])
    assert "without runs that are not measured: seed-1" in outcome.reason
    assert train_missing(paper, runs=tmp_path) == folders[1:]
    assert (folders[1] / weights).read_bytes() == trained


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["other"], "no paper 'other'"),
        (["matrix-completion", "--rows", "32"], "--rows 32: matrix-completion has rows 1 to 31"),
        (["matrix-completion", "--rows", "five"], "--rows 'five'"),
        (["matrix-completion", "--preset", "huge"], "--preset 'huge'"),
        (["matrix-completion", "--device", "tpu"], "--device 'tpu'"),
        (["matrix-completion", "--device", "cuda:1"], "--device cuda:1 is for --train"),
    ],
)
def test_wrong_options_are_refused_in_one_line(arguments, said, capsys):
    assert main(["reproduce", *arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
