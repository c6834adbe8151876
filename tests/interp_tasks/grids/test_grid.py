"""Grids: what a file asks for, that it is done once, and that what fails stops nothing else."""

import json
import math
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest

import tasks
from interp_tasks import train
from interp_tasks.checkpoints import stored_steps
from interp_tasks.checkpoints.lock import RunLock
from interp_tasks.cli import main
from interp_tasks.errors import UserError
from interp_tasks.grids import grid, read_spec, spec_of
from interp_tasks.grids import run as running_module
from interp_tasks.grids import table as table_module
from interp_tasks.grids.executors import Workplace, check_executor
from interp_tasks.grids.page import Findings, page, sentences
from interp_tasks.grids.table import pooled, table
from interp_tasks.grids.unit import Record, read_record, read_result, record_file, relative, result_file
from interp_tasks.grids.units import plan
from interp_tasks.pages import Table

TINY = {
    "task.p": 11,
    "train.steps": 4,
    "train.eval_samples": 8,
    "model.d_model": 8,
    "model.n_heads": 2,
}
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


# ---- What is asked for


def test_lists_are_axes_and_every_combination_has_every_seed():
    whole = plan(spec_of(small(seeds="0:3", **{"model.d_model": [8, 16], "train.weight_decay": [0, 1]})))
    assert len(whole.train) == 2 * 2 * 3
    assert len(whole.measure) == 12
    assert len({unit.folder for unit in whole.train}) == 12
    assert {tuple(unit.varied.items()) for unit in whole.train} == {
        (("model.d_model", width), ("train.weight_decay", decay)) for width in (8, 16) for decay in (0, 1)
    }
    assert {unit.resolved.train.seed for unit in whole.train} == {0, 1, 2}


def test_a_list_of_a_list_setting_is_one_value_and_lists_of_them_are_several():
    def primes(given):
        block = {"task": "miiii", "set": {"task.primes": given, "train.steps": 1}}
        return [unit.resolved.task["primes"] for unit in plan(spec_of({"train": block})).train]

    assert primes([2, 3]) == [[2, 3]]
    assert primes([[2], [2, 3]]) == [[2], [2, 3]]


def test_keys_follow_the_configuration_and_nothing_else():
    def keys(**changes):
        spec = {**small(seeds="0"), **changes.pop("top", {})}
        spec["train"]["set"] |= changes
        whole = plan(spec_of(spec))
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
        return [unit.folder for unit in plan(spec_of({"train": trained})).train]

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


def test_a_run_that_two_sweeps_share_is_one_unit():
    spec = small(seeds="0")
    spec["train"] = [spec["train"], {**spec["train"], "seeds": "0:2"}]
    assert len(plan(spec_of(spec)).train) == 2


