"""Stopped at any operation on the disk, a run goes on to the same end as one that never stopped."""

import os
import shutil

import pytest
import torch

from interp_tasks.checkpoints import RunFolder, load_checkpoint, read_metrics, save_checkpoint, stored_steps
from interp_tasks.checkpoints.checkpoint import fill_parameters
from interp_tasks.errors import UserError
from tests.interp_tasks.checkpoints.models import build

STEPS = 4
SAVED_EVERY = 2


def train(path):
    """A stand-in for the trainer: a walk with momentum, whose next step depends on all that is saved."""
    with RunFolder.open(path, {"train": {"steps": STEPS}}, {}) as run:
        model, momentum, first = build(1), torch.zeros(()), 0
        point = run.resume()
        if point is not None:
            fill_parameters(model, point.parameters, point.path)
            momentum, first = point.tensors["momentum"].clone(), point.step + 1
        for step in range(first, STEPS + 1):
            if step > 0:
                momentum = 0.9 * momentum + torch.rand((), generator=torch.Generator().manual_seed(step))
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(momentum * parameter)
            run.log({"step": step, "weight": model.embed.W_E[0, 0].item()})
            if step % SAVED_EVERY == 0:
                run.save(step, model, None, {"momentum": momentum})


def result(path):
    weights = {
        name: parameter.tolist()
        for step in stored_steps(path)
        for name, parameter in load_checkpoint(f"{path}@{step}").model.named_parameters(prefix=str(step))
    }
    return stored_steps(path), weights, read_metrics(path)


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it in the same process runs, so nothing may clean up."""


class DiesAt:
    """Lets a number of disk operations pass, then fails this and every later one, as a dead process would."""

    OPERATIONS = ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir", "ftruncate")

    def __init__(self, monkeypatch, survive, after):
        self.count, self.survive, self.after = 0, survive, after
        for name in self.OPERATIONS:
            # Syncing itself is left out: no test cuts the power, and a busy disk takes seconds.
            operation = (lambda descriptor: None) if name == "fsync" else getattr(os, name)
            monkeypatch.setattr(os, name, self._dying(operation))
        # The clean-up of an exception that a killed process would never run.
        monkeypatch.setattr(shutil, "rmtree", self._dying(shutil.rmtree))

    def _dying(self, operation):
        def wrapped(*arguments, **options):
            if self.count > self.survive:
                raise Killed
            self.count += 1
            if self.count > self.survive:
                if self.after:
                    operation(*arguments, **options)
                raise Killed
            return operation(*arguments, **options)

        return wrapped


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        counter = DiesAt(patch, survive=10**9, after=False)
        train(path)
    return counter.count, result(path)


@pytest.mark.parametrize("after", [False, True], ids=["before the operation", "after it"])
def test_killed_at_every_disk_operation(tmp_path, uninterrupted, after):
    operations, expected = uninterrupted
    # What dying after an operation adds are the unsynced writes up to the next one: a sample of it will do.
    for survive in range(0, operations, 3 if after else 1):
        path = tmp_path / str(survive)
        with pytest.MonkeyPatch.context() as patch:
            DiesAt(patch, survive, after)
            with pytest.raises(Killed):
                train(path)
        train(path)
        assert result(path) == expected, f"killed at operation {survive}"
        assert not [entry for entry in path.rglob(".*") if entry.name != ".lock"]


def test_killed_again_while_resuming(tmp_path, uninterrupted):
    operations, expected = uninterrupted
    path = tmp_path / "run"
    for survive in (operations // 2, 3, 5, 8, 9, 12, operations // 3, 10, 11):
        with pytest.MonkeyPatch.context() as patch:
            DiesAt(patch, survive, after=False)
            try:
                train(path)
            except Killed:
                continue
    train(path)
    assert result(path) == expected


@pytest.mark.parametrize("operation", ["rename", "fsync"])
def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch, operation):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, operation, fail)
    with pytest.raises(UserError, match=r"cannot write .*: No space left on device"):
        save_checkpoint(tmp_path / "one", build(1))
    assert list(tmp_path.iterdir()) == []
