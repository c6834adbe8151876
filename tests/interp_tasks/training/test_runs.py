"""Whole runs: what they store, that they resume and extend exactly, and how they refuse."""

import pytest
import torch
from safetensors.torch import load_file

import tasks
from interp_tasks import UserError, load_checkpoint, train
from interp_tasks.checkpoints import read_metrics, read_run, stored_steps
from interp_tasks.checkpoints.run_reader import read_clock
from interp_tasks.errors import Stopped
from interp_tasks.measurement.logged_runs import read_runs
from interp_tasks.training.config import TrainConfig
from interp_tasks.training.cost import cost

TINY = {"d_model": 8, "n_heads": 2}


@pytest.fixture
def addition():
    return tasks.get("modular-addition", p=7)


@pytest.fixture
def matrices():
    return tasks.get("matrix-completion", n=2, rank=1, grid_max=1, grid_step=0.1)


def test_a_task_without_a_whole_split_needs_a_batch_size(tmp_path, matrices, monkeypatch):
    # As a task of the user's has it, that hands None on to torch.
    monkeypatch.setattr(type(matrices), "sample", lambda self, n, **_: torch.randint(3, (n, 4)))
    with pytest.raises(
        UserError, match=r"without train\.batch_size .*'matrix-completion' .*randint"
    ) as refused:
        train(matrices, out=tmp_path / "run", settings=TINY, config={"steps": 1})
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=r"without train\.batch_size"):
        cost(matrices, settings=TINY, config=TrainConfig(steps=1))


def weights(run, step):
    return load_file(run / "checkpoints" / f"{step:08d}" / "model.safetensors")


def assert_same_weights(one, other, step):
    expected = weights(other, step)
    for name, tensor in weights(one, step).items():
        assert torch.equal(tensor, expected[name]), name


HARD = {
    "batch_size": 6,
    "grokfast": "ema",
    "dropout": 0.2,
    "clip_norm": 0.5,
    "warmup_steps": 5,
    "schedule": "cosine",
    "schedule_end": 12,
    "schedule_floor": 0.1,
    "weight_decay": 0.1,
    "checkpoint_every": 4,
    "log_every": 3,
    "threads": 1,
}


def constant(**changes):
    return {**{key: value for key, value in HARD.items() if not key.startswith("schedule")}, **changes}


@pytest.mark.parametrize("stops_at", [8, 10])
def test_a_constant_run_takes_a_fall_of_the_steps_to_come(addition, tmp_path, stops_at):
    """The run that had the schedule from the start, bit for bit, whether its end is a checkpoint's step or not."""

    def run(folder, config):
        return train(addition, out=folder, settings=TINY, config=config)

    fall = {"schedule": "linear", "schedule_start": 10, "schedule_end": 14, "schedule_floor": 0.25}
    whole = run(tmp_path / "whole", constant(steps=16, **fall))
    run(tmp_path / "extended", constant(steps=stops_at))
    torch.manual_seed(99)
    extended = run(tmp_path / "extended", constant(steps=16, **fall))
    assert_same_weights(extended, whole, 16)
    logged = {line["step"]: line for line in read_metrics(extended)}
    assert all(logged[line["step"]] == line for line in read_metrics(whole))
    stored = read_run(extended)
    assert stored["config"] == read_run(whole)["config"]
    assert stored["resumed"][-1]["config"] == {
        "train.steps": [stops_at, 16],
        "train.schedule": ["constant", "linear"],
        "train.schedule_start": [None, 10],
        "train.schedule_end": [None, 14],
        "train.schedule_floor": [0.0, 0.25],
    }


