"""The shipped models are what their files say: recipes, metrics of the stored weights, sizes, marks."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import tasks
from interp_tasks import UserError, load_checkpoint
from interp_tasks.checkpoints import (
    read_metrics,
    read_run,
    refs,
    resolve,
    stored_steps,
    zoo_names,
)
from interp_tasks.checkpoints.meta import read_meta
from interp_tasks.checkpoints.refs import zoo_folder
from interp_tasks.cli import main
from interp_tasks.experiments import drops
from interp_tasks.recipes import recipe as recipes
from interp_tasks.recipes.recipe import recipe_names
from interp_tasks.training.config import TrainConfig
from interp_tasks.training.trainer import model_settings
from interp_tasks.zoo import catalog as catalogs
from interp_tasks.zoo import pack as packing
from interp_tasks.zoo.catalog import catalog
from interp_tasks.zoo.pack import pack_recipe, shipped_runs, stored_metrics

#: What people open ships with weights, all else as logs and records.
MOST_BYTES = 40e6
RECIPES = {run.name: run for name in recipe_names() for run in shipped_runs(name)}
SHIPPED = {name: RECIPES[name] for name in zoo_names()}
#: Those with a history: their drop lies between stored steps.
CORE = [name for name, run in SHIPPED.items() if run.shipment.exact and "/" not in name]


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


def test_a_recipe_is_trained_packed_and_listed(own, capsys):
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
    ("arguments", "said"),
    [
        (["--pack", "smal"], "smal: no such file and no recipe of that name: the closest are small"),
        (["--into", "zoo"], "--into goes with --pack"),
    ],
)
def test_mistakes_are_one_line(own, capsys, arguments, said):
    assert main(["runs", "zoo", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
