"""The short forms of the campaigns of tests/campaigns, and that a campaign can fail."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tasks
from interp_tasks.checkpoints import read_metrics, stored_steps
from interp_tasks.errors import Stopped
from interp_tasks.training import train

REPOSITORY = Path(__file__).parents[2]


def campaign(name, n, *options):
    """The summary of a campaign in an interpreter of its own: it forks, and limits its memory."""
    command = [sys.executable, "-m", "tests.campaigns", name, "--n", str(n), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.stdout, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == bool(summary["failures"]), done.stderr
    return summary


@pytest.mark.parametrize("options", [("--n", "0"), ("--n", "-1"), ("--n", "a"), ("--only", "-1")])
def test_a_campaign_without_a_trial_is_refused(options):
    command = [sys.executable, "-m", "tests.campaigns", "mangle", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 2
    assert "invalid whole number from" in done.stderr


@pytest.mark.slow
def test_killed_runs_end_with_the_same_bytes():
    summary = campaign("kill", 8)
    assert summary["failures"] == {}
    assert sum(summary["kinds"].values()) >= 8


@pytest.mark.slow
def test_mangled_files_are_refused_or_read_as_saved():
    summary = campaign("mangle", 150)
    assert summary["failures"] == {}
    assert {kind.partition(" ")[0] for kind in summary["kinds"]} == {"checkpoint", "run", "grid"}


@pytest.mark.slow
def test_what_a_disk_refuses_is_said_and_loses_nothing():
    summary = campaign("disk", 16)
    assert summary["failures"] == {}


@pytest.mark.slow
def test_a_grid_whose_worker_is_killed_ends_with_the_serial_table():
    summary = campaign("grid", 1)
    assert summary["failures"] == {}
    assert summary["kinds"] == {"a worker of processes killed": 1}


@pytest.mark.slow
def test_eight_threads_on_one_model_find_what_each_finds_alone():
    summary = campaign("threads", 12)
    assert summary["failures"] == {}
    assert sum(summary["kinds"].values()) == 12 * 8


@pytest.mark.slow
def test_an_interrupt_at_any_instant_leaves_the_model_as_it_was():
    summary = campaign("interrupts", 100)
    assert summary["failures"] == {}
    assert summary["n"] == 100
    assert sum(count for kind, count in summary["kinds"].items() if kind.endswith("interrupted")) > 50


@pytest.mark.slow
def test_the_same_command_gives_the_same_bits():
    """Trained runs; every experiment, and executors, in the long form."""
    summary = campaign("bits", 4)
    assert summary["failures"] == {}
    assert summary["kinds"] == {"training": 4}


@pytest.mark.slow
def test_options_that_nobody_means_are_refused_in_one_line():
    summary = campaign("options", 40)
    assert summary["failures"] == {}
    assert summary["n"] == 40
    # How many of the others are done before they are stopped is the machine's affair.
    assert summary["kinds"]["refused"] > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
        ),
    ],
)
def test_a_device_finds_the_numbers_of_the_cpu(device):
    """Some trials of every kind; what the campaign can find, test_device_campaign.py has."""
    summary = campaign("device", 30, "--device", device)
    assert summary["failures"] == {}
    assert sum(summary["kinds"].values()) == 30
    assert {kind.partition(" ")[0].strip(",") for kind in summary["kinds"]} == {
        "command",
        "training",
        "circuits",
    }


def weights(run):
    return {
        step: (run / f"checkpoints/{step:08d}/model.safetensors").read_bytes() for step in stored_steps(run)
    }


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
    assert weights(tmp_path / "stopped") == weights(tmp_path / "alone")
    assert read_metrics(tmp_path / "stopped") == read_metrics(tmp_path / "alone")
    assert not (tmp_path / "stopped" / "stopped").exists()
