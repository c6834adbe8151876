"""Folders that the tests of the command line share."""

import json
import shutil

import numpy
import pytest

import tasks
from interp_tasks.checkpoints import save_checkpoint


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """``run`` (steps 0, 10, 40), ``bare`` (no task), ``other`` (one layer), ``foreign`` (a file), tokens, a module."""
    folder = tmp_path_factory.mktemp("cli")
    task = tasks.get("matrix-completion", n=3, rank=1, grid_max=1.2, grid_step=0.1)
    settings = task.Model(n_layers=2, n_heads=2, d_model=8, init_std=0.4)
    for step in (0, 10, 40):
        save_checkpoint(
            folder / f"run/checkpoints/{step:08d}", task.build_model(step, settings), task, step=step
        )
    run = {"format": 1, "config": {}, "drop_metric": {"name": "mse_masked", "direction": "down"}}
    (folder / "run/run.json").write_text(json.dumps(run))
    lines = ({"step": step, "validation": {"mse_masked": float(step < 20)}} for step in range(41))
    (folder / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_checkpoint(folder / "bare", task.build_model(0, settings))
    save_checkpoint(folder / "other", task.build_model(0, task.Model(n_layers=1, n_heads=2, d_model=8)), task)
    shutil.copy(folder / "bare/model.safetensors", folder / "weights.safetensors")
    (folder / "foreign").write_text("text")
    (folder / "three.jsonl").write_text("3")
    (folder / "three.csv").write_text("step,loss\n1,2,3")
    (folder / "broken.py").write_text("import tasks\nx = 1 / 0\n")
    numpy.save(folder / "tokens.npy", numpy.arange(18).reshape(2, 9))
    others = {
        "short": numpy.zeros((2, 5), int),
        "long": numpy.ones((2, 17), int),
        "large": numpy.full((2, 9), 10**6),
        "floats": numpy.ones((2, 9)),
        "empty": numpy.ones((0, 9), int),
        "objects": numpy.array([{}], dtype=object),
    }
    for name, array in others.items():
        numpy.save(folder / f"{name}.npy", array, allow_pickle=True)
    return folder
