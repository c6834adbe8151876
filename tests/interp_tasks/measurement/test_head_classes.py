"""Classes of heads: masks for a whole batch, heads that follow, counts over steps, and the table of groups."""

import numpy as np
import pytest
import torch

from circuits import edit, intervene, patterns
from circuits.model.heads import Head
from circuits.patch import activations
from interp_tasks.errors import UserError
from interp_tasks.experiments import ablation, attention, heads, patch
from interp_tasks.measurement.head_classes import UNINTERPRETABLE, classify_heads, head_classes_held_out
from interp_tasks.measurement.loaded_checkpoints import subjects
from interp_tasks.measurement.options_and_examples import Examples

N, SEED = 24, 3
POST = "zoo:matrix-completion-4x4@post"


def scored(result):
    return result.frame[result.frame["variant"] != "all heads"]


@pytest.mark.parametrize("mask", ["rows", "..#,#..,.#."])
def test_one_mask_for_all_examples(task, models, folders, mask):
    result = attention(folders[0], mask=mask, samples=N, seed=SEED)
    batch = task.with_mask(task.sample(N, seed=SEED), mask)
    templates = task.attention_templates()
    expected = patterns.scores(models[0], batch.tokens, templates, batch=batch, seed=SEED).frame
    found = scored(result)
    found = found[found["metric"].isin(templates)]
    np.testing.assert_allclose(found["value"], expected["score"], atol=1e-9)
    (maps,) = result.data["maps"].values()
    np.testing.assert_allclose(maps.mean, patterns.attention(models[0], batch.tokens).mean, atol=1e-9)
    free = attention(folders[0], samples=N, seed=SEED)
    assert (abs(found["value"] - scored(free)["value"][found.index]) > 1e-3).any()
    assert result.config["mask"] == mask


def test_what_follows_is_what_circuits_says(task, models, folders):
    result = attention(folders[1], samples=N, seed=SEED)
    pairs = task.attention_relocations(task.sample(N, seed=SEED), SEED)["longest_column"]
    moved = pairs.before.tokens, pairs.after.tokens, pairs.groups, pairs.source, pairs.target
    expected = patterns.follow(models[1], *moved, seed=SEED)
    rows = scored(result)
    rows = rows[rows["metric"] == "follows longest_column"]
    columns = {"value": "share", "baseline": "unpaired", "value_ci_high": "share_ci_high", "n": "n"}
    for ours, theirs in columns.items():
        np.testing.assert_allclose(rows[ours].astype(float), expected.frame[theirs])
    (count,) = result.frame.loc[result.frame["metric"] == "heads that follow longest_column", "value"]
    assert count == len(expected.heads())


def test_a_static_head_on_the_middle_row_processes_the_input():
    """At 5×5 the task declares it; here attention is set so that one head is static and another one is not."""
    examples = Examples(samples=8, seed=1)
    (subject,) = subjects("zoo:matrix-completion-5x5-small-init/seed-0@pre", examples)
    middle = subject.task.attention_templates()["input_processing"].double() / 5

    def still(pattern):
        return middle.to(pattern).expand_as(pattern).clone()

    def noisy(pattern):
        """On the middle row too, but on one of its entries, which depends on what is attended to."""
        keys = pattern.sum(2, keepdim=True)[..., 10:15]
        found = pattern.new_zeros(pattern.shape)
        found[..., 10:15] = (keys == keys.amax(-1, keepdim=True)).to(pattern)
        return found

    with intervene(subject.model, edit("pattern", still, "0.0"), edit("pattern", noisy, "0.1-2")):
        found = classify_heads(subject)
    assert found.classes[0, 0] == "input_processing"
    moved = found.moves["mask"].frame.set_index(["layer", "head"])["distance_ci_high"]
    for head in (Head(0, 1), Head(0, 2)):
        assert moved[head] > 0.05, "it does not move, and tests nothing"
        assert found.classes[head] != "input_processing"


@pytest.fixture(scope="module")
def by_class():
    return heads(POST, by_class=True, samples=64)


def test_groups_are_classes_found_on_other_examples(by_class):
    (subject,) = subjects(POST, Examples(samples=64))
    groups = head_classes_held_out(subject).heads_by_class()
    assert list(dict.fromkeys(by_class.frame["variant"])) == [*groups, "all"]
    assert len(groups) > 2
    assert UNINTERPRETABLE in groups
    assert sorted(head for heads_of in groups.values() for head in heads_of) == sorted(
        Head(layer, head) for layer in range(3) for head in range(4)
    )
    specs = ["+".join(f"{head.layer}.{head.head}" for head in heads_of) for heads_of in groups.values()]
    same = ablation(POST, specs, samples=64).frame
    mine = by_class.frame[
        ~by_class.frame["metric"].str.endswith(" ratio") & (by_class.frame["variant"] != "all")
    ]
    np.testing.assert_allclose(mine["value"], same["value"], rtol=1e-5)
    assert any(f"row {specs[0]}" in note for note in by_class.notes)


@pytest.mark.parametrize("split", ["test", "validation"])
def test_other_examples_are_none_of_those_measured(split):
    """As many as classes are found on: the same sample, but for the split."""
    (subject,) = subjects(POST, Examples(samples=256, split=split))
    found = head_classes_held_out(subject)
    assert found.scores.mass.shape[-1] == 256
    own = classify_heads(subject).scores.frame["score"]
    assert (found.scores.frame["score"] - own).abs().max() > 1e-6


