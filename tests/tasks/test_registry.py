"""Registering tasks, and getting them by name; the third-party task of the documentation's length."""

import subprocess
import sys

import pytest
import torch

import tasks
from tasks import TaskError, registry
from tasks.model_settings import list_valued_fields


@pytest.mark.parametrize("loaded", [True, False])
def test_a_built_in_name_cannot_be_taken(loaded, monkeypatch):
    """Also before the built-in task is imported, so that the import order cannot decide what a name means."""
    for built_in in registry.BUILT_IN:
        # What loads during the test would be forgotten with it, and is loaded once only.
        registry.task_class(built_in)
    monkeypatch.setattr(registry, "_CLASSES", dict(registry._CLASSES))
    if loaded:
        tasks.task_class("miiii")
    else:
        registry._CLASSES.pop("miiii", None)
    with pytest.raises(TaskError, match=r"'miiii' is taken by tasks\.modular_arithmetic"):
        tasks.register("miiii")(type("Mine", (tasks.task_class("modular-addition"),), {}))


def test_an_unknown_name_is_refused_in_one_line():
    with pytest.raises(TaskError, match=r"^no task '.*': did you mean modular-addition\?") as refused:
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
        ("matrix-completion-sizes", {"sizes": (2, 2)}, "sizes 2, 2 name one twice"),
        (
            "matrix-completion-sizes",
            {"sizes": (2, 3), "n": 5},
            "n = 5 is not the largest of the sizes: leave it",
        ),
        ("matrix-completion-sizes", {"sizes": ()}, "sizes"),
        ("matrix-completion-sizes", {"sizes": (2, 3), "rank": 3}, "rank 3 exceeds the sides of a 2×2 matrix"),
        ("matrix-completion-sizes", {"sizes": (2, 3), "m": 3}, "a mixture of sizes has neither m nor mask"),
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
def test_a_config_that_cannot_be_is_refused_in_one_line(name, config, says):
    with pytest.raises(TaskError, match=says) as refused:
        tasks.get(name, **config)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", [name for name in registry.task_names() if not tasks.get(name).parts()])
def test_a_task_says_what_its_metrics_are_called(name):
    task = tasks.get(name)
    batch = task.sample(2)
    output = torch.zeros(len(batch), task.sequence_length, task.d_vocab_out)
    assert task.drop_metric.name in task.metric_names
    assert getattr(task, "property_names", ()) == tuple(getattr(task, "properties", lambda _: ())(output))


def test_listing_tasks_and_presets_does_not_import_torch():
    program = """
import sys, tasks
from tasks import registry
print(*tasks.list())
assert registry.built_in_presets("miiii")["paper"]["train"]["steps"] == 65536
assert "nearest" not in registry.unknown_task_message("miii") and "mean miiii?" in registry.unknown_task_message("miii")
heavy = {"torch", "transformer_lens", "numpy", "pydantic"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(registry.BUILT_IN) <= set(done.stdout.split())


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_lists_are_those_that_the_classes_declare(name):
    task, model = tasks.task_class(name), tasks.task_class(name).Model
    assert (task.name, task.presets) == (name, registry.built_in_presets(name))
    lists = [f"task.{key}" for key in list_valued_fields(task)]
    lists += [f"model.{key}" for key in list_valued_fields(model)]
    assert registry.LIST_KEYS.get(name, ()) == tuple(lists)
