"""``interp-run``: its commands and their help, what they print, and what their options do."""

import json
import logging
import re
import sys
import warnings
from dataclasses import replace
from functools import wraps
from unittest.mock import Mock

import pytest

import tasks
from interp_tasks import experiments
from interp_tasks.checkpoints import checkpoint_refs as refs
from interp_tasks.cli import commands, tables
from interp_tasks.cli.command_dispatch import LISTED, iterate_commands
from interp_tasks.cli.streams_and_exit_codes import run_for_exit_code
from interp_tasks.experiments import every_experiment, experiment_named
from interp_tasks.measurement.result import EXPERIMENTS
from interp_tasks.pages import package_versions

SMALL = ["--samples", "12", "--quiet"]


@pytest.fixture
def call(call, root, monkeypatch):
    """Runs a command in ``root``."""
    monkeypatch.chdir(root)
    return call


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module", name="transformer_lens"), "transformer-lens>=3.9,<4"),
        (ImportError("'HookedTransformer' was removed in TransformerLens 4.0."), "transformer-lens>=3.9,<4"),
        (MemoryError(), "not enough memory"),
        (RuntimeError("CUDA out of memory"), "not enough memory"),
        (SystemExit(0), "ends the program"),
    ],
)
def test_what_a_machine_or_an_installation_causes_is_one_line(error, said, capsys):
    assert run_for_exit_code(Mock(side_effect=error), debug=False) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1
    # A programming error is not dressed up.
    with pytest.raises(ImportError, match="a bug"):
        run_for_exit_code(Mock(side_effect=ImportError("a bug")), debug=False)


def test_debug_shows_the_traceback_of_a_mistake(call):
    code, out, err = call("ablation", "--ckpt", "nothing", "--debug")
    assert (code, out) == (2, "")
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("interp-run: no run or checkpoint folder 'nothing'; ")


def test_warnings_of_libraries_stay_inside(call, monkeypatch):
    @wraps(experiments.ablation)
    def noisy(*arguments, **options):
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        logging.getLogger("transformer_lens").warning("loud")
        return experiments.ablation(*arguments, **options)

    monkeypatch.setitem(EXPERIMENTS, "ablation", replace(experiment_named("ablation"), function=noisy))
    code, _, err = call("ablation", "--ckpt", "run", *SMALL)
    assert (code, err) == (0, "")
    assert logging.root.manager.disable == logging.NOTSET


def test_each_command_is_on_the_page_of_its_group(call):
    assert sum(map(len, LISTED[""].values())) <= 18
    for group in ("", "modular"):
        out = call(*filter(None, [group]), "--help")[1]
        for panel, listed in LISTED[group].items():
            assert panel in out
            assert all(f" {name} " in out and line.split()[0] in out for name, line in listed.items())


def test_the_line_of_a_command_begins_its_help_and_required_options_come_first():
    """Listed without loading the command, and said again by it."""
    for path, made in iterate_commands():
        panels = LISTED["" if len(path) == 1 else path[0]].values()
        (line,) = (names[path[-1]] for names in panels if path[-1] in names)
        assert made.help.partition("\n\n")[0] == line != ""
        needed = [option.required for option in made.params if option.param_type_name == "option"]
        assert needed == sorted(needed, reverse=True), path


def test_no_option_is_explained_by_one_that_the_command_lacks():
    for path, made in iterate_commands():
        options = [option for option in made.params if option.param_type_name == "option"]
        names = {name for option in options for name in (*option.opts, *option.secondary_opts)}
        assert {*re.findall(r"--[a-z-]+", " ".join(option.help or "" for option in options))} <= names, path


def test_an_old_name_is_answered_with_the_new_one(call):
    for path, _ in iterate_commands():
        if len(path) > 1:
            new = f"interp-run {' '.join(path)}"
            said = f"interp-run: {path[-1]} is now {new}; see {new} --help\n"
            assert call(path[-1], "--ckpt", "run") == (2, "", said)


def test_the_schema_and_the_version_are_said(call):
    assert json.loads(call("--schema")[1])["$defs"]
    assert call("--version")[1] == f"interp-run {package_versions()['interp-tasks']}\n"


