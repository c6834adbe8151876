"""Claims judged from rows by hand: numbers, intervals and verdicts that a page of paper gives."""

import math

import pytest

from interp_tasks.published import Claim
from interp_tasks.reproduction.claim_verdicts import UnmeasuredError, claim_numbers, filter_rows, judge_claim
from interp_tasks.reproduction.judge_paper import frame_with_holm
from interp_tasks.reproduction.runs_and_records import (
    KEPT,
    RunIdentity,
    StudyRecord,
    rows_of_records,
    split_seed,
)

WHERE = {"ref": "4", "metric": "mse"}


def claim(**changes):
    entry = {"id": "c", "row": 1, "study": "s", "source": "1", "says": "It stays.", "where": WHERE}
    return Claim(**entry | {"holds": {"below": 1e9}} | changes)


def row(value=1.0, run="a", ref="4", metric="mse", **more):
    about = {"run": run, "ref": f"{run}@{ref}", "metric": metric, "value": value, "step": 4, "n_runs": 1}
    identity = dict(zip(("condition", "trained_seed"), split_seed(run), strict=True))
    return {**dict.fromkeys(KEPT), **about, **identity, "value_ci_low": 0.5, "value_ci_high": 1.5, **more}


def seeds(*values, run="x", **more):
    """Rows as several seeds have them, each with its own number."""
    return [row(value, f"{run}/seed-{seed}", **more) for seed, value in enumerate(values)]


def values(claim, rows):
    return [each.value for each in claim_numbers(claim, rows).numbers]


def verdict(claim, rows, *names, **options):
    """Returns these columns of a verdict, ``verdict`` first."""
    found = judge_claim(claim, rows, **options)
    return tuple(found.get(name) for name in ("verdict", *names))


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
    (found, reason) = verdict(claim(where=where), TWO, "reason")
    assert found == "error"
    assert said in reason
    # Of a row that may be absent it is none.
    found = judge_claim(claim(where=where, absent="no head is of this class"), TWO)["verdict"]
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
    spread = claim(where={"variant": names, "metric": "mse"}, reduce="max / min", absent="it has one")
    assert values(spread, rows) == [3.0, 2.0]
    assert "2 of 3 seeds have such a row; of the others, it has one" in judge_claim(spread, rows)["reason"]
    assert verdict(spread, rows[-1:]) == ("not run",)
    # Of a number that is not above 0 nothing is so many times another.
    below = [{**each, "value": each["value"] - 1.0} for each in rows]
    assert judge_claim(spread, below)["value"] is None


def test_runs_are_named_by_their_end_and_draws_left_out_unless_asked_for():
    for ends in ("a", ["a"], ["at no scale", "a"], "*"):
        assert len(filter_rows(TWO, {"run": ends})) == 2
    assert filter_rows(TWO, {"run": ["at no scale"]}) == []
    drawn = [*TWO, *({**each, "value": 9.0, "draw": 0} for each in TWO)]
    assert claim_numbers(claim(), drawn) == claim_numbers(claim(), TWO)
    assert values(claim(where=WHERE | {"draw": 0}), drawn) == [9.0]


THREE = seeds(1.0, 2.0, 3.0)
EXTREMES = [row(v + seed, f"x/seed-{seed}", variant=v) for seed in (0, 1) for v in (1.0, 2.0, 9.0)]
#: 1, 2, 3: 2 ± 4.303 · 1/√3; and so many powers of ten. Five of five: the fifth root of 0.025.
T3, LOG3, FIVE = (-0.4841, 4.4841), (10**-0.4841, 10**4.4841), (0.025**0.2, 1.0)
EXAMPLES = {"over": "examples"}
LOG = {"log": True, "holds": {"above": 0.1}}
SHARE = {"over": "share of runs", "holds": {"above": 0.5}}
ONE = "one training run, of three at least; this one "
ALIKE = "all 3 runs give the same number: no spread, and no p-value"
EMPTY = "there is no such number: its row is empty, or it is a share of 0"


