"""Batches, seeds, pooling and the checks every task inherits."""

import numpy
import pytest
import torch

import tasks
from tasks import Batch, TaskError, derive_seed, pool
from tasks.model_settings import ModelSettings


@pytest.fixture
def batch():
    tokens = torch.arange(12).view(6, 2)
    return Batch(tokens, tokens.float().sum(1), {"first": tokens[:, 0]})


@pytest.mark.parametrize(
    "rows",
    [slice(1, 4), slice(None, None, 2), [5, 0, 0], torch.tensor([3, 1]), torch.tensor([True, False] * 3)],
    ids=["slice", "strided", "list", "tensor", "mask"],
)
def test_a_batch_is_indexed_alike_in_all_its_parts(batch, rows):
    picked = numpy.arange(6)[rows.numpy() if isinstance(rows, torch.Tensor) else rows]
    part = batch[rows]
    assert len(part) == len(picked)
    assert part.tokens.tolist() == [[2 * i, 2 * i + 1] for i in picked]
    assert part.targets.tolist() == [4 * i + 1 for i in picked]
    assert part.extras["first"].tolist() == [2 * i for i in picked]
    assert len(batch) == 6


def test_a_batch_is_not_a_sequence_of_examples(batch):
    with pytest.raises(TypeError, match="slice"):
        batch[2]
    with pytest.raises(TypeError, match="slice"):
        list(batch)


def test_derived_seeds_are_the_same_everywhere():
    assert derive_seed(0, "batch", 1) == 3647071033110081681
    assert derive_seed(598) == 6899191170838110813


def test_pooling_is_a_mean_of_values_and_a_ratio_of_sums():
    sums, counts = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([1, 4, 0])
    pooled = pool({"values": torch.tensor([1.0, 2.0, 6.0]), "pairs": (sums, counts)})
    assert pooled == {"values": 3.0, "pairs": 3 / 5}
    assert pool({"nothing": (torch.zeros(3), torch.zeros(3, dtype=torch.int64))}) == {"nothing": None}


def test_pooling_accumulates_in_float64():
    values = torch.cat([torch.tensor([2.0**24]), torch.ones(9)])
    assert pool({"x": values})["x"] == (2**24 + 9) / 10


def test_a_model_with_room_to_spare_fits_and_a_smaller_one_is_refused():
    small, large = tasks.get("matrix-completion", n=3, rank=1), tasks.get("matrix-completion", n=4, rank=1)
    settings = large.Model(n_layers=1, n_heads=1, d_model=8)
    model = large.build_model(0, settings)
    small.check_model(model)
    with pytest.raises(TaskError, match="16 positions, the model has 9"):
        large.check_model(small.build_model(0, settings))
    coarse = tasks.get("matrix-completion", n=4, rank=1, grid_max=1.2, grid_step=0.05)
    with pytest.raises(TaskError, match="2002 token ids, the model has 50"):
        large.check_model(coarse.build_model(0, settings))
    with pytest.raises(TaskError, match=r"113 outputs per position, the model has 1$"):
        tasks.get("modular-addition").check_model(model)
    addition = tasks.get("modular-addition")
    own = addition.build_model(0, addition.Model(n_layers=1, n_heads=1, d_model=8))
    addition.check_model(own)
    own.cfg.d_vocab_out = 114
    with pytest.raises(
        TaskError, match="the model has 114, one for each token, such as '=': keep the first 113 of"
    ):
        addition.check_model(own)


@pytest.mark.parametrize("name", tasks.list())
def test_a_task_is_a_frozen_json_value(name):
    task = tasks.get(name)
    task.sample(2)  # some keep tensors then, which cannot be compared with ==
    again = type(task).model_validate_json(task.model_dump_json())
    assert again == task
    assert hash(again) == hash(task)
    assert task != tasks.get("modular-addition", p=7)
    with pytest.raises(ValueError, match="frozen"):
        task.p_mask = 0.5


@pytest.mark.parametrize("name", tasks.list())
def test_every_preset_is_valid_and_builds(name):
    presets = tasks.task_class(name).presets
    assert set(presets) == {"cpu", "reference", "paper"}
    for sections in presets.values():
        assert set(sections) <= {"task", "model", "train"}
        task = tasks.get(name, **sections.get("task", {}))
        settings = task.Model(**sections.get("model", {}))
        assert isinstance(settings, ModelSettings)
        task.check_model(task.build_model(0, settings))