def test_a_schedule_that_changes_a_step_taken_is_refused(addition, tmp_path):
    """By the steps that are stored, not by those that were asked for."""
    run = tmp_path / "run"
    asked = iter([False] * 7 + [True])
    with pytest.raises(Stopped, match="after step 8 of 20"):
        train(addition, out=run, settings=TINY, config=constant(steps=20), stop=lambda: next(asked))

    def given(**changes):
        return train(addition, out=run, settings=TINY, config=constant(**{"steps": 20, **changes}))

    def refusal(**changes):
        before = (run / "run.json").read_bytes()
        with pytest.raises(UserError) as caught:
            given(**changes)
        assert (run / "run.json").read_bytes() == before
        return str(caught.value)

    fall = {"schedule": "linear", "schedule_start": 7, "schedule_end": 17}
    # The update after five others is the last at the full rate.
    assert refusal(**fall | {"schedule_start": 5, "schedule_end": 15, "steps": 30}) == (
        f"{run} was made by another schedule (train.schedule: 'constant' there, 'linear' asked for; "
        "train.schedule_start: None there, 5 asked for; train.schedule_end: None there, 15 asked for): "
        "of the 8 steps taken, step 7 had a learning rate of 0.001 and would have 0.0009; choose another --out"
    )
    assert "train.weight_decay: 0.1 there, 0.2 asked for)" in refusal(**fall, weight_decay=0.2)
    assert "train.steps: 20 there, 18 asked for)" in refusal(**fall, steps=18)
    # Nothing but steps to come, and no more of them than were asked for.
    given(**fall)
    assert stored_steps(run)[-1] == 20
    assert "of the 20 steps taken, step 9 had a learning rate of 0.0009 and would have 0.001;" in refusal()
    assert "step 9 had a learning rate of 0.0009 and would have 0.00091;" in refusal(
        **fall, schedule_floor=0.1, steps=25
    )
    given(**fall, steps=24)


def test_the_clock_counts_updates_alone_and_goes_on(addition, tmp_path, monkeypatch):
    """An update takes a second, an evaluation a hundred, a pause a million."""
    from interp_tasks.training import observers_and_clock, training_loop

    now = [0.0]
    monkeypatch.setattr(observers_and_clock.time, "perf_counter", lambda: now[0])
    for name, seconds in (("train_step", 1.0), ("_validation_and_train_metrics", 100.0)):
        plain = getattr(training_loop.TrainingLoop, name)

        def slower(self, step, plain=plain, seconds=seconds):
            now[0] += seconds
            return plain(self, step)

        monkeypatch.setattr(training_loop.TrainingLoop, name, slower)
    config = {"checkpoint_every": 4, "log_every": 3}
    run = train(addition, out=tmp_path / "run", settings=TINY, config={**config, "steps": 6})
    now[0] += 1e6
    train(addition, out=run, settings=TINY, config={**config, "steps": 14})
    logged = [line["step"] for line in read_metrics(run)]
    assert read_clock(run) == {step: float(step) for step in logged}
    assert read_run(run)["peak_memory"]["process"] > 10 * 2**20
    # What is not known of the beginning is not made up at the end.
    (run / "clock.jsonl").unlink()
    train(addition, out=run, settings=TINY, config={**config, "steps": 15})
    assert read_clock(run) == {}


def test_l1_pulls_every_weight_towards_zero_by_the_same(addition, tmp_path):
    """One step of plain gradient descent: beside the run without it, w - rate · λ · sign w."""
    config = {"steps": 1, "optimizer": "sgd", "learning_rate": 0.1}
    for name, penalty in (("without", 0.0), ("with", 0.03)):
        train(addition, out=tmp_path / name, settings=TINY, config={**config, "l1": penalty})
    before, without, found = (
        weights(tmp_path / name, step) for name, step in (("with", 0), ("without", 1), ("with", 1))
    )
    frozen = {name for name, weight in before.items() if not weight.any()}
    for name, weight in before.items():
        expected = without[name] - (0.0 if name in frozen else 0.003 * weight.sign())
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-6)
    assert len(frozen) < len(before)
    # What is logged is the task's loss.
    lines = [read_metrics(tmp_path / name)[0] for name in ("without", "with")]
    assert lines[0]["train_loss"] == lines[1]["train_loss"]