@pytest.mark.parametrize(
    ("changes", "rows", "found", "interval", "about"),
    [
        # The whole interval over runs decides.
        ({"holds": {"below": 4.5}}, THREE, "held", T3, {"value": 2.0, "n_runs": 3, "interval": "t, over 3 runs"}),
        ({"holds": {"below": 4.4}}, THREE, "undecided", T3, {"reason": "the interval reaches across the rule's bound"}),
        ({"holds": {"above": 4.4}}, THREE, "undecided", T3, {}),
        ({"holds": {"above": 4.5}}, THREE, "failed", T3, {}),
        ({"holds": {"above": -0.5, "below": 4.5}}, THREE, "held", T3, {}),
        ({"holds": {"above": -0.4, "below": 4.5}}, THREE, "undecided", T3, {}),
        ({"holds": {"above": 5.0, "below": 6.0}}, THREE, "failed", T3, {}),
        # Of a method, and of what is of several runs already, the study's own interval does.
        ({"holds": {"below": 1.6}}, [row(n_runs=0)], "held", (0.5, 1.5), {"interval": "over examples", "n_runs": 0}),
        ({}, [row(n_runs=7)], "held", (0.5, 1.5), {"interval": "the study's, over 7 runs", "n_runs": 7}),
        ({}, [row(n_runs=2)], "undecided", None, {"n_runs": 2}),
        ({}, [row(n_runs=7, value_ci_low=None)], "undecided", None, {"reason": "no interval: the study has none"}),
        (EXAMPLES | {"holds": {"below": 1.6}}, [row()], "held", (0.5, 1.5), {}),
        (EXAMPLES | {"holds": {"below": 1.0}}, [row()], "undecided", (0.5, 1.5), {}),
        (EXAMPLES | {"holds": {"below": 0.4}}, [row()], "failed", (0.5, 1.5), {}),
        (EXAMPLES, [row(value_ci_low=None)], "undecided", None, {"reason": "the study has no interval of this number"}),
        # A t test of numbers without a spread would say p = 0. The mean of three tenths is not a tenth, by 1e-17.
        ({"holds": {"below": 1.5}}, seeds(1.0, 1.0, 1.0), "held", (1.0, 1.0), {"p": None, "reason": ALIKE}),
        ({}, seeds(0.1, 0.1, 0.1), "held", (0.1, 0.1), {"p": None}),
        ({}, [row(n_runs=0, value_ci_low=1.0, value_ci_high=1.0)], "held", (1.0, 1.0), {"p": None}),
        # Orders of magnitude are judged on their logarithms.
        (LOG, seeds(10.0, 100.0, 1000.0), "held", LOG3, {"value": 100.0}),
        (LOG | {"log": False}, seeds(10.0, 100.0, 1000.0), "undecided", (-989.94, 1729.94), {"value": 370.0}),
        (LOG, seeds(1.0, 0.0, 2.0), "undecided", None, {"value": None}),
        # A share of runs has an exact interval.
        (SHARE, seeds(*[1.0] * 5), "undecided", FIVE, {"value": 1.0, "p": 2 * 0.5**5}),
        (SHARE, seeds(*[1.0] * 6), "held", (0.025 ** (1 / 6), 1.0), {"interval": "exact binomial, over 6 runs"}),
        (SHARE, seeds(1.0, *[0.0] * 9), "failed", (0.00253, 0.44502), {"p": 2 * 11 * 0.5**10}),
        # Fewer than three runs decide nothing; an extreme has its median beside it.
        ({"holds": {"below": 5.0}}, seeds(1.0), "undecided", None, {"reason": f"{ONE}lies within the rule"}),
        ({"holds": {"below": 5.0}}, seeds(9.0), "undecided", None, {"reason": f"{ONE}does not"}),
        (
            *({"holds": {"below": 5.0}}, seeds(1.0, 9.0), "undecided", None),
            {"reason": "2 training runs, of three at least; 1 of them within the rule", "value": 5.0, "median": None},
        ),
        ({"reduce": "min"}, EXTREMES, "undecided", None, {"value": 1.5, "median": 2.5}),
        # What has no number decides nothing.
        ({}, [row(None)], "undecided", None, {"value": None, "reason": EMPTY}),
        ({"column": "effect", "per": "baseline"}, [row(effect=1.0, baseline=0)], "undecided", None, {"reason": EMPTY}),
    ],
)  # fmt: skip
def test_a_verdict_is_that_of_its_interval(changes, rows, found, interval, about):
    outcome = judge_claim(claim(**changes), rows)
    assert outcome["verdict"] == found
    ends = [outcome.get(name) for name in ("value_ci_low", "value_ci_high")]
    assert ends == ([None, None] if interval is None else pytest.approx(interval, rel=1e-3))
    assert {name: outcome[name] for name in about} == pytest.approx(about)
    if outcome.get("p") is not None:
        assert (outcome["p"] < 0.05) == (found != "undecided")


def test_a_step_that_a_run_did_not_reach_is_later_than_its_last():
    about = {"metric": "step at 95%"}
    late = row(None, "x/seed-2", step=2000, **about)
    found = verdict(claim(where=about, holds={"below": 2500.0}), [late], "value", "reason")
    too_soon = (
        "one training run, of three at least; a run ends too soon: the number is known to lie above 2000"
    )
    assert found == ("undecided", None, too_soon)
    rows = [*seeds(500.0, 700.0, **about), late]
    found = verdict(claim(where=about), rows, "at_least", "at_most", "reason")
    assert found[:3] == ("undecided", 500.0, math.inf)
    assert found[3].startswith("no interval: 1 of 3 runs end too soon")
    # As shares of what every run has they are bounded: the widest t interval.
    share = claim(where={"metric": "steps"}, per=about, holds={"above": 0.1})
    of_steps = [row(1000.0, each["run"], metric="steps") for each in rows]
    assert claim_numbers(share, [*rows, *of_steps]).numbers[2].bounds == (0.0, 0.5)
    found = verdict(share, [*rows, *of_steps], "interval", "value_ci_low")
    assert found == ("undecided", "t, over 3 runs, of 1 of which bounds alone are known", 0.0)