def test_a_configuration_of_two_crossed_sweeps_is_one_folder_with_what_both_vary(tmp_path):
    """It was two, each with some of the seeds, and in the rows of one sweep; what was trained was trained again."""
    widths, rates = {"model.d_model": [8, 16]}, {"train.learning_rate": [0.001, 0.003]}
    first, second = small("0", **widths), small("0:2", **rates)
    crossed = {**first, "train": [first["train"], second["train"]]}
    before, units = plan(spec_of(first)).train, plan(spec_of(crossed)).train
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
    rows = table(grid(crossed, tmp_path / "crossed", executor="serial"))
    rows = rows[(rows["train.learning_rate"] == 0.001) & (rows["metric"] == "loss")]
    assert set(rows["model.d_model"]) == {8}
    assert rows["n_runs"].tolist() == [1, 1, 2]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "[train.set]\ntrain.weight_decay = [2, 2.0]",
            "train 3 has two values that mean the same, of modular-addition, train.weight_decay=2, seed 0: leave",
        ),
        (
            '[[experiment]]\nname = "drops"\n[[experiment]]\nname = "curve"\n[[experiment]]\nname = "drops"',
            "experiments 1 and 3 are the same, drops: leave one out",
        ),
        (
            '[[experiment]]\nname = "ablation"\nat = [4, "last, 4"]',
            "experiment ablation, at: marks 1 and 3 are both 4: leave one out",
        ),
        (
            'ship = { name = "a", at = ["last", "last"] }',
            "ship a, at: marks 1 and 2 are both last: leave one out",
        ),
    ],
)
def test_what_is_given_twice_is_refused_with_both_places(tmp_path, capsys, more, said):
    """It was done once, in silence: one of the two was meant to be another."""
    first = '[[train]]\ntask = "modular-addition"\nseeds = "0:2"\n[train.set]\nmodel.d_model = 8\n'
    other = '[[train]]\ntask = "modular-addition"\nseeds = "0:2"\n[train.set]\nmodel.d_model = 32\n'
    third = '[[train]]\ntask = "modular-addition"\n'
    (tmp_path / "twice.toml").write_text(first + other + third + more)
    assert main(["grid", str(tmp_path / "twice.toml"), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert f"twice.toml: {said}" in error
    assert error.count("\n") == 1


def test_a_run_that_is_given_twice_is_refused(tmp_path):
    runs = ["runs/a", "zoo:modular-addition-113", "runs/../runs/a/"]
    with pytest.raises(UserError, match=r"^grid: runs 1 and 3 are both runs/a: leave one out$"):
        grid({"runs": runs}, tmp_path / "out", executor="serial")


def test_experiments_over_runs_seeds_or_all():
    def calls(over):
        asked = {"name": "drops", "over": over}
        spec = small(experiment=(asked,), **{"model.d_model": [8, 16]})
        return [unit.runs for unit in plan(spec_of({**spec, "runs": ["zoo:modular-addition-113"]})).measure]

    assert [len(runs) for runs in calls("run")] == [1] * 5
    assert [len(runs) for runs in calls("seeds")] == [2, 2, 1]
    assert [len(runs) for runs in calls("all")] == [5]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, "no runs: write"),
        ({"trane": {}}, "no setting grid.trane: did you mean grid.train?"),
        (small(**{"model.d_modle": 8}), "did you mean model.d_model?"),
        (small(**{"train.seed": 3}), "set train.seed: write seeds"),
        (small(**{"train.threads": 2}), "write threads, at the top"),
        (small(seeds=[0, 0]), "name different seeds"),
        (small(seeds="many"), "--seeds 'many'"),
        (small(experiment=[{"name": "ablations"}]), "no experiment 'ablations': did you mean ablation? exp"),
        (small(experiment=[{"name": "demo"}]), "no experiment 'demo'"),
        (
            small(experiment=[{"name": "ablation", "settings": {"head": 1}}]),
            "has no setting 'head': it has heads",
        ),
        (small(experiment=[{"name": "ablation", "settings": {"progress": 1}}]), "has no setting 'progress'"),
        ({"train": {"task": "modular-addition", "preset": "gpu"}}, "no preset 'gpu'"),
        (
            small(seeds=f"0:{10_000}", **{"train.eps": [i / 1e9 + 1e-9 for i in range(11)]}),
            "more than 100,000 runs",
        ),
        (
            small(**{f"train.{key}": list(range(1, 51)) for key in ("steps", "log_every", "observe_every")}),
            "more than",
        ),
        (small(**{"model.d_model": []}), "set model.d_model: a list of no values"),
        (
            small(**{"model.d_model": [8, 16, 8]}),
            "set model.d_model: a value is given twice, and each has one",
        ),
        (small(task={"p": 13}), "task.p is set twice, with quotes and without: leave one out"),
        (shipped({"name": "a"}), "two runs ship as a: write {seed}"),
        (shipped("a"), 'write ship = { name = "..." }'),
        (
            shipped({"name": "a{seed}", "at": ["lsat"]}),
            "'ship a{seed}, at': no step 'lsat': did you mean @last?",
        ),
        ({"runs": "zoo:nowhere"}, "no zoo:nowhere"),
        (
            {"runs": "zoo:modular-addition-113@post", "experiment": [ABLATION]},
            "runs 'zoo:modular-addition-113@post': name the run alone, zoo:modular-addition-113, and the step in at",
        ),
        ({"runs": LOG_ALONE, "experiment": [{"name": "drops"}, ABLATION]}, "ships its log alone: train it"),
        ({"runs": LOG_ALONE, "experiment": [{"name": "curve"}]}, "ships its log alone: train it"),
        (small(**{"task.p": date(2026, 1, 1)}), "date is not JSON serializable"),
        (small(seeds=3), 'write seeds as "0:4"'),
        (small(seeds=[True]), 'write seeds as "0:4"'),
        (
            {"train": {"task": "modular-addition", "threads": 2}},
            "no setting grid.train.0.threads: grid.train.0 has task",
        ),
        (small(experiment=[{**ABLATION, "at": ["lest"]}]), "no step 'lest': did you mean @last?"),
        (small(experiment=[{**ABLATION, "at": [True]}]), "valid string"),
        (
            small(experiment=[{**ABLATION, "settings": {"samples": "many"}}]),
            "experiment ablation: samples is of type int | None, not 'many'",
        ),
        (small(experiment=[{**ABLATION, "settings": {"samples": 0}}]), "at least one example"),
        (small(experiment=[{**ABLATION, "settings": {"mode": "zeros"}}]), "ablation: --mode 'zeros': choose"),
        (
            small(experiment=[{"name": "transplant", "settings": {"source": "nowhere-else"}}]),
            "experiment transplant: no run or checkpoint folder 'nowhere-else'",
        ),
        (
            small(experiment=[{**ABLATION, "settings": {"task": "modular-additon"}}]),
            "experiment ablation: no task 'modular-additon': did you mean 'modular-addition'?",
        ),
        (
            small(experiment=[{**ABLATION, "settings": {"device": "gpu"}}]),
            "experiment ablation: --device 'gpu': write cpu, cuda, cuda:1 or mps",
        ),
        (small(experiment=[{"name": "patch"}]), "missing a required argument: 'source'"),
        (small(experiment=[{"name": "drops", "at": 4}]), "experiment drops takes whole runs: leave out at"),
        (small(experiment=[{**ABLATION, "settings": {"samples": math.nan}}]), "finite numbers"),
        ({"runs": ["nowhere"], "experiment": [ABLATION]}, "no run or checkpoint folder 'nowhere'"),
        (
            {"runs": ["zoo:modular-addition-113"], "experiment": [{**ABLATION, "at": 7}]},
            "zoo:modular-addition-113 has no checkpoint at step 7",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_that_names_the_grid(spec, said, tmp_path):
    with pytest.raises(UserError, match=f"^grid: [^\n]*{re.escape(said)}[^\n]*$"):
        grid(spec, tmp_path / "out", executor="serial")
    assert not (tmp_path / "out").exists()


def test_a_pool_that_forks_is_refused(tmp_path):
    with (
        ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool,
        pytest.raises(UserError, match=r'^grid: .*mp_context=multiprocessing.get_context\("spawn"\)\)$'),
    ):
        grid(small(), tmp_path / "out", executor=pool)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (
            [2, 3],
            "ship a0: the run has no checkpoint at step 3: the nearest are 2 and 4 (of 0, 1, 2, 4)",
        ),
        (["pre", "4, 99999"], "the run has no checkpoint at step 99999: the nearest are 4"),
        ("0:4:2", None),
        ("1:4:1", "the run has no checkpoint at step 3"),
        ("5:", "ship a0: the run stores no step in 5:"),
        (["pre", "last", "all"], None),
    ],
)
def test_steps_that_ship_are_among_those_that_are_going_to_be_stored(at, said, tmp_path):
    """The steps are those that a run of these settings has stored, as the other tests' runs do."""
    spec = spec_of(shipped({"name": "a{seed}", "at": at}))
    if said is None:
        assert len(plan(spec).train) == 2
        return
    with pytest.raises(UserError) as error:
        grid(spec, tmp_path / "out", executor="serial")
    assert str(error.value).startswith("grid: ")
    assert said in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_step_that_only_this_run_stores_may_ship():
    ship = {"name": "a{seed}", "at": 3}
    block = small(**{"train.checkpoint_at": [3]})["train"]
    assert len(plan(spec_of({"train": {**block, "ship": ship}})).train) == 2


