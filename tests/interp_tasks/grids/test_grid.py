"""Grids: what a file asks for, that it is done once, and that what fails stops nothing else."""

import csv
import io
import json
import math
import re
import shutil
from datetime import date
from pathlib import Path

import pandas as pd
import pytest

import tasks
from interp_tasks import train
from interp_tasks.cli import main
from interp_tasks.errors import UserError
from interp_tasks.file_io import acquire_folder_lock
from interp_tasks.grids import grid, grid_run_and_table, parse_grid_spec, read_grid_spec
from interp_tasks.grids.grid_run_and_table import (
    count_executor_slots,
    grid_result,
    pool_over_seeds,
    read_record,
    record_file,
    result_file,
    tabulate_grid,
)
from interp_tasks.grids.work_units import list_work_units

TINY = {"task.p": 11, "train.steps": 4, "train.eval_samples": 8, "model.d_model": 8, "model.n_heads": 2}
ABLATION = {"name": "ablation", "at": "last", "settings": {"samples": 8, "heads": "0.0"}}

#: Ships without a checkpoint.
LOG_ALONE = "zoo:modular-arithmetic-sweeps/addition-60"


def small(seeds="0:2", experiment=(ABLATION,), **settings):
    train = {"task": "modular-addition", "seeds": seeds, "set": {**TINY, **settings}}
    return {"train": train, "experiment": list(experiment)}


