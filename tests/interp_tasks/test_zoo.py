"""The shipped models are what their files say: metrics of the stored weights, sizes, commands, marks."""

from __future__ import annotations

from itertools import pairwise

import pytest

from interp_tasks import load_checkpoint
from interp_tasks.checkpoints import find_marks, read_run, resolve, stored_steps, zoo_names
from interp_tasks.checkpoints.meta import read_meta
from interp_tasks.checkpoints.refs import zoo_folder
from interp_tasks.training.config import resolve_config
from interp_tasks.zoo.pack import stored_metrics

SHIPPED = {
    "matrix-completion-4x4": ("matrix-completion", "cpu"),
    "matrix-completion-4x4-small-init": ("matrix-completion", "cpu"),
    "matrix-completion-5x5": ("matrix-completion", "reference"),
    "miiii-113-small": ("miiii", "cpu"),
    "modular-addition-113": ("modular-addition", "cpu"),
}


def test_what_is_shipped():
    assert set(zoo_names()) == set(SHIPPED)
    size = sum(file.stat().st_size for file in zoo_folder().rglob("*") if file.is_file())
    assert size < 25e6


@pytest.mark.parametrize("name", SHIPPED)
def test_metrics_are_those_of_the_stored_weights(name):
    """Recomputed on the same 10,000 test examples; 1e-3 leaves room for other torch builds and thread counts."""
    checkpoint = load_checkpoint(f"zoo:{name}@post")
    found = stored_metrics(checkpoint.require_task(), checkpoint.model)
    stored = checkpoint.meta["metrics"]
    assert set(found) == set(stored)
    for metric, value in stored.items():
        assert found[metric] == pytest.approx(value, rel=1e-3, abs=1e-6), metric


@pytest.mark.parametrize("name", SHIPPED)
def test_the_last_is_exact_and_the_others_are_halved(name):
    folders = [resolve(f"zoo:{name}@{step}")[0].path for step in stored_steps(zoo_folder() / name)]
    dtypes = [read_meta(folder)["weights"]["dtype"] for folder in folders]
    assert dtypes == ["float16"] * (len(dtypes) - 1) + ["float32"]
    assert len(dtypes) == (5 if name.endswith(("5x5", "small-init")) else 10)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_stored_command_gives_the_config_that_trained_it(name):
    task_name, preset = SHIPPED[name]
    run = read_run(zoo_folder() / name)
    words = run["command"].split()
    assert words[:5] == ["interp-run", "train", task_name, "--preset", preset]
    overrides = dict(word.split("=", 1) for flag, word in pairwise(words) if flag == "--set")
    resolved = resolve_config(task_name, preset, overrides)
    assert run["config"]["train"] == resolved.train.model_dump(mode="json")
    stored = {**run["config"]["task"], **run["config"]["model"]}
    wanted = {**resolved.task, **resolved.model}
    assert {key: stored[key] for key in wanted} == wanted


@pytest.mark.parametrize("name", SHIPPED)
def test_the_marks_stand_before_and_after_a_drop(name):
    marks = find_marks(zoo_folder() / name)
    assert 0 < marks["pre"] < marks["onset"] < marks["end"] < marks["post"]
    metric = read_run(zoo_folder() / name)["drop_metric"]["name"]
    before, after = (
        load_checkpoint(f"zoo:{name}@{mark}").meta["metrics"][metric] for mark in ("pre", "post")
    )
    assert abs(after - before) > 0.5 * max(after, before)
