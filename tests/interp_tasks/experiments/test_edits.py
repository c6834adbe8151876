"""Transplant, permute, patch, heads and lens: their numbers against models edited by hand and against plain hooks."""

import base64
import copy
import json
import re
import statistics
import sys

import numpy as np
import pytest
import torch

import tasks
from circuits import CircuitsError, ablate, run
from circuits.interventions.replacements import derangement
from circuits.statistics import holm
from interp_tasks.checkpoints import save_checkpoint
from interp_tasks.errors import UserError
from interp_tasks.experiments import COLUMNS, ablation, heads, lens, patch, permute, transplant
from interp_tasks.measurement import options
from interp_tasks.measurement.options import check_components, check_groups, check_layers
from tasks import Batch

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
    result = transplant(folders[0], folders[1], ["qkv", "mlp+o", "pos_embed"], samples=N, seed=SEED)
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


def test_transplant_records_every_parameter_that_moved(folders):
    result = transplant(folders, folders[1], ["qkv", "mlp"], (0,), samples=4)
    (done,) = result.config["done"]
    assert done["refs"] == folders
    (described,) = done["interventions"]["qkv"]
    assert sorted(described["parameters"]) == sorted(
        f"blocks.0.attn.{kind}_{part}" for part in "QKV" for kind in "Wb"
    )
    names = {name for word in result.notes[-1].split() if (name := word.strip(";,.")).startswith("blocks.N.")}
    mlp = {f"blocks.N.mlp.{kind}_{part}" for kind in "Wb" for part in ("in", "out")}
    assert names == {f"blocks.N.attn.{kind}_{part}" for part in "QKV" for kind in "Wb"} | mlp
    assert json.loads(json.dumps(result.stamp()))["config"]["source"] == folders[1]
    # The donor's own weights put into it change nothing, and say so.
    assert result.frame[result.frame["ref"] == folders[1]]["null_effect"].all()
    assert not result.frame[result.frame["ref"] == folders[0]]["null_effect"].any()


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
        spread = result.spread()
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


def test_all_heads_patched_under_one_mask_give_hidden_entries_of_the_other_run(
    task, models, folders, batch, pooled
):
    """In any model: so that the published test of patching cannot fail, and is no claim that is judged."""
    minus = task.batch(-batch.targets, batch.extras["hidden"])
    other = pooled(models[0](minus.tokens), minus)["mse_masked"]
    for queries in ("all", "hidden"):
        frame = patch(folders[0], "negated", positions=queries, samples=N, seed=SEED).frame
        assert values(frame, "all", suffix=" (source)")["mse_masked"] == pytest.approx(other, rel=1e-5)
    # Those that are judged can.
    for settings, row in (({"positions": "observed"}, "all"), ({"heads": "each-layer"}, "layer 1")):
        frame = patch(folders[0], "negated", samples=N, seed=SEED, **settings).frame
        assert values(frame, row, suffix=" (source)")["mse_masked"] != pytest.approx(other, rel=1e-3)


def test_examples_and_their_sources_stay_together_over_several_forwards(task, models, folders, pooled):
    """2,000 examples of 9 tokens are more than one forward takes."""
    frame = patch(folders[0], "resample", samples=2000, seed=SEED).frame
    batch = task.sample(2000, seed=SEED, split="test")
    order = derangement(2000, SEED)
    cache = cached(models[0], batch.tokens[order])
    output = hooked(models[0], batch.tokens, [put(cache, name) for name in Z])
    assert values(frame, "all") == pytest.approx(pooled(output, batch), rel=1e-5)
    assert values(frame, "all", suffix=" (source)") == pytest.approx(pooled(output, batch[order]), rel=1e-5)


def test_patch_from_another_example(models, folders, batch, pooled):
    frame = patch(folders[0], "resample", ["z", "q.1"], ["all", "1.0"], samples=N, seed=SEED).frame
    order = derangement(N, SEED)
    cache = cached(models[0], batch.tokens[order])

    def one_head(activation, hook):
        activation[:, :, 0] = cache["blocks.1.attn.hook_q"][:, :, 0]
        return activation

    expected = {
        "z all": hooked(models[0], batch.tokens, [put(cache, name) for name in Z]),
        "q.1 all": hooked(models[0], batch.tokens, [put(cache, "blocks.1.attn.hook_q")]),
        "q.1 1.0": hooked(models[0], batch.tokens, [("blocks.1.attn.hook_q", one_head)]),
    }
    for variant, output in expected.items():
        assert values(frame, variant) == pytest.approx(pooled(output, batch), rel=1e-6)
        assert values(frame, variant, suffix=" (source)") == pytest.approx(
            pooled(output, batch[order]), rel=1e-6
        )
    same = run(models[0], batch.tokens, ablate.resample("all", batch.tokens, SEED))
    assert values(frame, "z all") == pytest.approx(pooled(same, batch), rel=1e-6)


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


