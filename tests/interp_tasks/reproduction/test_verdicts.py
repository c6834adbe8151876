"""Claims judged from rows by hand: numbers, intervals and verdicts that a page of paper gives."""

from types import SimpleNamespace

import pytest

from interp_tasks.measurement.table import COLUMNS
from interp_tasks.published import Claim
from interp_tasks.reproduction.numbers import Seed, Unmeasured, claim_numbers, rows_where
from interp_tasks.reproduction.records import tables_of
from interp_tasks.reproduction.reproduction import corrected
from interp_tasks.reproduction.verdicts import Outcome, judge

WHERE = {"ref": "4", "metric": "mse"}


def claim(**changes):
    entry = {"id": "c", "row": 1, "study": "s", "source": "1", "says": "It stays.", "where": WHERE}
    return Claim(**entry | {"holds": {"below": 1e9}} | changes)


def row(value=1.0, run="a", ref="4", metric="mse", **more):
    about = {"run": run, "ref": f"{run}@{ref}", "metric": metric, "value": value, "step": 4, "n_runs": 1}
    empty = dict.fromkeys((*COLUMNS, "variance"))
    return {**empty, **about, "value_ci_low": 0.5, "value_ci_high": 1.5, **more}


def seeds(*values, run="x", **more):
    """Rows as several seeds have them, each with its own number."""
    return [row(value, f"{run}/seed-{seed}", **more) for seed, value in enumerate(values)]


def values(claim, rows, seeds=None):
    return [each.value for each in claim_numbers(claim, rows, seeds).numbers]


TWO = [row(3.0, ref="0", baseline=4.0), row(1.0, effect=-1.0, baseline=2.0, variance=0.25)]


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({}, 1.0),
        ({"column": "baseline"}, 2.0),
        ({"column": "effect", "per": "baseline"}, -0.5),
        ({"per": "variance"}, 4.0),
        ({"per": {"ref": "0", "metric": "mse"}}, 1 / 3),
        ({"per": {"ref": "0", "metric": "mse", "column": "baseline"}}, 0.25),
        ({"where": {"metric": "mse"}, "reduce": "mean"}, 2.0),
        ({"where": {"metric": "mse"}, "reduce": "max"}, 3.0),
        ({"where": {"metric": "mse"}, "reduce": "max / min"}, 3.0),
        ({"where": {"metric": "mse"}, "reduce": "min", "per": "baseline"}, 0.5),
    ],
)
def test_a_number_is_one_of_the_table_reduced_and_divided(changes, value):
    (found,) = claim_numbers(claim(**changes), TWO).numbers
    assert found.value == pytest.approx(value)
    assert found.over_examples == ((0.5, 1.5) if not changes else None)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"metric": "mse"}, "2 rows have"),
        ({"metric": "accuracy"}, "no row has"),
        ({"colour": "red"}, "no column 'colour'"),
    ],
)
def test_a_number_that_is_not_one_is_an_error_and_no_verdict(where, said):
    with pytest.raises(Unmeasured, match=said):
        claim_numbers(claim(where=where), TWO)
    assert judge(claim(where=where), TWO, "a").verdict == "error"
    # Of a row that may be absent it is none.
    found = judge(claim(where=where, absent="no head is of this class"), TWO, "a").verdict
    assert found == ("not run" if said == "no row has" else "error")


def test_rows_of_a_run_differ_where_it_has_two_of_them_and_seeds_that_lack_a_row_are_counted():
    """The run with one row of the three has nothing to compare, the one with two is compared on these."""
    names = ["first", "second", "third"]
    of_run = {0: (1.0, 1.2, 3.0), 1: (2.0, 1.0), 2: (5.0,)}
    rows = [
        row(value, f"r/seed-{run}", variant=name)
        for run, values in of_run.items()
        for name, value in zip(names, values, strict=False)
    ]
    spread = {"where": {"variant": names, "metric": "mse"}, "reduce": "max / min", "absent": "it has one"}
    assert values(claim(**spread), rows) == [3.0, 2.0]
    assert (
        "2 of 3 seeds have such a row; of the others, it has one" in judge(claim(**spread), rows, "r").reason
    )
    assert judge(claim(**spread), rows[-1:], "r").verdict == "not run"
    # Of a number that is not above 0 nothing is so many times another.
    below = [{**each, "value": each["value"] - 1.0} for each in rows]
    assert judge(claim(**spread), below, "r").value is None


