"""Every command of ``interp-run``: its table fits 80 columns, its JSON is what the schema says."""

import json
import re
from dataclasses import fields
from importlib import resources

import jsonschema
import pytest
import torch

import tasks
from interp_tasks.cli import main
from interp_tasks.cli.command_dispatch import iterate_commands
from interp_tasks.cli.tables import print_in_format
from interp_tasks.experiments import COLUMNS
from interp_tasks.reproduction.judge_paper import COLUMNS as VERDICT_COLUMNS
from interp_tasks.training.cost import Cost

MC, RUN = "zoo:matrix-completion-4x4@post", "zoo:matrix-completion-4x4"
ADD, MIIII = "zoo:modular-addition-113@post", "zoo:miiii-113-small"
#: A grid of two runs of two steps.
GRID = """[train]
task = "modular-addition"
[train.set]
"task.p" = 5
"train.steps" = 2
"train.log_every" = 1
"train.learning_rate" = [0.001, 0.01]

[[experiment]]
name = "curve"
"""
#: Command -> the rest of some calls of it. ``few.toml`` is ``GRID``.
CALLS = {
    "tasks list": [""],
    "runs zoo": [""],
    "runs checkpoints": [f"--ckpt {RUN}"],
    "runs import": ["w.pth --out run --task modular-addition --set task.p=5"],
    "tasks cost": ["matrix-completion --rate 20 --set train.grokfast=ema"],
    "tasks data": ["miiii --set task.p=11"],
    "train": ["modular-addition --set task.p=5 --set train.steps=2 --seeds 0:2"],
    "grid": ["few.toml --dry-run --rate 20", "few.toml --executor serial"],
    "runs search": [
        "modular-addition --trials 2 --vary train.learning_rate=0.001,0.01 --set train.steps=2 --set task.p=5"
    ],
    "runs curve": [f"--ckpt {RUN}"],
    "runs drops": [f"--ckpt {RUN} --ckpt zoo:modular-addition-113"],
    "runs llc": [f"--ckpt {RUN}@0 --samples 8 --chains 2 --draws 2 --burn-in 0"],
    "modular generalisation": [f"--ckpt {MIIII}"],
    "modular gradients": ["--ckpt zoo:miiii-113-paper"],
    "modular prime-order": [f"--ckpt {MIIII}"],
    "ablation": [f"--ckpt {MC} --samples 8 --heads each"],
    "heads": [f"--ckpt {MC} --samples 8"],
    "transplant": [f"--ckpt {MC} --source {RUN}@pre --samples 8"],
    "patch": [f"--ckpt {MC} --source negated --samples 8"],
    "circuit": [
        f"--ckpt {ADD} --samples 16 --random 2",
        f"--ckpt {ADD} --ckpt {MIIII}@post --samples 8 --random 2 --no-curve --kind nodes",
    ],
    "permute": [f"--ckpt {MC} --draws 2 --samples 8"],
    "lens": [f"--ckpt {MC} --samples 8"],
    "probe": [f"--ckpt {MC} --target true_element --samples 64 --held-out 16"],
    "attention": [f"--ckpt {MC} --samples 8"],
    "fourier": [f"--ckpt {ADD} --rule of-largest"],
    "modular neurons": [f"--ckpt {ADD} --neurons 0 --draws 1"],
    "modular progress": [f"--ckpt {ADD} --kind losses"],
    "matrix embeddings": [f"--ckpt {MC}"],
    "modular weights": [f"--ckpt {ADD}"],
    "matrix influence": [f"--ckpt {MC} --samples 4"],
    "matrix order": [f"--ckpt {RUN}@0,1000,8000,20000 --samples 16"],
    "modular detector": [f"--ckpt {MIIII}@post"],
    "modular primes": [f"--ckpt {MIIII}@post --samples 8 --draws 1"],
    "matrix decoding": ["--ckpt zoo:matrix-completion-autoregressive@last --samples 2"],
    "matrix copying": [f"--ckpt {MC} --samples 8"],
    "matrix baseline": [f"--ckpt {MC} --samples 4"],
    "matrix ood": [f"--ckpt {MC} --samples 4"],
    "matrix algorithm": [f"--ckpt {MC} --samples 8"],
    "runs report": [f"--ckpt {RUN}@1000 --samples 4"],
    "reproduce": ["grokfast", "grokfast --preset paper"],
    "demo": ["--samples 8"],
}
pytestmark = pytest.mark.filterwarnings("ignore:.*HookedTransformer.*:DeprecationWarning")
CALLED = [f"{command} {rest}".strip() for command, calls in CALLS.items() for rest in calls]
#: Commands that print rows of their own -> what the schema calls those; others print results, of rows called ``row``.
OWN = {
    "tasks list": "preset",
    "runs zoo": "shipped",
    "runs checkpoints": "checkpoint",
    "runs import": "imported",
    "tasks cost": "cost",
    "grid few.toml --dry-run": "unit",
    "runs search": "search",
    "runs report": "headline",
    "reproduce": "verdict",
}
#: Called once more, for JSON: what prints no result, and two experiments. Of all others the result that was measured
#: for the table is printed as JSON too, without being measured again.
AGAIN = (
    *("tasks list", "tasks cost", "runs zoo", "runs checkpoints", "runs import", "runs search", "grid"),
    *(f"runs report --ckpt {RUN}@1000", "reproduce grokfast --preset"),
    *(f"ablation --ckpt {MC} --samples 8 --heads each", "modular detector"),
)


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run a command in a folder of its own; what it prints."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.toml").write_text(GRID)
    torch.save(tasks.get("modular-addition", p=5).build_model().state_dict(), "w.pth")

    def run(command):
        assert main(command.split()) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