@pytest.mark.parametrize(("entry", "kind"), [("run.json", "run"), ("search.json", "search")])
def test_the_folder_of_something_else_is_none_of_a_grid(tmp_path, entry, kind):
    (tmp_path / entry).write_text("{}")
    with pytest.raises(UserError, match=f"is the folder of a {kind}: choose another --out"):
        grid(small(), tmp_path, executor="serial")
    assert [file.name for file in tmp_path.iterdir()] == [entry]


def test_a_device_that_is_not_there_is_refused_before_anything_is_trained(tmp_path):
    there = {**ABLATION, "settings": {**ABLATION["settings"], "device": "cuda:99"}}
    with pytest.raises(
        UserError, match=r"^grid: experiment ablation: device 'cuda:99' is not available: this machine"
    ):
        grid(small(experiment=[there]), tmp_path, executor="serial")
    with pytest.raises(UserError, match=r"^device 'cuda:99' is not available: this machine has cpu"):
        grid(small(), tmp_path, executor="serial", device="cuda:99")
    assert not (tmp_path / "runs").exists()
    found = grid(small(seeds="0", experiment=()), tmp_path, executor="serial")
    again = grid(small(seeds="0", experiment=()), tmp_path, executor="serial", device="cuda:99")
    assert again.done_before == len(found.plan)  # done elsewhere: there is nothing to do here
    # Workers elsewhere may have it.
    with ThreadPoolExecutor(1) as pool:
        tried = grid(small(seeds="0", experiment=[there]), tmp_path, executor=pool)
    assert ["cuda:99" in record.error for record in tried.failed] == [True]


def test_toml_keys_without_quotes_and_one_experiment():
    quoted = spec_of(small())
    tables = {"task": {"p": 11}, **{key: value for key, value in TINY.items() if key != "task.p"}}
    train = {"task": "modular-addition", "seeds": "0:2", "set": tables}
    bare = spec_of({"train": train, "experiment": ABLATION})
    assert [unit.key for unit in plan(bare).units] == [unit.key for unit in plan(quoted).units]


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
    (block,) = read_spec(base).train
    assert (block.task, block.preset, block.seeds, block.ship) == ("modular-addition", "reference", (0,), ())
    assert block.settings == {"task.p": 11, "model.d_model": [8, 16], "train.steps": 4}
    # The first of the two is the base itself, one run of it.
    units = plan(read_spec(base)).train
    assert [unit.resolved.model["d_model"] for unit in units] == [8, 16]
    (same,) = (unit.key for unit in plan(read_spec(base.with_name("first.toml"))).train[:1])
    assert units[0].key == same


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('base = "secnd"', "secnd.toml"),
        ('base = "../first"', "name a grid file beside this one"),
        ("base = 3", "name a grid file beside this one"),
        ('base = "varied"', "base = 'varied' has a base itself"),
        ('base = "first"\ntask = "miiii"', "task is that of its base, first: leave it out"),
        ('base = "first"\npreset = "cpu"', "preset is that of its base"),
        ('base = "first"\nset = 3', "grid.train.0.set"),
        ('base = "first"\nset = { "task.p" = 3, task.p = 5 }', "varied.toml: task.p is set twice"),
        ('base = "two"', "a base has one [[train]], that one has 2"),
    ],
)
def test_a_base_that_is_none_is_refused_in_one_line(base, text, said):
    two = BASE.replace("[train]", "[[train]]").replace('ship = { name = "first/seed-{seed}" }\n', "")
    base.with_name("two.toml").write_text(two * 2, encoding="utf-8")
    base.write_text(f"[[train]]\n{text}\n", encoding="utf-8")
    with pytest.raises(UserError) as raised:
        read_spec(base)
    assert said in str(raised.value)
    assert str(raised.value).startswith(str(base.parent))
    assert "\n" not in str(raised.value)


# ---- Doing it


def test_a_grid_without_a_row_has_an_empty_table(tmp_path):
    """Runs alone, or experiments of which none succeeded."""
    found = grid(small(seeds="0", experiment=()), tmp_path, executor="serial")
    assert len(table(found)) == 0
    assert (tmp_path / "index.html") in Findings.of(found).write()


def test_no_table_of_the_page_has_two_columns_of_one_name(done):
    tables = [section for section in page(Findings.of(done)).sections if isinstance(section, Table)]
    assert {"drops", "ablation"} <= {one.name for one in tables}
    for one in tables:
        titles = [column.header for column in one.columns]
        assert len(set(titles)) == len(titles), one.name


def test_rows_are_those_of_the_experiment_called_by_itself(done):
    from interp_tasks.experiments import ablation

    found = table(done)
    unit = done.plan.train[0]
    alone = ablation(f"{done.folder / unit.folder}@last", heads="0.0", samples=8).frame
    mine = found[(found["run"] == unit.folder) & (found["experiment"] == "ablation")]
    for column in ("metric", "value", "value_ci_low", "value_ci_high", "effect", "p_value"):
        assert list(mine[column]) == list(alone[column])
    assert set(mine["model.d_model"]) == {unit.varied["model.d_model"]}


