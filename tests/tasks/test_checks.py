"""A task of anyone's own: each mistake in it is one line that names the method, before any training."""

import re

import pytest
import torch

from interp_tasks.training.train import train
from tasks.base import Batch
from tasks.errors import TaskError
from tasks.modular_arithmetic.one_modulus import OneModulus


class Sums(OneModulus):
    """Addition, registered nowhere."""

    name = "own"

    def answers(self, operands):
        return operands.sum(-1) % self.p


def sampled(change):
    def sample(self, n, seed=0, split="test"):
        return change(OneModulus.sample(self, n, seed, split))

    return {"sample": sample}


def raising(self, *arguments):
    raise KeyError("x")


BROKEN = {
    "sample: give a tasks.Batch": sampled(lambda batch: (batch.tokens, batch.targets)),
    "sample: it draws from torch's global generator": sampled(lambda batch: torch.rand(1) and batch),
    "sample: 4 rows of tokens and 3 of targets": sampled(
        lambda batch: Batch(batch.tokens, batch.targets[:3])
    ),
    "sample: token ids from 0 to 900, d_vocab is": sampled(
        lambda batch: Batch(torch.full_like(batch.tokens, 900).tril(), batch.targets)
    ),
    "read_positions: no position 9": {"read_positions": property(lambda self: (9,))},
    "loss: give a scalar, not of shape [4]": {"loss": lambda self, output, batch: output[:, 0, 0]},
    "loss: KeyError: 'x'": {"loss": raising},
    "metrics: give a dict": {"metrics": lambda self, output, batch: output[:, 0, 0]},
    "metrics: right is one value for each of 4 examples, not of shape []": {
        "metrics": lambda self, output, batch: {"right": output.mean()}
    },
}


@pytest.mark.parametrize("said", BROKEN)
def test_a_mistake_in_a_task_is_one_line_that_names_the_method(tmp_path, said):
    task = type("Broken", (Sums,), {**BROKEN[said], "__module__": __name__})(p=5)
    config = {"steps": 1, "batch_size": 4, "eval_samples": 4}
    settings = {"d_model": 8, "n_heads": 2}
    with pytest.raises(TaskError, match=f"^task 'own': {re.escape(said)}[^\\n]*$"):
        train(task, out=tmp_path / "run", settings=settings, config=config)
    assert not (tmp_path / "run").exists()