def test_runs_are_named_by_their_end_and_draws_left_out_unless_asked_for():
    for ends in ("a", ["a"], ["at no scale", "a"], "*"):
        assert len(rows_where(TWO, {"run": ends})) == 2
    assert rows_where(TWO, {"run": ["at no scale"]}) == []
    drawn = [*TWO, *({**each, "value": 9.0, "draw": 0} for each in TWO)]
    assert claim_numbers(claim(), drawn) == claim_numbers(claim(), TWO)
    assert values(claim(where=WHERE | {"draw": 0}), drawn) == [9.0]


def test_what_is_of_no_run_or_of_several_has_the_interval_of_its_study():
    method = judge(claim(holds={"below": 1.6}), [row(n_runs=0)], "a")
    assert (method.verdict, method.interval, method.n_runs, method.low) == ("held", "over examples", 0, 0.5)
    pooled = judge(claim(), [row(n_runs=7)], "a")
    assert (pooled.verdict, pooled.interval, pooled.n_runs) == ("held", "the study's, over 7 runs", 7)
    assert judge(claim(), [row(n_runs=2)], "a").verdict == "undecided"
    none = judge(claim(), [row(n_runs=7, value_ci_low=None)], "a")
    assert none.reason == "no interval: the study has none of this number"


@pytest.mark.parametrize(("bound", "verdict"), [(1.6, "held"), (1.0, "undecided"), (0.4, "failed")])
def test_a_claim_about_a_method_is_judged_over_examples_on_one_run(bound, verdict):
    outcome = judge(claim(over="examples", holds={"below": bound}), [row()], "a")
    assert (outcome.verdict, outcome.low, outcome.high) == (verdict, 0.5, 1.5)
    unknown = judge(claim(over="examples"), [row(value_ci_low=None)], "a")
    assert (unknown.verdict, unknown.reason) == ("undecided", "the study has no interval of this number")


@pytest.mark.parametrize(
    ("bounds", "verdict"),
    [
        ({"below": 4.5}, "held"),
        ({"below": 4.4}, "undecided"),
        ({"above": 4.4}, "undecided"),
        ({"above": 4.5}, "failed"),
        ({"above": -0.5, "below": 4.5}, "held"),
        ({"above": -0.4, "below": 4.5}, "undecided"),
        ({"above": 5.0, "below": 6.0}, "failed"),
    ],
)
def test_a_verdict_is_of_the_whole_interval_over_runs(bounds, verdict):
    """1, 2, 3: 2 ± 4.303 · 1/√3, which is -0.484 to 4.484."""
    outcome = judge(claim(holds=bounds), seeds(1.0, 2.0, 3.0), "x")
    assert outcome.verdict == verdict
    assert (outcome.value, outcome.n_runs, outcome.interval) == (2.0, 3, "t, over 3 runs")
    assert (outcome.low, outcome.high) == pytest.approx((-0.4841, 4.4841), abs=1e-4)
    assert outcome.runs == (("x/seed-0", 1.0), ("x/seed-1", 2.0), ("x/seed-2", 3.0))
    assert (outcome.p < 0.05) == (verdict != "undecided")
    assert ("reaches across" in outcome.reason) == (verdict == "undecided")


