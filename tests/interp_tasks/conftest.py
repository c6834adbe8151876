"""Two small checkpoints of one architecture, and their metrics in plain numpy."""

import pytest
import torch

import tasks
from interp_tasks.checkpoints import save_checkpoint
from interp_tasks.cli import main


@pytest.fixture(autouse=True)
def no_width_of_the_terminal(monkeypatch):
    """pytest-xdist tells its workers how wide the terminal is, which would break lines of tables."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="session")
def task():
    return tasks.get("matrix-completion", n=3, rank=1, grid_max=1.2, grid_step=0.1)


@pytest.fixture(scope="session")
def models(task):
    settings = task.Model(n_layers=2, n_heads=2, d_model=16, init_std=0.4)
    found = [task.build_model(seed, settings) for seed in (0, 1)]
    for seed, model in enumerate(found):
        stream = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            # Biases and norms that do something, so that leaving them out shows.
            if "b_" in name or "ln" in name:
                parameter.data += 0.3 * torch.randn(parameter.shape, generator=stream)
    return found


@pytest.fixture(scope="session")
def folders(task, models, tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return [
        str(save_checkpoint(root / f"c{index}", model, task, step=index))
        for index, model in enumerate(models)
    ]


@pytest.fixture(scope="session")
def pooled():
    """The task's metrics of an output ``[batch pos 1]``, pooled over the examples of a batch."""

    def pool(output, batch):
        error = (output[..., 0] - batch.targets).detach().square().double().numpy()
        hidden = batch.extras["hidden"].numpy()
        return {
            "mse_all": error.mean(),
            "mse_masked": error[hidden].mean(),
            "mse_observed": error[~hidden].mean(),
        }

    return pool