def test_rows_of_several_seeds_are_means_over_them(done):
    found = table(done)
    mine = found[(found["experiment"] == "ablation") & (found["metric"] == "loss")]
    for width in (8, 16):
        of_width = mine[mine["model.d_model"] == width]
        together = of_width[of_width["run"].str.endswith("seed-*")]
        alone = of_width[~of_width["run"].str.endswith("seed-*")]
        assert list(together["n_runs"]) == [2]
        assert together["value"].item() == pytest.approx(alone["value"].mean())
        assert together["effect"].item() == pytest.approx(alone["effect"].mean())
        assert together[["value_ci_low", "effect_ci_high"]].isna().all(axis=None), "of two runs there is none"


def test_what_an_experiment_pooled_itself_is_not_pooled_again(done):
    drops = table(done).query("experiment == 'drops'")
    several = drops[drops["run"].str.endswith("seed-*") & (drops["metric"] == "drop")]
    assert len(several) == 2
    assert set(several["n_runs"]) == {2}


def test_a_mean_over_seeds_counts_those_that_have_the_number():
    """Two of five get there: a mean over two, which was said to be over five."""
    from interp_tasks.measurement.table import tidy

    steps = [100.0, 300.0, None, None, None]
    rows = pd.DataFrame({"run": [f"a/seed-{seed}" for seed in range(5)], "step": 900, "value": steps})
    frame = tidy(rows.assign(experiment="generalisation", metric="step at 95%"))
    [row] = pooled(frame).to_dict("records")
    assert (row["value"], row["n_runs"]) == (200, 2)
    frame["value"] = [1.0, 2.0, 4.0, None, None]
    [row] = pooled(frame).to_dict("records")
    # Student's t of two degrees of freedom, 4.3027; the standard error is sqrt(7) / 3.
    half = 4.3027 * math.sqrt(7) / 3
    assert (row["value_ci_low"], row["value_ci_high"]) == pytest.approx(
        (7 / 3 - half, 7 / 3 + half), rel=1e-4
    )


def test_a_mean_over_fewer_seeds_says_so(done, monkeypatch):
    """On the page, below the command's table, and in the files; whether the number is missing or the whole row."""
    read_result, wide = table_module.read_result, done.plan.train[-1].folder

    def without_last_seed(root, key):
        rows = read_result(root, key)
        return rows.assign(value=rows["value"].where(rows["run"] != wide, math.nan))

    before = Findings.of(done)
    assert before.rows["run"].notna().all()
    assert not any("of n_seeds" in line for line in sentences(before))
    monkeypatch.setattr(table_module, "read_result", without_last_seed)
    findings = Findings.of(done)
    rows = findings.rows
    together = rows[(rows["run"] == f"{Path(wide).parent}/seed-*") & (rows["experiment"] == "ablation")]
    assert len(together) > 0
    assert set(zip(together["n_runs"], together["n_seeds"], strict=True)) == {(1, 2)}
    alone = rows[~rows["run"].str.endswith("seed-*")]
    assert len(alone) > 0
    assert alone["n_seeds"].isna().all()
    [line] = [line for line in sentences(findings) if "of n_seeds" in line]
    means = rows["n_seeds"].notna().sum()
    assert line.startswith(f"{len(together)} of {means} means over seeds are over those that have the number")
    text = page(findings).html()
    assert "1 of 2" in text
    assert "1 of 2" not in page(before).html()


def test_means_over_seeds_are_said_of_rows_that_the_grid_pooled(tmp_path):
    """`generalisation` over seeds has medians with ranges; over single runs, means that the grid makes of them."""
    captions = {}
    for over in ("seeds", "run"):
        asked = [ABLATION, {"name": "generalisation", "over": over}]
        found = grid(small(experiment=asked), tmp_path / "g", executor="serial")
        tables = [each for each in page(Findings.of(found)).sections if isinstance(each, Table)]
        captions[over] = {each.name: each.caption for each in tables}
    means = "Means over seeds, with intervals over runs."
    assert (
        captions["seeds"]["ablation"]
        == captions["run"]["ablation"]
        == captions["run"]["generalisation"]
        == means
    )
    assert captions["seeds"]["generalisation"] == ""


def test_columns_without_an_entry_are_left_out_of_the_page(done):
    findings = Findings.of(done)
    assert findings.rows.query("metric == 'onset'")["value"].isna().all()
    shown = {}
    for section in page(findings).sections:
        if not isinstance(section, Table):
            continue
        markup = section.html("t").partition("</table>")[0]
        header = re.findall(r"<th scope[^>]*>(.*?)</th>", markup)
        rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(<td.*?)</tr>", markup)]
        assert {len(row) for row in rows} == {len(header)}
        cells = zip(header, zip(*rows, strict=True), strict=True)
        shown[section.name] = header
        for name, column in cells:
            assert {re.sub(r"<[^>]*>", "", cell) for cell in column} - {"", "–", "<NA>"}, (section.name, name)
    assert {"run", "drop"} <= set(shown["drops"])
    assert "onset" not in shown["drops"]
    assert "model.d_model" in shown["ablation"]


def test_marks_of_seeds_are_pooled_though_their_steps_differ():
    rows = pd.DataFrame(
        {"run": ["a/seed-0", "a/seed-1"], "ref": ["a/seed-0@pre", "a/seed-1@pre"], "step": [3, 5]}
    )
    from interp_tasks.measurement.table import tidy

    frame = tidy(rows.assign(experiment="ablation", metric="loss", value=[1.0, 2.0], n=4))
    [row] = pooled(frame).to_dict("records")
    assert (row["run"], row["ref"], row["value"], row["n"]) == ("a/seed-*", "a/seed-*@pre", 1.5, 4)
    assert pd.isna(row["step"])
    other = frame.assign(ref=["a/seed-0", "a/seed-1"])
    assert pooled(other).empty  # rows of different steps of two curves


@pytest.fixture
def tried(monkeypatch):
    """What was tried from here on, of a grid on one process."""
    names = []
    perform = running_module.perform
    monkeypatch.setattr(
        running_module, "perform", lambda unit, *rest: names.append(unit.what) or perform(unit, *rest)
    )
    return names


