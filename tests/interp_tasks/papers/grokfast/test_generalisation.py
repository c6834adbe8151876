"""``generalisation`` on made-up logs whose crossings are known, censored runs and pairs included."""

import math

import pytest

from interp_tasks.experiments import COLUMNS, generalisation
from interp_tasks.measurement.level_crossing_steps import first_and_lasting_steps
from interp_tasks.papers.grokfast.generalisation import view_rows
from tests.interp_tasks.logs import write_run
from tests.interp_tasks.rows import row_of


def ramp(at, until=1000):
    """0, then exactly 0.95 at a step, 1 afterwards: linear between, so that the crossing is that step."""
    return {step: 0.0 if step < at else 0.95 if step == at else 1.0 for step in range(0, until + 1, 100)}


def write(path, validation, train=None, seed=0):
    return write_run(path, validation, train, task={"name": "miiii"}, train_config={"seed": seed})


def row(result, run, variant, metric, split="validation"):
    return row_of(result.frame, run=run, variant=variant, metric=metric, split=split)


def test_first_and_for_good_by_hand():
    """0.9 at 0, 1.0 at 10, 0.9 at 20, 1.0 at 30: level 0.95 at 5, and for good at 25."""
    assert first_and_lasting_steps([0, 10, 20, 30], [0.9, 1.0, 0.9, 1.0], 0.95) == pytest.approx((5, 25))
    assert first_and_lasting_steps([0, 10, 20], [0.9, 1.0, 0.9], 0.95) == pytest.approx((5, math.inf))
    # Linear from what it was a step before, not from the largest until then.
    assert first_and_lasting_steps([0, 10, 20], [0.9, 0.0, 1.0], 0.95) == pytest.approx((19.5, 19.5))
    assert first_and_lasting_steps([0, 10], [0.1, 0.2], 0.95) == (math.inf, math.inf)
    assert first_and_lasting_steps([3, 10], [1.0, 1.0], 0.95) == (3, 3)
    assert first_and_lasting_steps([], [], 0.95) == (math.inf, math.inf)


def test_the_table_of_one_run(tmp_path):
    validation = {
        "accuracy": ramp(800),
        **{f"accuracy_{q}": ramp(step) for q, step in ((2, 200), (3, 400), (11, 800))},
        "loss_11": {step: 1 - value for step, value in ramp(800).items()},
    }
    train = {name: ramp(300) for name in ("accuracy", "accuracy_2", "accuracy_3", "accuracy_11")}
    run = write(tmp_path / "run", validation, train)
    found = generalisation(run)
    assert tuple(found.frame.columns) == COLUMNS
    for q, step in ((2, 200), (3, 400), (11, 800)):
        one = row(found, run, f"accuracy_{q}", "step at 95%")
        assert one["value"] == pytest.approx(step)
        assert one["baseline"] == pytest.approx(300)
        assert one["effect"] == pytest.approx(step - 300)
        assert row(found, run, f"accuracy_{q}", "reached 95%")["value"] == 1
    then = {
        q: row(found, run, f"accuracy_{q}", "validation when train is at 95%")["value"] for q in (2, 3, 11)
    }
    assert then == {2: 1, 3: 0, 11: 0}
    assert row(found, run, "accuracy_11", "rank correlation with its loss")["value"] == pytest.approx(-1)
    assert math.isnan(row(found, run, "accuracy_2", "rank correlation with its loss")["value"])
    assert row(found, run, "order of all answers", "last step / first step")["value"] == pytest.approx(4)


def test_a_censored_run_is_no_number(tmp_path):
    never = write(tmp_path / "never", {"accuracy_2": ramp(900, 700), "accuracy_3": ramp(900, 700)})
    for metric in ("last step / first step", "pairs in order"):
        assert math.isnan(row(generalisation(never), never, "order of all answers", metric)["value"])
    run = write(tmp_path / "run", {"accuracy_2": ramp(300, 700), "accuracy_3": ramp(900, 700)})
    found = generalisation(run)
    for metric in ("step at 95%", "step at 95% for good"):
        assert math.isnan(row(found, run, "accuracy_3", metric)["value"])
    assert row(found, run, "accuracy_3", "reached 95%")["value"] == 0
    assert math.isnan(row(found, run, "order of all answers", "last step / first step")["value"])
    assert row(found, run, "order of all answers", "pairs in order")["value"] == 1
    shown = view_rows(found.frame).set_index("variant")
    assert shown.loc["accuracy_3", "validation"] == ">700"
    assert shown.loc["accuracy_2", "validation"] == "300"


def test_later_ties_do_not_lower_the_correlation_with_the_loss(tmp_path):
    """Accuracy rises to its ceiling as the loss falls, which then goes up again: -1 up to there."""
    accuracy = {step: min(1.0, step / 400) for step in range(0, 2001, 100)}
    loss = {step: 1 - step / 1000 if step <= 400 else step / 100 for step in accuracy}
    run = write(tmp_path / "run", {"accuracy": accuracy, "loss": loss})
    found = row(generalisation(run), run, "accuracy", "rank correlation with its loss")
    assert found["value"] == pytest.approx(-1)


def test_seeds_have_a_median_in_which_censored_runs_are_late(tmp_path):
    for seed, step in enumerate((200, 400, 2000)):
        write(tmp_path / "run" / f"seed-{seed}", {"accuracy": ramp(step)}, seed=seed)
    group = f"{tmp_path}/run/seed-*"
    found = generalisation(group)
    middle = row(found, group, "accuracy", "step at 95%")
    assert (middle["value"], middle["n_runs"]) == (pytest.approx(400), 3)
    # One of three never gets there: an interval of their median takes six.
    assert math.isnan(middle["value_ci_low"])
    assert math.isnan(middle["value_ci_high"])
    assert row(found, group, "accuracy", "step at 95%, smallest")["value"] == pytest.approx(200)
    assert math.isnan(row(found, group, "accuracy", "step at 95%, largest")["value"])
    assert row(found, group, "accuracy", "reached 95%")["value"] == pytest.approx(2 / 3)
    shown = view_rows(found.frame)
    assert shown[shown["n_runs"] == 3]["validation"].tolist() == ["400 (200 to ?; 2 of 3)"]


def test_the_order_of_small_and_of_large_moduli(tmp_path):
    steps = {2: 300, 3: 100, 5: 500, 11: 400, 13: 5000}
    run = write(tmp_path / "run", {f"accuracy_{q}": ramp(step) for q, step in steps.items()})
    found = generalisation(run)
    assert row(found, run, "order of answers below 11", "pairs in order")["value"] == pytest.approx(2 / 3)
    assert row(found, run, "order of answers from 11 on", "pairs in order")["value"] == 1