def shipped(ship):
    return {"train": {**small()["train"], "ship": ship}}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A grid of two widths and two seeds, in order in this process."""
    out = tmp_path_factory.mktemp("grids") / "first"
    drops = {"name": "drops", "over": "all"}
    return grid(small(experiment=(ABLATION, drops), **{"model.d_model": [8, 16]}), out, executor="serial")


def test_keys_follow_the_configuration_and_nothing_else():
    def keys(**changes):
        spec = {**small(seeds="0"), **changes.pop("top", {})}
        spec["train"]["set"] |= changes
        whole = list_work_units(parse_grid_spec(spec))
        return whole.train[0].key, whole.measure[0].key, whole.train[0].folder

    same = keys()
    assert keys() == same
    assert keys(**{"train.eps": 1e-8, "task.split_seed": 0}) == same  # the defaults, said in words
    for change in (
        {"model.d_model": 16},
        {"train.learning_rate": 0.5},
        {"task.train_fraction": 0.5},
        {"top": {"threads": 2}},
    ):
        other = keys(**change)
        assert all(a != b for a, b in zip(other, same, strict=True)), change
    fall = {"train.schedule": "linear", "train.schedule_start": 4, "train.schedule_end": 6}
    for change in ({"train.steps": 5}, fall):
        longer = keys(**change)
        assert longer[:2] != same[:2]
        assert longer[2] == same[2]  # goes on in the same run


def test_runs_that_differ_in_steps_or_schedule_have_folders_of_their_own():
    """Within a block as axes, between blocks by their order: the first keeps the name that it has alone."""

    def folders(*blocks):
        trained = [small(seeds="0:2", **each)["train"] for each in blocks]
        return [unit.folder for unit in list_work_units(parse_grid_spec({"train": trained})).train]

    fall = {"train.schedule": "linear", "train.schedule_end": 4}
    alone = folders({})
    found = folders({}, fall, {"train.steps": 6}, fall | {"train.schedule_end": 3})
    assert found[:2] == alone
    assert len(set(found)) == 8
    assert {Path(folder).name for folder in found} == {"seed-0", "seed-1"}
    assert len({Path(folder).parent for folder in found}) == 4
    assert folders(fall) == alone
    assert folders({}, {}) == alone
    axis = folders(fall | {"train.schedule": ["linear", "cosine"]})
    assert len(set(axis)) == 4
    assert set(alone).isdisjoint(axis)


def test_a_configuration_of_two_crossed_sweeps_is_one_folder_with_what_both_vary(tmp_path):
    """It was two, each with some of the seeds, and in the rows of one sweep; what was trained was trained again."""
    widths, rates = {"model.d_model": [8, 16]}, {"train.learning_rate": [0.001, 0.003]}
    first, second = small("0", **widths), small("0:2", **rates)
    crossed = {**first, "train": [first["train"], second["train"]]}
    before, units = (list_work_units(parse_grid_spec(spec)).train for spec in (first, crossed))
    assert [(unit.key, unit.folder) for unit in units[:2]] == [(unit.key, unit.folder) for unit in before]
    assert len(units) == 5
    shared = [unit for unit in units if unit.varied == {"model.d_model": 8, "train.learning_rate": 0.001}]
    assert [unit.resolved.train.seed for unit in shared] == [0, 1]
    assert len({Path(unit.folder).parent for unit in shared}) == 1
    assert [tuple(unit.varied) for unit in units if unit not in shared] == [
        ("model.d_model",),
        ("train.learning_rate",),
        ("train.learning_rate",),
    ]
    rows = tabulate_grid(grid(crossed, tmp_path / "crossed", executor="serial"))
    rows = rows[(rows["train.learning_rate"] == 0.001) & (rows["metric"] == "loss")]
    assert set(rows["model.d_model"]) == {8}
    assert rows["n_runs"].tolist() == [1, 1, 2]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, "no runs: write"),
        (small(seeds="0:2000"), "2,000 runs to train: --yes if that is meant"),
        ({"trane": {}}, "no setting grid.trane: did you mean grid.train?"),
        (small(**{"model.d_modle": 8}), "did you mean model.d_model?"),
        (small(**{"train.seed": 3}), "set train.seed: write seeds"),
        (small(seeds=[0, 0]), "1 to 10000 different ones"),
        (small(experiment=[{"name": "ablations"}]), "no experiment 'ablations': did you mean ablation? exp"),
        (small(experiment=[{"name": "ablation", "settings": {"head": 1}}]), "'head'"),
        (small(task={"p": 13}), "task.p is set twice, with quotes and without: leave one out"),
        (shipped({"name": "a"}), "two runs ship as a: write {seed}"),
        ({"runs": "zoo:nowhere"}, "no zoo:nowhere"),
        ({"runs": LOG_ALONE, "experiment": [{"name": "drops"}, ABLATION]}, "ships its log alone: train it"),
        (
            small(**{"train.learning_rate": [0.1, date(2026, 1, 1)]}),
            "set.train.learning_rate: 2026-01-01 is neith",
        ),
        (
            small(experiment=[{**ABLATION, "settings": {"samples": math.inf}}]),
            "settings.samples: inf is neither",
        ),
        ({"train": date(2026, 1, 1)}, "grid.train: 2026-01-01 is neither text"),
        (small(experiment=[{**ABLATION, "at": ["lest"]}]), "no step 'lest': did you mean @last?"),
        (small(experiment=[{**ABLATION, "settings": {"samples": 0}}]), "at least one example"),
        (small(experiment=[{"name": "drops", "at": 4}]), "experiment drops takes whole runs: leave out at"),
        ({"runs": ["nowhere"], "experiment": [ABLATION]}, "no run or checkpoint folder 'nowhere'"),
        (small(**{"train.start_from": "nowhere@last"}), "no run or checkpoint folder 'nowhere'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_that_names_the_grid(spec, said, tmp_path):
    with pytest.raises(UserError, match=f"^grid: [^\n]*{re.escape(said)}[^\n]*$"):
        grid(spec, tmp_path / "out", executor="serial")
    assert not (tmp_path / "out").exists()


BASE = """
[train]
task = "modular-addition"
preset = "reference"
seeds = "0:5"
ship = { name = "first/seed-{seed}" }
[train.set]
task.p = 11
model.d_model = 8
train.steps = 4
"""


@pytest.fixture
def base(tmp_path):
    (tmp_path / "first.toml").write_text(BASE, encoding="utf-8")
    return tmp_path / "varied.toml"


def test_a_variation_has_the_settings_of_its_base_but_for_its_own(base):
    """And neither its seeds nor what it ships."""
    base.write_text('[[train]]\nbase = "first"\n[train.set]\nmodel.d_model = [8, 16]\n', encoding="utf-8")
    (block,) = read_grid_spec(base).train
    assert (block.task, block.preset, block.seeds, block.ship) == ("modular-addition", "reference", (0,), ())
    assert block.settings == {"task.p": 11, "model.d_model": [8, 16], "train.steps": 4}
    # The first of the two is the base itself, one run of it.
    units = list_work_units(read_grid_spec(base)).train
    assert [unit.resolved.model["d_model"] for unit in units] == [8, 16]
    (same,) = (unit.key for unit in list_work_units(read_grid_spec(base.with_name("first.toml"))).train[:1])
    assert units[0].key == same


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('base = "secnd"', "secnd.toml"),
        (f"x = {'[' * 9999}", "varied.toml is not TOML"),
        ('base = "../first"', "name a grid file beside this one"),
        ('base = "first"\ntask = "miiii"', "task is that of its base, first: leave it out"),
        ('base = "first"\nset = { "task.p" = 3, task.p = 5 }', "varied.toml: task.p is set twice"),
        ("set = { train.steps = 2026-01-01 }", "grid.train.set.train.steps: 2026-01-01 is neither"),
        ('base = "two"', "a base has one [[train]], that one has 2"),
    ],
)
def test_a_base_that_is_none_is_refused_in_one_line(base, text, said):
    two = BASE.replace("[train]", "[[train]]").replace('ship = { name = "first/seed-{seed}" }\n', "")
    base.with_name("two.toml").write_text(two * 2, encoding="utf-8")
    base.write_text(f"[[train]]\n{text}\n", encoding="utf-8")
    with pytest.raises(UserError) as raised:
        read_grid_spec(base)
    assert said in str(raised.value)
    assert str(raised.value).startswith(str(base.parent))
    assert "\n" not in str(raised.value)


def test_rows_are_those_of_the_experiment_called_by_itself(done):
    from interp_tasks.experiments import ablation

    found = tabulate_grid(done)
    unit = done.plan.train[0]
    alone = ablation(f"{done.folder / unit.folder}@last", heads="0.0", samples=8).frame
    mine = found[(found["run"] == unit.folder) & (found["experiment"] == "ablation")]
    for column in ("metric", "value", "value_ci_low", "value_ci_high", "effect", "p_value"):
        assert list(mine[column]) == list(alone[column])
    assert set(mine["model.d_model"]) == {unit.varied["model.d_model"]}


def test_rows_of_several_seeds_are_means_over_them(done):
    found = tabulate_grid(done)
    mine = found[(found["experiment"] == "ablation") & (found["metric"] == "loss")]
    for width in (8, 16):
        of_width = mine[mine["model.d_model"] == width]
        together = of_width[of_width["run"].str.endswith("seed-*")]
        alone = of_width[~of_width["run"].str.endswith("seed-*")]
        assert list(together["n_runs"]) == [2]
        assert together["value"].item() == pytest.approx(alone["value"].mean())
        assert together["effect"].item() == pytest.approx(alone["effect"].mean())
        assert together[["value_ci_low", "effect_ci_high"]].isna().all(axis=None), "of two runs there is none"
    # What an experiment pooled itself is not pooled again.
    drops = found[(found["metric"] == "drop") & found["run"].str.endswith("seed-*")]
    assert drops["n_runs"].tolist() == [2, 2]


def test_a_mean_over_seeds_counts_those_that_have_the_number():
    """Two of five get there: a mean over two, which was said to be over five."""
    from interp_tasks.measurement.result import tidy_frame

    steps = [100.0, 300.0, None, None, None]
    rows = pd.DataFrame({"run": [f"a/seed-{seed}" for seed in range(5)], "step": 900, "value": steps})
    frame = tidy_frame(rows.assign(experiment="generalisation", metric="step at 95%"))
    [row] = pool_over_seeds(frame).to_dict("records")
    assert (row["value"], row["n_runs"]) == (200, 2)
    frame["value"] = [1.0, 2.0, 4.0, None, None]
    [row] = pool_over_seeds(frame).to_dict("records")
    # Student's t of two degrees of freedom, 4.3027; the standard error is sqrt(7) / 3.
    half = 4.3027 * math.sqrt(7) / 3
    assert (row["value_ci_low"], row["value_ci_high"]) == pytest.approx(
        (7 / 3 - half, 7 / 3 + half), rel=1e-4
    )


@pytest.fixture
def tried(monkeypatch):
    """What was tried from here on, of a grid on one process."""
    names = []
    perform = grid_run_and_table.perform_unit
    monkeypatch.setattr(
        grid_run_and_table, "perform_unit", lambda *one: names.append(one[0].description) or perform(*one)
    )
    return names


def test_a_grid_that_is_done_does_nothing(done, tried):
    again = grid(done.spec, done.folder, executor="serial")
    assert tried == []
    assert again.done_before == len(again.plan.units)
    pd.testing.assert_frame_equal(tabulate_grid(again), tabulate_grid(done))


def test_rows_that_were_stored_under_old_names_are_read_under_the_new_ones(tmp_path, monkeypatch):
    found = grid(small(seeds="0"), tmp_path, executor="serial")
    expected, file = tabulate_grid(found), result_file(tmp_path, found.plan.measure[0].key)
    old = pd.read_parquet(file).rename(columns={"value_ci_low": "ci_low", "value_ci_high": "ci_high"})
    old.to_parquet(file)
    pd.testing.assert_frame_equal(tabulate_grid(found), expected)


def test_a_failing_unit_stops_only_what_needs_it_and_is_tried_again_on_request(tmp_path):
    spec = small(seeds="0", **{"train.learning_rate": [1e-3, 1e30]})
    found = grid(spec, tmp_path / "g", executor="serial")
    [failed] = found.failed
    assert "diverged" in failed.error
    assert "Traceback" in failed.trace
    assert [unit.runs for unit in found.not_tried] == [(found.plan.train[1].folder,)]
    assert sum(record.status == "done" for record in found.records.values()) == 2
    stamp = record_file(tmp_path / "g", failed.key).stat().st_mtime_ns
    again = grid(spec, tmp_path / "g", executor="serial")
    assert record_file(tmp_path / "g", failed.key).stat().st_mtime_ns == stamp
    assert [record.error for record in again.failed] == [failed.error]
    grid(spec, tmp_path / "g", executor="serial", retry=True)
    assert record_file(tmp_path / "g", failed.key).stat().st_mtime_ns > stamp
    assert any("1 failed; 1 not tried" in note for note in grid_result(again).notes)


def altered(file):
    """It reads as before, with another number in it."""
    rows = pd.read_parquet(file)
    rows.assign(value=rows["value"] + 1).to_parquet(file)


#: What is done to the record and the rows of an experiment, to the record of its training, to the run.
MANGLED = {
    "record": lambda record, rows, other, run: record.write_text('{"key": '),
    "another's record": lambda record, rows, other, run: shutil.copy(other, record),
    "rows": lambda record, rows, other, run: rows.write_bytes(b"PAR1 and nothing"),
    "altered rows": lambda record, rows, other, run: altered(rows),
    "run": lambda record, rows, other, run: shutil.rmtree(run),
}


@pytest.mark.parametrize("what", MANGLED)
def test_what_is_mangled_or_gone_is_done_again(tmp_path, what):
    spec = small(seeds="0")
    found = grid(spec, tmp_path, executor="serial")
    train, measure = found.plan.train[0], found.plan.measure[0]
    files = record_file(tmp_path, measure.key), result_file(tmp_path, measure.key)
    MANGLED[what](*files, record_file(tmp_path, train.key), tmp_path / train.folder)
    assert read_record(tmp_path, train if what == "run" else measure) is None
    again = grid(spec, tmp_path, executor="serial")
    assert again.done_before == 1
    assert not again.failed
    pd.testing.assert_frame_equal(tabulate_grid(again), tabulate_grid(found))


def test_one_grid_at_a_time_in_a_folder(tmp_path):
    (tmp_path / "g").mkdir()
    lock = acquire_folder_lock(tmp_path / "g")
    with pytest.raises(UserError, match="is being written by another process"):
        grid(small(), tmp_path / "g", executor="serial")
    lock.release()


def test_a_run_that_is_only_named_and_trained_further_is_measured_again(tmp_path):
    values = {key.partition(".")[2]: value for key, value in TINY.items() if key.startswith("train.")}
    model = {"d_model": 8, "n_heads": 2}
    run = tmp_path / "run"

    def last_steps():
        found = grid({"runs": [str(run)], "experiment": [ABLATION]}, tmp_path / "g", executor="serial")
        return set(tabulate_grid(found)["step"]), found.done_before

    task = tasks.get("modular-addition", p=11)
    train(task, out=run, settings=model, config=values)
    assert last_steps() == ({4}, 0)
    assert last_steps() == ({4}, 1)
    train(task, out=run, settings=model, config={**values, "steps": 6})
    assert last_steps() == ({6}, 0)


@pytest.mark.parametrize("executor", ["processes", "dask"])
def test_executors_give_the_table_of_one_process(done, tmp_path, executor):
    if executor == "dask":
        pytest.importorskip("distributed", reason="no Dask: pip install 'interp-tasks[cluster]'")
    found = grid(done.spec, tmp_path / "g", executor=executor, jobs=1)
    assert not found.failed
    pd.testing.assert_frame_equal(tabulate_grid(found), tabulate_grid(done))


DEADLY = """
import os

