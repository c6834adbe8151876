"""Transplant, permute, patch, heads and lens: their numbers against models edited by hand and against plain hooks."""

import copy
import statistics

import numpy as np
import pytest
import torch

import tasks
from circuits.interventions.replacements import derangement
from circuits.statistics import holm_adjusted
from interp_tasks.checkpoints import save_checkpoint
from interp_tasks.experiments import COLUMNS, ablation, heads, lens, patch, permute, transplant
from interp_tasks.measurement import result as results

N, SEED = 24, 3
METRICS = ["mse_all", "mse_masked", "mse_observed"]


@pytest.fixture(scope="module")
def batch(task):
    return task.sample(N, seed=SEED, split="test")


def values(frame, variant, column="value", suffix=""):
    """Metric -> number, of the row that pools the draws where there are several."""
    rows = frame[(frame["variant"] == variant) & frame["draw"].isna()]
    assert len(rows) in (3, 6)
    found = dict(zip(rows["metric"], rows[column], strict=True))
    return {metric: found[metric + suffix] for metric in METRICS}


def with_weights_of(model, donor, names, layers=(0, 1)):
    """A copy of a model that has some attributes of a donor's blocks: ``attn.W_Q``, ..."""
    edited = copy.deepcopy(model)
    for layer in layers:
        for name in names:
            module, attribute = name.split(".")
            theirs = getattr(getattr(donor.blocks[layer], module), attribute)
            getattr(getattr(edited.blocks[layer], module), attribute).data.copy_(theirs.data)
    return edited


QKV = [f"attn.{kind}_{part}" for part in "QKV" for kind in "Wb"]
MLP = ["mlp.W_in", "mlp.b_in", "mlp.W_out", "mlp.b_out"]


def test_transplant_is_what_a_model_edited_by_hand_computes(models, folders, batch, pooled):
    result = transplant(folders[0], folders[1], ["qkv", " mlp, o+mlp", "pos_embed"], samples=N, seed=SEED)
    moved = {
        "qkv": with_weights_of(*models, QKV),
        "mlp+o": with_weights_of(*models, [*MLP, "attn.W_O", "attn.b_O"]),
        "pos_embed": copy.deepcopy(models[0]),
    }
    moved["pos_embed"].pos_embed.W_pos.data.copy_(models[1].pos_embed.W_pos.data)
    clean = pooled(models[0](batch.tokens), batch)
    for variant, model in moved.items():
        expected = pooled(model(batch.tokens), batch)
        assert values(result.frame, variant) == pytest.approx(expected, rel=1e-6)
        assert values(result.frame, variant, "baseline") == pytest.approx(clean, rel=1e-6)
        assert abs(expected["mse_all"] / clean["mse_all"] - 1) > 0.01, "too small an effect to test anything"
    one_layer = transplant(folders[0], folders[1], "attn", "1", samples=N, seed=SEED)
    expected = pooled(with_weights_of(*models, [*QKV, "attn.W_O", "attn.b_O"], (1,))(batch.tokens), batch)
    assert values(one_layer.frame, "attn") == pytest.approx(expected, rel=1e-6)
    assert set(one_layer.frame["intervention"]) == {f"attn(layers=1; source={folders[1]})"}
    assert set(one_layer.frame["layer"]) == {1}


def test_with_several_sources_every_cell_is_the_transplant_of_one(folders):
    grid = transplant(folders, folders, ["qkv", "mlp+o"], samples=N, seed=SEED)
    assert len(grid.frame) == 2 * 2 * 2 * 3
    assert list(dict.fromkeys(grid.frame["variant"])) == ["qkv", "mlp+o"]
    for source in folders:
        alone = transplant(folders, source, ["qkv", "mlp+o"], samples=N, seed=SEED).frame
        mine = grid.frame[grid.frame["intervention"].str.endswith(f"source={source})")]
        for column in ("ref", "variant", "metric", "intervention"):
            assert mine[column].tolist() == alone[column].tolist()
        for column in ("value", "baseline", "effect", "value_ci_low", "effect_ci_high"):
            assert mine[column].tolist() == pytest.approx(alone[column].tolist(), rel=1e-6, abs=1e-9)
        own = mine["ref"] == source
        assert mine.loc[own, "null_effect"].all()
        assert not mine.loc[~own, "null_effect"].any()
    assert grid.config["source"] == folders
    [shown] = grid.figures()
    assert shown.caption.startswith("Down: the checkpoint that is run.")