def test_a_grid_that_is_done_does_nothing(done, tried):
    again = grid(done.spec, done.folder, executor="serial")
    assert tried == []
    assert again.done_before == len(again.plan)
    pd.testing.assert_frame_equal(table(again), table(done))


def test_the_table_does_not_say_where_the_grid_lies(done):
    text = table(done).to_csv()
    assert str(done.folder.parent) not in text
    rows = pd.DataFrame({"run": ["/x/runs/a", None], "ref": ["/x/runs/a@last", "b"]})
    assert list(relative(rows, "/x/").fillna("")["run"]) == ["runs/a", ""]
    assert list(relative(rows, "/x/")["ref"]) == ["runs/a@last", "b"]


def test_rows_that_were_stored_under_old_names_are_read_under_the_new_ones(done, tmp_path):
    key = done.plan.measure[0].key
    rows = read_result(done.folder, key)
    result_file(tmp_path, key).parent.mkdir()
    old = rows.rename(columns={"value_ci_low": "ci_low", "value_ci_high": "ci_high"})
    old.to_parquet(result_file(tmp_path, key))
    pd.testing.assert_frame_equal(read_result(tmp_path, key), rows)


def test_a_grid_that_was_moved_has_the_same_table(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    first = table(grid(small(seeds="0"), here, executor="serial"))
    assert str(here) not in first.to_csv()
    here.rename(there)
    moved = grid(small(seeds="0"), there, executor="serial")
    assert moved.done_before == 2
    pd.testing.assert_frame_equal(table(moved), first)


def test_more_seeds_are_added_and_the_others_left_alone(tmp_path, tried):
    first = grid(small(seeds="0"), tmp_path / "g", executor="serial")
    assert len(tried) == 2
    tried.clear()
    second = grid(small(seeds="0:2"), tmp_path / "g", executor="serial")
    assert all("seed-1" in what for what in tried)
    assert len(tried) == 2
    assert second.done_before == 2
    assert first.plan.train[0].folder == second.plan.train[0].folder


def test_more_steps_go_on_from_where_the_run_was(tmp_path):
    grid(small(seeds="0", experiment=()), tmp_path / "g", executor="serial")
    longer = grid(small(seeds="0", experiment=(), **{"train.steps": 6}), tmp_path / "g", executor="serial")
    whole = grid(small(seeds="0", experiment=(), **{"train.steps": 6}), tmp_path / "h", executor="serial")

    def weights(each):
        folder = each.folder / each.plan.train[0].folder
        return (folder / "checkpoints" / "00000006" / "model.safetensors").read_bytes()

    assert (longer.folder / longer.plan.train[0].folder / "checkpoints" / "00000004").is_dir()
    assert weights(longer) == weights(whole)


def test_a_schedule_added_later_goes_on_from_where_the_run_was(tmp_path):
    def steps(**settings):
        return small(seeds="0", experiment=(), **settings)

    grid(steps(), tmp_path / "g", executor="serial")
    fall = {"train.steps": 8, "train.schedule": "linear", "train.schedule_start": 4, "train.schedule_end": 8}
    falling = grid(steps(**fall), tmp_path / "g", executor="serial")
    whole = grid(steps(**fall), tmp_path / "h", executor="serial")
    runs = [each.folder / each.plan.train[0].folder for each in (falling, whole)]
    assert stored_steps(runs[0])[-3:] == [2, 4, 8]
    one, other = ((run / "checkpoints" / "00000008" / "model.safetensors").read_bytes() for run in runs)
    assert one == other
    refused = grid(steps(**fall | {"train.schedule_start": 3}), tmp_path / "g", executor="serial")
    assert [record.error.partition("): ")[2] for record in refused.failed] == [
        "of the 8 steps taken, step 5 had a learning rate of 0.001 and would have 0.0008; choose another --out"
    ]


def test_a_failing_unit_stops_only_what_needs_it_and_is_tried_again_on_request(tmp_path):
    spec = small(seeds="0", **{"train.learning_rate": [1e-3, 1e30]})
    found = grid(spec, tmp_path / "g", executor="serial")
    [failed] = found.failed
    assert "diverged" in failed.error
    assert "Traceback" in failed.trace
    assert [unit.runs for unit in found.waiting] == [(found.plan.train[1].folder,)]
    assert sum(record.status == "done" for record in found.records.values()) == 2
    stamp = record_file(tmp_path / "g", failed.key).stat().st_mtime_ns
    again = grid(spec, tmp_path / "g", executor="serial")
    assert record_file(tmp_path / "g", failed.key).stat().st_mtime_ns == stamp
    assert [record.error for record in again.failed] == [failed.error]
    grid(spec, tmp_path / "g", executor="serial", retry=True)
    assert record_file(tmp_path / "g", failed.key).stat().st_mtime_ns > stamp
    assert (tmp_path / "g" / "index.html") in Findings.of(again).write()
    assert "diverged" in (tmp_path / "g" / "index.html").read_text()


@pytest.mark.parametrize(
    "mangle",
    [
        *("record", "record that is an endless device", "record without end", "result", "altered result"),
        *("checkpoints", "another's record"),
    ],
)
def test_what_is_mangled_or_gone_is_done_again(tmp_path, mangle):
    import shutil

    spec = small(seeds="0")
    found = grid(spec, tmp_path / "g", executor="serial")
    train, measure = found.plan.train[0], found.plan.measure[0]
    if mangle == "record":
        record_file(tmp_path / "g", measure.key).write_text('{"key": ')
    elif mangle == "record that is an endless device":
        record_file(tmp_path / "g", measure.key).unlink()
        record_file(tmp_path / "g", measure.key).symlink_to("/dev/zero")
    elif mangle == "record without end":
        record_file(tmp_path / "g", measure.key).write_text("[" * 100_000)
    elif mangle == "altered result":
        # It reads as before, with another number in it.
        rows = pd.read_parquet(result_file(tmp_path / "g", measure.key))
        rows.assign(value=rows["value"] + 1).to_parquet(result_file(tmp_path / "g", measure.key))
    elif mangle == "result":
        result_file(tmp_path / "g", measure.key).write_bytes(b"PAR1 and nothing")
    elif mangle == "checkpoints":
        shutil.rmtree(tmp_path / "g" / train.folder)
    else:
        shutil.copy(record_file(tmp_path / "g", train.key), record_file(tmp_path / "g", measure.key))
    unit = train if mangle == "checkpoints" else measure
    assert read_record(tmp_path / "g", unit) is None
    again = grid(spec, tmp_path / "g", executor="serial")
    assert again.done_before == 1
    assert not again.failed
    pd.testing.assert_frame_equal(table(again), table(found))


def test_a_record_that_cannot_be_removed_is_said(tmp_path):
    spec = small(seeds="0")
    found = grid(spec, tmp_path / "g", executor="serial")
    file = record_file(tmp_path / "g", found.plan.measure[0].key)
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match=f"cannot write {file}"):
        grid(spec, tmp_path / "g", executor="serial")


