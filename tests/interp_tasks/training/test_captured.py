"""Updates recorded once and repeated: equal to updates made one operation after another.

Where there is no CUDA device, a capture keeps the function instead of its operations; what is tested then is that
everything which changes from step to step reaches the memory that the recorded operations read.
"""

from __future__ import annotations

import pytest
import torch

import tasks
from interp_tasks import UserError, train
from interp_tasks.checkpoints import read_run
from interp_tasks.training.captured import CapturedUpdate, is_capturable, why_not_captured
from interp_tasks.training.config import TrainConfig
from interp_tasks.training.loop import Loop
from interp_tasks.training.optimizer import Updater
from interp_tasks.training.stacked import Seed, Stack
from interp_tasks.training.stacked_optimizer import StackedUpdater
from interp_tasks.training.trainer import prepare_model
from tasks.modular_arithmetic.one_modulus import OneModulus

TINY = {"d_model": 8, "n_heads": 2}
EVERYTHING = {
    "grokfast": "ema",
    "dropout": 0.2,
    "clip_norm": 0.05,
    "warmup_steps": 5,
    "schedule": "cosine",
    "schedule_end": 12,
    "weight_decay": 0.1,
    "gradient_norms_every": 5,
}
CASES = {
    "whole split": ("modular-addition", {"p": 5}, {}),
    "fresh batches": ("matrix-completion", {"n": 2, "rank": 1}, {"batch_size": 6}),
    "shared masks": ("miiii", {"p": 5}, {"batch_size": 9, "dropout_masks": "shared"}),
    "post-norm": ("matrix-completion", {"n": 3, "rank": 2}, {"batch_size": 6}),
    "sizes": ("matrix-completion-sizes", {"sizes": [2, 3], "rank": 1}, {"batch_size": 4}),
    "autoregressive": ("matrix-completion-autoregressive", {"n": 2, "rank": 1}, {"batch_size": 4}),
}


def kept(case):
    name, data, training = CASES[case]
    task = tasks.get(name, **data)
    norm = {"norm": "post"} if case == "post-norm" else {}
    return task, task.Model(**TINY, **norm), {**EVERYTHING, **training, "eval_samples": 4, "threads": 1}


def recording():
    """A capture that keeps the update itself, and the list of what it kept."""
    recorded = []

    def keep(update):
        recorded.append(update)
        return update

    return keep, recorded


def loops(case, device="cpu"):
    """The same run twice: an update at a time, and captured."""
    task, settings, training = kept(case)
    config = TrainConfig(**training)
    eager, captured = (
        Loop(task, prepare_model(task, settings, config, device)[0], config, device, (), None)
        for _ in range(2)
    )
    keep, recorded = recording()
    captured.captured = CapturedUpdate(captured.compute_from, capture=keep)
    captured.updater = Updater(captured.model, config, captured=True)
    return eager, captured, recorded


def stacks(case, device="cpu"):
    """The same seeds twice: an update at a time, and captured."""
    task, settings, training = kept(case)

    def stack():
        configs = [TrainConfig(**training, seed=seed) for seed in (0, 3)]
        return Stack(
            [
                Seed(task, prepare_model(task, settings, config, device)[0], config, device, (0, 3), None)
                for config in configs
            ]
        )

    eager, captured = stack(), stack()
    keep, recorded = recording()
    captured.captured = CapturedUpdate(captured._compute_from, capture=keep)
    captured.updater = StackedUpdater(captured.parameters, captured.config, captured=True)
    return eager, captured, recorded


def assert_same(expected, got, rtol=1e-5, atol=1e-6):
    assert expected.keys() == got.keys()
    for name, one in expected.items():
        # The gradient of b_K is rounding alone. The rate is a float32 tensor in the one, a double in the other.
        if not name.endswith("b_K"):
            torch.testing.assert_close(
                got[name], one, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("case", CASES)
def test_captured_updates_are_the_updates(case):
    eager, captured, recorded = loops(case)
    for step in range(14):
        lines = [loop.update(step) for loop in (eager, captured)]
        # Norms of gradients are logged in both.
        assert lines[0].keys() == lines[1].keys()
        assert ("gradient_norm" in lines[0]) == ((step + 1) % 5 == 0)
    assert_same(eager.updater.parameters, captured.updater.parameters)
    # Each shape of batch once.
    assert len(recorded) == (2 if case == "sizes" else 1)


@pytest.mark.parametrize("case", ["whole split", "fresh batches", "shared masks", "post-norm"])
def test_captured_updates_of_several_seeds_are_their_updates(case):
    eager, captured, recorded = stacks(case)
    for step in range(14):
        lines = [stack.update(step) for stack in (eager, captured)]
        assert [line.keys() for line in lines[0]] == [line.keys() for line in lines[1]]
    assert_same(eager.updater.parameters, captured.updater.parameters)
    assert len(recorded) == 1


def test_reasons_to_launch_operations_one_by_one():
    task = tasks.get("modular-addition", p=5)
    config = TrainConfig()
    assert why_not_captured("cpu", task, config, "fused") == "not on a CUDA device"
    assert why_not_captured("cuda", task, config, "fused") is None
    assert "own forward" in why_not_captured("cuda:1", task, config, "hooked")
    assert "processes" in why_not_captured("cuda", task, config, "shared")
    assert "sgd" in why_not_captured("cuda", task, TrainConfig(optimizer="sgd"), "fused")
    assert "window" in why_not_captured("cuda", task, TrainConfig(grokfast="ma"), "fused")


def test_a_loss_of_ones_own_is_not_captured_unless_it_says_so():
    class Own(OneModulus):
        name = "own"

        def answers(self, operands):
            return operands.sum(-1)

        def loss(self, output, batch):
            return output.square().mean()

    class Declared(Own):
        capturable = True

        def loss(self, output, batch):
            return output.square().mean()

    class Inherited(Declared):
        pass

    assert is_capturable(tasks.get("modular-addition", p=5))
    assert not is_capturable(Own(p=5))
    assert is_capturable(Declared(p=5))
    assert is_capturable(Inherited(p=5))
    assert "capturable" in why_not_captured("cuda", Own(p=5), TrainConfig(), "fused")


def test_a_run_says_how_its_updates_were_made(tmp_path):
    run = train("modular-addition", out=tmp_path / "run", settings=TINY, config={"steps": 1, "threads": 1})
    assert read_run(run)["updates"] == {"kind": "eager", "reason": "not on a CUDA device"}


def test_tf32_is_refused_where_products_are_not_rounded(tmp_path):
    with pytest.raises(UserError, match="CUDA"):
        train("modular-addition", out=tmp_path / "run", config={"steps": 1, "precision": "tf32"})
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES)
def test_cuda_graphs_make_the_same_updates(case):
    eager, captured, _ = loops(case, "cuda")
    eager.captured, eager.updater = None, Updater(eager.model, eager.config)
    captured.captured = CapturedUpdate(captured.compute_from)
    for step in range(14):
        for loop in (eager, captured):
            loop.update(step)
    assert_same(eager.updater.parameters, captured.updater.parameters, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", ["whole split", "fresh batches", "shared masks", "post-norm"])
def test_cuda_graphs_make_the_same_updates_of_several_seeds(case):
    eager, captured, _ = stacks(case, "cuda")
    eager.captured, eager.updater = None, StackedUpdater(eager.parameters, eager.config)
    captured.captured = CapturedUpdate(captured._compute_from)
    for step in range(14):
        for stack in (eager, captured):
            stack.update(step)
    assert_same(eager.updater.parameters, captured.updater.parameters, rtol=1e-3, atol=1e-4)