def test_runs_that_agree_have_a_verdict_and_no_p_value():
    """A t test of numbers without a spread would say p = 0, of three runs as of three hundred."""
    alike = judge(claim(holds={"below": 1.5}), seeds(1.0, 1.0, 1.0), "x")
    assert (alike.verdict, alike.low, alike.high, alike.p) == ("held", 1.0, 1.0, None)
    assert alike.reason == "all 3 runs give the same number: no spread, and no p-value"
    # The mean of three tenths is not a tenth, by 1e-17, and so their spread not 0.
    assert judge(claim(), seeds(0.1, 0.1, 0.1), "x").p is None
    assert judge(claim(), seeds(1.0, 1.0, 1.01), "x").p is not None
    assert judge(claim(), [row(n_runs=0, value_ci_low=1.0, value_ci_high=1.0)], "a").p is None


def test_orders_of_magnitude_are_judged_on_their_logarithms():
    three = seeds(10.0, 100.0, 1000.0)
    plain, logged = (judge(claim(holds={"above": 0.1}, log=log), three, "x") for log in (False, True))
    assert plain.verdict == "undecided"
    assert (logged.verdict, logged.value) == ("held", pytest.approx(100))
    # 2 ± 4.303/√3 powers of ten
    assert (logged.low, logged.high) == pytest.approx((10**-0.4841, 10**4.4841), rel=1e-3)
    none = judge(claim(holds={"above": 0.1}, log=True), seeds(1.0, 0.0, 2.0), "x")
    assert (none.verdict, none.value) == ("undecided", None)
    assert "no logarithm" in none.reason


def test_a_share_of_runs_has_an_exact_interval():
    """Five of five: at least the fifth root of 0.025, and twice a half to the fifth."""
    every = claim(over="share of runs", holds={"above": 0.5})
    five = judge(every, seeds(*[1.0] * 5), "x")
    assert (five.verdict, five.value, five.high) == ("undecided", 1.0, 1.0)
    assert (five.low, five.p) == pytest.approx((0.025**0.2, 2 * 0.5**5))
    assert judge(every, seeds(*[1.0] * 6), "x").verdict == "held"
    few = judge(every, seeds(1.0, *[0.0] * 9), "x")
    assert (few.verdict, few.interval) == ("failed", "exact binomial, over 10 runs")
    assert few.p == pytest.approx(2 * 11 * 0.5**10)


def test_an_extreme_has_its_median_beside_it():
    several = [row(v + seed, f"x/seed-{seed}", variant=v) for seed in (0, 1) for v in (1.0, 2.0, 9.0)]
    found = judge(claim(reduce="min"), several, "x")
    assert (found.value, found.median) == (1.5, 2.5)
    assert judge(claim(), seeds(1.0, 2.0), "x").median is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((1.0,), "one training run, of three at least; this one lies within the rule"),
        ((9.0,), "one training run, of three at least; this one does not"),
        ((1.0, 9.0), "2 training runs, of three at least; 1 of them within the rule"),
    ],
)
def test_fewer_than_three_runs_decide_nothing(values, said):
    outcome = judge(claim(holds={"below": 5.0}), seeds(*values), "x")
    assert (outcome.verdict, outcome.reason, outcome.low) == ("undecided", said, None)
    assert (outcome.n_runs, outcome.value) == (len(values), sum(values) / len(values))


def test_a_step_that_a_run_did_not_reach_is_later_than_its_last():
    about = {"metric": "step at 95%"}
    late = row(None, "x/seed-2", step=2000, **about)
    found = judge(claim(where=about, holds={"below": 2500.0}), [late], "x")
    too_soon = (
        "one training run, of three at least; a run ends too soon: the number is known to lie above 2000"
    )
    assert (found.verdict, found.value, found.reason) == ("undecided", None, too_soon)
    rows = [*seeds(500.0, 700.0, **about), late]
    found = judge(claim(where=about), rows, "x")
    assert (found.verdict, found.bounds) == ("undecided", (500.0, float("inf")))
    assert "an interval of the median takes six" in found.reason
    share = claim(where=about, per={"metric": "steps"}, holds={"above": 0.1})
    of_steps = [row(1000.0, each["run"], metric="steps") for each in rows]
    assert claim_numbers(share, [*rows, *of_steps]).numbers[2].bounds == (2.0, float("inf"))
    six = [*seeds(500.0, 600.0, 700.0, 800.0, 900.0, **about), {**late, "run": "x/seed-9"}]
    found = judge(claim(where=about, holds={"above": 400.0}), six, "x")
    assert (found.verdict, found.interval, found.low) == ("held", "of the median, over 6 runs", 500.0)
    assert found.reason == "1 of 6 runs end too soon: their numbers are known to lie above 2000"


