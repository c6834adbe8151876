"""Every intervention of the command line, on every task, on a model that comes with the package."""

import json
import math

import pytest

from interp_tasks.cli import main
from interp_tasks.experiments import COLUMNS
from interp_tasks.measurement.head_edits import MODES

MODULAR = {"loss", "accuracy"}
#: Shipped run -> (metrics, layers, what its task declares to patch from).
RUNS = {
    "zoo:matrix-completion-4x4": ({"mse_all", "mse_masked", "mse_observed"}, 3, ["negated"]),
    "zoo:modular-addition-113": (MODULAR, 1, []),
    "zoo:miiii-113-small": (
        MODULAR | {f"{name}_{prime}" for name in MODULAR for prime in (2, 3, 5, 7, 11)},
        1,
        [],
    ),
}
HEADS = 4


def commands(run: str) -> dict[str, tuple[list[str], int, bool]]:
    """What is run -> (arguments, rows per metric, whether metrics stand there for the source's targets too)."""
    _, layers, declared = RUNS[run]
    parts = 2 + layers * (HEADS + 2)  # embeddings; heads, their bias and the MLP of each layer
    return {
        **{
            f"ablation {mode}": (
                ["ablation", "--mode", mode, *["--scale", "0.5"] * (mode == "noise")],
                1,
                False,
            )
            for mode in MODES
        },
        "heads": (["heads", "--group", "pair=0.0-1"], layers * HEADS + layers + 1 + 1, False),
        "transplant": (
            ["transplant", "--source", f"{run}@pre", "--components", "qkv", "--components", "mlp+embed"],
            2,
            False,
        ),
        "patch checkpoint": (["patch", "--source", f"{run}@pre", "--heads", "each"], layers * HEADS, False),
        "patch resample": (["patch", "--source", "resample", "--site", "resid_mid.0"], 1, True),
        **{f"patch {name}": (["patch", "--source", name], 1, True) for name in declared},
        "permute": (["permute", "--draws", "3"], 1 + 3, False),
        "lens": (["lens"], 1 + layers + parts, False),
    }


#: What depends on the task; the rest is shown on the first run alone.
ON_ALL = ("ablation uniform", "heads", "patch resample", "lens")


@pytest.mark.parametrize(
    ("run", "what"),
    [(run, what) for at, run in enumerate(RUNS) for what in commands(run) if not at or what in ON_ALL],
)
def test_every_intervention_on_every_task(run, what, capsys):
    arguments, rows_per_metric, judged_twice = commands(run)[what]
    code = main([*arguments, "--ckpt", f"{run}@post", "--samples", "8", "--quiet", "--format", "json"])
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    rows = json.loads(captured.out)
    metrics = RUNS[run][0]
    if judged_twice:
        metrics = metrics | {f"{metric} (source)" for metric in metrics}
    assert {tuple(row) for row in rows} == {COLUMNS}
    assert {row["metric"] for row in rows} == metrics
    assert len(rows) == rows_per_metric * len(metrics)
    assert len({(row["variant"], row["draw"], row["metric"]) for row in rows}) == len(rows)
    for row in rows:
        assert (row["ref"], row["experiment"], row["n"]) == (f"{run}@post", arguments[0], 8)
        assert row["intervention"]
        for column in ("value", "baseline", "effect", "value_ci_low", "value_ci_high"):
            assert math.isfinite(row[column])
        assert (row["p_value"] is None) == (row["draw"] is not None)
    assert not all(row["null_effect"] for row in rows)
    # What is done to the model must show in the metric that it is trained for.
    main_metric = "mse_all" if "mse_all" in metrics else "loss"
    effects = [abs(row["effect"]) for row in rows if row["metric"] == main_metric]
    assert max(effects) > 1e-3
