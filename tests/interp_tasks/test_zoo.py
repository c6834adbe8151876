"""The shipped models are what their files say: recipes, metrics of the stored weights, sizes, marks."""

import json
import shutil
from pathlib import Path

import pytest

import tasks
from docs.scripts import pack as packing
from docs.scripts.pack import pack_recipe, shipped_runs, stored_metrics
from interp_tasks import UserError, grid_spec, load_checkpoint
from interp_tasks.checkpoints import checkpoint_refs, read_metrics, read_run, resolve, stored_steps, zoo_names
from interp_tasks.checkpoints.checkpoint_refs import ZOO_FOLDER
from interp_tasks.checkpoints.run_reader import read_checkpoint_meta
from interp_tasks.cli import main
from interp_tasks.experiments import drops
from interp_tasks.grid_spec import recipe_names, runs_shipped_by_recipe
from interp_tasks.training.config import TrainConfig
from interp_tasks.training.train import parse_model_settings
from interp_tasks.zoo.shipped_runs_table import shipped_run_rows

#: What people open ships with weights, all else as logs and records.
MOST_BYTES = 40e6
RECIPES = {name: run for recipe in recipe_names() for name, run in shipped_runs(recipe).items()}
SHIPPED = {name: RECIPES[name] for name in zoo_names()}
#: Those with a history: their drop lies between stored steps.
CORE = [name for name, (run, _) in SHIPPED.items() if run.shipment.exact and "/" not in name]


def test_what_ships_fits_into_a_wheel_and_names_no_folder_of_one_machine():
    assert sum(file.stat().st_size for file in ZOO_FOLDER.rglob("*") if file.is_file()) < MOST_BYTES
    described = {"command": "interp-run grid /home/ada/a.toml --out /data/g --quiet", "opened": [{"a": 1}]}
    shown = {"command": "interp-run grid a.toml --out g --quiet", "opened": [{"a": 1}]}
    assert packing.without_folders(described) == shown
    for file in ZOO_FOLDER.rglob("run.json"):
        run = json.loads(file.read_text(encoding="utf-8"))
        assert packing.without_folders(run) == run, file


def test_every_run_has_the_config_and_checkpoints_of_its_recipe():
    """Settings that came later have the value that they then had for want of any other."""
    for name, (ordered, unit) in SHIPPED.items():
        run, resolved, shipment = ZOO_FOLDER / name, unit.resolved, ordered.shipment
        stored, task = read_run(run)["config"], tasks.get(resolved.task_name, **resolved.task)
        assert resolved.train == TrainConfig(**stored["train"]), name
        assert {"name": task.name, **task.model_dump(mode="json")}.items() >= stored["task"].items(), name
        model = parse_model_settings(task, resolved.model).model_dump(mode="json")
        assert model == parse_model_settings(task, stored["model"]).model_dump(mode="json"), name
        steps = stored_steps(run)
        asked = resolved.train.checkpoint_steps(task.published_steps) if "all" in shipment.at else shipment.at
        assert len(steps) == len(asked), name
        dtypes = [
            read_checkpoint_meta(resolve(f"zoo:{name}@{step}")[0].path)["weights"]["dtype"] for step in steps
        ]
        last = ["float32" if shipment.exact else "float16"] * bool(steps)
        assert dtypes == ["float16"] * (len(steps) - 1) + last, name
        # The log goes to the end of the training that the recipe asks for.
        assert read_metrics(run)[-1]["step"] == resolved.train.steps, name


