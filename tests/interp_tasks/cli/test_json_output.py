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


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("value", "0.1"),
        ("p_value", 1.5),
        ("layer", -1),
        ("layer", 0.5),
        ("metric", None),
        ("null_effect", 1),
        ("extra", 1),
    ],
)
def test_the_schema_refuses(column, value, schema):
    row = dict.fromkeys(COLUMNS) | {"experiment": "ablation", "ref": "x", "metric": "loss", "value": 0.1}
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid([row])
    assert not validator.is_valid([row | {column: value}])


def test_settings_that_vary_are_columns_of_a_grid(schema):
    row = dict.fromkeys(COLUMNS) | {"experiment": "ablation", "ref": "x", "metric": "loss", "value": 0.1}
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid([row | {"train.learning_rate": 0.1, "task.primes": "2, 3"}])
    assert not validator.is_valid([row | {"learning_rate": 0.1}])


def test_columns_of_verdicts_and_costs_are_those_of_the_code(schema):
    for name, columns in (
        ("verdict", VERDICT_COLUMNS),
        ("cost", [*(field.name for field in fields(Cost)), "memory_bytes"]),
    ):
        described = schema["$defs"][name]
        assert list(described["required"]) == list(described["properties"]) == list(columns)