def records(call, *arguments):
    code, out, err = call("ablation", *arguments, *SMALL, "--format", "json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_people_see_the_metric_that_is_the_tasks_own(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")

    def shown(*options):
        code, out, err = call("ablation", "--ckpt", "run@10", "--ckpt", "run@40", *options, *SMALL)
        assert (code, err) == (0, "")
        return out

    table, _, notes = shown().partition("\n\n")
    legend, rows = table.splitlines()[:3], table.splitlines()[4:]
    assert legend[0].startswith("@10: run@10 · step 10 · ")
    assert legend[1].startswith("@40: run@40 · step 40 · ")
    assert "mse_masked" in legend[2]
    assert [row.split()[0] for row in rows] == ["@10", "@40"]
    assert "--metric all: mse_all, mse_observed too." in notes
    assert "mse_all" not in table
    assert shown("--metric", "mse_all").partition("\n\n")[0].count("mse_all") == 1
    every = shown("--metric", "all")
    assert all(every.count(name) == 2 for name in ("mse_all", "mse_masked", "mse_observed"))
    assert {row["metric"] for row in records(call, "--ckpt", "run@40", "--metric", "mse_all")} == {"mse_all"}


def test_the_largest_effects_are_ranked(call):
    asked = ["--ckpt", "run@40", "--heads", "each"]
    rows = [row for row in records(call, *asked) if row["metric"] == "mse_masked"]
    largest = sorted(rows, key=lambda row: -abs(row["effect"]))
    code, out, _ = call("ablation", *asked, "--top", "3", *SMALL)
    table = out.partition("\n\n")[0].splitlines()[-3:]
    assert (code, len(rows) > 3) == (0, True)
    assert f"over the {len(rows)} rows tested." in out
    assert [row.split()[0] for row in table] == [row["variant"] for row in largest[:3]]
    both = call("ablation", *asked, "--ckpt", "run@0", "--top", "1", *SMALL)[1].splitlines()
    assert [line.split()[0] for line in both if line.startswith("@") and ":" not in line] == ["@40", "@0"]