from tasks.modular_arithmetic.one_modulus import OneModulus
from tasks.registry import register


@register("deadly")
class Deadly(OneModulus):
    def answers(self, operands):
        os._exit(9)
"""


def test_a_unit_whose_process_dies_has_failed_and_the_others_are_done(tmp_path):
    (tmp_path / "deadly.py").write_text(DEADLY)
    trained = small(seeds="0:2", experiment=())
    trained["train"] = [{**trained["train"], "task": "deadly", "seeds": "0"}, trained["train"]]
    found = grid(trained, tmp_path / "g", jobs=1, imports=[tmp_path / "deadly.py"])
    [failed] = found.failed
    assert "its process died" in failed.error
    assert "deadly" in failed.what
    assert len(found.records) == 3


@pytest.mark.parametrize(
    ("name", "jobs", "threads", "said"),
    [
        ("thread", None, 1, "--executor 'thread': write serial, processes, dask"),
        ("desk://user:s3cret@host:1?password=s3cret", None, 1, "--executor 'desk': write serial"),
        ("dask://user:s3cret@host:1", None, 1, "--executor 'dask': write .* or dask://HOST:PORT$"),
        ("dask://", None, 1, "--executor 'dask': write"),
        ("dask://host", None, 1, "--executor 'dask': write"),
        ("dask://host:70000", None, 1, "--executor 'dask': write"),
        ("serial", 2, 1, "--jobs is for executors on this machine"),
        ("processes", 0, 1, "--jobs 0"),
        ("processes", 100_000, 1, "fit on"),
    ],
)
def test_executors_are_checked(name, jobs, threads, said):
    with pytest.raises(UserError, match=said) as refused:
        count_executor_slots(name, jobs, threads)
    assert "s3cret" not in str(refused.value)


FILE = """
[train]
task = "modular-addition"
seeds = "0:2"
[train.set]
"task.p" = 11
"train.steps" = 4
"train.eval_samples" = 8
"model.d_model" = 8
"model.n_heads" = 2

