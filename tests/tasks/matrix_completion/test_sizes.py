"""The mixture of sizes, and what the task says of its plateau and of exact answers."""

from collections import Counter

import pytest
import torch

import tasks
from tasks.base import pool_parts

SIZES = {"sizes": (2, 3, 4), "grid_max": 1, "grid_step": 0.1}


@pytest.fixture
def mixture():
    return tasks.get("matrix-completion-sizes", **SIZES)


def test_every_batch_is_of_one_size_and_all_sizes_come(mixture):
    lengths = Counter(mixture.sample(3, seed=seed, split="train").tokens.shape[1] for seed in range(300))
    assert set(lengths) == {4, 9, 16}
    # 100 each on average, s.d. 8.2: five of those on either side.
    assert all(59 <= count <= 141 for count in lengths.values())
    again = mixture.sample(3, seed=5, split="train")
    assert torch.equal(mixture.sample(3, seed=5, split="train").tokens, again.tokens)


def test_parts_are_the_single_sizes_with_all_other_settings():
    config = {"rank": 2, "p_mask": 0.4, "distribution": "gaussian", "scale": 0.5, **SIZES}
    mixture = tasks.get("matrix-completion-sizes", **config)
    shared = {key: value for key, value in config.items() if key != "sizes"}
    assert mixture.parts() == {f"n={n}": tasks.get("matrix-completion", n=n, **shared) for n in (2, 3, 4)}
    assert mixture.n == 4
    assert mixture.sequence_length == 16


def test_metrics_of_parts_are_pooled_over_all_entries():
    pairs = {
        "a": {"error": (torch.tensor([1.0, 2.0]), torch.tensor([1, 3])), "loss": torch.tensor([1.0, 3.0])},
        "b": {"error": (torch.tensor([5.0]), torch.tensor([4])), "loss": torch.tensor([8.0])},
    }
    assert pool_parts(pairs) == {
        "error": 1.0,
        "loss": 4.0,
        "error (a)": 0.75,
        "loss (a)": 2.0,
        "error (b)": 1.25,
        "loss (b)": 8.0,
    }
    assert pool_parts({"": pairs["a"]}) == {"error": 0.75, "loss": 2.0}


def test_the_plateau_is_the_loss_of_predicting_zero_at_hidden_entries():
    for mask in (None, (".#", "##")):
        task = tasks.get("matrix-completion", n=2, rank=1, mask=mask, p_mask=0.4)
        batch = task.sample(40_000, seed=2)
        output = batch.targets.masked_fill(batch.extras["hidden"], 0)[..., None]
        found = tasks.pool(task.metrics(output, batch))
        assert found == pytest.approx(task.plateau_levels(), rel=0.03)
        weights = task.loss_shares()
        assert task.loss(output, batch).item() == pytest.approx(
            sum(weight * found[name] for name, weight in weights.items()), rel=0.02
        )


def test_accuracies_count_outputs_that_round_to_the_entry():
    task = tasks.get("matrix-completion", n=2, rank=1, grid_max=1, grid_step=0.1)
    hidden = torch.tensor([[True, True, False, False]])
    batch = task.batch(torch.tensor([[0.3, -0.2, 0.5, 0.0]]), hidden)
    output = torch.tensor([[0.34, -0.26, 0.451, 0.049]])[..., None]
    found = {name: (int(s), int(c)) for name, (s, c) in task.accuracies(output, batch).items()}
    assert found == {"accuracy_masked": (1, 2), "accuracy_observed": (2, 2)}
