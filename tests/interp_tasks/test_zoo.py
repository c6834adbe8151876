"""The shipped models are what their files say: recipes, metrics of the stored weights, sizes, marks."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

import tasks
from interp_tasks import UserError, load_checkpoint
from interp_tasks.checkpoints import (
    find_marks,
    read_metrics,
    read_run,
    refs,
    resolve,
    stored_steps,
    zoo_names,
)
from interp_tasks.checkpoints.meta import read_meta
from interp_tasks.checkpoints.refs import zoo_folder
from interp_tasks.checkpoints.run_files import METRICS_FILE, write_log
from interp_tasks.cli import main
from interp_tasks.experiments import drops
from interp_tasks.grids import grid
from interp_tasks.recipes import recipe as recipes
from interp_tasks.recipes.recipe import recipe_names
from interp_tasks.training.config import TrainConfig
from interp_tasks.training.trainer import model_settings
from interp_tasks.zoo import catalog as catalogs
from interp_tasks.zoo import pack as packing
from interp_tasks.zoo.catalog import catalog
from interp_tasks.zoo.pack import difference, pack_recipe, replicate, shipped_runs, stored_metrics

#: What people open ships with weights, all else as logs and records.
MOST_BYTES = 40e6
RECIPES = {run.name: run for name in recipe_names() for run in shipped_runs(name)}
SHIPPED = {name: RECIPES[name] for name in zoo_names()}
#: Those with a history: their drop lies between stored steps.
CORE = [name for name, run in SHIPPED.items() if run.shipment.exact and "/" not in name]
LARGEST = "matrix-completion-7x7"


def test_what_ships_fits_into_a_wheel():
    assert sum(file.stat().st_size for file in zoo_folder().rglob("*") if file.is_file()) < MOST_BYTES


def test_commands_of_shipped_runs_name_no_folder_of_one_machine():
    described = {
        "command": "interp-run grid /home/ada/a.toml --out /data/g --quiet",
        "opened": [{"command": "train /x/y"}],
    }
    assert packing.without_folders(described) == {
        "command": "interp-run grid a.toml --out g --quiet",
        "opened": [{"command": "train y"}],
    }
    for file in zoo_folder().rglob("run.json"):
        run = json.loads(file.read_text(encoding="utf-8"))
        assert packing.without_folders(run) == run, file


def test_a_clock_is_thinned_to_its_first_its_last_and_lines_between():
    clock = "".join(json.dumps({"step": 5 * line, "seconds": 1.23456 * line}) + "\n" for line in range(1_001))
    lines = [json.loads(line) for line in packing.thinned(clock).splitlines()]
    assert len(lines) == packing.CLOCK_LINES
    assert lines[0] == {"step": 0, "seconds": 0.0}
    assert lines[-1] == {"step": 5_000, "seconds": 1234.56}
    steps = [line["step"] for line in lines]
    assert max(np.diff(steps)) - min(np.diff(steps)) == 5
    assert packing.thinned(packing.thinned(clock)) == packing.thinned(clock)
    assert packing.thinned("") == ""


@pytest.mark.parametrize("name", SHIPPED)
def test_the_recipe_gives_the_config_that_trained_it(name):
    """Settings that came later have the value that they then had for want of any other."""
    stored, resolved = read_run(zoo_folder() / name)["config"], SHIPPED[name].unit.resolved
    task = tasks.get(resolved.task_name, **resolved.task)
    assert resolved.train == TrainConfig(**stored["train"])
    assert {"name": task.name, **task.model_dump(mode="json")}.items() >= stored["task"].items()
    model = model_settings(task, resolved.model).model_dump(mode="json")
    assert model == model_settings(task, stored["model"]).model_dump(mode="json")


@pytest.mark.parametrize("name", SHIPPED)
def test_it_has_the_checkpoints_that_its_recipe_ships(name):
    run, shipment = zoo_folder() / name, SHIPPED[name].shipment
    steps = stored_steps(run)
    resolved = SHIPPED[name].unit.resolved
    published = tasks.get(resolved.task_name, **resolved.task).published_steps
    stored = resolved.train.checkpoint_steps(published) if "all" in shipment.at else shipment.at
    assert len(steps) == len(stored)
    dtypes = [read_meta(resolve(f"zoo:{name}@{step}")[0].path)["weights"]["dtype"] for step in steps]
    assert dtypes == ["float16"] * (len(steps) - 1) + ["float32" if shipment.exact else "float16"] * bool(
        steps
    )
    # The log goes to the end of the training that the recipe asks for.
    assert read_metrics(run)[-1]["step"] == SHIPPED[name].unit.resolved.train.steps


# The largest takes 40 s for so many; its log says what 512 give.
@pytest.mark.parametrize(
    "name", [CORE[0], *(pytest.param(name, marks=pytest.mark.slow) for name in CORE[1:] if name != LARGEST)]
)
def test_metrics_are_those_of_the_stored_weights(name):
    """Recomputed on the same 10,000 test examples; 1e-3 leaves room for other torch builds and thread counts."""
    checkpoint = load_checkpoint(f"zoo:{name}@post")
    found = stored_metrics(checkpoint.require_task(), checkpoint.model)
    stored = checkpoint.meta["metrics"]
    assert set(found) == set(stored)
    for metric, value in stored.items():
        assert found[metric] == pytest.approx(value, rel=1e-3, abs=1e-6), metric


@pytest.mark.parametrize("name", CORE)
def test_the_log_ends_with_the_metrics_of_the_stored_weights(name):
    checkpoint, run = load_checkpoint(f"zoo:{name}@last"), zoo_folder() / name
    config = read_run(run)["config"]["train"]
    examples = {"samples": config["eval_samples"], "seed": config["seed"], "split": "validation"}
    found = stored_metrics(checkpoint.require_task(), checkpoint.model, **examples)
    line = read_metrics(run)[-1]
    logged = line["validation"]
    assert line["step"] == checkpoint.step
    assert set(found) <= set(logged)
    for metric, value in found.items():
        assert logged[metric] == pytest.approx(value, rel=1e-3, abs=1e-6), metric


@pytest.mark.parametrize("name", CORE)
def test_the_marks_stand_before_and_after_a_drop(name):
    marks = find_marks(zoo_folder() / name)
    # Of three stored steps the one before the drop is also that at which it begins.
    assert marks["pre"] < marks["onset"] or len(stored_steps(zoo_folder() / name)) == 3
    assert 0 < marks["pre"] <= marks["onset"] < marks["end"] < marks["post"]
    metric = read_run(zoo_folder() / name)["drop_metric"]["name"]
    before, after = (
        load_checkpoint(f"zoo:{name}@{mark}").meta["metrics"][metric] for mark in ("pre", "post")
    )
    assert abs(after - before) > 0.5 * max(after, before)


RECIPE = """
[[train]]
task = "matrix-completion-sizes"
seeds = "2,10"
ship = [
    { name = "tiny", seeds = "2", at = [0, 1, "last"], exact = true },
    { name = "tiny-seeds/seed-{seed}", seeds = "10" },
    { name = "tiny-logs/{seed}-of-{train.learning_rate}", seeds = "10", at = [] },
]
[train.set]
task.sizes = [2, 3]
task.grid_max = 1
task.grid_step = 0.1
model.d_model = 8
model.n_heads = 2
train.steps = 2
train.batch_size = 4
train.eval_samples = 4
train.log_every = 1
train.learning_rate = [0.01, 0.02]
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A zoo of one's own with a recipe in it, and a grid folder."""
    for module in (refs, recipes, catalogs):
        monkeypatch.setattr(module, "zoo_folder", lambda: tmp_path / "zoo")
    (tmp_path / "zoo/recipes").mkdir(parents=True)
    # Two rates, of which the names of the first two shipments say nothing: one is trained.
    text = RECIPE.replace("[0.01, 0.02]", "[0.02]")
    (tmp_path / "zoo/recipes/small.toml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_log_without_a_drop_says_so_where_a_mark_of_it_is_asked_for():
    with pytest.raises(UserError, match="7x7-post-norm/seed-0 shows no drop in mse_masked"):
        resolve("zoo:matrix-completion-7x7-post-norm/seed-0@pre")
    for ref in (
        "zoo:matrix-completion-7x7-post-norm/seed-0@last",
        "zoo:matrix-completion-7x7-parts/mlp/seed-0@pre",
    ):
        with pytest.raises(UserError, match="ships its log alone"):
            resolve(ref)


def test_the_final_level_of_an_even_number_of_seeds_is_their_median():
    """The upper of the two in the middle was listed, and `runs drops` said another number."""
    row = next(row for row in catalog() if row["name"].endswith("/seed-*") and len(row["seeds"]) % 2 == 0)
    said = drops(row["name"], metric=row["metric"]).frame
    pooled = said[(said["run"] == row["name"]) & (said["metric"] == "final")]
    assert row["final"] == pytest.approx(pooled["value"].item(), rel=1e-12)
    assert pooled["n_runs"].item() == len(row["seeds"])


def test_a_recipe_is_trained_packed_listed_and_trained_again(own, capsys):
    assert main(["grid", "small", "--executor", "serial", "--quiet"]) == 0
    assert main(["runs", "zoo", "--pack", "small", "--into", "zoo"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said == ["tiny: packed", "tiny-seeds/seed-10: packed", "tiny-logs/10-of-0_02: packed"]
    assert refs.zoo_names() == ["tiny", "tiny-logs/10-of-0_02", "tiny-seeds/seed-10"]
    assert [each.step for each in resolve("zoo:tiny@all")] == [0, 1, 2]
    dtypes = [load_checkpoint(f"zoo:tiny@{step}").meta["weights"]["dtype"] for step in range(3)]
    assert dtypes == ["float16", "float16", "float32"]
    assert load_checkpoint("zoo:tiny-seeds/*@last").meta["weights"]["dtype"] == "float16"
    with pytest.raises(UserError, match="zoo:tiny-logs/10-of-0_02 ships its log alone"):
        resolve("zoo:tiny-logs/10-of-0_02@last")
    # What is there is left alone.
    assert main(["runs", "zoo", "--pack", "small", "--into", "zoo"]) == 0
    assert capsys.readouterr().err.count("there already") == 3

    (seed_10,) = (own / "grids/small/runs").glob("*/seed-10")
    for line, short in zip(
        read_metrics(seed_10), read_metrics(own / "zoo/tiny-logs/10-of-0_02"), strict=True
    ):
        assert short["step"] == line["step"]
        for metric, value in line["validation"].items():
            assert short["validation"][metric] == (None if value is None else float(f"{value:.9g}"))
    packed = load_checkpoint("zoo:tiny-seeds/seed-10@last")
    for size in (2, 3):
        part = packed.require_task().parts()[f"n={size}"]
        batch = part.sample(packing.SAMPLES, seed=0)
        with torch.no_grad():
            expected = tasks.pool(part.metrics(packed.model(batch.tokens), batch))
        for metric, value in expected.items():
            assert packed.meta["metrics"][f"{metric} (n={size})"] == pytest.approx(value, rel=1e-4)

    rows = {row["name"]: row for row in catalog()}
    assert list(rows) == ["zoo:tiny", "zoo:tiny-logs/10-of-0_02", "zoo:tiny-seeds/seed-*"]
    assert (rows["zoo:tiny"]["seeds"], rows["zoo:tiny"]["checkpoints"], rows["zoo:tiny"]["size"]) == (
        [2],
        3,
        "2/3 r1",
    )
    assert rows["zoo:tiny-logs/10-of-0_02"]["checkpoints"] == 0
    assert rows["zoo:tiny"]["bytes"] == sum(
        file.stat().st_size for file in (own / "zoo/tiny").rglob("*") if file.is_file()
    )
    assert main(["runs", "zoo"]) == 0
    shown = capsys.readouterr().out
    assert "matrix-completion-sizes · mse_masked" in shown
    assert "zoo:tiny" in shown
    assert "drop: steps from 10% to 90%" in shown
    assert " log " in next(line for line in shown.splitlines() if "10-of-0_02" in line)
    assert max(map(len, shown.splitlines())) <= 80
    assert " · in zoo:tiny-logs/" in shown, "names short enough for 80 columns"

    # Another seed has other numbers; the same one, stopped after a step, has the same.
    again = replicate("zoo:tiny", 1, own / "again")
    assert (again.lines, again.equal, again.largest, again.recipe) == (2, 2, 0.0, "small")
    assert again.trained_on == again.here == read_run(own / "again")["hardware"]["processor"] != ""
    again = replicate("tiny", 200, own / "again")
    assert (again.lines, again.equal) == (3, 3)
    lines = read_metrics(own / "zoo/tiny")
    lines[2]["train_loss"] *= 1.5
    write_log(own / "zoo/tiny", METRICS_FILE, "".join(json.dumps(line) + "\n" for line in lines))
    assert main(["runs", "zoo", "--check", "tiny", "--format", "json"]) == 0
    shown = capsys.readouterr()
    (row,) = json.loads(shown.out)
    assert (row["lines"], row["equal"]) == (3, 2)
    assert row["largest"] == pytest.approx(1 / 3)
    assert "trained on" not in shown.err, "the same processor is no reason"
    # On another processor sums round otherwise, and older runs do not name theirs.
    described = read_run(own / "zoo/tiny")
    for processor, said in (
        ("Abacus", "trained on Abacus; this is "),
        (None, "a processor that it does not name; this is "),
    ):
        named = {"processor": processor} if processor else {}
        (own / "zoo/tiny/run.json").write_text(json.dumps({**described, "hardware": named}))
        assert main(["runs", "zoo", "--check", "tiny"]) == 0
        assert f"{said}{again.here}" in capsys.readouterr().err


def test_what_is_not_trained_is_not_packed(own, capsys):
    spec = own / "zoo/recipes/small.toml"
    (unit, *_) = shipped_runs(spec)
    assert pack_recipe(spec, own / "nowhere", own / "zoo") == []
    assert f"tiny: {own}/nowhere/{unit.unit.folder} is not trained to step 2 yet" in capsys.readouterr().out


def test_a_log_alone_is_packed_without_the_weights_that_it_was_made_with(own, capsys):
    assert main(["grid", "small", "--executor", "serial", "--quiet"]) == 0
    for checkpoints in (own / "grids/small/runs").glob("*/seed-*/checkpoints"):
        shutil.rmtree(checkpoints)
    packed = pack_recipe(own / "zoo/recipes/small.toml", own / "grids/small", own / "zoo")
    assert [run.name for run in packed] == ["tiny-logs/10-of-0_02"]
    assert capsys.readouterr().out.count("is not trained to step 2 yet") == 2
    shutil.rmtree(own / "zoo/tiny-logs")
    # A log that ends too soon is none.
    for log in (own / "grids/small/runs").glob("*/seed-*/metrics.jsonl"):
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    assert pack_recipe(own / "zoo/recipes/small.toml", own / "grids/small", own / "zoo") == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            'seeds = "10" },',
            'seeds = "3" },',
            "small.toml: ship tiny-seeds/seed-{seed}: seed 3 is not trained",
        ),
        (
            "{seed}-of-{train.learning_rate}",
            "{seed}.{train.learning_rate}",
            "a name in the zoo is of letters",
        ),
        (
            "{train.learning_rate}",
            "{task.p}",
            "small.toml: ship tiny-logs/{seed}-of-{task.p}: {task.p} is none of seed, task.sizes",
        ),
        (
            "[0.02]",
            "[0.01, 0.02]",
            "small.toml: two runs ship as tiny: write {seed} or a setting into the name",
        ),
        ("exact = true", "precise = true", "precise"),
    ],
)
def test_recipes_that_cannot_be(own, capsys, old, new, said):
    file = own / "zoo/recipes/small.toml"
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")
    assert main(["runs", "zoo", "--pack", "small", "--into", "zoo"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("at", "said"),
    [(["7"], "no checkpoint at step 7"), (["onset"], "shows no drop"), (["x"], "no step 'x'")],
)
def test_what_cannot_be_packed_leaves_nothing(own, at, said):
    (unit, *_) = shipped_runs("small")
    grid("zoo/recipes/small.toml", own / "grid", executor="serial")
    with pytest.raises(UserError, match=said):
        packing.pack(own / "grid" / unit.unit.folder, at, own / "zoo/new/name")
    assert not (own / "zoo/new").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pack", "smal"], "smal: no such file and no recipe of that name: the closest are small"),
        (["--check", "nothing"], "no zoo:nothing; interp-run runs zoo lists what ships"),
        (["--steps", "3"], "--steps goes with --check"),
        (["--into", "zoo"], "--into goes with --pack"),
        (["--pack", "small", "--check", "tiny"], "two things to do"),
        (["--check", "tiny", "--steps", "0"], "from 1 up"),
    ],
)
def test_mistakes_are_one_line(own, capsys, arguments, said):
    assert main(["runs", "zoo", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_numbers_are_compared_by_their_size():
    assert difference({"a": 1.0, "b": {"c": 2}}, {"a": 1.0, "b": {"c": 1}}) == 0.5
    assert difference({"a": None}, {"a": None}) == 0
    assert difference({"a": 1.0}, {"b": 1.0}) == difference({"a": None}, {"a": 1.0}) == float("inf")
