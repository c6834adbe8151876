"""Many variants in one forward give what each gives alone: drawn models, edits, sites, padding and batch sizes."""

import random

import numpy as np
import pytest
import torch

from circuits import ablate, draws, edit, logit_difference, patch, prompts, run, sweep, transplant
from circuits.engine.stacked import NotStacked, check_model
from circuits.model.hooked_model import HookedModel
from circuits.model.inputs import parse_prompts
from circuits.model.sites import KINDS

LENGTH, EXAMPLES, LAYERS = 6, 5, 3
FAMILIES = {
    "GPT-2": {"act_fn": "gelu_new"},
    "Llama": {
        "normalization_type": "RMS",
        "positional_embedding_type": "rotary",
        "gated_mlp": True,
        "act_fn": "silu",
        "n_key_value_heads": 2,
    },
    "Pythia": {"parallel_attn_mlp": True, "positional_embedding_type": "rotary", "act_fn": "gelu"},
    "Gemma": {
        "normalization_type": "RMS",
        "positional_embedding_type": "rotary",
        "use_normalization_before_and_after": True,
        "attn_scores_soft_cap": 2.0,
        "output_logits_soft_cap": 3.0,
        "use_local_attn": True,
        "attn_types": ["local", "global", "local"],
        "window_size": 3,
    },
    "ALiBi": {"positional_embedding_type": "alibi"},
    "BERT": {"norm": "post", "attention_dir": "bidirectional", "act_fn": "gelu"},
    "one layer": {"n_layers": 1, "normalization_type": None},
    "attention only": {"attn_only": True},
}


def tokens_of(seed, examples=EXAMPLES):
    return torch.randint(0, 11, (examples, LENGTH), generator=torch.Generator().manual_seed(seed))


def halved(x):
    x /= 2
    return x


def an_edit(rng, surface, source, padded):
    """Draws an intervention: what, where, which positions."""
    heads = ",".join(
        {f"{rng.randrange(surface.n_layers)}.{rng.randrange(4)}" for _ in range(rng.randint(1, 2))}
    )
    sites = [name for name in surface.site_names() if name not in ("scores", "pattern")]
    site = rng.choice(sites)
    if KINDS[site].per_layer:
        site = f"{site}.{rng.randrange(surface.n_layers)}"
    at = rng.choice([None, [0], [1, -1]])
    if not padded and rng.random() < 0.3:
        at = torch.rand(EXAMPLES, LENGTH, generator=torch.Generator().manual_seed(rng.randrange(99))) < 0.5
    kind = rng.randrange(8)
    if kind == 0:
        return ablate.uniform(heads, positions=at)
    if kind == 1:
        return ablate.mean_pattern(heads, source, positions=at)
    if kind == 2 and not padded:
        return ablate.resample(heads, source, seed=rng.randrange(9), positions=at)
    what = rng.choice([heads, site, rng.randrange(surface.n_layers)])
    if kind == 3:
        return ablate.mean(what, source, positions=at)
    if kind == 4:
        return ablate.zero(what, positions=at)
    if kind == 5:
        return edit(rng.choice([site, "scores", "pattern"]), halved, positions=at)
    return patch.activations(site, source, positions=at)


def metric(output):
    return {"sum": output.square().sum((1, 2)), "last": (output[:, -1, 3], torch.ones(len(output)))}


def last(output, targets):
    return output[:, -1].gather(1, targets[:, None])[:, 0]


last.read_positions = (-1,)


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_shares_forwards_is_what_runs_alone(make_model, hooked_only, name, dtype, seed):
    rng = random.Random(f"{name} {dtype} {seed}")
    model = make_model(seed, hooked_only, **{"n_layers": LAYERS, **FAMILIES[name]}).to(dtype)
    model.cfg.dtype = dtype
    surface = HookedModel.of(model)
    tokens, source = tokens_of(seed), tokens_of(seed + 50)
    padded = surface.causal and rng.random() < 0.4
    if padded:
        lengths = [rng.randint(2, LENGTH) for _ in range(EXAMPLES)]
        side = rng.choice(["left", "right"])
        tokens, source = (
            prompts(model, [row[:n].tolist() for row, n in zip(rows, lengths, strict=True)], side)
            for rows in (tokens, source)
        )
    variants = {}
    for number in range(8):
        together = tuple(an_edit(rng, surface, source, padded) for _ in range(rng.choice([1, 1, 2])))
        variants[f"{number}"] = together
    variants |= {
        "nothing": edit("z.0", torch.clone),
        "a source that is the run": patch.activations("z", tokens),
    }
    if not padded:
        variants["draws"] = draws(lambda one: ablate.resample("0.1", source, seed=one), 2)
    given = {"metric": metric} if not padded else {}
    if rng.random() < 0.3:
        # Both read each example's last token alone.
        given = {"metric": logit_difference(3, 5) if padded else last}
        given |= {} if padded else {"batch": torch.arange(EXAMPLES)}
    given |= {"draws": 20, "flips": 99}
    found = sweep(model, tokens, variants, batch_size=rng.choice([None, 1, 3, 7, 12]), **given)
    alone = sweep(model, tokens, variants, engine="naive", **given)
    assert set(found.frame["engine"]) == {"fast"}
    assert found.settings["naive"] == {}
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 0.05)
    for of_metric, rows in alone.frame.groupby("metric"):
        ours = found.frame.loc[rows.index]
        largest = rows["effect"].abs().max()
        assert largest > 1e-3, of_metric
        np.testing.assert_allclose(ours["effect"], rows["effect"], atol=tolerance * largest, rtol=0)
        assert ours["null_effect"].tolist() == rows["null_effect"].tolist()
        assert rows[rows["variant"].isin(["nothing", "a source that is the run"])]["null_effect"].all()
    if dtype == torch.float64:
        np.testing.assert_allclose(found.frame["p_value"], alone.frame["p_value"], rtol=1e-9)


