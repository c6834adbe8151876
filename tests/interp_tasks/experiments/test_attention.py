"""``interp-run attention``: its numbers against plain hooks, its table, its page, and the shipped models."""

import numpy as np
import pandas as pd
import pytest

from circuits import patterns
from circuits.interventions.replacements import derangement
from interp_tasks.checkpoints import load_checkpoint
from interp_tasks.experiments import attention
from interp_tasks.experiments.attention_experiment import FOLLOWS, MOVED

N, SEED = 24, 3
POST = "zoo:matrix-completion-4x4@post"
MOVES = [f"{MOVED}mask", f"{MOVED}values", f"{FOLLOWS}longest_column"]
#: Templates that a loop over their definition decides here; tests of the task do the others.
BY_HAND = ("identity", "row", "column", "mask_ignore", "hidden", "row_observed", "column_observed")
PATTERNS = [f"blocks.{layer}.attn.hook_pattern" for layer in (0, 1)]
#: What is said of all heads without a threshold.
DISTRIBUTION = ("best score: ", "largest score: ")


def cached(model, tokens):
    """Patterns [layer] -> [batch head query key] in float64, by TransformerLens."""
    _, found = model.run_with_cache(tokens, names_filter=PATTERNS)
    return {layer: found[name].double().numpy() for layer, name in enumerate(PATTERNS)}


def in_template(name, hidden, query, key):
    """Whether a template of a 3×3 matrix has a key, by its definition."""
    same_row, same_column = query // 3 == key // 3, query % 3 == key % 3
    return {
        "identity": query == key,
        "row": same_row and query != key,
        "column": same_column and query != key,
        "mask_ignore": not hidden[key],
        "hidden": hidden[key],
        "row_observed": same_row and query != key and not hidden[key],
        "column_observed": same_column and query != key and not hidden[key],
    }[name]


@pytest.mark.parametrize("positions", ["read", "hidden"])
def test_scores_are_what_loops_over_the_cache_give(task, models, folders, positions):
    result = attention(folders, positions=positions, samples=N, seed=SEED)
    hidden = task.sample(N, seed=SEED).extras["hidden"].numpy()
    templates = [*task.attention_templates()]
    for step, model in enumerate(models):
        found = cached(model, task.sample(N, seed=SEED).tokens)
        frame = result.frame[result.frame["step"] == step]
        metrics = [metric for metric in dict.fromkeys(frame["metric"]) if not metric.startswith(DISTRIBUTION)]
        assert metrics[: len(templates) + 3] == [*templates, *MOVES]
        assert all(metric.startswith("heads") for metric in metrics[len(templates) + 3 :])
        for row in frame[frame["metric"].isin(BY_HAND)].itertuples():
            mass, chance, count = 0.0, 0.0, 0
            for example in range(N):
                for query in range(9):
                    keys = [key for key in range(9) if in_template(row.metric, hidden[example], query, key)]
                    if keys and (positions == "read" or hidden[example, query]):
                        mass += found[row.layer][example, row.head, query, keys].sum()
                        chance += len(keys) / 9
                        count += 1
            assert row.value == pytest.approx(mass / count, abs=1e-6)
            assert row.baseline == pytest.approx(chance / count, abs=1e-12)
            assert row.effect == pytest.approx(row.value - row.baseline)
            assert row.value_ci_low < row.value < row.value_ci_high
            assert (row.variant, row.site) == (f"{row.layer}.{row.head}", "pattern")


def test_movement_is_between_the_pairs_of_the_task(task, models, folders):
    result = attention(folders[1], samples=N, seed=SEED)
    batch = task.sample(N, seed=SEED)
    before = cached(models[1], batch.tokens)
    order = derangement(N, SEED).numpy()
    for change, other in task.attention_moves(batch, SEED).items():
        after = cached(models[1], other.tokens)
        rows = result.frame[result.frame["metric"] == f"{MOVED}{change}"]
        assert len(rows) == 4
        for row in rows.itertuples():
            mine, theirs = before[row.layer][:, row.head], after[row.layer][:, row.head]
            assert row.value == pytest.approx(np.abs(mine - theirs).sum(-1).mean() / 2, abs=1e-6)
            assert row.baseline == pytest.approx(np.abs(mine - theirs[order]).sum(-1).mean() / 2, abs=1e-6)
            assert row.value_ci_low < row.value < row.value_ci_high


def test_the_class_of_a_head_is_that_of_its_scores():
    frame = attention(POST, samples=N, seed=SEED, moves=False).frame
    checkpoint = load_checkpoint(POST)
    batch, templates = checkpoint.task.sample(N, seed=SEED), checkpoint.task.attention_templates()
    shared = {"batch": batch, "seed": SEED, "positions": range(16)}
    scores = patterns.scores(checkpoint.model, batch.tokens, templates, **shared)
    unless = {"masked_row": "row_observed_elsewhere", "observed_copy": "identity_in_hidden_rows"}
    classes = patterns.classify(scores, 0.5, unless=unless)
    assert len(classes.groups) > 1, "all heads in one class test little"
    for row in frame[frame["variant"] != "all heads"].itertuples():
        assert row.intervention == classes[row.layer, row.head]
    of_all = frame[frame["metric"].str.startswith("heads: ")].set_index("metric")
    assert set(of_all["baseline"]) == {12}
    assert of_all["value"].sum() == 12
    for name, group in classes.groups.items():
        assert of_all.loc[f"heads: {name}", "value"] == len(group)
    of_templates = frame.loc[frame["metric"].isin(templates), "effect_ci_high"]
    np.testing.assert_allclose(of_templates, scores.frame["effect_ci_high"], rtol=0, atol=1e-12)


def test_a_resample_without_a_template_says_nothing_of_it(folders):
    """Of three examples a resample may hold none with a key in it."""
    frames = [attention(folders[1], samples=3, seed=seed, moves=False).frame for seed in range(3)]
    largest = pd.concat([frame[frame["metric"].str.startswith(DISTRIBUTION)] for frame in frames])
    assert np.isfinite(largest[["value", "value_ci_low", "value_ci_high"]].to_numpy(dtype=float)).all()
