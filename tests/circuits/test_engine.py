"""The fast engine against one full forward per variant with plain hooks, which is its oracle."""

import pytest
import torch

from circuits import (
    CircuitsError,
    Site,
    ablate,
    cache,
    draws,
    edit,
    grid,
    heads,
    intervene,
    patch,
    permute,
    sweep,
    transplant,
)

SHAPES = {
    "causal": {"n_layers": 3},
    "bidirectional": {
        "attention_dir": "bidirectional",
        "n_layers": 2,
        "normalization_type": None,
        "act_fn": "gelu_new",
    },
    "attention-only": {"attn_only": True, "normalization_type": "LNPre"},
    "scaled": {"n_layers": 1, "attn_scale": 3.0, "d_vocab_out": 7, "act_fn": "gelu"},
    "RMS": {"normalization_type": "RMS", "final_rms": True, "act_fn": "silu"},
}


@pytest.fixture(params=SHAPES)
def shaped(request, family, make_model):
    return make_model(3, family, **SHAPES[request.param])


def variants(model, tokens, other):
    """Every kind of edit, alone and together, over heads, positions and layers."""
    last = model.cfg.n_layers - 1
    has_mlp = not model.cfg.attn_only
    mask = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(5)) < 0.5
    theirs = cache(model, other, ["z", "resid_post"])
    found = {
        **ablate.each(ablate.zero, heads("all", model)),
        **{f"uniform {name}": one for name, one in ablate.each(ablate.uniform, heads("all", model)).items()},
        **{
            f"source {name}": one
            for name, one in grid(
                lambda head, positions: patch.activations("z", other, heads=head, positions=positions),
                {"head": heads("all", model), "positions": range(tokens.shape[1])},
            ).items()
        },
        "mean": ablate.mean("0.1, 0.2", reference=other),
        "mean over all": ablate.mean(Site("z", last), reference=other, over="batch,pos"),
        "mean pattern": ablate.mean_pattern("all", reference=other),
        "resample": ablate.resample("all", source=tokens, seed=3),
        "uniform all": ablate.uniform("all"),
        "uniform keys": ablate.uniform("0.1", keys=[0]),
        "uniform queries": ablate.uniform("0.0-2", queries=mask),
        "uniform of edited scores": (ablate.zero(Site("scores", 0)), ablate.uniform("0.1")),
        "uniform, then zero": (ablate.uniform("0.1"), ablate.zero("0.1", queries=[0, 2])),
        "zero, then uniform": (ablate.zero(Site("z", 0), queries=[1]), ablate.uniform("all")),
        "queries": ablate.zero("all", queries=mask),
        "one example": patch.activations("z", other[:1]),
        "stored": patch.activations("z.0", theirs, positions=[1]),
        "stream": patch.activations("resid_post", theirs, positions=[2]),
        "stream before": patch.activations(Site("resid_pre", last), other),
        "scores": patch.activations("scores", other, heads="0.2"),
        "pattern": patch.activations(Site("pattern", last), other),
        "embed": edit("embed", lambda x: 1.5 * x, positions=[0]),
        "positions": draws(permute.positions, 3),
        "attention out": ablate.zero(Site("attn_out", last)),
        "path": patch.path("0.1", "output", source=other),
        "far apart": (edit("embed", lambda x: x + 1, positions=[3]), ablate.zero(Site("z", last))),
    }
    for name in "qkv":
        found[name] = patch.activations(name, other, heads="0.3")
    if has_mlp:
        found["neurons"] = ablate.neurons(last, [1, 5, 7], how="mean", reference=other)
        found["layer"] = ablate.zero(0)
        found["middle"] = patch.activations("resid_mid", other, positions=[0])
        found["mlp"] = edit("mlp_out", lambda x: -x, positions=[1, 2])
        found["before the activation"] = patch.activations("mlp_pre.0", other, neurons=[3, 4])
    return found


def same(fast, naive, tolerance):
    """Relative to the largest effect in the grid, which must be one."""
    assert list(fast.frame["variant"]) == list(naive.frame["variant"])
    for metric, rows in naive.frame.groupby("metric"):
        largest = rows["effect"].abs().max()
        assert largest > 0
        ours = fast.frame[fast.frame["metric"] == metric]
        for column in ("value", "effect", "baseline", "ci_low", "effect_ci_high"):
            assert (ours[column] - rows[column]).abs().max() <= tolerance * largest, (metric, column)
    assert list(fast.frame["null_effect"]) == list(naive.frame["null_effect"])


def total(output):
    """A metric that tells outputs apart, example by example."""
    weights = torch.linspace(-1, 2, output[0].numel(), dtype=output.dtype).reshape(output.shape[1:])
    return (output * weights).flatten(1).sum(1)


def test_equal_to_plain_hooks(shaped, tokens, other_tokens):
    given = variants(shaped, tokens, other_tokens)
    fast = sweep(shaped, tokens, given, metric=total, engine="fast")
    naive = sweep(shaped, tokens, given, metric=total, engine="naive")
    assert set(fast.frame["engine"]) == {"fast"}
    assert set(naive.frame["engine"]) == {"naive"}
    same(fast, naive, 1e-10)


@pytest.mark.parametrize("positions", [[5], [0, 3]])
@pytest.mark.parametrize("chunk", [6, 30, 100, 10**6])
def test_positions_and_chunks(make_model, family, tokens, other_tokens, positions, chunk):
    model = make_model(3, family, n_layers=2)
    given = variants(model, tokens, other_tokens)
    seen = []

    def read(output):
        seen.append(output)
        return total(output[:, positions])

    fast = sweep(model, tokens, given, metric=read, positions=positions, engine="fast", chunk=chunk)
    for output in seen:
        finite = output.isfinite().all(-1).all(0)
        assert finite.nonzero().flatten().tolist() == positions
    same(fast, sweep(model, tokens, given, metric=read, positions=positions, engine="naive"), 1e-10)