def test_each_variant_runs_the_blocks_from_its_first_edit_on(make_model, hooked_only):
    """Three heads in each of three blocks: rows by block, the clean pass first."""
    model = make_model(0, hooked_only, n_layers=LAYERS)
    rows = {layer: [] for layer in range(LAYERS)}
    for layer in range(LAYERS):
        kind = type(model.blocks[layer].attn)

        class Counted(kind):
            tokens_enter_by_embeddings_alone = True
            at = layer

            def forward(self, *args, **given):
                rows[self.at].append(len(given["query_input"]))
                return super().forward(*args, **given)

        model.blocks[layer].attn.__class__ = Counted
    variants = ablate.each(ablate.zero, [(layer, head) for layer in range(LAYERS) for head in range(3)])
    found = sweep(model, tokens_of(0), variants, metric)
    assert set(found.frame["engine"]) == {"fast"}
    assert rows == {0: [5, 15], 1: [5, 30], 2: [5, 45]}
    rows.update({layer: [] for layer in rows})
    # Two variants of five examples in a forward.
    sweep(model, tokens_of(0), variants, metric, batch_size=10)
    assert sum(rows[0]) == 5 + 15
    assert max(rows[2]) == 10


def test_logits_are_computed_where_they_are_read(make_model, hooked_only):
    model = make_model(0, hooked_only)
    seen = []
    kind = type(model.unembed)

    class Seen(kind):
        tokens_enter_by_embeddings_alone = True

        def forward(self, residual):
            seen.append(tuple(residual.shape[:2]))
            return super().forward(residual)

    model.unembed.__class__ = Seen
    variants = {"0.1": ablate.zero("0.1"), "1.1": ablate.zero("1.1")}
    sweep(model, tokens_of(0), variants, metric=last, batch=torch.arange(EXAMPLES))
    assert seen == [(5, 6), (10, 1)]


def test_reasons_to_run_alone(make_model, hooked_only):
    model, tokens = make_model(0, hooked_only), tokens_of(0)
    variants = {
        "0.1": ablate.zero("0.1"),
        "path": patch.path("0.1", "1.2", tokens),
        "weights": transplant.weights(make_model(1, hooked_only), "qkv"),
    }
    alone = {"path": "it cuts paths", "weights": "it edits weights"}
    assert sweep(model, tokens, variants, metric).settings["naive"] == alone

    def reason():
        with pytest.raises(NotStacked) as caught:
            check_model(HookedModel.of(model), parse_prompts(HookedModel.of(model), tokens, "test"))
        return str(caught.value)

    handle = model.blocks[0].hook_mlp_out.register_forward_hook(lambda *_: None)
    assert reason() == "there is a hook on blocks.0.hook_mlp_out"
    handle.remove()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert reason() == "there are hooks on all modules"
    handle.remove()
    model.blocks[1].mlp.forward = model.blocks[1].mlp.forward
    assert reason() == "there is a forward of its own on blocks.1.mlp"
    del model.blocks[1].mlp.forward
    model.embed.__class__ = type("Mine", (type(model.embed),), {"__module__": "mine"})
    assert reason() == "its class Mine is not the library's"
    assert sweep(model, tokens, {"0.1": ablate.zero("0.1")}, metric).frame["engine"].unique() == ["naive"]


def test_an_edit_that_never_fires_is_an_error_with_a_shared_forward_too(make_model, hooked_only):
    model, tokens = make_model(0, hooked_only), tokens_of(0)
    never = edit("blocks.0.attn.hook_result", halved)
    for call in (lambda: run(model, tokens, never), lambda: sweep(model, tokens, {"never": never})):
        with pytest.raises(Exception, match=r"blocks\.0\.attn\.hook_result never fired"):
            call()


def test_an_edit_that_runs_the_model_runs_alone(make_model, hooked_only):
    model, tokens = make_model(0, hooked_only), tokens_of(0)

    def running(z):
        with torch.no_grad():
            return z + 0.01 * model(tokens[:1]).square().mean() if len(z) > 1 else z

    variants = {"running": edit("z.1", running), "0.1": ablate.zero("0.1")}
    found, alone = (sweep(model, tokens, variants, metric, engine=engine) for engine in ("auto", "naive"))
    assert found.settings["naive"] == dict.fromkeys(variants, "an edit runs the model inside its run")
    np.testing.assert_array_equal(found.frame["value"], alone.frame["value"])