def test_ratios_are_rows_of_their_own(by_class):
    frame = by_class.frame
    metrics = list(dict.fromkeys(frame["metric"]))
    assert metrics == [f"mse_{part}{end}" for part in ("all", "masked", "observed") for end in ("", " ratio")]
    for variant in frame["variant"].unique():
        of = frame[frame["variant"] == variant].set_index("metric")
        for part in ("all", "masked", "observed"):
            row, ratio = of.loc[f"mse_{part}"], of.loc[f"mse_{part} ratio"]
            assert ratio["value"] == pytest.approx(row["value"] / row["baseline"])
            assert ratio["effect"] == pytest.approx(ratio["value"] - 1)
            assert ratio["baseline"] == 1
            assert ratio["value_ci_low"] < ratio["value"] < ratio["value_ci_high"]
            assert np.isnan(ratio["p_value"])
    assert frame["p_value"].notna().sum() == len(frame) / 2


def test_the_least_patterned_heads_and_as_many_at_random():
    own = {"mine": "0.0+2.1"}
    frame = heads(POST, by_class=True, groups=own, least=5, random=3, samples=16, seed=SEED).frame
    with pytest.raises(UserError, match="--group row: there is a class of that name"):
        heads(POST, by_class=True, groups={"row": "0.0"}, samples=8)
    (subject,) = subjects(POST, Examples(samples=16, seed=SEED))
    found = head_classes_held_out(subject)
    # By hand: of every head the best corrected score over templates that may be classes.
    scores = found.scores.frame[found.scores.frame["template"].isin(found.possible)]
    best = {
        Head(layer, head): ((rows["score"] - rows["chance"]) / (1 - rows["chance"])).max()
        for (layer, head), rows in scores.groupby(["layer", "head"])
    }
    least = sorted(sorted(best, key=best.__getitem__)[:5])
    metric = "mse_masked"

    def of(variant):
        rows = frame[(frame["variant"] == variant) & (frame["metric"] == metric)]
        return rows[rows["draw"].isna()]["value"].item(), rows[rows["draw"].notna()]["value"].tolist()

    def by_hand(heads_of):
        rows = ablation(POST, [[tuple(head) for head in heads_of]], samples=16, seed=SEED).frame
        return rows.loc[rows["metric"] == metric, "value"].item()

    assert of("least patterned 5") == (pytest.approx(by_hand(least), rel=1e-5), [])
    assert of("mine") == (pytest.approx(by_hand([(0, 0), (2, 1)]), rel=1e-5), [])
    # The whole model at random is the whole model.
    sizes = {len(group) for group in found.heads_by_class().values()} | {5, 2}
    assert {f"random {size}" for size in sizes} == {v for v in frame["variant"] if v.startswith("random")}
    pooled, single = of("random 5")
    every = [Head(layer, head) for layer in range(3) for head in range(4)]
    seeds = np.random.SeedSequence(SEED).generate_state(3, np.uint64) >> 1
    picked = [np.random.default_rng(int(s)).choice(12, 5, replace=False) for s in seeds]
    expected = [by_hand(sorted(every[at] for at in chosen)) for chosen in picked]
    assert single == pytest.approx(expected, rel=1e-5)
    assert pooled == pytest.approx(np.mean(expected), rel=1e-5)


def test_a_patch_of_each_class_of_heads():
    frame = patch(POST, "negated", heads="each-layer", by_class=True, samples=32, seed=SEED).frame
    (subject,) = subjects(POST, Examples(samples=32, seed=SEED))
    groups = head_classes_held_out(subject).heads_by_class()
    assert list(dict.fromkeys(frame["variant"])) == ["layer 0", "layer 1", "layer 2", *groups]
    batch = subject.batch
    negated = subject.task.patch_sources(batch)["negated"]
    with intervene(subject.model, activations("z", negated.tokens, groups["row"])), torch.no_grad():
        output = subject.model(batch.tokens)
    sums, counts = subject.task.metrics(output, negated)["mse_masked"]
    rows = frame[(frame["variant"] == "row") & (frame["metric"] == "mse_masked (source)")]
    assert rows["value"].item() == pytest.approx(float(sums.sum() / counts.sum()), rel=1e-5)


def test_how_scores_are_distributed_over_heads():
    frame = attention(POST, samples=N, seed=SEED).frame
    counted = frame[frame["variant"] == "all heads"].set_index("metric")
    possible = [m.removeprefix("largest score: ") for m in counted.index if m.startswith("largest score: ")]
    assert {"row", "column", "identity"} <= set(possible)
    rows = frame[frame["metric"].isin(possible)]
    rows = rows.assign(corrected=rows["effect"] / (1 - rows["baseline"]))
    corrected = rows.pivot(index="variant", columns="metric", values="corrected")
    expected = {f"largest score: {name}": corrected[name].max() for name in possible}
    best = corrected.max(axis=1)
    expected |= {"best score: median": best.median(), "best score: largest": best.max()}
    for name, value in expected.items():
        row = counted.loc[name]
        assert row["value"] == pytest.approx(value)
        assert row["value_ci_low"] <= row["value_ci_high"]
    one = attention(POST, samples=1, seed=SEED).frame.set_index("metric")
    assert np.isnan(one.loc["best score: median", "value_ci_low"])
