"""The schema that the package ships, and what it refuses; the output of every command: test_every_command.py."""

import json
from dataclasses import fields
from importlib import resources

import jsonschema
import pytest

from interp_tasks.experiments import COLUMNS
from interp_tasks.reproduction.reproduction import COLUMNS as VERDICT_COLUMNS
from interp_tasks.training.cost import Cost


@pytest.fixture(scope="module")
def schema():
    text = resources.files("interp_tasks.cli").joinpath("output.schema.json").read_text(encoding="utf-8")
    found = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def test_the_schema_names_the_columns_of_the_table(schema):
    row = schema["$defs"]["row"]
    assert tuple(row["required"]) == tuple(row["properties"]) == COLUMNS
    assert all("description" in one for one in row["properties"].values())


def test_columns_of_verdicts_and_costs_are_those_of_the_code(schema):
    for name, columns in (
        ("verdict", VERDICT_COLUMNS),
        ("cost", [*(field.name for field in fields(Cost)), "memory_bytes"]),
    ):
        described = schema["$defs"][name]
        assert list(described["required"]) == list(described["properties"]) == list(columns)