def test_one_grid_at_a_time_in_a_folder(tmp_path):
    (tmp_path / "g").mkdir()
    lock = RunLock(tmp_path / "g")
    with pytest.raises(UserError, match="is being written by another process"):
        grid(small(), tmp_path / "g", executor="serial")
    lock.release()


def test_runs_that_are_there_are_measured_and_not_trained(tmp_path):
    spec = {"runs": ["zoo:modular-addition-113"], "experiment": [ABLATION]}
    found = grid(spec, tmp_path / "g", executor="serial")
    assert not found.plan.train
    assert set(table(found)["ref"]) == {"zoo:modular-addition-113@last"}


def test_experiments_that_read_logs_alone_take_runs_that_ship_nothing_else(tmp_path):
    from interp_tasks.experiments import drops

    asked = [
        {"name": "drops"},
        {"name": "generalisation"},
        {"name": "curve", "settings": {"stored": False}},
    ]
    found = grid({"runs": LOG_ALONE, "experiment": asked}, tmp_path / "g", executor="serial")
    assert [record.status for record in found.records.values()] == ["done"] * 3
    rows = table(found).query("experiment == 'drops'").reset_index(drop=True)
    alone = drops(LOG_ALONE).frame
    pd.testing.assert_frame_equal(rows[list(alone.columns)], alone, check_dtype=False)


def test_a_log_that_grew_is_read_again_by_experiments_of_whole_runs(tmp_path):
    run = tmp_path / "run"
    values = {key.partition(".")[2]: value for key, value in TINY.items() if key.startswith("train.")}
    task = tasks.get("modular-addition", p=11)
    train(task, out=run, settings={"d_model": 8, "n_heads": 2}, config=values)
    spec = spec_of({"runs": [str(run)], "experiment": [{"name": "drops"}]})
    [before] = plan(spec).measure
    assert plan(spec).measure == (before,)
    train(task, out=run, settings={"d_model": 8, "n_heads": 2}, config={**values, "steps": 6})
    assert plan(spec).measure[0].key != before.key


def test_a_run_that_is_only_named_and_trained_further_is_measured_again(tmp_path):
    values = {key.partition(".")[2]: value for key, value in TINY.items() if key.startswith("train.")}
    model = {"d_model": 8, "n_heads": 2}
    run = tmp_path / "run"

    def last_steps():
        found = grid({"runs": [str(run)], "experiment": [ABLATION]}, tmp_path / "g", executor="serial")
        return set(table(found)["step"]), found.done_before

    task = tasks.get("modular-addition", p=11)
    train(task, out=run, settings=model, config=values)
    assert last_steps() == ({4}, 0)
    assert last_steps() == ({4}, 1)
    train(task, out=run, settings=model, config={**values, "steps": 6})
    assert last_steps() == ({6}, 0)


# ---- Executors


def test_an_executor_of_ones_own(done, tmp_path):
    with ThreadPoolExecutor(1) as pool:
        found = grid(done.spec, tmp_path / "g", executor=pool)
    pd.testing.assert_frame_equal(table(found), table(done))


def test_processes_give_the_table_of_one_process(done, tmp_path):
    found = grid(done.spec, tmp_path / "g", executor="processes", jobs=1)
    assert not found.failed
    pd.testing.assert_frame_equal(table(found), table(done))


def test_dask_gives_the_table_of_one_process(done, tmp_path):
    pytest.importorskip("distributed", reason="Dask is not installed: pip install 'interp-tasks[cluster]'")
    found = grid(done.spec, tmp_path / "g", executor="dask", jobs=1)
    assert not found.failed
    pd.testing.assert_frame_equal(table(found), table(done))


def test_where_no_scheduler_listens_is_said_at_once_and_nothing_is_left(tmp_path, monkeypatch, capsys):
    distributed = pytest.importorskip("distributed", reason="Dask is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seeds.toml").write_text(FILE)

    def refused(port):
        started = time.monotonic()
        assert main(["grid", "seeds.toml", "--executor", f"dask://127.0.0.1:{port}"]) == 2
        assert [path.name for path in tmp_path.iterdir()] == ["seeds.toml"]
        assert time.monotonic() - started < 5
        said = capsys.readouterr().err
        assert said.startswith(
            f"interp-run: --executor dask://127.0.0.1:{port}: no scheduler answers there ("
        )
        assert said.count("\n") == 1

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        # What listens there is no scheduler: Dask gives up.
        monkeypatch.setattr(distributed, "Client", mock.Mock(side_effect=TimeoutError))
        refused(port)
    monkeypatch.setattr(distributed, "Client", None)
    refused(port)


