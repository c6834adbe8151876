"""Gradient norms over training: a tiny run against its own log, hand-made logs, and what is refused."""

import json
import math
import shutil

import numpy as np
import pytest

import tasks
from interp_tasks import experiments, train
from interp_tasks.experiments import COLUMNS
from interp_tasks.measurement.result import readable_table
from tests.interp_tasks.rows import row_of


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """40 steps of addition modulo 11 with Grokfast, norms logged every 5."""
    folder = tmp_path_factory.mktemp("gradients") / "run"
    train(
        tasks.get("modular-addition", p=11),
        settings={"d_model": 8, "n_heads": 1, "d_mlp": 8},
        config={
            "steps": 40,
            "gradient_norms_every": 5,
            "grokfast": "ema",
            "log_every": 10,
            "checkpoint_every": 40,
        },
        out=folder,
    )
    return folder


def of(result, variant, stage, metric, column="value"):
    return row_of(result.frame, variant=variant, intervention=stage, metric=metric)[column]


def with_norms(run, folder, tables, steps=None):
    """The run with other gradient norms: step -> stage -> tensor -> norm."""
    shutil.copytree(run, folder)
    lines = [
        {"step": step, "validation": {"accuracy": 0.1, "loss": 1.0}, "gradient_norm": table}
        for step, table in zip(steps or range(0, 10 * len(tables), 10), tables, strict=True)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def test_a_run_against_its_log(run):
    result = experiments.gradients(str(run))
    assert tuple(result.frame.columns) == COLUMNS
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = {line["step"]: line["gradient_norm"] for line in lines if "gradient_norm" in line}
    assert list(logged) == [5, 10, 15, 20, 25, 30, 35, 40]
    for stage in ("raw", "filtered"):
        for name in logged[5][stage]:
            norms = [table[stage][name] for table in logged.values()]
            largest = max(norms)
            assert of(result, name, stage, "largest norm") == largest
            if not largest:
                continue
            late = [step for step, norm in zip(logged, norms, strict=True) if norm >= largest / 2]
            after = of(result, name, stage, "step below half")
            assert math.isnan(after) if late[-1] == 40 else after == late[-1] + 5
    raw, filtered = (of(result, "embed.W_E", stage, "largest norm") for stage in ("raw", "filtered"))
    assert filtered > raw
    assert set(result.frame["split"]) == {"train"}


A, B, C = "blocks.0.attn.W_Q", "blocks.0.attn.W_V", "unembed.W_U"


def test_steps_and_ranks_by_hand(run, tmp_path):
    tables = [{A: a, B: b, C: c} for a, b, c in [(4, 1, 9), (1, 8, 8), (1, 5, 6), (1, 1, 9)]]
    result = experiments.gradients(with_norms(run, tmp_path / "r", [{"raw": table} for table in tables]))
    assert of(result, A, "raw", "step below half") == 10
    assert of(result, B, "raw", "step below half") == 30, "5 is more than half of 8"
    assert math.isnan(of(result, C, "raw", "step below half"))
    assert [of(result, name, "raw", "rank of the step below half") for name in (A, B, C)] == [1, 2, 3]
    assert of(result, "attention", "raw", "median rank of the step below half") == 1.5
    assert of(result, "attention", "raw", "median rank of the step below half", "baseline") == 3
    assert of(result, "attention", "raw", "median rank of the step below half", "effect") == -1.5
    assert set(result.frame["intervention"]) == {"raw"}, "without a filter nothing is filtered"
    assert list(readable_table(result.frame)[0]["variant"]) == [A, B, C, "attention"]


def test_the_first_steps_can_be_left_out(run, tmp_path):
    folder = with_norms(run, tmp_path / "r", [{"raw": {A: a, C: 1}} for a in (100, 8, 7, 1)])
    assert of(experiments.gradients(folder), A, "raw", "step below half") == 10
    later = experiments.gradients(folder, start=10)
    assert of(later, A, "raw", "largest norm") == 8
    assert of(later, A, "raw", "step below half") == 30


def test_a_step_that_diverged_is_not_small(run, tmp_path):
    folder = with_norms(run, tmp_path / "r", [{"raw": {A: a, C: 1}} for a in (8, None, 1)])
    result = experiments.gradients(folder)
    assert of(result, A, "raw", "step below half") == 20
    # Nothing is a share of what is infinite.
    np.testing.assert_array_equal(result.plot().data[0].z, [[np.nan] * 3, [1] * 3])
