"""``interp-run`` from the outside: what it prints, what it refuses, and how fast it says so."""

import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

import tasks
from circuits.figures.names import short_names
from interp_tasks.checkpoints import save_checkpoint
from interp_tasks.cli import main
from interp_tasks.cli.app import program
from interp_tasks.cli.failures import exit_code_of
from interp_tasks.cli.groups import every_command
from interp_tasks.cli.tables import heading
from interp_tasks.errors import UserError
from interp_tasks.experiments import COLUMNS
from interp_tasks.measurement.experiment import EXPERIMENTS
from interp_tasks.measurement.header import header_parts
from interp_tasks.pages import versions
from interp_tasks.settings import read_seeds, read_settings
from interp_tasks.training.config import TrainConfig

SMALL = ["--samples", "12", "--quiet"]
METRIC = {"name": "mse_masked", "direction": "down"}
COMMANDS = [path for path, _ in every_command(program())]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """``run`` (steps 0, 10 and 40, with a drop), ``bare`` (no task), ``other`` (one layer), ``foreign`` (a file),
    ``tokens.npy``.
    """
    folder = tmp_path_factory.mktemp("cli")
    task = tasks.get("matrix-completion", n=3, rank=1, grid_max=1.2, grid_step=0.1)
    settings = task.Model(n_layers=2, n_heads=2, d_model=8, init_std=0.4)
    for step in (0, 10, 40):
        save_checkpoint(
            folder / f"run/checkpoints/{step:08d}", task.build_model(step, settings), task, step=step
        )
    (folder / "run/run.json").write_text(
        json.dumps(
            {
                "format": 1,
                "config": {},
                "drop_metric": {"name": "mse_masked", "direction": "down"},
            }
        )
    )
    lines = ({"step": s, "validation": {"mse_masked": 1.0 if s < 20 else 0.0}} for s in range(41))
    (folder / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_checkpoint(folder / "bare", task.build_model(0, settings))
    other = task.Model(n_layers=1, n_heads=2, d_model=8)
    save_checkpoint(folder / "other", task.build_model(0, other), task)
    (folder / "foreign").write_text("text")
    numpy.save(folder / "tokens.npy", numpy.arange(18).reshape(2, 9))
    return folder


@pytest.fixture
def call(call, root, monkeypatch):
    """Runs a command in ``root``."""
    monkeypatch.chdir(root)
    return call


def records(call, *arguments):
    code, out, err = call("ablation", *arguments, *SMALL, "--format", "json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_json_is_a_list_of_records_with_the_agreed_columns(call):
    rows = records(call, "--ckpt", "run@pre", "--ckpt", "run@post")
    assert [(row["ref"], row["step"], row["metric"]) for row in rows] == [
        (ref, step, metric)
        for ref, step in (("run@pre", 10), ("run@post", 40))
        for metric in ("mse_all", "mse_masked", "mse_observed")
    ]
    assert {tuple(row) for row in rows} == {COLUMNS}


def test_csv_and_json_say_the_same(call):
    rows = records(call, "--ckpt", "run@40")
    code, out, _ = call("ablation", "--ckpt", "run@40", *SMALL, "--format", "csv")
    header, *lines = out.strip().split("\n")
    assert code == 0
    assert tuple(header.split(",")) == COLUMNS
    cells = [dict(zip(COLUMNS, line.split(","), strict=True)) for line in lines]
    assert [float(cell["value"]) for cell in cells] == [row["value"] for row in rows]


def test_holm_is_over_the_metric_that_was_asked_for(call):
    """Of what a table shows, too: and the number of tests stands below it."""
    asked = ("--ckpt", "run@10", "--ckpt", "run@40", "--heads", "each")
    rows = records(call, *asked, "--metric", "mse_masked")
    p_values, adjusted = ([row[name] for row in rows] for name in ("p_value", "p_adjusted"))
    assert len(rows) == 8
    assert min(adjusted) == pytest.approx(min(1, 8 * min(p_values)))
    for metric, count in ((), 8), (("--metric", "mse_masked"), 8), (("--metric", "all"), 24):
        code, out, _ = call("ablation", *asked, *metric, *SMALL)
        assert code == 0
        assert f"Holm's adjustment over the {count} tests of these rows." in out


def test_files_that_adjust_over_more_tests_than_the_screen_say_so(call, tmp_path):
    asked = ("--ckpt", "run@40", "--heads", "each", "--out", str(tmp_path / "out"))
    said = {
        metric: " ".join(call("ablation", *asked, *metric, "--samples", "12")[2].split())
        for metric in ((), ("--metric", "mse_all", "--format", "json"), ("--metric", "all"))
    }
    adjusted = json.loads((tmp_path / "out/ablation.json").read_text())
    count = sum(row["p_value"] is not None for row in adjusted)
    clauses = [text.partition("ablation.config.json")[2] for text in said.values()]
    assert clauses == [*[f"; p adj. in files: over all {count} tests"] * 2, ""]
    assert min(row["p_adjusted"] for row in adjusted) == pytest.approx(
        min(1, count * min(row["p_value"] for row in adjusted))
    )


@pytest.mark.parametrize("columns", [80, 100, 120, 200])
def test_table_fits_its_terminal(call, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = call("ablation", "--ckpt", "run@all", "--heads", "all", "--heads", "0.1+1.0", *SMALL)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= min(columns, 120)
    assert "…" not in out
    for word in (
        "run@0 · step 0 · 12 test examples, seed 0",
        "run@40",
        "0.1+1.0",
        "mse_observed",
        "baseline",
    ):
        assert word in out
    assert "\x1b" not in out, "colour where there is no terminal"


#: What each command needs beside checkpoints, and a word that its table must show.
SHOWN = {
    "heads": (["--group", "my own=0.0+1.1"], "layer 0"),
    "transplant": (["--source", "run@0", "--components", "qkv", "--components", "mlp+ln1"], "mlp+ln1"),
    "patch": (["--source", "negated", "--site", "z", "--site", "resid_mid.1"], "resid_mid.1"),
    "permute": (["--draws", "3"], "draws"),
    "lens": ([], "pos_embed"),
}


@pytest.mark.parametrize("command", SHOWN)
def test_tables_of_every_command_fit(call, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    arguments, word = SHOWN[command]
    code, out, err = call(command, "--ckpt", "run@10", "--ckpt", "run@40", *arguments, *SMALL)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    for expected in (word, "run@40 · step 40 · 12 test examples, seed 0", "baseline", "Holm's"):
        assert expected in out
    if command == "permute":
        table = out.partition("\n\n")[0]
        assert table.count("mse_masked") == 1, "draws are pooled in what people see"


#: What a command is asked for, and what the head of its table says of it.
HEADS = {
    "ablation --heads each --queries hidden": "mode uniform · queries hidden",
    "ablation --keys 0,1 --positions 2": "mode uniform · keys 0, 1 · queries 2",
    "ablation --heads 0.1": "mode uniform · heads 0.1",
    "heads --mode mean_pattern": "mode mean_pattern",
    "transplant --source run@0 --components qkv+mlp --layers 1": "source run@0 · components qkv+mlp · layers 1",
    "patch --source negated --site z.0 --heads each": "source negated · site z.0 · heads each",
    "permute --draws 3": "draws 3",
    "lens": "",
    "attention --queries hidden --threshold 0.25": "queries hidden · threshold 0.25",
    "attention": "",
    "probe --held-out 4 --intercept --target true_element": ("method least squares · intercept · held-out 4"),
    "probe --ridge 0.1,1 --site z --heads all --positions 0,1 --held-out 4": (
        "method ridge(0.1,1) · site z · heads all · positions 0, 1 · held-out 4"
    ),
}


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
    assert all(
        shown("--metric", "all").count(name) == 2 for name in ("mse_all", "mse_masked", "mse_observed")
    )
    whole = {row["metric"] for row in records(call, "--ckpt", "run@40")}
    assert whole == {"mse_all", "mse_masked", "mse_observed"}
    assert {row["metric"] for row in records(call, "--ckpt", "run@40", "--metric", "mse_all")} == {"mse_all"}
    line = call("ablation", "--ckpt", "run@40", "--metric", "mse", *SMALL)[2]
    assert "the metrics are mse_all, mse_masked, mse_observed; or write all" in line


@pytest.mark.parametrize(
    ("refs", "names"),
    [
        (["zoo:x@pre", "zoo:x@post"], ["@pre", "@post"]),
        (["runs/a/seed-0@last", "runs/a/seed-1@last"], ["seed-0", "seed-1"]),
        (["runs/a@0", "runs/b@10"], ["a@0", "b@10"]),
        (["one", "one@5"], ["one", "one@5"]),
        (["a very long name of a folder", "another long name of a folder"], ["A", "B"]),
    ],
)
def test_short_names_tell_checkpoints_apart(refs, names):
    assert short_names(refs) == dict(zip(refs, names, strict=True))


def test_a_p_column_stands_only_where_rows_differ_in_it(call):
    same = call("ablation", "--ckpt", "run@40", *SMALL)[1]
    differ = call("ablation", "--ckpt", "run@40", "--metric", "all", "--heads", "each", *SMALL)[1]
    head, columns, _ = same.split("\n", 2)
    assert re.search(r" · p adj\. \d\.\d+$", head)
    assert "p adj." not in columns
    assert "p adj." not in differ.splitlines()[0]
    assert "p adj.\n" in differ


def test_the_head_says_all_heads_and_nothing_twice(call):
    assert "mode uniform · all heads" in call("ablation", "--ckpt", "run@10", *SMALL)[1]
    moved = call("transplant", "--ckpt", "run@10", "--source", "run@40", *SMALL)[1]
    assert "components qkv · " in moved
    assert "qkv · qkv" not in moved


@pytest.mark.parametrize("asked", HEADS)
def test_the_head_of_a_table_says_what_was_done(call, monkeypatch, asked):
    monkeypatch.setenv("COLUMNS", "80")
    command, *options = asked.split()
    code, out, err = call(command, "--ckpt", "run@10", *options, *SMALL, "--split", "validation")
    assert (code, err) == (0, "")
    found = [part for line in out.splitlines()[:3] for part in line.split(" · ")]
    examples = "4" if command == "probe" else "12"
    expected = [
        "run@10",
        "step 10",
        f"{examples} validation examples, seed 0",
        *filter(None, HEADS[asked].split(" · ")),
    ]
    assert found[: len(expected)] == expected
    assert max(map(len, out.splitlines())) <= 80


def test_a_head_breaks_between_its_parts():
    parts = ["run@10", "queries hidden", "mode uniform"]
    assert heading(parts, 24) == "run@10 · queries hidden\nmode uniform"
    assert heading(parts, 40) == "run@10 · queries hidden · mode uniform"
    assert heading(parts, 3) == "run@10\nqueries hidden\nmode uniform"


def test_of_joined_results_the_head_says_what_they_have_in_common():
    parts = [{"mode": "uniform", "queries": "hidden"}, {"mode": "uniform", "keys": [0], "queries": "hidden"}]
    assert header_parts("ablation", {"parts": parts}) == ["mode uniform", "queries hidden"]
    assert header_parts("of one's own", {"mode": "uniform"}) == []


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'transformer_lens'", name="transformer_lens"),
        ImportError("'HookedTransformer' was removed in TransformerLens 4.0. Use TransformerBridge"),
    ],
)
def test_without_hooked_transformer_one_line_says_what_is_needed(error, capsys):
    def command():
        raise error

    assert exit_code_of(command, debug=False) == 2
    said = capsys.readouterr().err
    assert "transformer-lens>=3.9,<4" in said
    assert "circuits" in said
    assert said.count("\n") == 1


def test_other_imports_that_fail_are_not_taken_for_it():
    def command():
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    with pytest.raises(ModuleNotFoundError):
        exit_code_of(command, debug=False)


def test_beside_transformer_lens_4_a_checkpoint_is_refused_in_one_line(root, tmp_path):
    """A stand-in that answers as release 4 does: an ImportError without a name, when the class is asked for."""
    (tmp_path / "transformer_lens.py").write_text(
        "def __getattr__(name):\n"
        "    if name.startswith('Hooked'):\n"
        "        raise ImportError(f'{name!r} was removed in TransformerLens 4.0. Use another.')\n"
        "    raise AttributeError(name)\n"
    )
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from interp_tasks.cli import main; sys.exit(main())"
    for arguments in (["ablation", "--ckpt", "run@10"], ["train", "matrix-completion", "--out", "never"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, cwd=root
        )
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert "transformer-lens>=3.9,<4" in done.stderr
    assert not (root / "never").exists()


def test_the_table_shows_both_intervals(call):
    """What stands in brackets, against the numbers for programs."""
    rows = records(call, "--ckpt", "run@40")
    shown = call("ablation", "--ckpt", "run@40", "--metric", "all", *SMALL)[1]
    found = re.findall(r"\[(\S+), (\S+)\]", shown.replace("[95% CI]", ""))
    expected = [
        (row[f"{kind}_ci_low"], row[f"{kind}_ci_high"]) for row in rows for kind in ("value", "effect")
    ]
    assert [tuple(map(float, pair)) for pair in found] == [pytest.approx(pair, rel=0.01) for pair in expected]


def test_options_of_every_command_reach_the_experiment(call):
    def found(*arguments):
        code, out, err = call(*arguments, "--ckpt", "run@40", *SMALL, "--format", "json")
        assert (code, err) == (0, "")
        return json.loads(out)

    rows = found("transplant", "--source", "run@0", "--components", "q,k", "--layers", "1")
    assert {(row["variant"], row["intervention"]) for row in rows} == {("q+k", "q+k(layers=1; source=run@0)")}
    rows = found("permute", "--draws", "3")
    assert [row["draw"] for row in rows if row["metric"] == "mse_all"] == [None, 0, 1, 2]
    rows = found("patch", "--source", "negated", "--heads", "each", "--positions", "0,3")
    assert {row["intervention"] for row in rows} == {"z(queries=0,3; source=negated)"}
    assert {row["variant"] for row in rows} == {"0.0", "0.1", "1.0", "1.1"}
    assert {row["metric"] for row in rows} >= {"mse_masked", "mse_masked (source)"}
    rows = found("heads", "--mode", "mean", "--queries", "observed", "--group", "a=0.0+1.1")
    assert {row["intervention"] for row in rows} == {"mean(queries=observed)"}
    assert "a" in {row["variant"] for row in rows}
    rows = found("lens")
    assert {row["intervention"] for row in rows} == {"read-out", "without direct"}


def test_modes_keys_queries_and_heads_reach_the_experiment(call):
    rows = records(call, "--ckpt", "run@40", "--heads", "each", "--keys", "0,1", "--queries", "observed")
    assert {row["variant"] for row in rows} == {"0.0", "0.1", "1.0", "1.1"}
    assert {row["intervention"] for row in rows} == {"uniform(keys=0,1; queries=observed)"}
    for mode in ("mean_pattern", "zero", "mean", "resample"):
        assert {row["intervention"] for row in records(call, "--ckpt", "run@40", "--mode", mode)} == {mode}


def test_files_and_page(call, tmp_path):
    code, _, err = call("ablation", "--ckpt", "run@40", "--samples", 12, "--out", tmp_path / "out", "--plot")
    assert code == 0
    assert err.startswith("wrote ")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"ablation.{suffix}" for suffix in ("config.json", "csv", "html", "json", "parquet")
    ]


def test_checkpoint_without_a_task(call):
    assert {row["metric"] for row in records(call, "--ckpt", "bare", "--tokens", "tokens.npy")} == {"mse"}
    settings = [part for value in ("n=3", "task.grid_max=1.2", "grid_step=0.1") for part in ("--set", value)]
    rows = records(call, "--ckpt", "bare", "--task", "matrix-completion", *settings)
    assert {row["metric"] for row in rows} == {"mse_all", "mse_masked", "mse_observed"}
    assert {row["split"] for row in rows} == {"test"}
    out = call("ablation", "--ckpt", "bare", "--task", "matrix-completion", *settings, *SMALL)[1]
    assert "task matrix-completion (n 3, grid_max 1.2, grid_step 0.1) · mode uniform" in " ".join(out.split())


def test_checkpoints_lists_steps_and_marks(call):
    code, out, _ = call("runs", "checkpoints", "--ckpt", "run", "--format", "json")
    assert code == 0
    assert [(row["ref"], row["marks"]) for row in json.loads(out)] == [
        ("run@0", []),
        ("run@10", ["pre", "onset"]),
        ("run@40", ["end", "post"]),
    ]
    code, out, _ = call("runs", "checkpoints", "--ckpt", "run")
    name, head, *rows = out.splitlines()
    assert name == "run · matrix-completion"
    assert head.split() == ["checkpoint", "marks"], "this run has logged nothing"
    assert [row.split()[0] for row in rows] == ["@0", "@10", "@40"]
    assert rows[1].split()[:3] == ["@10", "pre,", "onset"]


@pytest.mark.parametrize(
    "command", ["runs checkpoints", "runs curve", "runs drops", "modular generalisation"]
)
@pytest.mark.parametrize("given", ["bare", "run/checkpoints/00000040"])
def test_a_checkpoint_in_the_place_of_a_run_is_refused_as_it_was_written(call, command, given):
    line = f"interp-run: {given!r} is a checkpoint: name its run\n"
    assert call(*command.split(), "--ckpt", given) == (2, "", line)


def test_a_table_says_which_checkpoints_have_no_row_of_the_metric(call):
    both = ["--ckpt", "run@40", "--ckpt", "zoo:modular-addition-113@post", *SMALL]
    assert "No accuracy: run@40." in call("ablation", *both, "--metric", "accuracy")[1]
    assert "No " not in call("ablation", *both)[1]


def test_tasks_lists_presets(call):
    code, out, _ = call("tasks", "--format", "json")
    assert code == 0
    assert {row["task"] for row in json.loads(out)} == set(tasks.list())
    assert call("tasks")[0] == call("tasks", "--format", "csv")[0] == 0


def test_the_help_of_train_says_where_all_settings_stand(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = " ".join(call("train", "--help")[1].split())
    assert "docs/training.md" in text
    code, out, err = call("train", "miiii", "--set", "train.weigth_decay=1")
    assert (code, out) == (2, "")
    assert "did you mean train.weight_decay? train has steps, batch_size, " in err
    assert err.endswith(f" and others, {len(TrainConfig.model_fields)} in all\n")


TINY = [
    part
    for setting in (
        "train.steps=2",
        "train.batch_size=4",
        "train.eval_samples=8",
        "task.n=2",
        "task.grid_max=1",
        "task.grid_step=0.5",
        "model.n_layers=1",
        "model.n_heads=1",
        "model.d_model=4",
    )
    for part in ("--set", setting)
]


def test_train_makes_runs_extends_them_and_ablation_reads_them(call, tmp_path):
    out = tmp_path / "made"
    code, stdout, err = call("train", "matrix-completion", *TINY, "--out", out, "--seeds", "0:2", "--quiet")
    assert (code, err) == (0, "")
    assert [line.split()[:3] for line in stdout.splitlines()] == [
        [f"{out}/seed-{seed}@last", "step", "2"] for seed in (0, 1)
    ]
    code, stdout, err = call(
        "train", "matrix-completion", *TINY, "--set", "train.steps=3", "--out", out / "seed-0"
    )
    assert code == 0, err
    assert "went on from step 2" in err
    assert "step 3" in stdout
    rows = records(call, "--ckpt", f"{out}/seed-*@last")
    assert [row["step"] for row in rows] == [3] * 3 + [2] * 3
    weights = out / "seed-0/checkpoints/00000003/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    err = call("train", "matrix-completion", *TINY, "--set", "train.steps=3", "--out", out / "seed-0")[2]
    assert "went on from step 2" in err
    assert weights.read_bytes() == whole
    nested = call("train", "matrix-completion", *TINY, "--out", out / "seed-0", "--seeds", "0:2")
    assert nested[:2] == (2, "")
    # A long path is shortened in the middle.
    assert nested[2].endswith("made/seed-0 is the folder of a run: choose another --out\n")
    code, stdout, err = call(
        "train", "matrix-completion", *TINY, "--set", "train.batch_size=5", "--out", out / "seed-1"
    )
    assert (code, stdout) == (2, "")
    assert "another config" in err
    assert err.count("\n") == 1


def test_imported_task_gets_every_command(call, tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.registry._CLASSES", dict(tasks.registry._CLASSES))
    monkeypatch.setattr("tasks.catalog.registered", set())
    (tmp_path / "mine.py").write_text(
        "from tasks import register\nfrom module_beside_it import SIZE, MatrixCompletion\n"
        "@register('mine')\nclass Mine(MatrixCompletion):\n"
        "    presets = {'cpu': {}}\n    n: int = SIZE\n    rank: int = 1\n"
    )
    (tmp_path / "module_beside_it.py").write_text(
        "from tasks.matrix_completion import MatrixCompletion\nSIZE = 2\n"
    )
    monkeypatch.setattr("sys.path", list(sys.path))
    arguments = ["--import", tmp_path / "mine.py"]
    assert "mine" in call("tasks", *arguments)[1]
    code, _, err = call("train", "mine", *TINY, *arguments, "--out", tmp_path / "run", "--quiet")
    assert (code, err) == (0, "")
    assert len(records(call, "--ckpt", f"{tmp_path / 'run'}@last", *arguments)) == 3


REFUSED = {
    "no command": ["ablate"],
    "no option": ["ablation", "--ckpt", "run", "--mdoe", "zero"],
    "no checkpoint given": ["ablation"],
    "no such run": ["ablation", "--ckpt", "rnu@last"],
    "no such step": ["ablation", "--ckpt", "run@5"],
    "not a REF": ["ablation", "--ckpt", "run@soon"],
    "no such zoo model": ["ablation", "--ckpt", "zoo:nothing@last"],
    "foreign file": ["ablation", "--ckpt", "foreign"],
    "zero samples": ["ablation", "--ckpt", "run", "--samples", "0"],
    "seed negative": ["ablation", "--ckpt", "run", "--seed", "-1"],
    "seed too large": ["ablation", "--ckpt", "run", "--seed", str(2**63)],
    "seed of the demo": ["demo", "--seed", "-1"],
    "REF too long": ["ablation", "--ckpt", "r" * 5000],
    "out too long": ["ablation", "--ckpt", "run", "--out", "r" * 5000],
    "samples no number": ["ablation", "--ckpt", "run", "--samples", "many"],
    "unknown mode": ["ablation", "--ckpt", "run", "--mode", "uniformly"],
    "unknown format": ["ablation", "--ckpt", "run", "--format", "yaml"],
    "unknown split": ["ablation", "--ckpt", "run", "--split", "val"],
    "unknown device": ["ablation", "--ckpt", "run", "--device", "gpu"],
    "heads unreadable": ["ablation", "--ckpt", "run", "--heads", "first"],
    "keys unreadable": ["ablation", "--ckpt", "run", "--keys", "a"],
    "keys without uniform": ["ablation", "--ckpt", "run", "--keys", "0", "--mode", "zero"],
    "queries unreadable": ["ablation", "--ckpt", "run", "--queries", "0;1"],
    "unknown task for a checkpoint": ["ablation", "--ckpt", "bare", "--task", "matrix"],
    "no task": ["ablation", "--ckpt", "bare"],
    "task and tokens": ["ablation", "--ckpt", "bare", "--task", "miiii", "--tokens", "tokens.npy"],
    "settings without a task": ["ablation", "--ckpt", "run", "--set", "n=4"],
    "no such tokens": ["ablation", "--ckpt", "bare", "--tokens", "none.npy"],
    "no such import": ["ablation", "--ckpt", "run", "--import", "none.py"],
    "out below a file": ["ablation", "--ckpt", "run", "--out", "foreign/out"],
    "heads group without heads": ["heads", "--ckpt", "run", "--group", "copying"],
    "heads group twice": ["heads", "--ckpt", "run", "--group", "a=0.0", "--group", "a=0.1"],
    "heads group like a row": ["heads", "--ckpt", "run", "--group", "layer 0=0.0"],
    "no draws": ["permute", "--ckpt", "run", "--draws", "0"],
    "no donor": ["transplant", "--ckpt", "run"],
    "donor of another architecture": ["transplant", "--ckpt", "run@40", "--source", "other"],
    "no such donor": ["transplant", "--ckpt", "run", "--source", "rnu@last"],
    "unknown component": ["transplant", "--ckpt", "run", "--source", "run@0", "--components", "qkw"],
    "layers unreadable": ["transplant", "--ckpt", "run", "--source", "run@0", "--layers", "first"],
    "no source": ["patch", "--ckpt", "run"],
    "source of another architecture": ["patch", "--ckpt", "run", "--source", "other"],
    "named source of bare tokens": [
        "patch",
        "--ckpt",
        "bare",
        "--tokens",
        "tokens.npy",
        "--source",
        "negated",
    ],
    "unknown site": ["patch", "--ckpt", "run", "--source", "resample", "--site", "resid"],
    "site of no layer": ["patch", "--ckpt", "run", "--source", "resample", "--site", "embed.0"],
    "heads of a site without": [
        *("patch", "--ckpt", "run", "--source", "resample", "--site", "resid_pre", "--heads", "all"),
    ],
    "lens option": ["lens", "--ckpt", "run", "--mode", "zero"],
    "unknown task": ["train", "matrix-compltion"],
    "unknown preset": ["train", "matrix-completion", "--preset", "gpu"],
    "unknown key": ["train", "matrix-completion", "--set", "train.stepz=3"],
    "unknown task key": ["train", "matrix-completion", "--set", "task.rnk=3"],
    "unknown model key": ["train", "matrix-completion", "--set", "model.d_modle=3"],
    "unknown section": ["train", "matrix-completion", "--set", "steps=3"],
    "setting without a value": ["train", "matrix-completion", "--set", "train.steps"],
    "more threads than can start": ["train", "matrix-completion", "--set", "train.threads=100000"],
    "infinite value": ["train", "matrix-completion", "--set", "train.eps=Infinity"],
    "value that cannot be": ["train", "matrix-completion", "--set", "train.steps=-1"],
    "no seeds": ["train", "matrix-completion", "--seeds", "3:3"],
    "two seeds": ["train", "matrix-completion", "--seeds", "0:2", "--set", "train.seed=1"],
    "run below a file": ["train", "matrix-completion", "--out", "foreign/run"],
    "a value twice": ["patch", "--ckpt", "run", "--source", "run@0", "--source", "run@10"],
    "two names of an option": ["ablation", "--ckpt", "run", "--queries", "0", "--positions", "3"],
    "empty value": ["ablation", "--ckpt", "run", "--out", ""],
    "empty argument": ["runs", "checkpoints", "--ckpt", ""],
    "more samples than there can be": ["ablation", "--ckpt", "run", "--samples", str(2**62)],
    "more draws than there can be": ["permute", "--ckpt", "run", "--draws", str(2**62)],
    "layers of no layer": [
        *("transplant", "--ckpt", "run", "--source", "run@0", "--components", "embed", "--layers", "0"),
    ],
    "split of tokens": ["ablation", "--ckpt", "run", "--tokens", "tokens.npy", "--split", "train"],
    "more runs than there can be": ["train", "matrix-completion", "--seeds", "0:99999999"],
    "out in place of a file": ["ablation", "--ckpt", "run", "--out", "/dev/null"],
    "no task named": ["train"],
    "no run": ["runs", "checkpoints", "--ckpt", "nowhere"],
    "a REF for a run": ["runs", "checkpoints", "--ckpt", "run@40"],
    "demo page in place of a folder": ["demo", "--out", "run"],
    "other task": ["modular", "progress", "--ckpt", "run"],
    "old name": ["progress", "--ckpt", "run"],
    "a REF without --ckpt": ["runs", "curve", "run"],
}
#: What each of some messages must name: what is wrong, and what would be right.
NAMES = {
    "no command": ["'ablate'", "ablation"],
    "no option": ["--mdoe", "--mode"],
    "no such run": ["rnu", "run"],
    "no such step": ["step 5", "0 and 10"],
    "zero samples": ["--samples 0"],
    "seed negative": ["--seed -1", "from 0"],
    "REF too long": ["too long", "rrr"],
    "more threads than can start": ["train.threads", "1024"],
    "infinite value": ["train.eps", "finite"],
    "unknown mode": ["uniformly", "mean_pattern"],
    "unknown format": ["yaml", "json"],
    "heads unreadable": ["first", "0.1"],
    "unknown task for a checkpoint": ["'matrix'", "matrix-completion"],
    "no task": ["bare", "--task NAME", "--tokens FILE.npy"],
    "out below a file": ["foreign", "not a folder"],
    "heads group without heads": ["--group", "NAME=HEADS"],
    "heads group like a row": ["layer 0", "already"],
    "no draws": ["--draws 0"],
    "no donor": ["--source"],
    "donor of another architecture": ["other", "n_layers is 1, not 2"],
    "unknown component": ["qkw", "qkv"],
    "no source": ["--source"],
    "named source of bare tokens": ["negated", "resample"],
    "unknown site": ["resid", "resid_pre"],
    "heads of a site without": ["resid_pre", "no heads"],
    "unknown task": ["did you mean 'matrix-completion'"],
    "unknown preset": ["'gpu'", "cpu, reference, paper"],
    "unknown key": ["train.stepz", "did you mean train.steps"],
    "unknown task key": ["task.rnk", "did you mean task.rank"],
    "unknown model key": ["model.d_modle", "did you mean model.d_model"],
    "unknown section": ["'steps'", "train.steps"],
    "demo page in place of a folder": ["run", "folder"],
    "a value twice": ["--source", "2 times"],
    "two names of an option": ["--queries", "--positions", "2 times"],
    "empty value": ["--out", "empty"],
    "empty argument": ["--ckpt", "empty"],
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_one_line_and_exit_2(call, case):
    code, out, err = call(*REFUSED[case])
    assert (code, out) == (2, "")
    assert err.startswith("interp-run: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    for name in NAMES.get(case, []):
        assert name in err


def test_mistakes_found_late_are_one_line_too(call, root, tmp_path):
    (tmp_path / "broken.py").write_text("import tasks\nx = 1 / 0\n")
    for arguments, names in [
        (["--ckpt", "run", "--heads", "7.0"], ["7.0", "layers 0-1"]),
        (["--ckpt", "run", "--queries", "visible"], ["hidden, observed"]),
        (["--ckpt", "run", "--keys", "40"], ["40"]),
        (["--ckpt", "run", "--device", "cuda:7"], ["cuda:7", "cpu"]),
        (["--ckpt", "bare", "--tokens", "foreign"], ["foreign", ".npy"]),
        (["--ckpt", "bare", "--task", "matrix-completion", "--set", "grid=1"], ["grid", "grid_step"]),
        (["--ckpt", "bare", "--task", "modular-addition"], ["does not fit"]),
        (["--ckpt", "run", "--samples", "1000000000000"], ["not enough memory", "--samples"]),
        (["--ckpt", "run", "--import", tmp_path / "broken.py"], ["line 2", "ZeroDivisionError"]),
        (["patch", "--ckpt", "run", "--source", "negative"], ["negative", "declares negated", "resample"]),
        (["patch", "--ckpt", "run", "--source", "resample", "--site", "z.2"], ["layers 0-1"]),
        (["transplant", "--ckpt", "run", "--source", "run@0", "--layers", "5"], ["5"]),
        (["heads", "--ckpt", "run", "--group", "a=7.0"], ["7.0", "layers 0-1"]),
    ]:
        small = [] if "--samples" in arguments else SMALL
        command = ["ablation"] if str(arguments[0]).startswith("-") else []
        code, out, err = call(*command, *arguments, *small)
        assert (code, out) == (2, ""), arguments
        assert err.startswith("interp-run: ")
        assert err.count("\n") == 1
        for name in names:
            assert name in err


def test_debug_shows_the_traceback(call):
    code, _, err = call("ablation", "--ckpt", "nowhere", "--debug")
    assert code == 2
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("interp-run: no run")


def test_a_programming_error_is_not_dressed_up(capsys):
    def broken():
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        exit_code_of(broken, debug=False)


def test_interruption(capsys):
    def interrupted():
        raise KeyboardInterrupt

    assert exit_code_of(interrupted, debug=False) == 130
    assert capsys.readouterr().err == "interp-run: interrupted\n"


def test_interruption_within_a_command(call, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setitem(EXPERIMENTS, "ablation", replace(EXPERIMENTS["ablation"], function=interrupted))
    assert call("ablation", "--ckpt", "run") == (130, "", "interp-run: interrupted\n")


def test_warnings_of_libraries_stay_inside(call, monkeypatch):
    import logging

    from interp_tasks.experiments import ablation

    def noisy(*arguments, **options):
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        logging.getLogger("transformer_lens").warning("loud")
        return ablation(*arguments, **options)

    monkeypatch.setitem(EXPERIMENTS, "ablation", replace(EXPERIMENTS["ablation"], function=noisy))
    code, _, err = call("ablation", "--ckpt", "run", *SMALL)
    assert (code, err) == (0, "")
    assert logging.root.manager.disable == logging.NOTSET


def test_at_most_18_commands_at_the_first_level_each_on_the_page_of_its_group(call):
    assert len(program().entries) <= 18
    for group in (program(), program().get_command(None, "modular")):
        out = call(*([] if group is program() else ["modular"]), "--help")[1]
        for entry in group.entries.values():
            assert f" {entry.name} " in out
            assert entry.help.split()[0] in out
            assert entry.panel in out
        assert "bool" not in out


def test_flags_have_no_type_on_a_help_page(call):
    out = call("ablation", "--help")[1]
    assert "--plot " in out
    assert "bool" not in out


@pytest.mark.parametrize("path", COMMANDS)
def test_the_line_of_a_command_begins_its_help(path):
    """Listed without loading the command, and said again by it."""
    group = program()
    for word in path[:-1]:
        group = group.get_command(None, word)
    entry, made = group.entries[path[-1]], group.get_command(None, path[-1])
    assert entry.help
    assert made.help.partition("\n\n")[0] == entry.help
    needed = [option.required for option in made.params if option.param_type_name == "option"]
    assert needed == sorted(needed, reverse=True), "required options come first"


@pytest.mark.parametrize("path", [path for path in COMMANDS if len(path) > 1])
def test_an_old_name_is_answered_with_the_new_one(call, path):
    code, out, err = call(path[-1], "--ckpt", "run")
    new = f"interp-run {' '.join(path)}"
    assert (code, out) == (2, "")
    assert err == f"interp-run: {path[-1]} is now {new}; see {new} --help\n"


def test_the_changelog_has_every_old_name():
    changes = (Path(__file__).parents[3] / "CHANGELOG.md").read_text(encoding="utf-8")
    table = changes.partition("| before | now |")[2].partition("\n\n")[0]
    before, now = zip(*(line.split("|")[1:3] for line in table.splitlines()[2:]), strict=True)
    # A list of tasks was had by their name alone.
    old = program().moved.keys() - {"list"}
    assert set(re.findall(r"`([\w-]+)", "".join(before))) == old | {"tasks"}
    groups = {words[0] for words in COMMANDS if len(words) > 1}
    assert {name.split()[0] for name in re.findall(r"`([^`]+)`", "".join(now))} == groups | {"interp-run"}


def test_a_misspelled_command_leaves_the_others_as_they_are():
    """What lists commands for a close name is not what is called."""
    program.cache_clear()
    assert main(["ablaton"]) == 2
    made = program().get_command(None, "ablation")
    assert "--ckpt" in {flag for option in made.params for flag in option.opts}
    assert main(["ablation"]) == 2, "the command without its options was called, and did nothing"


@pytest.mark.parametrize(
    ("path", "now"),
    [
        ("modular copying", "interp-run matrix copying"),
        ("matrix zoo", "interp-run runs zoo"),
        ("runs ablation", "interp-run ablation"),
    ],
)
def test_a_command_of_another_group_is_named(call, path, now):
    group, name = path.split()
    line = f"interp-run: no command {name!r} of interp-run {group}; there is {now}\n"
    assert call(*path.split(), "--ckpt", "run") == (2, "", line)


def test_the_schema_moved_too_and_the_version_is_said(call):
    assert call("schema")[2] == "interp-run: schema is now interp-run --schema\n"
    assert json.loads(call("--schema")[1])["$defs"]
    assert call("--version")[1] == f"interp-run {versions()['interp-tasks']}\n"


@pytest.mark.parametrize(
    "command", ["runs checkpoints", "runs curve", "runs report", "ablation", "matrix order"]
)
def test_a_word_that_is_no_option_is_told_of_ckpt(call, command):
    code, out, err = call(*command.split(), "--ckpt", "run", "other@post")
    assert (code, out) == (2, "")
    assert "'other@post'" in err
    assert "--ckpt other@post" in err


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (
            "modular progress --ckpt run@10",
            ["models of modular arithmetic", "run@10 is of matrix-completion"],
        ),
        (
            "modular generalisation --ckpt zoo:matrix-completion-4x4",
            ["models of modular arithmetic", "is of matrix-completion"],
        ),
        ("matrix copying --ckpt zoo:miiii-113-small@post", ["models of matrix completion", "is of miiii"]),
        ("matrix copying --ckpt bare --task miiii", ["models of matrix completion", "--task is of miiii"]),
    ],
)
def test_a_group_refuses_the_other_task_before_anything_is_loaded(call, monkeypatch, arguments, names):
    def load(*arguments, **options):
        raise AssertionError("loaded")

    monkeypatch.setattr("interp_tasks.checkpoints.load.load_checkpoint", load)
    code, out, err = call(*arguments.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert all(name in err for name in names)


def test_no_arguments_print_the_help(call):
    code, out, err = call()
    assert (code, err) == (0, "")
    for name in program().entries:
        assert name in out


def test_help_and_argument_errors_import_nothing_slow(root):
    """Every case above that is an argument error, and every help page, in one fresh interpreter."""
    program = (
        "import contextlib, io, json, sys\n"
        "from interp_tasks.cli import main\n"
        "codes, lacking = [], json.loads(sys.argv[2])\n"
        "for arguments in json.loads(sys.argv[1]) + lacking:\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        "        codes.append(main(arguments))\n"
        "    slow = {'torch', 'transformer_lens', 'pandas', 'plotly', 'circuits'}\n"
        "    light = {'numpy', 'pydantic', 'email', 'importlib.metadata'}\n"
        "    slow |= light if arguments[-1] == '--help' else set()\n"
        "    slow -= {'circuits'} if arguments in lacking else set()\n"
        "    assert not slow & set(sys.modules), (arguments, slow & set(sys.modules))\n"
        "print(json.dumps(codes))\n"
    )
    helps = [["--help"], *([*path, "--help"] for path in COMMANDS)]
    # Its configuration says that a model lacks what an option names: heads are read by circuits, without torch.
    lacking = [[*asked.split(), "--ckpt", "run@40"] for asked in LACKING]
    lacking += [[*asked.split(), "--ckpt", "zoo:modular-addition-113@last"] for asked in LACKING_NEURONS]
    lacking += [["transplant", "--source", "run@0", "--layers", "2", "--ckpt", "run@40"]]
    cases = [*helps, *REFUSED.values(), ["runs", "checkpoints", "--ckpt", "run"], ["tasks"]]
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(cases), json.dumps(lacking)],
        cwd=root,
        # Without it the child has what readline, once loaded, sets past os.environ: the width of a terminal.
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == [0] * len(helps) + [2] * len(REFUSED) + [0, 0] + [2] * len(lacking)
    assert done.stderr == ""


def test_a_closed_pipe_is_quiet(root):
    """``interp-run tasks --format json | head -1``, after head has gone."""
    program = "import sys\nfrom interp_tasks.cli import main\nsys.exit(main(['tasks', '--format', 'json']))"
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_settings_and_seeds():
    assert read_settings(["a=1", "b=x=y", "a=2"]) == {"a": "2", "b": "x=y"}
    assert read_seeds(None) is None
    assert read_seeds("0:3") == [0, 1, 2]
    assert read_seeds("4,1") == [4, 1]
    for text in ("a", "1:2:3", "-1", "", "4,4,1", f"0:{2**70}", str(2**63), "9" * 5000):
        with pytest.raises(UserError, match="--seeds"):
            read_seeds(text)


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("command", ["ablation", "permute"])
def test_tables_never_crop_a_number(call, monkeypatch, command, width):
    """Every cell of the table is in the text whole, whatever room the terminal has."""
    from interp_tasks import experiments
    from interp_tasks.measurement.table import shown_columns, shown_rows

    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = call(command, "--ckpt", "run", "--samples", "8", "--metric", "all", "--quiet")
    assert code == 0
    printed = out.split()
    frame = shown_rows(getattr(experiments, command)("run", samples=8).frame)
    for row in frame.to_dict("records"):
        for column in shown_columns(frame):
            for word in column.shown(row).split():
                assert word in printed, (column.header, word)


def test_a_wrong_metric_is_refused_before_anything_is_loaded(call, monkeypatch):
    def loaded(*arguments):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("interp_tasks.checkpoints.load.load_resolved", loaded)
    code, out, err = call("ablation", "--ckpt", "run@40", "--metric", "mse_maskd", *SMALL)
    line = (
        "interp-run: --metric 'mse_maskd': did you mean mse_masked? the metrics are mse_all, mse_masked, "
        "mse_observed; or write all\n"
    )
    assert (code, out, err) == (2, "", line)
    code, out, err = call("ablation", "--ckpt", "zoo:miiii-113-paper@last", "--metric", "los_3", *SMALL)
    assert (code, out) == (2, "")
    assert re.fullmatch(
        r"interp-run: --metric 'los_3': of 60 metrics the closest are loss_3, .*; or write all\n", err
    )
    line = call("matrix", "baseline", "--ckpt", "run@40", "--metric", "nuclear", *SMALL)[2]
    assert "mse_observed, nuclear_norm; or write all" in line, "properties of outputs are metrics of baseline"
    with pytest.raises(AssertionError, match="a model was loaded"):
        call("ablation", "--ckpt", "run@40", "--metric", "mse_masked (source)", *SMALL)


@pytest.mark.parametrize("fails", [False, True])
def test_a_metric_of_a_task_that_does_not_say_its_metrics(call, monkeypatch, fails):
    """Its names are those of its metrics on two examples; where that fails, measuring says what is wrong."""
    from tasks.matrix_completion.task import MatrixCompletion

    sizes = []

    def metrics(self, output, batch, real=MatrixCompletion.metrics):
        sizes.append(len(batch))
        if fails and len(batch) == 2:
            raise ValueError("no such output")
        return real(self, output, batch)

    monkeypatch.setattr(MatrixCompletion, "metric_names", ())
    monkeypatch.setattr(MatrixCompletion, "metrics", metrics)
    code, out, err = call("ablation", "--ckpt", "run@40", "--metric", "mse_maskd", *SMALL)
    assert (code, out) == (2, "")
    assert "metric 'mse_maskd': did you mean mse_masked? the metrics" in err
    assert err.count("\n") == 1
    assert (sizes == [2]) is not fails, "before anything is measured"
    assert call("ablation", "--ckpt", "run@40", "--metric", "mse_masked", *SMALL)[0] == 0


#: What the shallower of two models lacks, and what is said of it.
LACKING = {
    "ablation --heads 2.1": "run@40: heads '2.1': no head 2.1: the model has layers 0-1 and heads 0-1",
    "ablation --queries 15": "--queries: no position 15: run@40 has positions 0-8",
    "ablation --keys 15": "--keys: no position 15: run@40 has positions 0-8",
    "heads --group mine=2.0": "run@40: heads '2.0': no head 2.0: the model has layers 0-1 and heads 0-1",
    "heads --by-class --least 4": "--least 4: run@40 has 4 heads; fewer than that",
    "patch --source negated --site z.2": "--site z.2: run@40 has layers 0-1",
    "patch --source negated --site resid_pre.2": "--site resid_pre.2: run@40 has layers 0-1",
    "patch --source negated --heads 2.1": "run@40: heads '2.1': no head 2.1: the model has layers 0-1 and heads 0-1",
    "probe --site z --heads 2.1": "run@40: heads '2.1': no head 2.1: the model has layers 0-1 and heads 0-1",
    "probe --site resid_post.2": "--site resid_post.2: run@40 has layers 0-1",
    "probe --positions 15": "--positions: no position 15: run@40 has positions 0-8",
    "attention --queries 15": "--queries: no position 15: run@40 has positions 0-8",
    "patch --source negated --queries -10": "--queries: no position -10: run@40 has positions 0-8",
    "patch --source negated --site z.1 --heads 0.1": (
        "--site z.1 with --heads 0.1: 0.1 is not in layer 1; leave the layer out"
    ),
}


LACKING_NEURONS = {
    "modular neurons --site mlp_post.1": "--site mlp_post.1: zoo:modular-addition-113@3000 has layers 0-0",
    "modular neurons --neurons 512": "--neurons 512: mlp_post of",
    "modular neurons --site mlp_out --neurons 128": "has neurons 0-127",
}


@pytest.mark.parametrize("asked", LACKING)
def test_every_ref_is_checked_before_the_first_is_loaded(call, monkeypatch, asked):
    """The first REF has three layers of four heads and 16 positions, the second two layers of two heads and 9."""
    monkeypatch.setattr("interp_tasks.checkpoints.load.load_resolved", None)
    command, *options = asked.split()
    refs = ["--ckpt", "zoo:matrix-completion-4x4@post", "--ckpt", "run@40"]
    code, out, err = call(command, *refs, *options, "--samples", "12")
    assert (code, out, err) == (2, "", f"interp-run: {LACKING[asked]}\n")


@pytest.mark.parametrize("option", ["--queries", "--keys"])
def test_a_position_that_the_model_has_and_the_tokens_lack(call, monkeypatch, tmp_path, option):
    monkeypatch.setattr("interp_tasks.checkpoints.load.load_resolved", None)
    numpy.save(tmp_path / "short.npy", numpy.zeros((2, 5), dtype=int))
    err = call("ablation", "--ckpt", "run@40", "--tokens", tmp_path / "short.npy", option, "7")[2]
    assert err == f"interp-run: {option}: no position 7: the examples of run@40 have positions 0-4\n"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("patch --source mirrored", "which declares negated"),
        ("attention --template roww", "has no such template"),
        ("ablation --queries seen", "have no such mask"),
        ("permute --what diagonals", "no such positions in run@40"),
        ("probe --target truth", "declares true_element"),
        ("matrix baseline --method magic", "declares nuclear norm"),
        ("matrix baseline --vary seed", "--vary 'seed'"),
    ],
)
def test_what_a_task_declares_is_known_before_a_model_is_loaded(call, monkeypatch, asked, said):
    monkeypatch.setattr("interp_tasks.checkpoints.load.load_resolved", None)
    code, out, err = call(*asked.split(), "--ckpt", "run@40", "--samples", "12")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("modular progress --answer product", "--answer 'product': task 'modular-addition' has sum"),
        *LACKING_NEURONS.items(),
        ("modular detector --metric recal", "'modular-addition' has none"),
        (
            "modular detector --metric recal --ckpt zoo:miiii-113-paper@last",
            "--metric 'recal': of 11 metrics",
        ),
        ("matrix embeddings --metric norms --ckpt run@40", "--metric 'norms': of"),
        ("matrix embeddings --largest 0.05 --ckpt run@40", "at least 4 are needed"),
        ("transplant --source run@0 --layers 2 --ckpt run@40", "--layers 2: run@40 has layers 0-1"),
    ],
)
def test_what_experiments_of_models_lack_is_said_before_one_is_loaded(call, monkeypatch, asked, said):
    monkeypatch.setattr("interp_tasks.checkpoints.load.load_resolved", None)
    refs = [] if "--ckpt" in asked else ["--ckpt", "zoo:modular-addition-113@last"]
    code, out, err = call(*asked.split(), *refs)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


@pytest.mark.parametrize(
    "asked",
    [
        "ablation --ckpt run@all",
        "patch --ckpt run@all --source negated",
        "matrix embeddings --ckpt run@all",
        "modular weights --ckpt zoo:modular-addition-113@last",
        "modular progress --ckpt zoo:modular-addition-113@last",
    ],
)
def test_a_ref_is_resolved_once(call, monkeypatch, asked):
    from interp_tasks.measurement import subjects

    resolved, real = [], subjects.resolve
    monkeypatch.setattr(subjects, "resolve", lambda ref: resolved.append(ref) or real(ref))
    samples = [] if asked.startswith("modular") else ["--samples", "4"]
    assert call(*asked.split(), *samples)[0] == 0
    assert resolved == [asked.split("--ckpt ")[1].split()[0]]
