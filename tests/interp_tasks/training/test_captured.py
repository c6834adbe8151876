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
from interp_tasks.training.captured import WARM_UP, CapturedUpdate, is_capturable, why_not_captured
from interp_tasks.training.config import TrainConfig
from interp_tasks.training.loop import Loop
from interp_tasks.training.optimizer import Updater
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


def loops(case, device="cpu"):
    """The same run twice: an update at a time, and captured."""
    name, data, training = CASES[case]
    task = tasks.get(name, **data)
    config = TrainConfig(**EVERYTHING, **training, eval_samples=4, threads=1)
    norm = {"norm": "post"} if case == "post-norm" else {}
    pair = []
    for _ in range(2):
        model, _described = prepare_model(task, task.Model(**TINY, **norm), config, device)
        pair.append(Loop(task, model, config, device, (), None))
    eager, captured = pair
    recorded = []

    def keep(update):
        recorded.append(update)
        return update

    sizes = captured.model.cfg
    captured.captured = CapturedUpdate(
        captured.compute, sizes.n_layers, sizes.attn_only, sizes.d_model, capture=keep
    )
    captured.updater = Updater(captured.model, config, captured=True)
    return eager, captured, recorded


@pytest.mark.parametrize("case", CASES)
def test_captured_updates_are_the_updates(case):
    eager, captured, recorded = loops(case)
    for step in range(14):
        lines = [loop.update(step) for loop in (eager, captured)]
        # Norms of gradients are logged in both.
        assert lines[0].keys() == lines[1].keys()
        assert ("gradient_norm" in lines[0]) == ((step + 1) % 5 == 0)
    for (name, one), other in zip(eager.model.named_parameters(), captured.model.parameters(), strict=True):
        # The rate is a float32 tensor there, a double here.
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6, msg=name)
    # Each shape of batch once.
    assert len(recorded) == (2 if case == "sizes" else 1)


def test_what_is_recorded_reads_nothing_of_the_step_it_was_recorded_in():
    """Were batch, masks or rate those of one step, the weights would be others."""
    _, captured, recorded = loops("fresh batches")
    for step in range(WARM_UP + 1):
        captured.update(step)
    before = [parameter.clone() for parameter in captured.model.parameters()]
    batch, dropout = captured.batch(9), captured.dropout(9, 4)
    captured.updater.set_rate(9)
    captured.captured(batch, dropout)
    again = [parameter.clone() for parameter in captured.model.parameters()]
    for parameter, was in zip(captured.model.parameters(), before, strict=True):
        parameter.data.copy_(was)
    captured.updater.set_rate(9)
    # The same weights, and the batch of another step.
    captured.captured(captured.batch(10), dropout)
    apart = [(one - other).abs().max() for one, other in zip(again, captured.model.parameters(), strict=True)]
    assert len(recorded) == 1
    assert max(apart) > 0


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
    eager.captured = None
    eager.updater = Updater(eager.model, eager.config)
    captured.captured = CapturedUpdate(
        captured.compute,
        captured.model.cfg.n_layers,
        captured.model.cfg.attn_only,
        captured.model.cfg.d_model,
    )
    for step in range(30):
        for loop in (eager, captured):
            loop.update(step)
    for (name, one), other in zip(eager.model.named_parameters(), captured.model.parameters(), strict=True):
        # The gradient of b_K is rounding alone.
        if not name.endswith("b_K"):
            torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4, msg=name)