@pytest.mark.parametrize("name", CORE)
def test_the_log_ends_with_the_metrics_of_the_stored_weights(name):
    checkpoint, run = load_checkpoint(f"zoo:{name}@last"), ZOO_FOLDER / name
    config = read_run(run)["config"]["train"]
    examples = {"samples": config["eval_samples"], "seed": config["seed"], "split": "validation"}
    found = stored_metrics(checkpoint.require_task(), checkpoint.model, **examples)
    line = read_metrics(run)[-1]
    assert line["step"] == checkpoint.step
    assert found == pytest.approx({key: line["validation"][key] for key in found}, rel=1e-3, abs=1e-6)


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
train.learning_rate = [0.02]
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A zoo of one's own with a recipe in it, and a grid folder."""
    for module in (checkpoint_refs, grid_spec):
        monkeypatch.setattr(module, "ZOO_FOLDER", tmp_path / "zoo")
    (tmp_path / "zoo/recipes").mkdir(parents=True)
    (tmp_path / "zoo/recipes/small.toml").write_text(RECIPE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_log_without_a_drop_says_so_where_a_mark_of_it_is_asked_for():
    with pytest.raises(UserError, match="7x7-post-norm/seed-0 shows no drop in mse_masked"):
        resolve("zoo:matrix-completion-7x7-post-norm/seed-0@pre")
    for ref in ("7x7-post-norm/seed-0@last", "7x7-parts/mlp/seed-0@pre"):
        with pytest.raises(UserError, match="ships its log alone"):
            resolve(f"zoo:matrix-completion-{ref}")


def test_the_final_level_of_an_even_number_of_seeds_is_their_median():
    """The upper of the two in the middle was listed, and `runs drops` said another number."""
    row = next(
        row for row in shipped_run_rows() if row["name"].endswith("/seed-*") and len(row["seeds"]) % 2 == 0
    )
    said = drops(row["name"], metric=row["metric"]).frame
    pooled = said[(said["run"] == row["name"]) & (said["metric"] == "final")]
    assert row["final"] == pytest.approx(pooled["value"].item(), rel=1e-12)
    assert pooled["n_runs"].item() == len(row["seeds"])


def test_a_recipe_is_trained_packed_and_listed(own, capsys):
    assert main(["grid", "small", "--executor", "serial", "--quiet"]) == 0
    names = ["tiny", "tiny-seeds/seed-10", "tiny-logs/10-of-0_02"]
    assert pack_recipe("small", Path("grids/small"), Path("zoo")) == names
    assert checkpoint_refs.zoo_names() == sorted(names)
    assert [each.step for each in resolve("zoo:tiny@all")] == [0, 1, 2]
    dtypes = [load_checkpoint(f"zoo:tiny@{step}").meta["weights"]["dtype"] for step in range(3)]
    assert dtypes == ["float16", "float16", "float32"]
    packed = load_checkpoint("zoo:tiny-seeds/*@last")
    assert packed.meta["weights"]["dtype"] == "float16"
    assert packed.meta["metrics"] == pytest.approx(stored_metrics(packed.require_task(), packed.model))
    # What is there is left alone.
    assert pack_recipe("small", Path("grids/small"), Path("zoo")) == []
    (seed_10,) = (own / "grids/small/runs").glob("*/seed-10")
    short = read_metrics(own / "zoo/tiny-logs/10-of-0_02")
    for line, packed_line in zip(read_metrics(seed_10), short, strict=True):
        assert packed_line["step"] == line["step"]
        for metric, value in line["validation"].items():
            assert packed_line["validation"][metric] == (None if value is None else float(f"{value:.9g}"))
    rows = {row["name"]: row for row in shipped_run_rows()}
    assert list(rows) == ["zoo:tiny", "zoo:tiny-logs/10-of-0_02", "zoo:tiny-seeds/seed-*"]
    tiny = rows["zoo:tiny"]
    assert (tiny["seeds"], tiny["checkpoints"], tiny["size"]) == ([2], 3, "2/3 r1")
    assert rows["zoo:tiny-logs/10-of-0_02"]["checkpoints"] == 0
    capsys.readouterr()
    assert main(["runs", "zoo"]) == 0
    shown = capsys.readouterr().out
    assert "matrix-completion-sizes · mse_masked" in shown
    assert "drop: steps from 10% to 90%" in shown
    assert " log " in next(line for line in shown.splitlines() if "10-of-0_02" in line)
    assert max(map(len, shown.splitlines())) <= 80


def test_a_log_alone_is_packed_without_the_weights_that_it_was_made_with(own):
    assert main(["grid", "small", "--executor", "serial", "--quiet"]) == 0
    for checkpoints in (own / "grids/small/runs").glob("*/seed-*/checkpoints"):
        shutil.rmtree(checkpoints)
    assert pack_recipe("small", own / "grids/small", own / "zoo") == ["tiny-logs/10-of-0_02"]
    shutil.rmtree(own / "zoo/tiny-logs")
    # A log that ends too soon is none.
    for log in (own / "grids/small/runs").glob("*/seed-*/metrics.jsonl"):
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    assert pack_recipe("small", own / "grids/small", own / "zoo") == []


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
        ("{train.learning_rate}", "{task.p}", "{task.p} is none of seed, task.sizes"),
    ],
)
def test_recipes_that_cannot_be(own, old, new, said):
    assert old in RECIPE
    (own / "zoo/recipes/small.toml").write_text(RECIPE.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(UserError, match=r"small\.toml") as caught:
        runs_shipped_by_recipe("small")
    assert said in str(caught.value)
    with pytest.raises(
        UserError, match="smal: no such file and no recipe of that name: the closest are small"
    ):
        runs_shipped_by_recipe("smal")
