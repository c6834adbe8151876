"""``interp-run runs search``: what is tried, that every trial counts once, and that nothing stops it for good."""

import csv
import io
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from interp_tasks.checkpoints import read_metrics, read_run
from interp_tasks.cli import main
from interp_tasks.errors import Diverged, UserError
from interp_tasks.file_io import acquire_folder_lock
from interp_tasks.search import make_plan, run_search, search
from interp_tasks.search.run_search import mean_of_last_evaluations
from interp_tasks.search.search_plan import parse_vary, read_shipped_spaces, representative_values
from interp_tasks.training.train import parse_model_settings

TINY = {"task.p": "5", "model.d_model": "8", "model.n_heads": "2", "train.threads": "1"}
VARY = ("train.weight_decay=0.1,0.5,1,2", "train.learning_rate=1e-4:1e-2:log")


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch):
    """No test here cuts the power, and a busy disk takes seconds to sync."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def plan(*vary, **options):
    settings = {**TINY, **options.pop("settings", {})}
    return make_plan("modular-addition", vary=vary or VARY, settings=settings, **options)


def bowl(config):
    """A loss that is best at weight decay 1 and learning rate 1e-3."""
    return abs(config.weight_decay - 1) + abs(config.learning_rate - 1e-3) * 100


class FakeTrainer:
    """In the place of the trainer: writes the log of a run whose metrics are functions of its settings.

    Files, which take longer than the rest, are left out unless ``results``.
    """

    def __init__(self, monkeypatch, loss=bowl, results=False):
        self.loss, self.runs = loss, []
        self.before = lambda out: None
        monkeypatch.setattr(run_search, "train_resolved", self)
        if not results:
            monkeypatch.setattr(run_search, "write_search_files", lambda result, study: [])

    def __call__(self, configuration, out, *, device):
        self.runs.append(out.name)
        out.mkdir(exist_ok=True)
        self.before(out)
        with (out / "metrics.jsonl").open("w") as file:
            for step in (0, *range(11, 21)):
                loss = self.loss(configuration.train) if step else 50.0
                line = {"step": step, "validation": {"loss": loss, "accuracy": 1 / (1 + loss)}}
                file.write(json.dumps(line) + "\n")
        return out


@pytest.fixture
def fake(monkeypatch):
    return FakeTrainer(monkeypatch)


def settled(found):
    names = ("state", "value", *found.identity["space"])
    return [tuple(map(trial.get, names)) for trial in sorted(found.trials, key=lambda trial: trial["trial"])]


def states(found):
    return [state for state, *_ in settled(found)]


def test_what_a_user_can_vary():
    written = {
        "train.weight_decay=0.1, 0.5,1": [0.1, 0.5, 1],
        "train.optimizer=adam,adamw": ["adam", "adamw"],
        "train.clip_norm=none,1": [None, 1],
        "task.primes=[2, 3],[5, 7]": ["[2, 3]", "[5, 7]"],
        "train.learning_rate=1e-4:1e-2:log": {"low": 1e-4, "high": 1e-2, "log": True},
        "model.d_model=32:128:32": {"low": 32, "high": 128, "step": 32},
        "task.p=5:11": {"low": 5, "high": 11},
        "train.dropout=0:1": {"low": 0.0, "high": 1.0},
    }
    assert parse_vary(list(written)) == {text.partition("=")[0]: values for text, values in written.items()}
    # Whole numbers are how it is written, not what it takes.
    assert type(parse_vary(["train.dropout=0:1"])["train.dropout"]["high"]) is float


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"vary": ["train.weight_decay"]}, "--vary 'train.weight_decay': write"),
        ({"vary": ["train.weight_decay=1"]}, "train.weight_decay: a search varies it"),
        ({"vary": ["train.weight_decay=1,2,1"]}, "at least two different values"),
        ({"vary": ["train.weight_decay=1,2", "train.weight_decay=1,3"]}, "write each key once"),
        ({"vary": ["train.weight_decay=1,-2"]}, "train.weight_decay = -2"),
        ({"vary": ["train.weight_decay=-1:2"]}, "train.weight_decay = -1"),
        ({"vary": ["train.learning_rate=0:1:log"]}, "above 0"),
        ({"vary": ["train.learning_rate=1:0.5"]}, "is no range"),
        ({"vary": ["train.weigth_decay=1,2"]}, "weight_decay"),
        ({"vary": ["weight_decay=1,2"]}, "keys start with task."),
        ({"vary": VARY, "settings": {"train.weight_decay": "1"}}, "vary it, or hold it"),
        ({"vary": VARY, "objective": "loss:up"}, "--objective 'loss:up'"),
        ({"vary": VARY, "preset": "large"}, "no preset 'large'"),
        ({"vary": VARY, "seed": -1}, "--seed -1"),
        ({"space": "printed"}, "shipped ones of modular-addition are recorded"),
    ],
)
def test_what_cannot_be_searched_is_refused(options, complaint):
    with pytest.raises(UserError, match=r".") as caught:
        make_plan("modular-addition", **options)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_printed_space_of_miiii():
    """Syrkis & Søgaard 2024, the search space: dropout, lambda, weight decay, width, learning rate, heads."""
    found = make_plan("miiii", preset="paper")
    assert {key: set(values) for key, values in found.vary.items()} == {
        "train.dropout": {0, 1 / 10, 1 / 5, 1 / 2},
        "train.grokfast_lambda": {0, 1 / 2, 2},
        "train.weight_decay": {0, 1 / 10, 1 / 2, 1},
        "train.learning_rate": {3e-4, 1e-4},
        "model.d_model": {128, 256},
        "model.n_heads": {4, 8},
    }
    # The filter is on also where the preset leaves it off: its strength would vary nothing.
    assert make_plan("miiii", preset="cpu").config_of_trial({}).train.grokfast == "ema"


def test_every_shipped_space_can_be_built():
    for task, spaces in read_shipped_spaces().items():
        for name in spaces:
            make_plan(task, preset="paper", space=name)
            plan = make_plan(task, space=name)
            found = plan.config_of_trial({key: representative_values(of)[0] for key, of in plan.vary.items()})
            parse_model_settings(found.make_task(), found.model)


def test_the_objective_is_the_mean_of_the_last_ten_evaluations():
    lines = [{"step": i, "validation": {"loss": float(i)}} for i in range(30)]
    lines.insert(25, {"step": 99, "gradient_norm": {}})
    assert mean_of_last_evaluations(lines, "loss") == sum(range(20, 30)) / 10
    assert mean_of_last_evaluations(lines[:3], "loss") == 1
    for wrong in (None, float("nan"), float("inf")):
        with pytest.raises(Diverged):
            mean_of_last_evaluations([*lines, {"step": 100, "validation": {"loss": wrong}}], "loss")
    with pytest.raises(Diverged):
        mean_of_last_evaluations([], "loss")


@pytest.mark.parametrize(
    ("objective", "largest"), [(None, False), ("accuracy", True), ("accuracy:min", False)]
)
def test_the_best_trial_is_the_first(fake, tmp_path, objective, largest):
    found = search(plan(objective=objective), out=tmp_path, trials=2)
    values = [trial["value"] for trial in found.trials]
    assert values == sorted(values, reverse=largest)
    assert found.best == found.trials[0]


def test_a_metric_that_is_not_logged_leaves_no_search_behind(fake, tmp_path):
    with pytest.raises(UserError, match="no metric 'acc' is logged: --objective takes loss, accuracy"):
        search(plan(objective="acc"), out=tmp_path / "s", trials=1)
    assert not (tmp_path / "s").exists()


def test_trials_count_in_all(fake, tmp_path):
    first = search(plan(), out=tmp_path, trials=3)
    assert fake.runs == ["trial-0000", "trial-0001", "trial-0002"]
    again = search(plan(), out=tmp_path, trials=3)
    fewer = search(plan(), out=tmp_path, trials=2)
    assert len(fake.runs) == 3
    assert settled(again) == settled(fewer) == settled(first)
    more = search(plan(), out=tmp_path, trials=5)
    assert fake.runs[3:] == ["trial-0003", "trial-0004"]
    assert settled(more)[:3] == settled(first)
    for trial in more.trials:
        rate, decay = trial["train.learning_rate"], trial["train.weight_decay"]
        assert trial["value"] == pytest.approx(abs(decay - 1) + abs(rate - 1e-3) * 100)


def test_files_of_a_search(monkeypatch, tmp_path):
    FakeTrainer(monkeypatch, results=True)
    found = search(plan(), out=tmp_path, trials=5)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "trials.csv").read_text())))
    assert [int(row["trial"]) for row in rows] == found.frame["trial"].tolist()
    assert float(rows[0]["train.weight_decay"]) == found.frame["train.weight_decay"][0]
    whole = json.loads((tmp_path / "trials.json").read_text())
    assert whole["best"] == whole["trials"][0] == found.best
    assert "optuna" in whole["versions"]
    page = (tmp_path / "search.html").read_text()
    for title in ("Importance", "Course of the search", "The objective against every setting"):
        assert f">{title}</h2>" in page


def test_an_interrupted_search_comes_to_the_same_end(fake, tmp_path):
    """Also past the tenth trial, from where the sampler learns from those before."""
    whole = search(plan(), out=tmp_path / "whole", trials=12)
    fake.runs.clear()

    def interrupt(out):
        if fake.runs in (["trial-0000"], [f"trial-{number:04d}" for number in (0, *range(12))]):
            raise KeyboardInterrupt

    fake.before = interrupt
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            search(plan(), out=tmp_path / "cut", trials=12)
    cut = search(plan(), out=tmp_path / "cut", trials=12)
    assert settled(cut) == settled(whole)
    # What was interrupted is taken up, nothing is trained in vain.
    assert fake.runs == [f"trial-{number:04d}" for number in (0, *range(12), 11)]


def test_a_combination_has_one_run(fake, tmp_path):
    found = search(plan("train.weight_decay=1,2"), out=tmp_path, trials=8)
    assert len(set(fake.runs)) == 2
    assert len(found.trials) == 8
    for trial in found.trials:
        assert trial["value"] == pytest.approx(trial["train.weight_decay"] - 1)
    assert {Path(run).name for run in found.frame["run"]} == set(fake.runs)


def test_a_diverged_trial_is_told_and_the_search_goes_on(fake, tmp_path):
    def diverge(out):
        if out.name == "trial-0001":
            raise Diverged("training diverged: weights are not finite at step 3")

    fake.before = diverge
    found = search(plan(), out=tmp_path, trials=3)
    assert states(found) == ["complete", "pruned", "complete"]
    assert found.trials[-1]["reason"].startswith("diverged: training diverged")
    assert found.trials[-1]["value"] is None


def test_what_stops_a_run_leaves_its_trial_to_the_next_call(fake, tmp_path):
    def fail(out):
        if fake.runs == ["trial-0000", "trial-0001"]:
            raise UserError("cannot write: No space left on device")

    fake.before = fail
    with pytest.raises(UserError, match="No space left"):
        search(plan(), out=tmp_path, trials=3)
    assert states(search(plan(), out=tmp_path, trials=3)) == ["complete"] * 3
    assert fake.runs == ["trial-0000", "trial-0001", "trial-0001", "trial-0002"]


def test_a_combination_that_cannot_be_built_fails_alone(fake, tmp_path):
    odd = make_plan(
        "modular-addition",
        vary=["model.d_model=8,9,16", "model.n_heads=2,3"],
        settings={"task.p": "5", "train.threads": "1"},
    )
    found = search(odd, out=tmp_path, trials=8)
    for trial in found.trials:
        fits = trial["model.d_model"] % trial["model.n_heads"] == 0
        assert trial["state"] == ("complete" if fits else "failed")
        assert fits or "does not divide into" in trial["reason"]
    assert {trial["state"] for trial in found.trials} == {"complete", "failed"}


def test_another_search_is_refused_and_nothing_lost(fake, tmp_path):
    first = search(plan(), out=tmp_path, trials=2)
    others = {
        r"space\.train\.weight_decay: .* there": plan("train.weight_decay=1,2", VARY[1]),
        r"objective\.metric: 'loss' there, 'accuracy' asked for": plan(objective="accuracy"),
        r"settings\.task\.p: 5 there, 7 asked for": plan(settings={"task.p": "7"}),
        r"sampler\.seed: 42 there, 1 asked for": plan(seed=1),
    }
    for complaint, other in others.items():
        with pytest.raises(UserError, match=rf"holds another search \(.*{complaint}"):
            search(other, out=tmp_path, trials=3)
    lock = acquire_folder_lock(tmp_path)
    with pytest.raises(UserError, match="is being written by another process"):
        search(plan(), out=tmp_path, trials=3)
    lock.release()
    assert fake.runs == ["trial-0000", "trial-0001"]
    assert settled(search(plan(), out=tmp_path, trials=2)) == settled(first)


@pytest.mark.parametrize(
    "damage", [{"train.learning_rate": None}, {"train.learning_rate": 1e9}, {"value": "text"}, {"run": 5}]
)
def test_trials_that_no_search_has_told_are_one_line(fake, tmp_path, damage):
    search(plan(), out=tmp_path, trials=2)
    file = tmp_path / "trials.json"
    content = json.loads(file.read_text())
    content["trials"][0] |= damage
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"trials\.json cannot be used: [^\n]+$"):
        search(plan(), out=tmp_path, trials=3)
    file.write_text("no JSON")
    with pytest.raises(UserError, match=r"trials\.json is not valid JSON"):
        search(plan(), out=tmp_path, trials=3)


def test_several_trials_at_a_time(fake, tmp_path, monkeypatch):
    """Threads stand for the processes; two runs begin before either ends."""
    both = threading.Barrier(2, timeout=60)
    fake.before = lambda out: both.wait() and None
    monkeypatch.setattr(run_search, "executor_for_jobs", ThreadPoolExecutor)
    found = search(plan(), out=tmp_path, trials=6, jobs=2)
    assert states(found) == ["complete"] * 6
    assert sorted(fake.runs) == [f"trial-{number:04d}" for number in range(6)]


def test_the_command(tmp_path, capsys):
    settings = [f"--set={key}={value}" for key, value in (TINY | {"train.steps": "4"}).items()]
    asked = [
        "runs",
        "search",
        "modular-addition",
        *settings,
        f"--vary={VARY[0]}",
        f"--out={tmp_path}",
        "--quiet",
    ]
    assert main([*asked, "--trials", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 trials: 2 complete; minimize loss"
    assert {"trial", "loss", "weight_decay", "run"} <= {*" ".join(lines[1:3]).split()}
    assert main([*asked, "--trials", "2", "--format", "json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert len(whole["trials"]) == 2
    run = Path(whole["best"]["run"])
    assert whole["best"]["value"] == pytest.approx(mean_of_last_evaluations(read_metrics(run), "loss"))
    decay = whole["best"]["train.weight_decay"]
    assert read_run(run)["config"]["train"]["weight_decay"] == decay
