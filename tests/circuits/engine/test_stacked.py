"""Many variants in one forward give what each gives alone: drawn models, edits, sites, padding and batch sizes."""

import numpy as np
import pytest
import torch

from circuits import ablate, draws, edit, patch, sweep, transplant
from tests.circuits.conftest import FEATURES, SHAPES, build

EXAMPLES, LAYERS = 5, 3


TOKENS, SOURCE = (
    torch.randint(0, 11, (EXAMPLES, 6), generator=torch.Generator().manual_seed(seed)) for seed in (0, 50)
)


def halved(x):
    x /= 2
    return x


def metric(output):
    return {"sum": output.square().sum((1, 2)), "last": (output[:, -1, 3], torch.ones(len(output)))}


def last(output, targets):
    return output[:, -1].gather(1, targets[:, None])[:, 0]


last.read_positions = (-1,)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float64) for name in ("causal", "post-norm", "llama", "gemma", "parallel", "alibi")]
    + [("causal", torch.bfloat16), ("llama", torch.float32)],
)
def test_what_shares_forwards_is_what_runs_alone(hooked_only, name, dtype):
    """test_matrix compares both with forwards by hand; here p-values too, and what changes nothing is exactly none."""
    settings = (SHAPES | FEATURES)[name]
    model = build(family=hooked_only, dtype=dtype, **settings)
    mask = torch.rand(EXAMPLES, 6, generator=torch.Generator().manual_seed(1)) < 0.5
    variants = {
        "uniform": ablate.uniform("0.1,1.2", positions=[1, -1]),
        "mean pattern": (ablate.mean_pattern("1.0", SOURCE), ablate.zero("0.2")),
        "layer": ablate.mean(1, SOURCE, positions=mask),
        "scores": edit("scores.0", halved),
        "embed": edit("embed", halved, positions=[0]),
        "patch": patch.activations("resid_post.0", SOURCE, positions=[1]),
        "nothing": edit("z.0", torch.clone),
        "a source that is the run": patch.activations("z", TOKENS),
        "draws": draws(lambda one: ablate.resample("0.1", SOURCE, seed=one), 2),
    }
    for given in ({}, {"metric": metric}, {"metric": last, "batch": torch.arange(EXAMPLES)}):
        found, alone = (
            sweep(model, TOKENS, variants, engine=engine, batch_size=size, draws=20, flips=99, **given)
            for engine, size in (("auto", 7), ("naive", None))
        )
        assert set(found.frame["engine"]) == {"fast"}
        tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 0.05)
        for of_metric, rows in alone.frame.groupby("metric"):
            ours, largest = found.frame.loc[rows.index], rows["effect"].abs().max()
            assert largest > 1e-3, of_metric
            np.testing.assert_allclose(ours["effect"], rows["effect"], atol=tolerance * largest, rtol=0)
            assert ours["null_effect"].tolist() == rows["null_effect"].tolist()
            assert rows[rows["variant"].isin(["nothing", "a source that is the run"])]["null_effect"].all()
        if dtype == torch.float64:
            np.testing.assert_allclose(found.frame["p_value"], alone.frame["p_value"], rtol=1e-9)


def test_each_variant_runs_the_blocks_from_its_first_edit_on(make_model, hooked_only):
    """Three heads in each of three blocks: rows by attention, the clean pass first; at z itself one row would do."""
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
    found = sweep(model, TOKENS, variants, metric)
    assert set(found.frame["engine"]) == {"fast"}
    assert rows == {0: [5, 1], 1: [5, 15], 2: [5, 30]}
    rows.update({layer: [] for layer in rows})
    # Two variants of five examples in a forward.
    sweep(model, TOKENS, variants, metric, batch_size=10)
    assert max(rows[2]) == 10
    rows.update({layer: [] for layer in rows})
    sweep(model, TOKENS, variants | {"q": ablate.zero("q.1")}, metric)
    assert rows == {0: [5, 1], 1: [5, 20], 2: [5, 35]}


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
    sweep(model, TOKENS, variants, metric=last, batch=torch.arange(EXAMPLES))
    assert seen == [(5, 6), (10, 1)]


def test_reasons_to_run_alone(make_model, hooked_only):
    model, tokens = make_model(0, hooked_only), TOKENS
    variants = {
        "0.1": ablate.zero("0.1"),
        "path": patch.path("0.1", "1.2", tokens),
        "weights": transplant.weights(make_model(1, hooked_only), "qkv"),
    }
    alone = {"path": "it cuts paths", "weights": "it edits weights"}
    assert sweep(model, tokens, variants, metric).settings["naive"] == alone

    def reason():
        (said,) = set(sweep(model, tokens, {"0.1": ablate.zero("0.1")}, metric).settings["naive"].values())
        return said

    handle = model.blocks[0].hook_mlp_out.register_forward_hook(lambda *_: None)
    assert "there is a hook on blocks.0.hook_mlp_out" in reason()
    handle.remove()
    model.blocks[1].mlp.forward = model.blocks[1].mlp.forward
    assert "there is a forward of its own on blocks.1.mlp" in reason()
    del model.blocks[1].mlp.forward
    model.cfg.positional_embedding_type = "shortformer"
    assert reason() == "positions enter every block"
    model.cfg.positional_embedding_type = "standard"
    model.embed.__class__ = type("Mine", (type(model.embed),), {"__module__": "mine"})
    assert "its class Mine is not the library's" in reason()