def test_the_update_is_the_one_torch_would_make(addition, tmp_path):
    """Three full-batch AdamW steps written out by hand on the hooked model."""
    config = {"steps": 3, "learning_rate": 0.01, "weight_decay": 0.5, "betas": (0.8, 0.9), "warmup_steps": 2}
    run = train(addition, out=tmp_path / "run", settings=TINY, config=config)
    model = addition.build_model(0, addition.Model(**TINY))
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5, betas=(0.8, 0.9))
    batch = addition.sample(None, split="train")
    for rate in (0.005, 0.01, 0.01):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        logits = model(batch.tokens)[:, -1].double()
        torch.nn.functional.cross_entropy(logits, batch.targets).backward()
        optimizer.step()
    stored = weights(run, 3)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(stored[name], parameter.detach(), rtol=1e-4, atol=1e-6)


def test_log_lines_hold_the_metrics_of_the_stored_weights(addition, tmp_path):
    run = train(addition, out=tmp_path / "run", settings=TINY, config={"steps": 4, "eval_samples": None})
    line = read_metrics(run)[-1]
    checkpoint = load_checkpoint(f"{run}@last")
    assert checkpoint.task == addition
    for split in ("train", "validation"):
        batch = addition.sample(None, split=split)
        with torch.no_grad():
            expected = tasks.pool(addition.metrics(checkpoint.model(batch.tokens), batch))
        assert line[split] == pytest.approx(expected, rel=1e-5)
    assert checkpoint.meta["metrics"] == pytest.approx(line["validation"])
    assert line["train_loss"] == pytest.approx(line["train"]["loss"], rel=1e-6)


def test_run_json_holds_the_resolved_config_and_where_it_ran(addition, tmp_path, monkeypatch):
    # Of the code that runs: another copy may be installed.
    monkeypatch.setattr("circuits.__version__", "9.9")
    run = train(addition, out=tmp_path / "run", preset="cpu", settings=TINY, config={"steps": 1})
    stored = read_run(run)
    assert stored["config"]["train"]["weight_decay"] == 3.0
    assert stored["config"]["train"]["threads"] == torch.get_num_threads()
    assert stored["config"]["task"] == {"name": "modular-addition", **addition.model_dump(mode="json")}
    assert stored["preset"] == "cpu"
    assert stored["forward"] == {"kind": "fused", "reason": None}
    # 49 inputs, 14 to train on: half of the others validate, though 512 are asked for.
    assert stored["validation_examples"] == {"": 17}
    (found,) = read_runs(str(run))
    assert found.label_columns()["n"] == 17
    assert stored["drop_metric"] == {"name": "accuracy", "direction": "up", "plateau": None}
    assert stored["plateau_levels"] == stored["loss_shares"] == {}
    assert {"python", "torch", "transformer-lens"} <= {*stored["versions"]}
    assert stored["versions"]["interp-tasks"] == "9.9"


def test_published_steps_mark_a_run_of_the_papers_data_only(tmp_path):
    tiny = {"n_layers": 1, "d_model": 8, "n_heads": 2, "n_ctx": 49}
    config = {"steps": 0, "batch_size": 2, "eval_samples": 2}
    run = train("matrix-completion", preset="paper", settings=tiny, config=config, out=tmp_path / "paper")
    assert read_run(run)["published_drop"] == {"pre": 4000}
    smaller = tasks.get("matrix-completion", n=3, rank=1)
    run = train(smaller, preset="paper", settings=tiny, config=config, out=tmp_path / "other")
    assert "published_drop" not in read_run(run)


