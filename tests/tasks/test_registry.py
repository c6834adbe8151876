"""Registering tasks, and getting them by name; the third-party task of the documentation's length."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tasks
from tasks import TaskError, registry
from tasks.settings import list_fields

THIRD_PARTY = Path(__file__).with_name("third_party_task.py")


@pytest.fixture
def third_party() -> Iterator[str]:
    spec = importlib.util.spec_from_file_location("third_party_task", THIRD_PARTY)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    yield "largest-token"
    forget("largest-token")


def forget(name: str) -> None:
    registry._CLASSES.pop(name, None)


def test_a_third_party_task_has_everything_a_built_in_one_has(third_party: str) -> None:
    assert third_party in tasks.list()
    task = tasks.get(third_party, length=4)
    batch = task.sample(16, seed=1)
    assert batch.targets.tolist() == [max(row) for row in batch.tokens.tolist()]
    model = task.build_model(seed=0, settings=task.Model(n_layers=1, n_heads=2, d_model=8))
    task.check_model(model)
    output = model(batch.tokens)
    loss = task.loss(output, batch)
    loss.backward()
    assert 0 < loss.item() < 10
    assert torch.equal(loss, task.loss(task.read(output), batch))
    accuracy = tasks.pool(task.metrics(output, batch))["accuracy"]
    assert accuracy == (output[:, -1].argmax(-1) == batch.targets).double().mean().item()
    assert task.metrics(output, batch)["accuracy"].shape == (16,)  # type: ignore[union-attr]


@pytest.mark.parametrize("loaded", [True, False])
def test_a_built_in_name_cannot_be_taken(
    loaded: bool, third_party: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before the built-in task is imported, so that the import order cannot decide what a name means."""
    for built_in in registry.BUILT_IN:
        # What loads during the test would be forgotten with it, and is loaded once only.
        registry.task_class(built_in)
    monkeypatch.setattr(registry, "_CLASSES", dict(registry._CLASSES))
    mine = tasks.task_class(third_party)
    if loaded:
        tasks.task_class("miiii")
    else:
        registry._CLASSES.pop("miiii", None)
    with pytest.raises(TaskError, match=r"'miiii' is taken by tasks\.modular_arithmetic"):
        tasks.register("miiii")(mine)
    assert mine.name == third_party


def test_an_unknown_name_is_refused_in_one_line() -> None:
    with pytest.raises(
        TaskError, match=r"^no task 'modular-adition': did you mean 'modular-addition'"
    ) as refused:
        tasks.get("modular-adition")
    assert "\n" not in str(refused.value)
    with pytest.raises(
        TaskError, match=r"; import the file that registers one of your own \(--import FILE\.py\)$"
    ):
        tasks.get("sorting")


@pytest.mark.parametrize(
    ("name", "config", "says"),
    [
        ("matrix-completion", {"rnk": 2}, "no setting task.rnk"),
        ("matrix-completion", {"n": 0}, "task.n: .*greater than or equal to 1, got 0"),
        ("matrix-completion", {"grid_max": float("inf")}, "task.grid_max: .*finite number"),
        ("matrix-completion", {"n": 3, "rank": 4}, "rank 4 exceeds the sides of a 3×3 matrix"),
        ("matrix-completion", {"grid_max": 1.0, "grid_step": 0.3}, "not a multiple of grid_step 0.3; 0.9 is"),
        ("matrix-completion", {"n": 2, "rank": 1, "mask": ("..", ".")}, "2 rows of 2 characters"),
        ("matrix-completion", {"n": 2, "rank": 1, "mask": ("..", ".x")}, "each '.' or '#'"),
        ("matrix-completion", {"p_mask": 1.5, "scale": 0}, "task.scale: .*, got 0; task.p_mask: .*, got 1.5"),
        ("modular-addition", {"p": 100}, "p must be prime; 101 is the nearest, got 100"),
        ("miiii", {"p": 10**12 + 39}, "task.p: .*less than or equal to 2003"),
        ("modular-addition", {"p": 3, "train_fraction": 0.95}, "leaves a split empty"),
        ("miiii", {"primes": (2, 9)}, r"must be primes below p = 113, not \[9\]"),
        ("miiii", {"primes": ()}, "not an empty list"),
        ("miiii", {"primes": (113,)}, r"not \[113\]"),
        ("miiii", {"primes": (3, 2)}, "ascending"),
        ("miiii", {"primes": (2, 2)}, "ascending, each once"),
        ("miiii", {"primes": (2, 7), "variant": "masked"}, "leaves nothing to train"),
    ],
)
def test_a_config_that_cannot_be_is_refused_in_one_line(
    name: str, config: dict[str, object], says: str
) -> None:
    with pytest.raises(TaskError, match=says) as refused:
        tasks.get(name, **config)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", [name for name in registry.names() if not tasks.get(name).parts()])
def test_a_task_says_what_its_metrics_are_called(name: str) -> None:
    task = tasks.get(name)
    batch = task.sample(2)
    output = torch.zeros(len(batch), task.sequence_length, task.d_vocab_out)
    assert task.drop_metric.name in task.metric_names
    assert getattr(task, "property_names", ()) == tuple(getattr(task, "properties", lambda _: ())(output))


def test_listing_tasks_and_presets_does_not_import_torch() -> None:
    program = """
import sys, tasks
from tasks import registry
print(*tasks.list())
assert registry.built_in_presets("miiii")["paper"]["train"]["steps"] == 65536
assert "nearest" not in registry.unknown("miii") and "'miiii'" in registry.unknown("miii")
heavy = {"torch", "transformer_lens", "numpy", "pydantic"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(registry.BUILT_IN) <= set(done.stdout.split())


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_lists_are_those_that_the_classes_declare(name: str) -> None:
    task, model = tasks.task_class(name), tasks.task_class(name).Model
    assert (task.name, task.presets) == (name, registry.built_in_presets(name))
    lists = [f"task.{key}" for key in list_fields(task)] + [f"model.{key}" for key in list_fields(model)]
    assert registry.LIST_KEYS.get(name, ()) == tuple(lists)