def test_what_was_done_is_recorded_for_each_group_of_checkpoints(models, folders, tmp_path):
    """Tasks that draw other examples: the means that are put in are means over these."""
    half = tasks.get("matrix-completion", n=3, rank=1, grid_max=1.2, grid_step=0.1, p_mask=0.5)
    other = str(save_checkpoint(tmp_path / "half", models[0], half))
    done = ablation([*folders, other], mode="mean", samples=4).config["done"]
    assert [group["refs"] for group in done] == [folders, [other]]
    references = [group["interventions"]["all"][0]["reference"]["sha256"] for group in done]
    assert references[0] != references[1]


def test_permute_is_what_permuted_position_tables_compute(models, folders, batch, pooled):
    result = permute(folders, draws=4, samples=N, seed=SEED)
    (done,) = result.config["done"]
    assert done["refs"] == folders
    for folder, model in zip(folders, models, strict=True):
        frame = result.frame[result.frame["ref"] == folder]
        expected = []
        for described in done["interventions"]["positions"]:
            edited = copy.deepcopy(model)
            order = torch.randperm(9, generator=torch.Generator().manual_seed(described["seed"]))
            edited.pos_embed.W_pos.data = model.pos_embed.W_pos.data[order]
            expected.append(pooled(edited(batch.tokens), batch))
        spread = results.spread_over_draws(result.frame)
        for metric in METRICS:
            rows = frame[frame["metric"] == metric]
            each = [draw[metric] for draw in expected]
            assert rows["draw"].fillna(-1).tolist() == [-1, 0, 1, 2, 3]
            assert rows["value"].tolist()[1:] == pytest.approx(each, rel=1e-6)
            # Every draw has the same entries, so that pooling them is the mean.
            assert rows["value"].tolist()[0] == pytest.approx(statistics.mean(each), rel=1e-6)
            assert rows["p_value"].notna().tolist() == [True] + [False] * 4
            (row,) = spread[(spread["ref"] == folder) & (spread["metric"] == metric)].to_dict("records")
            assert row["draws"] == 4
            assert row["sd"] == pytest.approx(statistics.stdev(each), rel=1e-5)
            assert (row["smallest"], row["largest"]) == pytest.approx((min(each), max(each)), rel=1e-6)
        assert len({round(draw["mse_all"], 9) for draw in expected}) == 4, "the draws do not differ"
    other = permute(folders[0], draws=4, samples=N, seed=SEED + 1).config["done"][0]["interventions"]
    assert not {str(draw) for draw in other["positions"]} & {
        str(draw) for draw in done["interventions"]["positions"]
    }