@pytest.fixture
def results(monkeypatch):
    """Keep the results that experiments print, with the metric that was asked for."""
    kept = []

    def keep(result, format, metric=None, top=None):
        kept.append((result, metric))
        print_in_format(result, format, metric, top)

    monkeypatch.setattr("interp_tasks.cli.options.print_in_format", keep)
    monkeypatch.setattr("interp_tasks.cli.commands.tasks.print_in_format", keep)
    return kept


@pytest.fixture(scope="module")
def schema():
    found = json.loads(resources.files("interp_tasks.cli").joinpath("output.schema.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def test_the_schema_names_the_columns_of_the_code(schema):
    costs = [field.name for field in fields(Cost)]
    for name, columns in (("row", COLUMNS), ("verdict", VERDICT_COLUMNS), ("cost", costs)):
        described = schema["$defs"][name]
        assert list(described["required"]) == list(described["properties"]) == list(columns)


def test_every_command_is_called():
    assert set(CALLS) == {" ".join(path) for path, _ in iterate_commands()}


@pytest.mark.parametrize("command", CALLED)
def test_tables_fit_80_columns_and_have_no_colour_in_a_pipe(
    call, command, results, schema, monkeypatch, capsys
):
    """And the result of an experiment, as JSON, is what the schema says."""
    if command.startswith("runs llc"):
        pytest.importorskip("devinterp")
    monkeypatch.setenv("COLUMNS", "80")
    shown = call(f"{command} --quiet")
    assert shown.strip()
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown
    # What names have in common is said once above, as in "run zoo:…".
    cut = [
        line for line in shown.splitlines() if "…" in line and not re.fullmatch(r"\w+ \S*…\S*", line.strip())
    ]
    # A claim is one line: what is cut stands in full on the page.
    assert not cut or command.startswith("reproduce")
    assert bool(results) == (not command.startswith((*OWN, "train", "demo", "grid")))
    for result, metric in results:
        print_in_format(result, "json", metric)
        check_json(capsys.readouterr().out, "row", schema)


@pytest.mark.parametrize("command", [each for each in CALLED if each.startswith(AGAIN)])
def test_json_is_what_the_schema_says(call, command, schema, tmp_path):
    name = next((name for begins, name in OWN.items() if command.startswith(begins)), "row")
    check_json(call(f"{command} --quiet --format json"), name, schema)
    assert not (tmp_path / "results").exists()


def check_json(shown, name, schema):
    """Hold what is printed against the whole schema, and against the part of it that its rows are of."""
    found = json.loads(shown)
    assert found
    jsonschema.Draft202012Validator(schema).validate(found)
    of = {"$ref": f"#/$defs/{name}"}
    whole = of if name == "search" else {"type": "array", "items": of}
    jsonschema.Draft202012Validator({**whole, "$defs": schema["$defs"]}).validate(found)