def test_lens_of_a_post_norm_model_has_what_its_norms_add(tmp_path):
    task = tasks.get("matrix-completion", n=2, rank=1, grid_max=1, grid_step=0.1)
    model = task.build_model(0, task.Model(n_layers=2, n_heads=2, d_model=8, norm="post"))
    saved = save_checkpoint(tmp_path / "post-norm", model, task)
    frame = lens(str(saved), samples=8).frame
    names = {"ln_embed", "ln1 0", "ln2 0", "ln1 1"}
    assert {f"without direct {name}" for name in names} <= set(frame["variant"])
    rows = frame[frame["variant"] == "without direct ln2 0"]
    assert set(rows["site"]) == {"ln2"}
    assert set(rows["layer"]) == {0}


def test_lens_in_several_passes_is_lens_in_one(folders, monkeypatch):
    whole = lens(folders[0], samples=N).frame
    monkeypatch.setattr(sys.modules["interp_tasks.experiments._lens"], "TOKENS_PER_PASS", 45)
    parts = lens(folders[0], samples=N).frame
    assert parts["value"].tolist() == pytest.approx(whole["value"].tolist(), rel=1e-5)
    assert parts["variant"].tolist() == whole["variant"].tolist()


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
        assert f"Holm's adjustment over the {hypotheses} tests of these rows." in " ".join(result.notes)
        # Of one metric there are fewer.
        one = result.of_metric("mse_masked")
        assert one.frame["p_value"].notna().sum() == hypotheses // 3
        np.testing.assert_allclose(one.frame["p_adjusted"], holm(one.frame["p_value"].to_numpy(dtype=float)))
        assert f"over the {hypotheses // 3} tests of these rows." in " ".join(one.notes)


def test_a_metric_that_no_row_has_is_refused_in_words_of_python(folders):
    with pytest.raises(UserError) as refused:
        lens(folders[:1], samples=N).of_metric("mse_mask")
    said = "no metric 'mse_mask': did you mean mse_masked? the metrics of the rows are "
    assert str(refused.value).startswith(said)


def test_specifications():
    assert check_components(" q, k+q") == "q+k"
    assert check_layers("1, 0+1") == (1, 0)
    assert check_groups(["a b=0.1, 1.0"]) == {"a b": "0.1, 1.0"}
    for group in ("all=0.1", "layer 1=0.1", "0.1=0.2", "=0.1", "a", "a="):
        with pytest.raises(UserError, match="--group"):
            check_groups([group])
    with pytest.raises(UserError, match="already"):
        check_groups(["a=0.1", "a=0.2"])
    assert options.has_heads("z.1")
    assert not options.has_heads("mlp_post.1")


