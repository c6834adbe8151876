"""What training takes: against formulas, against a real step, and against the run folder that comes out."""

import json

import pytest

import tasks
from interp_tasks import train
from interp_tasks.cli import main
from interp_tasks.training.config import parse_train_config
from interp_tasks.training.cost import cost
from interp_tasks.training.parameter_update import Updater
from interp_tasks.training.start_weights_and_freezing import freeze_untrained


@pytest.fixture(scope="module")
def addition():
    return tasks.get("modular-addition", p=11)


def test_flop_follow_the_formula_and_a_run_is_its_steps_and_the_metrics_between_them(addition):
    """22 examples, fewer than two per (position, token): no table of keys and values is looked up."""
    config = {"batch_size": 20, "steps": 10, "log_every": 5, "eval_samples": 4, "checkpoint_every": 10}
    settings = {"d_model": 16, "n_heads": 2}
    found = cost(addition, settings=settings, config=parse_train_config(config), gflop_per_second=1.0)
    # Keys and values at three positions; query, output, MLP of 64 and 11 classes at the last.
    forward = 2 * 20 * (2 * 3 * 16 * 16 + 2 * 16 * 16 + 2 * 16 * 64 + 16 * 11)
    assert (found.step_flop, found.examples) == (3 * forward, 20)
    # Logged at 0, 5, 10 and at the checkpoints 1, 2, 4, 8: the step's batch and 4 validation examples.
    assert found.run_flop == 10 * found.step_flop + 7 * (20 + 4) * forward // 20
    assert found.seconds == pytest.approx(found.run_flop / 1e9)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "momentum": 0.9},
        {"grokfast": "ema"},
        {"grokfast": "ma", "grokfast_window": 3},
        {"optimizer": "adam", "train_parts": ["mlp"]},
    ],
)
def test_memory_of_the_state_is_what_an_updater_holds(addition, changes):
    config, settings = parse_train_config({"weight_decay": 0.1, **changes}), {"d_model": 16, "n_heads": 2}
    model = addition.build_model(0, addition.Model(**settings))
    freeze_untrained(model, config)
    updater = Updater(model, config)
    batch = addition.sample(8, seed=0, split="train")
    for step in range(4):
        addition.loss(model(batch.tokens), batch).backward()
        updater.set_learning_rate(step)
        updater.update_parameters()
    state = {
        key: value for key, value in updater.resume_tensors().items() if not key.endswith(("/step", "/torch"))
    }
    held = sum(value.nbytes for value in state.values() if value.ndim)
    assert cost(addition, settings=settings, config=config).state_bytes == held


def test_disk_is_about_what_the_run_folder_takes(addition, tmp_path):
    settings = {"d_model": 64, "n_heads": 2}
    config = parse_train_config({"steps": 40, "checkpoint_every": 10, "log_every": 10, "grokfast": "ema"})
    found = cost(addition, settings=settings, config=config)
    run = train(addition, out=tmp_path / "run", settings=settings, config=config)
    assert len(list((run / "checkpoints").iterdir())) == found.checkpoints
    taken = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
    assert found.disk_bytes == pytest.approx(taken, rel=0.05)


def test_the_published_run_of_all_primes_is_what_the_fact_sheet_derives(capsys):
    assert not main(["tasks", "cost", "miiii", "--preset", "paper", "--rate", "100", "--format", "json"])
    [found] = json.loads(capsys.readouterr().out)
    # Derived independently: 1,195,264 parameters, 34.7 GFLOP a step, 2.3 PFLOP the run without its metrics.
    assert found["trained"] == 1_195_264
    assert found["step_flop"] == pytest.approx(34.7e9, rel=0.1)
    assert found["steps"] * found["step_flop"] == pytest.approx(2.3e15, rel=0.1)
