"""Drops whose place is known, on curves such as the two tasks log; and curves that have none."""

import re
from itertools import pairwise

import numpy as np
import pytest

import tasks
from interp_tasks.checkpoints import Drop, detect_drop, find_marks, read_run, zoo_names
from interp_tasks.checkpoints.checkpoint_refs import find_run_folder
from interp_tasks.checkpoints.drop_detection import detect_drop_or_reason, plateau_steps
from interp_tasks.checkpoints.run_reader import stored_steps
from interp_tasks.checkpoints.run_writer import declared_drop
from interp_tasks.checkpoints.steps_around_drop import detect_drop_of_run, theoretical_plateau
from interp_tasks.errors import UserError

LAST = 20_000
SCHEDULES = {
    "every 100": np.arange(0, LAST + 1, 100),
    "log-spaced": np.unique(np.round(np.geomspace(1, LAST, 160)).astype(int)),
    "powers of 2, then every 50": np.unique(np.concatenate([2 ** np.arange(7), np.arange(0, LAST + 1, 50)])),
}


def rise(steps, middle, width):
    return 1 / (1 + np.exp(-(steps - middle) / width))


def first_fall(steps):
    """An untrained read-out is far worse than the plateau, for the first few hundred steps."""
    return 0.7 * np.exp(-steps / 60)


def logged(curve, schedule, noise, direction="down"):
    steps = SCHEDULES[schedule]
    values = curve(steps.astype(float))
    stream = np.random.default_rng(0)
    if direction == "down":
        values = values * np.exp(noise * stream.normal(size=len(steps)))
    else:
        values = np.clip(values + 0.2 * noise * stream.normal(size=len(steps)), 0, 1)
    return steps.tolist(), values.tolist()


DROPS = {
    # curve, direction, its 10% and 90% steps (ln 9 widths either side of the middle), level of the plateau
    "plateau and drop": (lambda t: 0.11 - 0.08 * rise(t, 9000, 500), "down", 7901, 10099, 0.11),
    "first fall, plateau, drop": (
        lambda t: 0.11 + first_fall(t) - 0.08 * rise(t, 9000, 500), "down", 7901, 10099, 0.11,
    ),
    "early drop": (lambda t: 0.11 + first_fall(t) - 0.08 * rise(t, 2500, 300), "down", 1841, 3159, 0.11),
    "slow drop": (lambda t: 0.11 + first_fall(t) - 0.085 * rise(t, 4800, 1000), "down", 2603, 6997, 0.11),
    "slingshots": (
        lambda t: 0.11 - 0.08 * rise(t, 9000, 500) + 0.2 * ((t > 15000) & (t < 15150)),
        "down", 7901, 10099, 0.11,
    ),
    "a lucky evaluation": (
        lambda t: np.where((t > 3000) & (t < 3110), 0.03, 0.11 - 0.08 * rise(t, 9000, 500)),
        "down", 7901, 10099, 0.11,
    ),
    "loss of many decades": (lambda t: 25 * (1 - rise(t, 13000, 200)) + 1e-7, "down", 12561, 13439, 25.0),
    "loss that rises to its plateau": (
        lambda t: (1 + 20 * (1 - np.exp(-t / 500))) * (1 - rise(t, 13000, 200)), "down", 12561, 13439, 21.0,
    ),
    "accuracy": (lambda t: 0.01 + 0.99 * rise(t, 9000, 400), "up", 8121, 9879, 0.01),
    "creeping accuracy": (
        lambda t: 0.01 + 0.03 * np.minimum(t / 9000, 1) + 0.96 * rise(t, 9000, 400), "up", 8121, 9879, 0.02,
    ),
}  # fmt: skip


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", DROPS)
def test_known_drops(name, schedule, noise):
    curve, direction, tenth, nine_tenths, plateau = DROPS[name]
    steps, values = logged(curve, schedule, noise, direction)
    drop = detect_drop(steps, values, direction)
    spacing = max(after - before for before, after in pairwise(steps) if before <= drop.end)
    slack = 2 * spacing + (0.4 if noise else 0.1) * (nine_tenths - tenth)
    assert drop.onset == pytest.approx(tenth, abs=slack)
    assert drop.end == pytest.approx(nine_tenths, abs=slack)
    assert drop.plateau == pytest.approx(plateau, rel=0.05, abs=0.01)
    assert drop.onset in steps
    assert drop.end in steps