def test_bad_requests_are_refused_in_one_line(task, models, folders, tmp_path):
    small = task.build_model(0, task.Model(n_layers=1, n_heads=2, d_model=16))
    other = str(save_checkpoint(tmp_path / "other", small, task))
    for experiment, arguments, complaint in [
        (transplant, {"source": ""}, "no source"),
        (transplant, {"source": other}, "n_layers is 1, not 2"),
        (transplant, {"source": folders[1], "components": "qvk"}, "no component 'qvk'; choose from q, k"),
        (transplant, {"source": folders[1], "components": []}, "nothing to transplant"),
        (transplant, {"source": folders[1], "layers": "2"}, "--layers 2: .* has layers 0-1"),
        (transplant, {"source": folders[1], "layers": "a"}, "counted from 0"),
        (patch, {"source": "negativ"}, "declares negated"),
        (patch, {"source": other}, "n_layers is 1, not 2"),
        (patch, {"source": "resample", "samples": 1}, "at least 2 examples"),
        (patch, {"source": "resample", "site": "zz"}, "no site 'zz'; closest"),
        (patch, {"source": "resample", "site": "embed.1"}, "has no layer 1"),
        (patch, {"source": "resample", "site": []}, "nothing to patch"),
        (patch, {"source": "resample", "site": "resid_pre", "heads": "all"}, "has no heads"),
        (patch, {"source": "resample", "site": "z.2"}, "layers 0-1"),
        (patch, {"source": "resample", "site": "z.0", "heads": "1.0"}, "layer 0"),
        (patch, {"source": "negated", "tokens": [[1, 2]]}, "resample or a REF"),
        (permute, {"draws": 0}, "at least one"),
        (heads, {"groups": {"a": "7.0"}}, "layers 0-1"),
        (heads, {"mode": "zero", "keys": "0"}, "--keys goes with --mode uniform"),
    ]:
        with pytest.raises((UserError, CircuitsError), match=complaint) as refused:
            experiment(folders[0], **{"samples": N, **arguments})
        assert "\n" not in str(refused.value)
    assert len(permute(folders[0], 1, samples=4, task_config=None, tokens=None).frame) == 2 * 3
    with pytest.raises(TypeError, match="no option 'sample': options are samples"):
        permute(folders[0], sample=3)


def test_a_source_of_several_checkpoints_is_refused(task, models, tmp_path):
    for step in (0, 10):
        save_checkpoint(tmp_path / f"run/checkpoints/{step:08d}", models[0], task, step=step)
    (tmp_path / "run/run.json").write_text(json.dumps({"format": 1, "config": {}}))
    with pytest.raises(UserError, match=r"names 2 checkpoints, from .*@0 to .*@10: name one"):
        patch(f"{tmp_path}/run@10", f"{tmp_path}/run@all")


def test_a_map_shows_the_effect_of_each_head(folders):
    result = heads(folders, groups={"one": "0.1"}, samples=N)
    figure = result.plot()
    maps = [trace for trace in figure.data if trace.type == "heatmap"]
    assert len(maps) == 2 * 3
    frame = result.frame[(result.frame["ref"] == folders[0]) & (result.frame["metric"] == "mse_all")]
    effects = dict(zip(frame["variant"], frame["effect"], strict=True))
    assert maps[0].z.tolist() == [
        [effects["0.0"], effects["0.1"]],
        [effects["1.0"], effects["1.1"]],
    ]
    # One scale, symmetric, for both checkpoints of a metric.
    assert maps[0].zmax == maps[1].zmax == -maps[0].zmin
    assert (
        maps[0].zmax
        == result.frame[result.frame["metric"] == "mse_all"]["effect"]
        .abs()[lambda effects: result.frame["head"].notna() & (result.frame["variant"] != "one")]
        .max()
    )
    points = [trace for trace in figure.data if trace.type == "scatter"]
    assert {tuple(trace.x) for trace in points} == {("layer 0", "layer 1", "all", "one")}
    assert "Maps:" in result.caption()
    assert result.heading() == "Effect of each head alone, and of heads together"
    page = result.page().html()
    assert f">{result.heading()}</h2>" in page
    assert ">Values<" not in page


def test_single_draws_stand_beside_the_row_that_pools_them(folders):
    result = permute(folders[0], 5, samples=N)
    sizes = [len(trace.x) for trace in result.plot().data]
    assert sizes == [1, 5, 1] * 3
    assert "single draws" in result.caption()
    page = result.page().html()
    assert "sd of draws [range]" in page
    (download,) = re.findall(r'href="data:text/csv;base64,([^"]+)"', page)
    assert base64.b64decode(download).decode() == result.frame.to_csv(index=False), "it holds every draw"


def test_a_declared_source_is_a_batch(task, folders, batch, monkeypatch):
    def swapped(self, given):
        return {
            "swapped": Batch(
                given.tokens.flip(0), given.targets.flip(0), {"hidden": given.extras["hidden"].flip(0)}
            )
        }

    monkeypatch.setattr(type(task), "patch_sources", swapped)
    frame = patch(folders[0], "swapped", "resid_pre.0", samples=N, seed=SEED).frame
    # The whole input is swapped: by its own targets the output is as good as ever.
    assert values(frame, "resid_pre.0", suffix=" (source)") == pytest.approx(
        values(frame, "resid_pre.0", "baseline"), rel=1e-5
    )
