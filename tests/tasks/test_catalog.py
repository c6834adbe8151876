"""Names and presets, without torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Literal

import pytest
from pydantic import BaseModel

import tasks
from tasks import catalog
from tasks.registry import task_class
from tasks.settings import list_fields


def test_listing_tasks_and_presets_does_not_import_torch() -> None:
    program = """
import sys, tasks
from tasks import catalog
print(*tasks.list())
assert catalog.built_in_presets("miiii")["paper"]["train"]["steps"] == 65536
assert "nearest" not in catalog.unknown("miii") and "'miiii'" in catalog.unknown("miii")
heavy = {"torch", "transformer_lens", "numpy", "pydantic"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(catalog.BUILT_IN) <= set(done.stdout.split())


def test_every_built_in_name_is_registered_where_the_catalog_says() -> None:
    for name, home in catalog.BUILT_IN.items():
        task_class = tasks.task_class(name)
        assert task_class.name == name
        assert task_class.__module__.startswith(home + ".")
        assert task_class.presets == catalog.built_in_presets(name)


@pytest.mark.parametrize("name", catalog.BUILT_IN)
def test_keys_are_those_the_classes_declare(name):
    found = task_class(name)
    assert catalog.built_in_keys(name) == {
        "task": tuple(found.model_fields),
        "model": tuple(found.Model.model_fields),
    }


@pytest.mark.parametrize("name", catalog.BUILT_IN)
def test_lists_are_those_the_classes_declare(name):
    found = task_class(name)
    declared = [f"task.{key}" for key in list_fields(found)] + [
        f"model.{key}" for key in list_fields(found.Model)
    ]
    assert catalog.LIST_KEYS.get(name, ()) == tuple(declared)


def test_list_fields_are_told_from_text():
    class Settings(BaseModel):
        names: tuple[str, ...] | None = None
        steps: list[int] = []
        untyped: tuple = ()  # type: ignore[type-arg]
        law: str = "a,b"
        kind: Literal["x", "y"] | None = None

    assert list_fields(Settings) == ("names", "steps", "untyped")