WHAT = {
    "rows": lambda order: (order % 3 == GRID % 3) & (order // 3 == order[:, :1] // 3),
    "columns": lambda order: (order // 3 == GRID // 3) & (order % 3 == order[:1] % 3),
    "within-rows": lambda order: order // 3 == GRID // 3,
    "within-columns": lambda order: order % 3 == GRID % 3,
}
GRID = np.arange(9).reshape(3, 3)


def test_groups_of_positions_leave_alone_what_they_should(task, models, folders, batch, pooled):
    found = permute(folders[0], 3, ["all", *WHAT], samples=N, seed=SEED)
    (done,) = found.config["done"]
    orders = {
        what: [np.array(draw["permutation"]).reshape(3, 3) for draw in done["interventions"][what]]
        for what in WHAT
    }
    for what, is_right in WHAT.items():
        assert all(is_right(order).all() for order in orders[what])
        assert any((order != GRID).any() for order in orders[what])
    assert list(dict.fromkeys(found.frame["variant"])) == ["positions", *WHAT]
    assert set(found.frame["intervention"]) == {f"{name}(draws=3)" for name in ("positions", *WHAT)}
    # The edited model does on the matrices what the unedited one does on matrices whose rows have moved.
    for draw, order in enumerate(orders["rows"]):
        flat = torch.from_numpy(order.flatten())
        moved_values, hidden = torch.empty_like(batch.targets), torch.empty_like(batch.extras["hidden"])
        moved_values[:, flat], hidden[:, flat] = batch.targets, batch.extras["hidden"]
        moved = task.batch(moved_values, hidden)
        rows = found.frame[(found.frame["variant"] == "rows") & (found.frame["draw"] == draw)]
        expected = pooled(models[0](moved.tokens), moved)
        assert dict(zip(rows["metric"], rows["value"], strict=True)) == pytest.approx(expected, rel=1e-5)


def hooked(model, tokens, hooks):
    with torch.no_grad():
        return model.run_with_hooks(tokens, fwd_hooks=hooks)


def cached(model, tokens):
    with torch.no_grad():
        return model.run_with_cache(tokens)[1]


def put(cache, name):
    return name, lambda activation, hook: cache[name]


Z = ["blocks.0.attn.hook_z", "blocks.1.attn.hook_z"]


def test_patch_from_a_named_source_is_judged_by_both_targets(task, models, folders, batch, pooled):
    frame = patch(folders[0], "negated", samples=N, seed=SEED).frame
    minus = task.batch(-batch.targets, batch.extras["hidden"])
    cache = cached(models[0], minus.tokens)
    output = hooked(models[0], batch.tokens, [put(cache, name) for name in Z])
    assert values(frame, "all") == pytest.approx(pooled(output, batch), rel=1e-6)
    assert values(frame, "all", suffix=" (source)") == pytest.approx(pooled(output, minus), rel=1e-6)
    clean = models[0](batch.tokens)
    assert values(frame, "all", "baseline") == pytest.approx(pooled(clean, batch), rel=1e-6)
    assert values(frame, "all", "baseline", " (source)") == pytest.approx(pooled(clean, minus), rel=1e-6)
    assert set(frame["intervention"]) == {"z(source=negated)"}
    # Of the whole residual stream: what comes out is what the source gives.
    frame = patch(folders[0], "negated", "resid_post.1", samples=N, seed=SEED).frame
    assert values(frame, "resid_post.1", suffix=" (source)") == pytest.approx(
        pooled(models[0](minus.tokens), minus), rel=1e-6
    )


def test_examples_and_their_sources_stay_together_over_several_forwards(task, models, folders, pooled):
    """2,000 examples of 9 tokens are more than one forward takes."""
    frame = patch(folders[0], "resample", samples=2000, seed=SEED).frame
    batch = task.sample(2000, seed=SEED, split="test")
    order = derangement(2000, SEED)
    cache = cached(models[0], batch.tokens[order])
    output = hooked(models[0], batch.tokens, [put(cache, name) for name in Z])
    assert values(frame, "all") == pytest.approx(pooled(output, batch), rel=1e-5)
    assert values(frame, "all", suffix=" (source)") == pytest.approx(pooled(output, batch[order]), rel=1e-5)


def test_patch_from_another_checkpoint_at_some_queries(models, folders, batch, pooled):
    frame = patch(
        folders[0], folders[1], "pattern", ["0.1+1.0"], positions="hidden", samples=N, seed=SEED
    ).frame
    cache = cached(models[1], batch.tokens)
    hidden = batch.extras["hidden"]

    def edit(head):
        def put_head(pattern, hook):
            pattern[:, head] = torch.where(hidden[:, :, None], cache[hook.name][:, head], pattern[:, head])
            return pattern

        return put_head

    names = ["blocks.0.attn.hook_pattern", "blocks.1.attn.hook_pattern"]
    output = hooked(models[0], batch.tokens, [(names[0], edit(1)), (names[1], edit(0))])
    assert values(frame, "0.1+1.0") == pytest.approx(pooled(output, batch), rel=1e-5)
    assert set(frame["metric"]) == set(METRICS)
    assert set(frame["intervention"]) == {f"pattern(positions=hidden; source={folders[1]})"}
    each = patch(folders[0], folders[1], "z.1", "each", samples=N).frame
    assert list(dict.fromkeys(each["variant"])) == ["1.0", "1.1"]


def test_heads_alone_in_layers_together_and_in_groups(folders):
    groups = {"mixed": "0.1+1.0"}
    frame = heads(folders[0], "zero", positions="observed", groups=groups, samples=N, seed=SEED).frame
    names = ["0.0", "0.1", "1.0", "1.1", "layer 0", "layer 1", "all", "mixed"]
    assert list(dict.fromkeys(frame["variant"])) == names
    specs = ["0.0", "0.1", "1.0", "1.1", "0.0-1", "1.0-1", "all", "0.1+1.0"]
    same = ablation(folders[0], specs, "zero", positions="observed", samples=N, seed=SEED).frame
    for name, spec in zip(names, specs, strict=True):
        assert values(frame, name) == values(same, spec)
    assert set(frame["intervention"]) == {"zero(positions=observed)"}
    assert heads(folders[0], groups=["mixed = 0.1 + 1.0"], samples=4).config["groups"] == groups


def test_lens_reads_the_residual_stream_and_takes_direct_effects_away(models, folders, batch, pooled):
    model, frame = models[0], lens(folders[0], samples=N, seed=SEED).frame
    cache = cached(model, batch.tokens)
    final = cache["blocks.1.hook_resid_post"]
    scale = (final.var(-1, keepdim=True, unbiased=False) + model.cfg.eps).sqrt()

    def added(part):
        """What a part of the residual stream adds to the output."""
        return ((part - part.mean(-1, keepdim=True)) / scale * model.ln_final.w) @ model.W_U

    output = model(batch.tokens)
    expected = {
        "read-out after embed": model.unembed(model.ln_final(cache["blocks.0.hook_resid_pre"])),
        "read-out after layer 0": model.unembed(model.ln_final(cache["blocks.0.hook_resid_post"])),
        "read-out after layer 1": output,
        "without direct pos_embed": output - added(cache["hook_pos_embed"]),
        "without direct 1.0": output - added(cache["blocks.1.attn.hook_z"][:, :, 0] @ model.W_O[1, 0]),
        "without direct b_O 1": output - added(model.b_O[1].expand(final.shape)),
        "without direct mlp 0": output - added(cache["blocks.0.hook_mlp_out"]),
    }
    for variant, edited in expected.items():
        assert values(frame, variant) == pytest.approx(pooled(edited, batch), rel=1e-4), variant
        assert values(frame, variant, "baseline") == pytest.approx(pooled(output, batch), rel=1e-6)
    assert len(set(frame["variant"])) == 3 + 2 + 2 * (2 + 1 + 1)
    null = dict(zip(frame["variant"], frame["null_effect"], strict=True))
    assert null["read-out after layer 1"]
    assert not null["read-out after layer 0"]
    (row,) = frame[(frame["variant"] == "without direct 1.0") & (frame["metric"] == "mse_all")].to_dict(
        "records"
    )
    assert (row["site"], row["layer"], row["head"], row["intervention"]) == ("z", 1, 0, "without direct")


def test_every_experiment_runs_on_bare_tokens(folders, batch):
    tokens = batch.tokens.numpy()
    for result in (
        transplant(folders[0], folders[1], tokens=tokens),
        permute(folders[0], 2, tokens=tokens),
        patch(folders[0], folders[1], tokens=tokens),
        patch(folders[0], "resample", tokens=tokens),
        heads(folders[0], tokens=tokens),
        lens(folders[0], tokens=tokens),
    ):
        assert tuple(result.frame.columns) == COLUMNS
        assert set(result.frame["metric"]) == {"mse"}
        assert (result.frame["value"] > 0).any()


def test_holm_is_over_all_rows_of_the_command(folders):
    """The smallest p-value of any checkpoint is multiplied by the number of hypotheses, as in one sweep."""
    for result, hypotheses in (
        (permute(folders, 3, samples=N), 3 * len(folders)),
        (transplant(folders[:1], folders[1], ["qkv", "mlp"], samples=N), 6),
        (patch(folders[0], "negated", samples=N), 6),
        (lens(folders, samples=N), 13 * 3 * len(folders)),
    ):
        rows = result.frame
        assert rows["p_value"].notna().sum() == hypotheses
        assert rows["p_adjusted"].min() == pytest.approx(min(1, rows["p_value"].min() * hypotheses))
        assert f"Holm's adjustment over the {hypotheses} rows tested." in " ".join(result.notes)
        # Of one metric there are fewer.
        one = result.of_metric("mse_masked")
        assert one.frame["p_value"].notna().sum() == hypotheses // 3
        np.testing.assert_allclose(
            one.frame["p_adjusted"], holm_adjusted(one.frame["p_value"].to_numpy(dtype=float))
        )
        assert f"over the {hypotheses // 3} rows tested." in " ".join(one.notes)