def test_gradient_norms_activations_and_own_observers_at_their_own_cadence(addition, tmp_path):
    class WeightNorm:
        every = 4

        def __call__(self, step, model, run):
            return {"weight_norm": model.embed.W_E.norm().item()}

    config = {
        "steps": 6,
        "log_every": 100,
        "checkpoint_every": 100,
        "gradient_norms_every": 3,
        "grokfast": "ema",
        "observe": ["blocks.0.mlp.hook_post"],
        "observe_every": 2,
        "observe_samples": 5,
    }
    run = train(addition, out=tmp_path / "run", settings=TINY, config=config, observers=[WeightNorm()])
    assert [line["step"] for line in read_metrics(run) if "weight_norm" in line] == [0, 4, 6]
    norms = {line["step"]: line["gradient_norm"] for line in read_metrics(run) if "gradient_norm" in line}
    assert sorted(norms) == [3, 6]
    assert set(norms[3]) == {"raw", "filtered"}
    assert norms[3]["filtered"]["embed.W_E"] > norms[3]["raw"]["embed.W_E"] > 0
    files = sorted(path.name for path in (run / "activations").iterdir())
    assert files == [f"{step:08d}.safetensors" for step in (0, 2, 4, 6)]
    stored = load_file(run / "activations" / files[-1])
    assert stored["blocks.0.mlp.hook_post"].shape == (5, 3, 32)
    _, cache = load_checkpoint(f"{run}@6").model.run_with_cache(stored["tokens"])
    torch.testing.assert_close(stored["blocks.0.mlp.hook_post"], cache["blocks.0.mlp.hook_post"])


def test_a_model_of_ones_own_trains_in_place_and_resumes(addition, tmp_path):
    def own_model():
        return addition.build_model(3, addition.Model(**TINY, n_layers=2, normalization="LN", init="normal"))

    model = own_model()
    before = model.embed.W_E.detach().clone()
    run = train(addition, out=tmp_path / "run", model=model, config={**HARD, "steps": 4})
    assert not torch.equal(model.embed.W_E, before)
    assert torch.equal(weights(run, 4)["embed.W_E"], model.embed.W_E)
    torch.manual_seed(99)  # the state of the process that resumes is not the run's
    train(addition, out=run, model=own_model(), config={**HARD, "steps": 8})
    assert stored_steps(run) == [0, 1, 2, 4, 8]
    straight = train(addition, out=tmp_path / "straight", model=own_model(), config={**HARD, "steps": 8})
    assert_same_weights(run, straight, 8)


def test_bf16_keeps_float32_weights_and_stays_close(matrices, tmp_path):
    """Twenty steps in bfloat16: 8 bits of mantissa, so the loss agrees to a few per cent, not more."""
    losses = {}
    for precision in ("float32", "bf16"):
        config = {"steps": 20, "batch_size": 32, "precision": precision, "betas": (0.9, 0.999)}
        run = train(matrices, out=tmp_path / precision, settings=TINY, config=config)
        assert all(tensor.dtype == torch.float32 for tensor in weights(run, 20).values())
        losses[precision] = read_metrics(run)[-1]["train_loss"]
    assert losses["bf16"] == pytest.approx(losses["float32"], rel=0.05)
    assert losses["bf16"] != losses["float32"]


@pytest.mark.parametrize("grokfast", ["ema", "ma"])
def test_a_run_stopped_after_every_update_ends_as_one_left_alone(tmp_path, grokfast):
    """And stores no checkpoint that the other lacks."""
    task = tasks.get("modular-addition", p=5)
    settings = {"d_model": 8, "n_heads": 2}
    config = {"steps": 10, "checkpoint_every": 4, "log_every": 3, "batch_size": 5, "threads": 1}
    config |= {"grokfast": grokfast, "grokfast_window": 3, "dropout": 0.1, "warmup_steps": 3}
    train(task, out=tmp_path / "alone", settings=settings, config=config)
    stops = []
    for _ in range(20):
        try:
            train(task, out=tmp_path / "stopped", settings=settings, config=config, stop=lambda: True)
            break
        except Stopped as stopped:
            stops.append(str(stopped))
    assert [text.partition("after step ")[2].split(" ")[0] for text in stops] == [*map(str, range(1, 10))]
    steps = stored_steps(tmp_path / "alone")
    assert stored_steps(tmp_path / "stopped") == steps
    for step in steps:
        assert_same_weights(tmp_path / "stopped", tmp_path / "alone", step)
    assert read_metrics(tmp_path / "stopped") == read_metrics(tmp_path / "alone")
    assert not (tmp_path / "stopped" / "stopped").exists()
