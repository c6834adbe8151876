"""``interp-run transplant`` with several sources: tables against single calls, maps, refusals."""

import pytest

from interp_tasks.checkpoints import save_checkpoint
from interp_tasks.cli import main
from interp_tasks.experiments import transplant

N, SEED = 16, 3
SHARED = {"samples": N, "seed": SEED}


@pytest.fixture(scope="module")
def grid(folders):
    return transplant(folders, folders, ["qkv", "mlp+o"], **SHARED)


def test_every_cell_is_the_transplant_of_one_source(grid, folders):
    assert len(grid.frame) == 2 * 2 * 2 * 3
    assert list(dict.fromkeys(grid.frame["variant"])) == ["qkv", "mlp+o"]
    for source in folders:
        alone = transplant(folders, source, ["qkv", "mlp+o"], **SHARED).frame
        mine = grid.frame[grid.frame["intervention"].str.endswith(f"source={source})")]
        for column in ("ref", "variant", "metric", "intervention"):
            assert mine[column].tolist() == alone[column].tolist()
        for column in ("value", "baseline", "effect", "value_ci_low", "effect_ci_high"):
            assert mine[column].tolist() == pytest.approx(alone[column].tolist(), rel=1e-6, abs=1e-9)
        own = mine["ref"] == source
        assert mine.loc[own, "null_effect"].all()
        assert not mine.loc[~own, "null_effect"].any()
    assert grid.config["source"] == folders


def test_a_ref_that_names_several_is_several_sources(models, task, tmp_path, capsys):
    for step, model in enumerate(models):
        save_checkpoint(tmp_path / f"c{step}", model, task, step=step)
    arguments = ["--ckpt", tmp_path / "c0", "--source", tmp_path / "c0", "--source", tmp_path / "c1"]
    arguments += ["--samples", 4, "--quiet", "--plot", "--out", tmp_path / "out"]
    assert main(["transplant", *map(str, arguments)]) == 0
    assert "source=" in capsys.readouterr().out
    assert "Across: the one whose weights it gets" in (tmp_path / "out" / "transplant.html").read_text()
    result = transplant(
        "zoo:matrix-completion-5x5-small-init/seed-0@pre",
        "zoo:matrix-completion-5x5-small-init/seed-0@all",
        samples=2,
    )
    assert len(result.config["source"]) == 2
    assert (
        result.frame["intervention"]
        .str.startswith("qkv(source=zoo:matrix-completion-5x5-small-init/seed-0@")
        .all()
    )
    trace = result.plot().data[0]
    assert list(trace.x) == ["256", "10000"]