class Deadly(Executor):
    """An executor that breaks, with all it works on, when a certain unit comes; what else it has, :meth:`work` ends."""

    def __init__(self, deadly):
        self.deadly, self.alive, self.running = deadly, True, {}

    def submit(self, call, unit, /, *rest):
        if not self.alive:
            raise BrokenExecutor
        future = Future()
        self.running[future] = unit
        if unit.key in self.deadly:
            self.alive = False
            for each in self.running:
                each.set_exception(BrokenExecutor())
        return future

    def work(self):
        if self.alive:
            for future, unit in self.running.items():
                future.set_result(Record(unit.key, unit.what, "done", 0.0))
            self.running = {}

    def shutdown(self, **options):
        pass


def run_on(make, whole, tmp_path, monkeypatch, *, renewable=True):
    """The records of a grid on executors from ``make``, three units at a time."""
    run = running_module._Run(whole, tmp_path, "cpu", [], {}, None)
    place = Workplace(make(), 3, make if renewable else None)

    def work_and_wait(futures, **options):
        place.executor.work()
        return wait(futures, **options)

    monkeypatch.setattr(running_module, "wait", work_and_wait)
    run.all(place)
    return run.records


def test_a_unit_that_kills_its_process_twice_has_failed_and_the_others_have_not(tmp_path, monkeypatch):
    whole = plan(spec_of(small(seeds="0:5", experiment=())))
    deadly = whole.train[2].key
    records = run_on(lambda: Deadly({deadly}), whole, tmp_path, monkeypatch)
    assert {key for key, record in records.items() if record.status == "failed"} == {deadly}
    assert "its process died twice" in records[deadly].error
    assert len(records) == 5


PARENT = """
import os, time
from interp_tasks.grids.executors import processes

with processes(1) as place:
    print(place.submit(os.getpid).result(), flush=True)
    place.submit(time.sleep, 60)
    time.sleep(60)
"""


def test_workers_do_not_outlive_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(f"if __name__ == '__main__':\n{textwrap.indent(PARENT, '    ')}")
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 30
    while is_running(worker):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid):
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")
    except (ProcessLookupError, FileNotFoundError):
        return False


class Forgetful(Executor):
    """A scheduler that goes with all it was given, once; the next one does its work."""

    def __init__(self, goes):
        self.goes, self.running = goes, {}

    def submit(self, call, unit, /, *rest):
        future = Future()
        self.running[future] = unit
        return future

    def work(self):
        for future, unit in self.running.items():
            if self.goes:
                future.cancel()
                future.set_running_or_notify_cancel()
            else:
                future.set_result(Record(unit.key, unit.what, "done", 0.0))
        self.running = {}

    def shutdown(self, **options):
        pass


def test_units_of_a_scheduler_that_went_are_done_by_the_next_and_none_is_suspect(tmp_path, monkeypatch):
    whole = plan(spec_of(small(seeds="0:3", experiment=())))
    schedulers = [Forgetful(goes) for goes in (True, True, True, False)]
    records = run_on(lambda: schedulers.pop(0), whole, tmp_path, monkeypatch)
    assert [record.status for record in records.values()] == ["done"] * 3


def test_a_run_that_is_still_written_is_waited_for(tmp_path, monkeypatch):
    whole = plan(spec_of(small(seeds="0", experiment=())))
    run = running_module._Run(whole, tmp_path, "cpu", [], {}, None)
    folder = tmp_path / whole.train[0].folder
    folder.mkdir(parents=True)
    lock = RunLock(folder)
    naps = []
    monkeypatch.setattr(running_module.time, "sleep", lambda seconds: naps.append(lock.release()))
    waiting = []
    run.take_back(list(whole.train), waiting)
    assert waiting == list(whole.train)
    assert len(naps) == 1


def test_a_broken_executor_of_ones_own_is_an_error_that_loses_nothing(tmp_path, monkeypatch):
    whole = plan(spec_of(small(seeds="0:3", experiment=())))
    deadly = {whole.train[1].key}
    with pytest.raises(UserError, match="goes on from there"):
        run_on(lambda: Deadly(deadly), whole, tmp_path, monkeypatch, renewable=False)


@pytest.mark.parametrize(
    ("name", "jobs", "threads", "said"),
    [
        ("thread", None, 1, "--executor 'thread': write serial, processes, dask"),
        ("dask://host", None, 1, "write serial"),
        ("serial", 2, 1, "--jobs is for executors on this machine"),
        ("dask://host:1", 2, 1, "--jobs is for executors on this machine"),
        ("processes", 0, 1, "--jobs 0"),
        ("processes", 100_000, 1, "fit on"),
    ],
)
def test_executors_are_checked(name, jobs, threads, said):
    with pytest.raises(UserError, match=said):
        check_executor(name, jobs, threads)


# ---- The command

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
    assert not (tmp_path / "grids").exists()
    assert not main(["grid", "seeds.toml", "--executor", "serial", "--quiet"])
    said = capsys.readouterr().out
    assert "4 units: 2 runs to train, 2 experiments" in said
    assert (tmp_path / "grids/seeds/grid.csv").is_file()
    assert not main(["grid", "seeds.toml", "--dry-run"])
    assert "0 of 4 units to do" in capsys.readouterr().out
    one = FILE.partition("[[experiment]]")[0].replace('seeds = "0:2"', "seeds = [0]")
    (tmp_path / "one.toml").write_text(one)
    assert not main(["grid", "one.toml", "--dry-run"])
    assert "1 of 1 unit to do" in capsys.readouterr().out
    assert not main(["grid", "one.toml", "--executor", "serial", "--quiet"])
    assert "1 unit: 1 run to train, 0 experiments." in capsys.readouterr().out


