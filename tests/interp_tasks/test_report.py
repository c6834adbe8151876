"""The report on a run: what it measures, against the experiments and closed forms, and what its page holds."""

import json

import numpy as np
import pytest

import tasks
from circuits import patterns
from interp_tasks import experiments
from interp_tasks.checkpoints import save_checkpoint
from interp_tasks.cli import main
from interp_tasks.report import attention_slider_figure, report, resolve_report_refs
from tests.interp_tasks.logs import write_run_of_task

SAMPLES = 12
LABELS = ["step 0", "step 10 (pre, onset)", "step 40 (end, post)"]


@pytest.fixture(scope="module")
def matrix():
    task = tasks.get("matrix-completion", n=3, rank=1, grid_max=1.2, grid_step=0.1)
    return task, task.Model(n_layers=2, n_heads=2, d_model=16, init_std=0.4)


@pytest.fixture(scope="module")
def run(matrix, tmp_path_factory):
    return write_run_of_task(tmp_path_factory.mktemp("runs") / "matrix", *matrix, steps=(0, 10, 40))


@pytest.fixture(scope="module")
def addition(tmp_path_factory):
    task = tasks.get("modular-addition", p=7)
    settings = task.Model(n_layers=1, n_heads=2, d_model=8, init="nanda", normalization=None)
    folder = tmp_path_factory.mktemp("runs") / "addition"
    return write_run_of_task(folder, task, settings, (10, 25), 0.0, 0.0)


@pytest.fixture(scope="module")
def found(run):
    return report(run, samples=SAMPLES)


def test_a_report_is_of_a_run_some_of_its_steps_or_one_checkpoint(found, run, matrix, tmp_path):
    assert [each.step for each in resolve_report_refs(run, {})] == [0, 10, 40]
    assert (found.curve.drop.onset, found.curve.drop.end) == (19, 20)
    assert found.marks() == {"pre": 10, "onset": 10, "end": 40, "post": 40}
    assert [each.step for each in resolve_report_refs(f"{run}@40,10", {})] == [10, 40]
    alone = report(f"{run}/checkpoints/00000010", samples=4)
    assert [each.step for each in alone.snapshots] == [10]
    task, settings = matrix
    bare = save_checkpoint(tmp_path / "bare", task.build_model(0, settings), task, step=3)
    assert "A checkpoint on its own" in report(str(bare), samples=4).missing


def test_effects_are_those_of_the_experiment(found, run):
    ours = found.effects()
    theirs = experiments.heads(f"{run}@40", "zero", samples=SAMPLES).frame
    columns = ["value", "baseline", "effect", "effect_ci_low", "effect_ci_high"]
    for metric in ("mse_masked", "mse_observed"):
        for variant in ("0.1", "layer 1", "all"):
            mine = ours[(ours["step"] == 40) & (ours["intervention"] == "zero")]
            one, other = (
                frame[(frame["metric"] == metric) & (frame["variant"] == variant)][columns].to_numpy(float)
                for frame in (mine, theirs)
            )
            assert one.shape == (1, len(columns))
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)


def steps_of(figure):
    """By what the slider says, the numbers of every map."""
    (slider,) = figure.layout.sliders
    assert slider.active == len(slider.steps) - 1
    return {step.label: step.args[0]["z"] for step in slider.steps}


def test_maps_of_attention_are_those_of_the_library_at_every_step(found, matrix):
    task, settings = matrix
    tokens = task.sample(SAMPLES, seed=0, split="test").tokens
    figure = attention_slider_figure(found.snapshots, LABELS)
    steps = steps_of(figure)
    for step, maps in zip((0, 10, 40), steps.values(), strict=True):
        expected = patterns.attention(task.build_model(step, settings), tokens).mean.numpy()
        np.testing.assert_allclose(np.array(maps).reshape(expected.shape), expected, rtol=1e-3, atol=1e-6)
    # The page opens at the end of the training.
    np.testing.assert_allclose(figure.data[3].z, expected[1, 1], atol=1e-6)
    assert list(figure.data[0].x)[5] == "(1,2)"


def test_a_run_without_a_drop(addition):
    found = report(addition, samples=4)
    assert "No drop in accuracy" in found.page().html()
    assert {"quantity": "rise of accuracy", "value": "none found"} in found.headlines()


def test_command_writes_the_page_and_prints_its_head(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["runs", "report", "--ckpt", f"{run}@10,40", "--samples", "4", "--format", "json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "wrote report.html\n"
    rows = json.loads(captured.out)
    assert {"quantity": "checkpoints shown", "value": "2, steps 10 to 40"} in rows
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "step 40 (end, post)" in page
