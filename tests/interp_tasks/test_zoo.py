"""The shipped models are what their files say: metrics of the stored weights, sizes, commands, marks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import tasks
from interp_tasks import UserError, load_checkpoint, train
from interp_tasks.checkpoints import (
    find_marks,
    read_metrics,
    read_run,
    refs,
    resolve,
    stored_steps,
    zoo_names,
)
from interp_tasks.checkpoints.meta import read_meta
from interp_tasks.checkpoints.refs import zoo_folder
from interp_tasks.training.config import resolve_config, train_config
from interp_tasks.zoo import pack as packing
from interp_tasks.zoo.pack import stored_metrics

SHIPPED = {
    "matrix-completion-4x4": ("matrix-completion", "cpu"),
    "matrix-completion-4x4-small-init": ("matrix-completion", "cpu"),
    "matrix-completion-5x5": ("matrix-completion", "reference"),
    "matrix-completion-autoregressive": ("matrix-completion-autoregressive", "cpu"),
    "matrix-completion-autoregressive-answer": ("matrix-completion-autoregressive", "cpu"),
    "miiii-113": ("miiii", "reference"),
    "miiii-113-small": ("miiii", "cpu"),
    "modular-addition-113": ("modular-addition", "cpu"),
}


#: Checkpoints of each, where they are not ten.
SHIPPED_STEPS = {
    "matrix-completion-4x4-small-init": 5,
    "matrix-completion-5x5": 5,
    "matrix-completion-autoregressive": 4,
    "matrix-completion-autoregressive-answer": 3,
    "miiii-113": 6,
}
#: The run of a sweep whose way is looked at: ten steps of it, as of the core run beside it.
OVER_TRAINING = "modular-arithmetic-sweeps/miiii-masked"
#: Other runs of sweeps: their last step alone.
FINAL = [name for name in zoo_names() if "/" in name and name != OVER_TRAINING]


def test_what_is_shipped():
    assert set(zoo_names()) - set(FINAL) - {OVER_TRAINING} == set(SHIPPED)
    size = sum(file.stat().st_size for file in zoo_folder().rglob("*") if file.is_file())
    assert size < 90e6


@pytest.mark.parametrize("name", FINAL)
def test_runs_of_sweeps_ship_their_last_step_halved(name):
    [step] = stored_steps(zoo_folder() / name)
    [found] = resolve(f"zoo:{name}@last")
    assert read_meta(found.path)["weights"]["dtype"] == "float16"
    assert (
        read_metrics(found.run_path)[-1]["step"]
        == step
        == read_run(found.run_path)["config"]["train"]["steps"]
    )


@pytest.mark.parametrize("name", SHIPPED)
def test_metrics_are_those_of_the_stored_weights(name):
    """Recomputed on the same 10,000 test examples; 1e-3 leaves room for other torch builds and thread counts."""
    checkpoint = load_checkpoint(f"zoo:{name}@post")
    found = stored_metrics(checkpoint.require_task(), checkpoint.model)
    stored = checkpoint.meta["metrics"]
    assert set(found) == set(stored)
    for metric, value in stored.items():
        assert found[metric] == pytest.approx(value, rel=1e-3, abs=1e-6), metric


@pytest.mark.parametrize("name", [*SHIPPED, OVER_TRAINING])
def test_the_last_is_exact_and_the_others_are_halved(name):
    folders = [resolve(f"zoo:{name}@{step}")[0].path for step in stored_steps(zoo_folder() / name)]
    dtypes = [read_meta(folder)["weights"]["dtype"] for folder in folders]
    assert dtypes == ["float16"] * (len(dtypes) - 1) + ["float32"]
    assert len(dtypes) == SHIPPED_STEPS.get(name, 10)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_stored_command_gives_the_config_that_trained_it(name):
    task_name, preset = SHIPPED[name]
    run = read_run(zoo_folder() / name)
    words = run["command"].split()
    assert words[:5] == ["interp-run", "train", task_name, "--preset", preset]
    overrides = dict(word.split("=", 1) for flag, word in pairwise(words) if flag == "--set")
    resolved = resolve_config(task_name, preset, overrides)
    assert train_config(run["config"]["train"]) == resolved.train
    stored = {**run["config"]["task"], **run["config"]["model"]}
    wanted = {**resolved.task, **resolved.model}
    assert {key: stored[key] for key in wanted} == wanted


@pytest.mark.parametrize("name", SHIPPED)
def test_the_marks_stand_before_and_after_a_drop(name):
    marks = find_marks(zoo_folder() / name)
    # Of three stored steps the one before the drop is also that at which it begins.
    assert marks["pre"] < marks["onset"] or len(stored_steps(zoo_folder() / name)) == 3
    assert 0 < marks["pre"] <= marks["onset"] < marks["end"] < marks["post"]
    metric = read_run(zoo_folder() / name)["drop_metric"]["name"]
    before, after = (
        load_checkpoint(f"zoo:{name}@{mark}").meta["metrics"][metric] for mark in ("pre", "post")
    )
    assert abs(after - before) > 0.5 * max(after, before)


def small_run(path):
    task = tasks.get("matrix-completion-sizes", sizes=(2, 3), grid_max=1, grid_step=0.1)
    config = {"steps": 2, "batch_size": 4, "eval_samples": 4}
    return train(task, out=path, settings={"d_model": 8, "n_heads": 2}, config=config)


@pytest.fixture
def own_zoo(tmp_path, monkeypatch):
    monkeypatch.setattr(refs, "zoo_folder", lambda: tmp_path / "zoo")
    monkeypatch.setattr(packing, "zoo_folder", lambda: tmp_path / "zoo")
    return tmp_path / "zoo"


def test_last_steps_are_packed_into_a_folder_and_named_by_refs(own_zoo, tmp_path, capsys):
    first, second = small_run(tmp_path / "a"), small_run(tmp_path / "seed-10")
    packing.main([f"seed-2={first}", str(second), "--into", "sweeps", "--final"])
    assert sorted(path.relative_to(own_zoo).as_posix() for path in own_zoo.rglob("*") if path.is_file()) == [
        f"sweeps/{run}/{file}"
        for run in ("seed-10", "seed-2")
        for file in (
            "checkpoints/00000002/meta.json",
            "checkpoints/00000002/model.safetensors",
            "clock.jsonl",
            "metrics.jsonl",
            "run.json",
        )
    ]
    assert refs.zoo_names() == ["sweeps/seed-2", "sweeps/seed-10"]
    assert [each.ref for each in resolve("zoo:sweeps/seed-*@last")] == [
        "zoo:sweeps/seed-2@2",
        "zoo:sweeps/seed-10@2",
    ]
    # Nine digits of each number.
    for line, short in zip(read_metrics(first), read_metrics(own_zoo / "sweeps/seed-2"), strict=True):
        assert short["step"] == line["step"]
        for metric, value in line["validation"].items():
            assert short["validation"][metric] == (None if value is None else float(f"{value:.9g}"))
    packed = load_checkpoint("zoo:sweeps/seed-2@last")
    assert packed.meta["weights"]["dtype"] == "float16"
    for size in (2, 3):
        part = packed.require_task().parts()[f"n={size}"]
        batch = part.sample(packing.SAMPLES, seed=0)
        with torch.no_grad():
            expected = tasks.pool(part.metrics(packed.model(batch.tokens), batch))
        for metric, value in expected.items():
            assert packed.meta["metrics"][f"{metric} (n={size})"] == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "--into", "sweeps"], "say which: --steps 0,100 or --final"),
        (["init-0.02=RUN", "--final"], "init-0.02: a name with a dot is left out of wheels"),
        (["a=RUN", "a=RUN", "--final"], "a is there already"),
    ],
)
def test_what_cannot_be_packed(own_zoo, tmp_path, arguments, message, capsys):
    run = small_run(tmp_path / "run")
    with pytest.raises((UserError, SystemExit)) as refused:
        packing.main([each.replace("RUN", str(run)) for each in arguments])
    assert message in str(refused.value) + capsys.readouterr().err


def test_a_glob_of_shipped_runs_that_matches_nothing(own_zoo, tmp_path):
    packing.main([f"seed-2={small_run(tmp_path / 'run')}", "--final"])
    with pytest.raises(UserError, match=r"^no zoo:other-\*: shipped runs are zoo:seed-2$"):
        resolve("zoo:other-*@last")