[[experiment]]
name = "ablation"
at = "last"
settings = { samples = 8 }
"""


def test_the_command_shows_what_it_would_do_then_does_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seeds.toml").write_text(FILE)
    assert not main(["grid", "seeds.toml", "--dry-run", "--rate", "10", "--format", "json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["status"] for row in rows] == ["to do"] * 4
    assert rows[0]["flop"] == rows[1]["flop"] > 0
    assert rows[0]["seconds"] == pytest.approx(rows[0]["flop"] / 10e9)
    assert not main(["grid", "seeds.toml", "--dry-run", "--format", "csv"])
    same = next(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert (json.loads(same["settings"]), float(same["flop"])) == (rows[0]["settings"], rows[0]["flop"])
    (tmp_path / "nothing.toml").write_text('runs = ["zoo:matrix-completion-7x7"]')
    assert not main(["grid", "nothing.toml", "--dry-run", "--format", "csv"])
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "grids").exists()
    assert not main(["grid", "seeds.toml", "--executor", "serial", "--quiet"])
    said = capsys.readouterr().out
    assert "4 units: 2 runs to train, 2 experiments" in said
    assert (tmp_path / "grids/seeds/grid.csv").is_file()
    assert not main(["grid", "seeds.toml", "--dry-run"])
    assert "0 of 4 units to do" in capsys.readouterr().out