#: Curves without a drop, and why; of each condition one that fails it alone.
SMOOTH = {
    "flat": (lambda t: 0.11 + 0 * t, "it does not fall, yet; train longer"),
    "a rise": (lambda t: 0.1 + 0.5 * rise(t, 9000, 500), "it does not fall, yet; train longer"),
    "a fall by a quarter": (
        lambda t: 0.11 - 0.028 * rise(t, 9000, 500),
        "from 0.11 to 0.082, by less than 30% of",
    ),
    "straight line": (lambda t: 1 - t / 21_000, "about as fast before its middle as in it"),
    "at once": (lambda t: 0.1 + 1.0 * (t < 50), "in the first hundredth of the run"),
    "no plateau is logged": (
        lambda t: 0.1 + 1.0 * (t < 150),
        "half-way .* by step 200, too early to tell a plateau",
    ),
    "first fall only": (lambda t: 0.11 + first_fall(t), ""),
    "warm-up, then first fall only": (lambda t: 0.11 + 0.7 * (1 - rise(t, 100, 20)), ""),
    "exponential decay": (lambda t: np.exp(-t / 3000), ""),
    "slow exponential decay": (lambda t: 0.05 + np.exp(-t / 8000), ""),
    "square-root decay": (lambda t: (1 + t / 20) ** -0.5, ""),
    "hyperbolic decay": (lambda t: 1 / (1 + t / 200), ""),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", SMOOTH)
def test_no_drop_and_why(name, schedule):
    curve, reason = SMOOTH[name]
    assert all(detect_drop(*logged(curve, schedule, noise), "down") is None for noise in (0.0, 0.03))
    assert re.search(reason, str(detect_drop_or_reason(*logged(curve, "every 100", 0.0), "down")))


def test_why_there_is_no_drop_counts_values_and_asks_theory():
    steps, values = logged(DROPS["plateau and drop"][0], "every 100", 0.0)
    assert str(detect_drop_or_reason(steps[:5], values[:5], "down")).startswith("5 values are logged")
    reason = str(detect_drop_or_reason(steps, values, "down", 1e3))
    assert reason.startswith(f"it goes from {values[0]:.4g} to ")
    assert str(detect_drop_or_reason(steps, [0.1] * len(steps), "up")).startswith("it does not rise, yet")


def test_an_accuracy_must_gain_three_tenths_and_a_run_leave_its_plateau():
    for gain in (0.0, 0.25):
        rising = logged(lambda t, gain=gain: 0.01 + gain * rise(t, 9000, 400), "every 100", 0.0, "up")
        assert detect_drop(*rising, "up") is None
    steps, values = logged(DROPS["first fall, plateau, drop"][0], "every 100", 0.0)
    assert detect_drop(steps[:60], values[:60], "down") is None


@pytest.mark.parametrize("middle", [600, 2000])
def test_a_slow_tail_after_the_drop_does_not_hide_it(middle):
    """Where the tail is long, the first guess lies in it, and the repetition leads back to the drop."""

    def curve(t):
        tail = 0.6 * np.maximum(t / middle, 1) ** -0.5
        return 0.11 - 0.11 * rise(t, middle, middle / 15) * (1 - tail)

    for schedule in ("log-spaced", "powers of 2, then every 50"):
        drop = detect_drop(*logged(curve, schedule, 0.0), "down")
        assert 0.75 * middle <= drop.onset < middle
        assert drop.plateau == pytest.approx(0.11, rel=0.02)


def test_a_step_between_two_logged_values():
    values = [0.0] * 20 + [1.0] * 20
    assert detect_drop(range(0, 400, 10), values, "up") == Drop(190, 200, 0.0, 1.0, 200, (190, 200))


def test_missing_values_are_skipped_and_wrong_arguments_refused():
    steps, values = logged(DROPS["plateau and drop"][0], "every 100", 0.0)
    expected = detect_drop(steps, values, "down")
    holes = list(values)
    holes[3], holes[11], holes[17], holes[150] = None, float("nan"), float("inf"), None
    found = detect_drop(steps, holes, "down")
    assert (found.onset, found.end) == (expected.onset, expected.end)
    assert detect_drop(steps, [None] * len(steps), "down") is None
    with pytest.raises(ValueError, match="2 steps and 1 values"):
        detect_drop([0, 1], [1.0], "down")
    with pytest.raises(ValueError, match="must ascend"):
        detect_drop([0, 2, 1], [1.0, 1.0, 1.0], "down")


@pytest.mark.parametrize(
    ("high", "low", "drops"),
    [
        (1.0, 0.01, True),
        (1.0, 0.48, True),
        (1.0, 0.52, False),  # less than half of the way is made, and a third as well
        (1.0, 2 / 3, False),
        (1.28, 0.3, True),
        (1.32, 0.3, False),  # from above the plateau, past it
        (1.8, 1.0, False),  # onto the plateau
        (0.72, 0.3, True),
        (0.68, 0.3, False),  # from a level that was reached before
    ],
)
def test_a_drop_begins_on_the_plateau_by_theory_and_makes_half_of_the_way(high, low, drops):
    """Without theory each of them is one, with the same steps; the scale does not matter.

    An accuracy rises from its plateau, 0.2 here, to a half of the 0.8 that are left.
    """
    steps, values = logged(lambda t: high - (high - low) * rise(t, 9000, 400), "every 100", 0.0)
    expected = detect_drop(steps, values, "down")
    assert detect_drop(steps, values, "down", 1.0) == (expected if drops else None)
    assert (detect_drop(steps, [value / 9 for value in values], "down", 1 / 9) is None) != drops
    accuracies = [1 - 0.8 * value for value in values]
    # Below 0.3 it gains too little for any accuracy.
    assert (detect_drop(steps, accuracies, "up", 0.2) is None) != drops or 0.8 * (high - low) < 0.3


SHIPPED = {
    "matrix-completion-4x4": {"onset": 1000, "end": 8000},
    "matrix-completion-4x4-small-init": {"onset": 512, "end": 8000},
    "matrix-completion-5x5-small-init/seed-0": {"onset": 256, "end": 10000},
}


@pytest.mark.parametrize("name", ["sgd", "gaussian"])
def test_shipped_runs_without_a_drop(name):
    """One falls onto the variance of an entry, the other ends above half of it; both change abruptly."""
    run = find_run_folder(f"zoo:matrix-completion-sweeps/{name}")
    with pytest.raises(
        UserError, match=r"shows no drop in mse_masked from its plateau by theory, 0\.(1111|0625),"
    ):
        detect_drop_of_run(run, read_run(run), name)
    described = read_run(run)
    described["drop_metric"]["plateau"] = None
    assert detect_drop_of_run(run, described, name).final > described["config"]["task"]["scale"] ** 4 / 18


def test_a_run_older_than_the_plateau_asks_its_task():
    described = read_run(find_run_folder("zoo:matrix-completion-sweeps/sizes-to-their-end"))
    assert theoretical_plateau(described) == pytest.approx(1 / 9)
    del described["drop_metric"]["plateau"]
    assert theoretical_plateau(described) == pytest.approx(1 / 9)
    for task in ({"name": "nobody's"}, {"name": "matrix-completion", "side": 4}, {}, None):
        assert theoretical_plateau({**described, "config": {"task": task}}) is None
    addition = read_run(find_run_folder("zoo:modular-addition-113"))
    assert addition["drop_metric"].pop("plateau") is None
    assert theoretical_plateau(addition) is None


def test_what_a_shipped_run_says_of_its_drop_is_what_its_task_declares_now():
    for name in zoo_names():
        described = read_run(find_run_folder(f"zoo:{name}"))
        section = described["config"]["task"]
        task = tasks.get(section["name"], **{key: value for key, value in section.items() if key != "name"})
        assert described["drop_metric"] == declared_drop(task), name


def test_every_shipped_run_has_its_marks():
    # Runs of sweeps, in a folder of their own, may have no drop; some runs ship their last step or their log alone.
    for name in (name for name in zoo_names() if "/" not in name):
        if len(stored_steps(find_run_folder(f"zoo:{name}"))) < 2:
            continue
        marks = find_marks(find_run_folder(f"zoo:{name}"), name)
        assert 0 < marks["pre"] <= marks["onset"] < marks["end"] <= marks["post"], name
        assert SHIPPED.get(name, {}).items() <= marks.items(), name


@pytest.mark.parametrize("power", [6, 12, 24])
@pytest.mark.parametrize("scale", [1, 7])
def test_sharpness_is_the_slope_over_the_logarithm_of_the_step(power, scale):
    """1 / (1 + (s/c)^k) passes 0.7 and 0.3 at c (3/7)^(1/k) and c (7/3)^(1/k); longer runs and slower clocks agree."""
    exact = 0.4 / ((7 / 3) ** (1 / power) - (3 / 7) ** (1 / power))
    assert exact == pytest.approx(power / 4, rel=0.2)
    for length in (4000, 16000):
        steps = range(0, length * scale + 1, 5 * scale)
        drop = detect_drop(steps, [1 / (1 + (step / (1000 * scale)) ** power) for step in steps], "down")
        assert drop.crossing == pytest.approx(1000 * scale, abs=5 * scale)
        # Each of the two steps is one of the log, and the median of five or more around it.
        assert drop.sharpness == pytest.approx(exact, rel=0.3)
        plateau = plateau_steps(list(steps), drop)
        assert (plateau[0], plateau[-1]) == pytest.approx((100 * scale, 500 * scale), abs=5 * scale)