def test_on_a_narrow_terminal_rows_are_one_line_and_have_the_largest_effects(call, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setattr(tables, "MOST_ROWS", 6)
    asked = ["lens", "--ckpt", "run@40", *SMALL]
    rows = json.loads(call(*asked, "--metric", "mse_masked", "--format", "json")[1])
    least, shown = sorted(abs(row["effect"]) for row in rows)[-6], call(*asked)[1]
    lines = shown.partition("\n\n")[0].splitlines()[-6:]
    for line, row in zip(lines, (one for one in rows if abs(one["effect"]) >= least), strict=True):
        assert line.startswith(row["variant"])
        assert line.count("[") == 1
    assert len({line.index("[") for line in lines}) == 1, "numbers of other lengths, and yet below each other"
    assert f"6 of {len(rows)} rows, of the largest effects" in shown
    assert "No room for intervals of value:" in shown
    tables.print_blocks([tables.text_column("value", "value", ["–", "0.5"])], [[0, 1]], [[["post"]]])
    assert capsys.readouterr().out.split() == ["post", "value", "–", "0.5"], "a row without a value stands"


#: What a command is asked for, and what the head of its table says of it.
HEADS = {
    "ablation --heads each --positions hidden": "mode uniform · positions hidden",
    "ablation --keys 0,1 --positions 2": "mode uniform · keys 0, 1 · positions 2",
    "patch --source negated --site z.0 --heads each": "source negated · site z.0 · heads each",
}


@pytest.mark.parametrize("asked", HEADS)
def test_the_head_of_a_table_says_what_was_done(call, monkeypatch, asked):
    monkeypatch.setenv("COLUMNS", "80")
    command, *options = asked.split()
    code, out, err = call(command, "--ckpt", "run@10", *options, *SMALL, "--split", "validation")
    assert (code, err) == (0, "")
    found = [part for line in out.splitlines()[:3] for part in line.split(" · ")]
    expected = ["run@10", "step 10", "12 validation examples, seed 0", *HEADS[asked].split(" · ")]
    assert found[: len(expected)] == expected
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("asked", ["ablation --samples 12", "patch --source negated", "matrix embeddings"])
def test_a_ref_is_resolved_once(call, monkeypatch, asked):
    read, check = [], refs.check_selector
    monkeypatch.setattr(refs, "check_selector", lambda at, text: read.append(text) or check(at, text))
    assert call(*asked.split(), "--ckpt", "run@all")[0] == 0
    assert read == ["run@all"]


def test_checkpoints_lists_steps_and_marks(call):
    rows = json.loads(call("runs", "checkpoints", "--ckpt", "run", "--format", "json")[1])
    marks = {"run@0": [], "run@10": ["pre", "onset"], "run@40": ["end", "post"]}
    assert {row["ref"]: row["marks"] for row in rows} == marks
    name, head, *lines = call("runs", "checkpoints", "--ckpt", "run")[1].splitlines()
    assert name == "run · matrix-completion"
    assert head.split() == ["checkpoint", "marks"], "this run has logged nothing"
    assert [line.split()[0] for line in lines] == ["@0", "@10", "@40"]


SETTINGS = "train.steps=2 train.batch_size=4 train.eval_samples=8 task.n=2 task.grid_max=1 task.grid_step=0.5"
MODEL = "model.n_layers=1 model.n_heads=1 model.d_model=4"
TINY = [part for one in f"{SETTINGS} {MODEL}".split() for part in ("--set", one)]


def test_train_makes_runs_extends_them_and_ablation_reads_them(call, tmp_path, monkeypatch):
    monkeypatch.setattr("interp_tasks.cli.streams_and_exit_codes.MINUTE", 0.0)
    out = tmp_path / "made"
    code, stdout, err = call("train", "matrix-completion", *TINY, "--out", out, "--seeds", "0:2", "--quiet")
    assert (code, err) == (0, "")
    assert [line.split()[:4] for line in stdout.splitlines()] == [
        [f"{out}/seed-{seed}@last", "step", "2", "val:"] for seed in (0, 1)
    ]
    longer = [part.replace("steps=2", "steps=3") for part in TINY]
    code, stdout, err = call("train", "matrix-completion", *longer, "--out", out / "seed-0")
    assert (code, "went on from step 2" in err, "3 of 3: " in err) == (0, True, True)
    assert "step 3" in stdout
    rows = records(call, "--ckpt", f"{out}/seed-*@last")
    assert [row["step"] for row in rows] == [3] * 3 + [2] * 3
    nested = call("train", "matrix-completion", *TINY, "--out", out / "seed-0", "--seeds", "0:2")
    assert nested[:2] == (2, "")
    # A long path is shortened in the middle.
    assert nested[2].endswith("made/seed-0 is the folder of a run: choose another --out\n")


def test_imported_task_gets_every_command(call, tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.registry._CLASSES", dict(tasks.registry._CLASSES))
    (tmp_path / "mine.py").write_text(
        "from tasks import register\nfrom beside import SIZE, MatrixCompletion\n"
        "@register('mine')\nclass Mine(MatrixCompletion):\n"
        "    presets = {'cpu': {}}\n    n: int = SIZE\n    rank: int = 1\n"
    )
    (tmp_path / "beside.py").write_text("from tasks.matrix_completion import MatrixCompletion\nSIZE = 2\n")
    monkeypatch.setattr("sys.path", list(sys.path))
    arguments = ["--import", tmp_path / "mine.py"]
    assert "mine" in call("tasks", *arguments)[1]
    code, _, err = call("train", "mine", *TINY, *arguments, "--out", tmp_path / "run", "--quiet")
    assert (code, err) == (0, "")
    assert len(records(call, "--ckpt", f"{tmp_path / 'run'}@last", *arguments)) == 3


def test_every_experiment_is_listed():
    """``--help`` imports none of them."""
    listed = {name for names in commands.COMMANDS.values() for name in names}
    assert listed == {*every_experiment()} | {*commands.FUNCTIONS}