def test_a_dry_run_refuses_a_device_that_is_not_there_as_the_run_does(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seeds.toml").write_text(FILE)

    def said(*options):
        ended = main(["grid", "seeds.toml", "--device", "cuda:99", *options])
        return ended, capsys.readouterr().err

    assert said("--dry-run") == said()
    ended, error = said("--dry-run")
    assert ended == 2
    assert "device 'cuda:99' is not available" in error
    # Workers elsewhere may have it.
    assert said("--dry-run", "--executor", "dask://elsewhere:8786") == (0, "")


TOLD_APART = """
[[train]]
task = "modular-addition"
seeds = "0:3"
ship = { name = "sweep/width-{model.d_model}/seed-{seed}" }
[train.set]
"task.p" = 11
"train.steps" = 4
"model.d_model" = [8, 16, 32]

[[train]]
task = "modular-addition"
seeds = [0, 2]
[train.set]
"task.p" = 11
"train.steps" = 8
"model.d_model" = 8

[[experiment]]
name = "ablation"
at = "last"
settings = { samples = 8, heads = "each" }

[[experiment]]
name = "ablation"
at = "last"
over = "all"

[[experiment]]
name = "drops"
over = "seeds"
"""


def test_a_dry_run_says_what_each_configuration_changes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "widths.toml").write_text(TOLD_APART)
    assert not main(["grid", "widths.toml", "--dry-run"])
    said = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert (
        lines[0] == "ships in sweep · where not said: steps=4 · status to do"
    )  # most have; no width is usual
    for begins in (
        "d_model=8 0-2 width-8/seed-*",
        "d_model=16 0-2 width-16/seed-*",
        "steps=8 d_model=8 0, 2",
        "ablation (samples=8 heads=each) of d_model=16 0-2 last",
        "ablation of 11 runs",
        "drops of all seeds of steps=8 d_model=8 0, 2",
    ):
        assert any(line.startswith(begins) for line in lines), begins
    assert not re.search(r"[0-9a-f]{8}", said)
    assert max(map(len, said.splitlines())) <= 80
    assert not main(["grid", "widths.toml", "--dry-run", "--format", "json"])
    units = json.loads(capsys.readouterr().out)
    assert len(units) == 11 + 11 + 1 + 4
    last = units[10]
    assert last["settings"] == {"train.steps": 8, "model.d_model": 8}
    assert last["ships"] is None
    assert re.fullmatch(r"train runs/modular-addition-[0-9a-f]{8}/seed-2", last["unit"])
    assert [unit["ships"] for unit in units[:2]] == ["sweep/width-8/seed-0", "sweep/width-8/seed-1"]


def test_a_dry_run_of_a_recipe_has_a_line_a_run_where_what_it_changes_has_room(tmp_path, monkeypatch, capsys):
    """One run ships outside of the folder of the others, whose name took the room of every row."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert not main(["grid", "modular-addition", "--dry-run"])
    head, header, *rows = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert head == "… stands for modular-arithmetic-sweeps · status to do"
    assert header.split() == ["run", "seeds", "ships", "as", "flop", "disk"]
    assert max(map(len, rows)) <= 80
    # Of four of the fifteen the changes are longer than what the other columns leave.
    assert len([row for row in rows if row.endswith("MiB")]) == 15
    assert len(rows) <= 15 + 5
    [longest] = [row for row in rows if "…/addition-as-miiii" in row]
    assert longest.split()[-5:] == ["…/addition-as-miiii", "2.61", "TFLOP", "5.02", "MiB"]


def test_a_dry_run_of_experiments_alone_says_at_which_marks_and_nothing_of_training(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    asked = [
        f'[[experiment]]\nname = "ablation"\nsettings = {{ samples = 8 }}\n{at}'
        for at in ("at = [0, 'post']", "at = 3000", "")
    ]
    runs = 'runs = "zoo:modular-addition-113"'
    (tmp_path / "alone.toml").write_text("\n".join([runs, *asked, '[[experiment]]\nname = "drops"']))
    assert not main(["grid", "alone.toml", "--dry-run", "--rate", "10"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "status to do",
        "experiment at",
        "ablation of zoo:modular-addition-113 0, post",
        "3000",  # a name that repeats is not repeated
        "last",
        "drops of zoo:modular-addition-113",
        "",
        "4 of 4 units to do",
    ]
    assert not main(["grid", "alone.toml", "--dry-run", "--format", "json"])
    units = json.loads(capsys.readouterr().out)
    assert [unit["at"] for unit in units] == [["0", "post"], ["3000"], ["last"], []]


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ("", ["--rate", "3"], "--rate is for --dry-run"),
        ("", ["--executor", "mpi"], "--executor 'mpi'"),
        ("x = [", [], "is not TOML"),
        (
            '[[experiment]]\nname = "ablation"\nsettings = { sample = 3 }',
            [],
            "seeds.toml: experiment ablation has no setting 'sample'",
        ),
        (
            '[[experiment]]\nname = "ablation"\nsettings = { device = "cuda:99" }',
            ["--dry-run"],
            "seeds.toml: experiment ablation: device 'cuda:99' is not available",
        ),
        (
            '[train.ship]\nname = "s{seed}"\nat = 3',
            ["--dry-run"],
            "seeds.toml: ship s0: the run has no checkpoint",
        ),
        ("", ["--out", "seeds.toml"], "is a file, not a folder"),
        ('[train.ship]\nname = "twice"', [], "seeds.toml: two runs ship as twice: write {seed}"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_made(change, options, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seeds.toml").write_text(FILE + change)
    assert main(["grid", "seeds.toml", *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["seeds.toml"]


def test_a_grid_that_is_no_file(capsys, tmp_path):
    assert main(["grid", str(tmp_path / "none.toml")]) == 2
    assert "none.toml is missing: it would hold a grid, see docs/grids.md" in capsys.readouterr().err


def test_weights_to_start_from_that_are_not_there_are_refused_before_any_run(tmp_path):
    with pytest.raises(UserError, match="no run or checkpoint folder 'nowhere'"):
        grid(small(**{"train.start_from": "nowhere@last"}), tmp_path / "out", executor="serial")
    assert not (tmp_path / "out").exists()
