"""``interp-run matrix`` ``baseline``, ``ood``, ``algorithm``: numbers by hand."""

import json

import numpy as np
import pytest

import tasks
from interp_tasks.checkpoints import save_checkpoint
from interp_tasks.experiments import COLUMNS, algorithm, baseline, ood

N, SEED = 24, 3


@pytest.fixture(scope="module")
def wide(task, tmp_path_factory):
    """A model with room for more positions than its task has."""
    settings = task.Model(n_layers=1, n_heads=2, d_model=8, n_ctx=12, init_std=0.4)
    model = task.build_model(0, settings)
    return model, str(save_checkpoint(tmp_path_factory.mktemp("wide") / "c", model, task, step=5))


def norms(matrices, rows=3, columns=3):
    return np.linalg.svd(matrices.detach().double().numpy().reshape(-1, rows, columns))[1].sum(1)


def test_baseline_is_the_model_beside_a_method_on_each_variation(task, models, folders, pooled):
    name = "nuclear norm, lambda 0.005"
    result = baseline(
        folders, ["nuclear norm", name], variants=["p_mask 0.10", "p_mask 0.60"], samples=N, seed=SEED
    )
    assert tuple(result.frame.columns) == COLUMNS
    for step, model in enumerate(models):
        for share in (0.1, 0.6):
            varied = tasks.get("matrix-completion", **{**task.model_dump(), "p_mask": share})
            batch = varied.sample(N, seed=SEED)
            output = model(batch.tokens)
            own = pooled(output, batch) | {"nuclear_norm": norms(output).mean()}
            mine = result.frame[
                (result.frame["step"] == step) & (result.frame["variant"] == f"p_mask {share:.2f}")
            ]
            assert list(dict.fromkeys(mine["intervention"])) == ["nuclear norm", name, "truth"]
            for row in mine.itertuples():
                assert row.value == pytest.approx(own[row.metric], rel=1e-5)
                assert row.value_ci_low < row.value < row.value_ci_high
                assert row.effect == pytest.approx(row.value - row.baseline)
                if row.intervention == "truth":
                    assert row.metric == "nuclear_norm"
                    assert row.baseline == pytest.approx(norms(batch.targets).mean(), rel=1e-5)
                    continue
                filled = task.baselines()[row.intervention](batch)
                other = pooled(filled, batch) | {"nuclear_norm": norms(filled).mean()}
                assert row.baseline == pytest.approx(other[row.metric], rel=1e-5, abs=1e-12)


def test_methods_alone_need_no_model(call):
    code, out, err = call(
        *("matrix", "baseline", "--task", "matrix-completion", "--set", "task.n=3", "--set", "task.rank=1"),
        *("--samples", "30", "--seed", "2", "--format", "json", "--quiet"),
    )
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert {tuple(row) for row in rows} == {COLUMNS}
    task = tasks.get("matrix-completion", n=3, rank=1)
    batch = task.sample(30, seed=2)
    assert list(dict.fromkeys(row["variant"] for row in rows)) == list(task.baselines())
    hidden = batch.extras["hidden"]
    for row in rows:
        error = (task.baselines()[row["variant"]](batch).squeeze(-1) - batch.targets).square()
        if row["metric"] == "mse_masked":
            assert row["value"] == pytest.approx(float(error[hidden].mean()))
            assert row["baseline"] is None
        elif row["metric"] == "nuclear_norm":
            assert row["baseline"] == pytest.approx(norms(batch.targets).mean(), rel=1e-6)
            assert row["intervention"] == "truth"
        assert (row["ref"], row["step"]) == ("matrix-completion", None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:cvxpy.*")
def test_the_two_solvers_agree(task):
    one, other = (
        baseline(task=task, methods="nuclear norm", solver=solver, samples=8).frame["value"]
        for solver in ("batched", "cvxpy")
    )
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_ood_says_which_shapes_use_untrained_positions_and_which_do_not_fit(task, wide):
    model, folder = wide
    result = ood(folder, samples=N, seed=SEED)
    frame = result.frame
    counts = frame[frame["metric"] == "untrained_positions"].set_index("variant")["value"]
    # The model has 12 positions, its task 9.
    assert counts[["2x3", "4x3", "3x4", "3x2"]].tolist() == [0, 3, 3, 0]
    assert np.isnan([counts["5x3"], counts["3x5"]]).all()
    measured = frame[frame["metric"] == "mse_masked"]
    assert not set(measured["variant"]) & {"5x3", "3x5"}
    said = " ".join(result.notes)
    assert "3x5: not measured" in said
    assert "15 positions, the model has 12" in said
    for name, group in (("4x3", "rows"), ("3x4", "columns"), ("laplace 0.25", "entries"), ("rank 2", "rank")):
        varied = task.variations()[group][name]
        batch = varied.sample(N, seed=SEED)
        (row,) = measured[measured["variant"] == name].to_dict("records")
        hidden = batch.extras["hidden"]
        error = (model(batch.tokens)[..., 0] - batch.targets).detach().square()[hidden].mean()
        assert row["value"] == pytest.approx(float(error), rel=1e-5)
        assert row["site"] == group
        best = (varied.baselines()["nuclear norm"](batch)[..., 0] - batch.targets).square()[hidden].mean()
        assert row["baseline"] == pytest.approx(float(best), rel=1e-5)


def test_algorithm_is_agreement_over_the_entries_of_a_kind(task, models, folders):
    result = algorithm(folders[0], samples=60, seed=SEED)
    batch = task.sample(60, seed=SEED)
    truth = batch.targets.double().numpy()
    groups = {kind: mask.numpy() for kind, mask in task.entry_groups(batch).items()}
    made = {name: method(batch)[..., 0].numpy() for name, method in task.methods().items()}
    made["truth"] = truth
    assert len(result.frame) == len(groups) * (3 * len(made) - 1)
    output = models[0](batch.tokens)[..., 0].detach().double().numpy()
    for row in result.frame.itertuples():
        mask, other = groups[row.intervention], made[row.variant]
        x, y, t = output[mask], other[mask], truth[mask]
        if row.metric == "distance":
            assert row.value == pytest.approx(((x - y) ** 2).mean(), rel=1e-4)
            assert row.baseline == pytest.approx(((x - t) ** 2).mean(), rel=1e-4)
            continue
        if row.metric == "r_errors":
            x, y = x - t, y - t
        if min(x.std(), y.std()) < 1e-6:
            assert np.isnan(row.value)
        else:
            assert row.value == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-4)
            assert row.value_ci_low <= row.value <= row.value_ci_high