def test_runs_are_divided_by_those_of_the_same_seed():
    """2/1, 2/4, 9/3: not the ratio of the means, and not in another order."""
    mine, other = seeds(2.0, 2.0, 9.0), seeds(1.0, 4.0, 3.0, run="y")[::-1]
    ratio = claim(where={**WHERE, "run": "x/seed-*"}, per={**WHERE, "run": "y/seed-*"})
    assert values(ratio, mine + other) == [2.0, 0.5, 3.0]
    # Without one of the seeds they cannot be paired: Fieller's interval, over the smaller group.
    fewer = [*mine, other[0], other[2]]
    found = claim_numbers(ratio, fewer)
    assert (len(found.numbers), found.against, found.n_runs) == (3, (3.0, 1.0), 2)
    assert judge(ratio, fewer, "x").verdict == "undecided"
    outcome = judge(ratio, [*mine, row(2.0, "x/seed-3"), *other], "x")
    assert (outcome.n_runs, outcome.value) == (3, pytest.approx((2 + 2 + 9 + 2) / 4 / (8 / 3)))
    # One of the other condition is one training run, and stands once in the tables of all that it is beside.
    once = tables_of(SimpleNamespace(table=[each, other[2]]) for each in mine)
    assert len(once) == 4
    assert judge(ratio, once, "x").reason == "one training run, of three at least; 3 are divided by it"


def test_what_is_said_of_several_conditions_is_measured_again_with_each_seed():
    """The largest over two conditions, seed by seed: 4, 5, 6; the fourth seed is of one condition alone."""
    both = [*seeds(4.0, 1.0, 6.0, 99.0), *seeds(3.0, 5.0, 2.0, run="y")]
    assert values(claim(reduce="max"), both) == [4.0, 5.0, 6.0]
    with pytest.raises(Unmeasured, match="of 2 conditions"):
        claim_numbers(claim(), both)
    # Without seeds they are one measurement.
    named = [{**each, "run": each["run"].replace("/seed-", "-")} for each in both]
    assert values(claim(reduce="max"), named) == [99.0]
    # What the paper's file says of runs counts more than their names.
    same = {each["run"]: Seed("one", index) for index, each in enumerate(both)}
    assert claim_numbers(claim(), both, same).n_runs == 7


def test_a_claim_that_a_control_passes_is_not_held():
    three, below = seeds(1.0, 1.1, 1.2), claim(holds={"below": 5.0})
    passed = judge(below, three, "x", controls={"untrained": [row(1.0)], "shuffled": [row(9.0)]})
    assert (passed.verdict, passed.reason) == ("not testable", "an untrained model passes too")
    assert passed.controls == (("untrained", 1.0), ("shuffled", 9.0))
    held = judge(below, three, "x", controls={"untrained": [row(9.0)]})
    assert (held.verdict, held.controls) == ("held", (("untrained", 9.0),))
    # What fails stays failed, and what has no number on a control does not pass there.
    failed = judge(claim(holds={"above": 5.0}), three, "x", controls={"untrained": [row(9.0)]})
    assert failed.verdict == "failed"
    empty = judge(below, three, "x", controls={"untrained": [row(None)]})
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


def test_what_has_no_number_decides_nothing():
    empty = judge(claim(), [row(None)], "a")
    assert (empty.verdict, empty.value) == ("undecided", None)
    outcome = judge(claim(column="effect", per="baseline"), [row(effect=1.0, baseline=0.0)], "a")
    assert (outcome.verdict, outcome.value, outcome.low) == ("undecided", None, None)
    assert "a share of 0" in outcome.reason