def test_runs_are_divided_by_those_of_the_same_seed():
    """2/1, 2/4, 9/3: not the ratio of the means, and not in another order."""
    mine, other = seeds(2.0, 2.0, 9.0), seeds(1.0, 4.0, 3.0, run="y")[::-1]
    ratio = claim(where={**WHERE, "run": "x/seed-*"}, per={**WHERE, "run": "y/seed-*"})
    assert values(ratio, mine + other) == [2.0, 0.5, 3.0]
    # Without one of the seeds they cannot be paired: one number, that of the means, which decides nothing.
    fewer = [*mine, other[0], other[2]]
    assert values(ratio, fewer) == [pytest.approx(13 / 3 / 2)]
    assert verdict(ratio, fewer, "n_runs") == ("undecided", 1)
    with pytest.raises(UnmeasuredError, match="2 rows have"):
        claim_numbers(claim(where={**WHERE, "run": "x/seed-*"}, per={**WHERE, "run": "[yz]/seed-0"}),
                      [*mine, other[2], row(1.0, "z/seed-0")])  # fmt: skip


def test_a_table_has_what_several_records_say_of_one_other_model_once():
    """Runs are known by their records, others by their names."""
    columns, other = ("run", "value"), ("y/seed-2", 3.0)
    records = [
        StudyRecord("s", name, "", (RunIdentity(name, seed, 4, "config"),), "", {}, "", columns, ((name, 1.0), other))
        for seed, name in enumerate(("x", "z"))
    ]  # fmt: skip
    found = [(each["run"], each["condition"], each["trained_seed"]) for each in rows_of_records(records)]
    assert found == [("x", "config", 0), ("y/seed-2", "y/", 2), ("z", "config", 1)]


def test_what_is_said_of_several_conditions_is_measured_again_with_each_seed():
    """The largest over two conditions, seed by seed: 4, 5, 6; the fourth seed is of one condition alone."""
    both = [*seeds(4.0, 1.0, 6.0, 99.0), *seeds(3.0, 5.0, 2.0, run="y")]
    assert values(claim(reduce="max"), both) == [4.0, 5.0, 6.0]
    for changes, rows, said in (({}, both, "of 2 conditions"), ({"reduce": "max"}, both[2:5], "no seed")):
        with pytest.raises(UnmeasuredError, match=said):
            claim_numbers(claim(**changes), rows)


def test_a_claim_that_a_control_passes_is_not_held():
    three, below = seeds(1.0, 1.1, 1.2), claim(holds={"below": 5.0})
    controls = {"untrained": [row(1.0)], "shuffled": [row(9.0)]}
    passed = verdict(below, three, "reason", "untrained", "shuffled", controls=controls)
    assert passed == ("not testable", "an untrained model passes too", 1.0, 9.0)
    alone = {"untrained": [row(9.0)]}
    assert verdict(below, three, "untrained", controls=alone) == ("held", 9.0)
    # What fails stays failed, and what has no number on a control does not pass there.
    assert verdict(claim(holds={"above": 5.0}), three, controls=alone) == ("failed",)
    for empty in ([row(None)], []):
        assert verdict(below, three, "untrained", controls={"untrained": empty}) == ("held", None)


def test_holms_correction_is_over_the_headlines_of_a_paper():
    def outcome(p, headline=True, verdict="held", name="a"):
        return {
            "claim": name,
            "headline": headline,
            "is_published": True,
            "verdict": verdict,
            "p": p,
            "reason": "",
        }

    given = [outcome(0.01), outcome(0.03), outcome(0.03, headline=False), outcome(None), outcome(0.02)]
    # Of a claim that is decided on the published configuration other conditions do not count.
    found = frame_with_holm([*given, outcome(0.001) | {"is_published": False}])
    assert found["p_holm"].dropna().tolist() == pytest.approx([0.03, 0.04, 0.04])
    assert found["headline"].tolist() == [True, True, False, True, True, False]
    assert set(found["verdict"]) == {"held"}
    found = frame_with_holm([outcome(0.03), outcome(0.04), outcome(0.5, verdict="undecided")])
    assert set(found["verdict"]) == {"undecided"}
    assert found["reason"][0] == "not after Holm's correction over 3 headline verdicts: held alone"
