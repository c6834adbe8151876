"""Experiments on runs that are mangled, and on examples with little in them."""

import json
import shutil

import pytest

from interp_tasks.cli import main

ZOO = "zoo:matrix-completion-4x4"
MODEL = ("model.d_model=8", "model.n_heads=2")
TINY = ("task.n=3", "task.rank=1", "task.grid_step=0.1", "task.grid_max=1.2", *MODEL)
SCHEDULE = ("train.steps=4", "train.log_every=1", "train.eval_samples=9", "train.batch_size=4")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A run of 3×3 matrices; a test that changes it takes a copy."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    settings = [part for one in (*TINY, *SCHEDULE) for part in ("--set", one)]
    assert main(["train", "matrix-completion", *settings, "--out", str(out), "--quiet"]) == 0
    return out


MANGLED = {
    "steps twice": ("metrics.jsonl", lambda text: text + text, "no later step"),
    "a section that is a number": (
        *("run.json", lambda text: json.dumps({**json.loads(text), "config": {"task": {}, "train": 3}})),
        "a section of its config is not an object",
    ),
    "no number of the metric": (
        *("metrics.jsonl", lambda text: '{"step": 0, "validation": {"mse_masked": null, "mse_all": 1.0}}\n'),
        "logs no validation 'mse_masked': it has mse_all",
    ),
}


@pytest.mark.parametrize("what", MANGLED)
def test_a_mangled_run_is_said_to_be_one(call, tiny, tmp_path, what):
    file, mangle, said = MANGLED[what]
    run = tmp_path / "run"
    shutil.copytree(tiny, run)
    (run / file).write_text(mangle((run / file).read_text()))
    code, out, err = call("runs", "drops", "--ckpt", str(run))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


ONE = {
    "curve": lambda run: ["runs", "curve", "--ckpt", run],
    "influence": lambda run: ["matrix", "influence", "--ckpt", f"{ZOO}@post"],
    "baseline": lambda run: ["matrix", "baseline", "--ckpt", f"{run}@last", "--variant", "p_mask 0.50"],
    "algorithm": lambda run: ["matrix", "algorithm", "--ckpt", f"{run}@last"],
    "copying": lambda run: ["matrix", "copying", "--ckpt", f"{run}@last"],
}


@pytest.mark.parametrize("command", ONE)
def test_one_example_has_no_interval(call, tiny, command):
    code, out, err = call(*ONE[command](tiny), "--samples", "1", "--quiet", "--format", "json")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert any(row["value"] is not None for row in rows)
    ends = [f"{part}_ci_{end}" for part in ("value", "effect") for end in ("low", "high")]
    assert {row[end] for row in rows for end in ends} == {None}


def test_a_matrix_of_three_entries_has_no_map_of_positions(call, tmp_path):
    settings = [part for one in ("task.m=1", *TINY, *SCHEDULE) for part in ("--set", one)]
    assert call("train", "matrix-completion", *settings, "--out", "run", "--quiet")[0] == 0
    code, out, err = call(
        "matrix", "embeddings", "--ckpt", "run@last", "--quiet", "--format", "json", "--plot"
    )
    assert (code, err) == (0, "")
    assert {row["variant"] for row in json.loads(out)} == {"tokens"}
