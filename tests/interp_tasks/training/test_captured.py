"""Updates recorded once and repeated: equal to updates made one operation after another.

Where there is no CUDA device, a capture keeps the function instead of its operations; what is tested then is that
everything which changes from step to step reaches the memory that the recorded operations read.
"""

import pytest
import torch

import tasks
from interp_tasks import UserError, train
from interp_tasks.cli import main
from interp_tasks.training.config import TrainConfig
from interp_tasks.training.cuda_graph_capture import CapturedUpdate, is_capturable, why_not_captured
from interp_tasks.training.parameter_update import Updater
from interp_tasks.training.train import prepare_model
from interp_tasks.training.training_loop import TrainingLoop
from tasks.modular_arithmetic.one_modulus import OneModulus
from tasks.registry import BUILT_IN

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
        TrainingLoop(task, prepare_model(task, settings, config, device)[0], config, device, (), None)
        for _ in range(2)
    )
    keep, recorded = recording()
    captured.updater = Updater(captured.model, config, captured=True)
    update, parameters = captured.update_from_tensors, captured.updater.parameters
    captured.captured = CapturedUpdate(update, parameters, device, keep)
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
        lines = [loop.train_step(step) for loop in (eager, captured)]
        # Norms of gradients are logged in both.
        assert lines[0].keys() == lines[1].keys()
        assert ("gradient_norm" in lines[0]) == ((step + 1) % 5 == 0)
    assert_same(eager.updater.parameters, captured.updater.parameters)
    # Each shape of batch once.
    assert len(recorded) == (2 if case == "sizes" else 1)


@pytest.mark.parametrize("change", ["moved", "frozen"])
def test_parameters_that_are_replaced_are_those_that_train_on(change):
    """A replay would go on with the memory that they had."""
    eager, captured, recorded = loops("fresh batches")
    for step in range(12):
        for loop in (eager, captured):
            loop.train_step(step)
        for loop in (eager, captured) if step == 5 else ():
            parameter = loop.updater.parameters["unembed.W_U"]
            if change == "moved":
                parameter.data = parameter.data.clone()
            else:
                parameter.requires_grad_(False)
    assert_same(eager.updater.parameters, captured.updater.parameters)
    assert len(recorded) == 2


def test_what_cannot_be_recorded_is_told_once_and_goes_on():
    eager, captured, _ = loops("fresh batches")
    asked = []

    def fail(update):
        asked.append(update)
        raise RuntimeError("operation not permitted when stream is capturing")

    captured.captured.capture = fail
    for step in range(3):
        captured.train_step(step)
    with pytest.warns(UserWarning, match="operation not permitted"):
        captured.train_step(3)
    for step in range(8):
        eager.train_step(step)
        if step > 3:
            captured.train_step(step)
    assert len(asked) == 1
    assert_same(eager.updater.parameters, captured.updater.parameters)


def test_reasons_to_launch_operations_one_by_one():
    task = tasks.get("modular-addition", p=5)
    model = task.build_model(0, task.Model(**TINY))
    config = TrainConfig()

    def reason(device="cuda", config=config, forward="fused", model=model, task=task):
        return why_not_captured(device, task, model, config, forward)

    assert reason("cpu") == "not on a CUDA device"
    assert reason() is None
    assert "own forward" in reason("cuda:1", forward="hooked")
    assert "sgd" in reason(config=TrainConfig(optimizer="sgd"))
    assert "window" in reason(config=TrainConfig(grokfast="ma"))
    matrices = tasks.get("matrix-completion", n=2, rank=1)
    completing = matrices.build_model(0, matrices.Model(**TINY))
    # The row of MASK is kept at zero by a hook that does the same in every update.
    assert reason(model=completing, task=matrices) is None
    completing.embed.W_E.register_hook(lambda gradient: gradient)
    assert "hooks" in reason(model=completing, task=matrices)


def test_every_task_of_ours_is_captured_and_none_derived_from_it():
    class Own(OneModulus):
        name = "own"

        def answers(self, operands):
            return operands.sum(-1)

    class Declared(Own):
        capturable = True

    class Derived(Declared):
        def read(self, output):
            return output * torch.rand(())

    assert all(is_capturable(tasks.get(name)) for name in BUILT_IN)
    assert not is_capturable(Own(p=5))
    assert is_capturable(Declared(p=5))
    assert not is_capturable(Derived(p=5))


def test_tf32_is_refused_where_products_are_not_rounded(tmp_path):
    rounded = {"steps": 1, "precision": "tf32"}
    with pytest.raises(UserError, match="CUDA"):
        train("modular-addition", out=tmp_path / "run", config=rounded)
    search = ["runs", "search", "modular-addition", "--trials", "1", "--out", str(tmp_path / "search")]
    assert main([*search, "--vary", "train.precision=float32,tf32"]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES)
def test_cuda_graphs_make_the_same_updates(case):
    eager, captured, _ = loops(case, "cuda")
    eager.captured, eager.updater = None, Updater(eager.model, eager.config)
    captured.captured = CapturedUpdate(captured.update_from_tensors, captured.updater.parameters, "cuda")
    for step in range(14):
        for loop in (eager, captured):
            loop.train_step(step)
    assert_same(eager.updater.parameters, captured.updater.parameters, rtol=1e-3, atol=1e-4)
