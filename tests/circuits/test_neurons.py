"""Ablation of single neurons against the forward written by hand."""

import json

import numpy as np
import pytest
import torch

from circuits import CircuitsError, ablate, cache, edit, grid, patch, run, sweep
from circuits.interventions.replacements import derangement

CHOSEN = [1, 5, 17]


@pytest.fixture
def both(family, make_model):
    return make_model(family=family, n_layers=2)


def at(layer, function):
    def edit(s, found, x):
        if (s, found) != ("mlp_post", layer):
            return x
        x = x.clone()
        x[..., CHOSEN] = function(x)[..., CHOSEN]
        return x

    return edit


def post(by_hand, model, tokens, layer):
    seen = {}
    by_hand(model, tokens, lambda s, found, x: seen.setdefault((s, found), x))
    return seen["mlp_post", layer]


def test_zero_mean_and_resample_against_a_forward_by_hand(both, tokens, other_tokens, by_hand, assert_same):
    clean, order = by_hand(both, tokens), derangement(8, 4)
    for layer in (0, 1):
        theirs = post(by_hand, both, other_tokens, layer)
        for given, function in (
            (ablate.neurons(layer, CHOSEN), torch.zeros_like),
            (
                ablate.neurons(layer, CHOSEN, "mean", reference=other_tokens),
                lambda x, m=theirs: m.mean(0).expand_as(x),
            ),
            (
                ablate.neurons(layer, CHOSEN, how="resample", source=other_tokens, seed=4),
                lambda x, m=theirs: m[order],
            ),
        ):
            assert_same(run(both, tokens, given), by_hand(both, tokens, at(layer, function)), clean)


def test_queries_limit_it_and_the_output_bias_stays(both, tokens, by_hand, assert_same):
    mask = torch.rand(8, 6, generator=torch.Generator().manual_seed(1)) < 0.5
    for queries, chosen in (([0, -1], torch.tensor([True, *[False] * 4, True]).expand(8, 6)), (mask, mask)):
        expected = by_hand(both, tokens, at(1, lambda x, c=chosen: torch.where(c[..., None], 0, x)))
        found = run(both, tokens, ablate.neurons(1, CHOSEN, positions=queries))
        assert_same(found, expected, by_hand(both, tokens))
    _, seen = run(both, tokens, ablate.neurons(0, range(24)), cache=["mlp_out.0"])
    bias = next(
        b for name, b in both.state_dict().items() if name in ("blocks.0.mlp.b_out", "blocks.0.mlp.out.bias")
    )
    assert bool((bias != 0).any())
    torch.testing.assert_close(seen["mlp_out.0"], bias.expand(8, 6, -1))


def test_ways_to_name_neurons(both, tokens):
    mask = torch.zeros(24, dtype=torch.bool)
    mask[CHOSEN] = True
    expected = run(both, tokens, ablate.neurons(0, CHOSEN))
    assert not bool((expected == run(both, tokens)).all())
    for given in (
        tuple(CHOSEN),
        np.array(CHOSEN),
        torch.tensor([17, 1, 5, 5]),
        mask,
        mask.numpy(),
        {1, 5, 17},
    ):
        assert bool((run(both, tokens, ablate.neurons(0, given)) == expected).all())
    one = run(both, tokens, ablate.neurons(0, 5))
    assert bool((one == run(both, tokens, ablate.neurons(0, [5]))).all())


def test_what_the_model_lacks(both, tokens, make_model):
    with pytest.raises(CircuitsError, match="no neuron 24: the model has neurons 0-23"):
        run(both, tokens, ablate.neurons(0, [3, 24]))
    with pytest.raises(CircuitsError, match=r"mask of neurons is \[10\], the model has 24"):
        run(both, tokens, ablate.neurons(0, torch.ones(10, dtype=torch.bool)))
    with pytest.raises(CircuitsError, match=r"no site mlp_post\.7: the model has layers 0-1"):
        run(both, tokens, ablate.neurons(7, [0]))
    with pytest.raises(CircuitsError, match=r"no site mlp_post\.0 in this model"):
        run(make_model(attn_only=True), tokens, ablate.neurons(0, [0]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"neurons": [-1]}, "neurons are whole numbers from 0"),
        ({"neurons": []}, "neurons are whole numbers from 0, at least one"),
        ({"neurons": None}, "no neurons given"),
        ({"neurons": [True, False]}, "neurons are whole numbers"),
        ({"neurons": torch.zeros(24, dtype=torch.bool)}, r"mask of neurons is \[d_mlp\] and selects some"),
        ({"neurons": torch.ones(2, 24, dtype=torch.bool)}, r"got \[2, 24\]"),
        ({"layer": -1}, "layer are whole numbers from 0"),
        ({"layer": None}, "layer=None; give one layer, counting from 0"),
        ({"layer": [0, 1]}, r"layer=\[0, 1\]; give one layer"),
        ({"how": "half"}, "how='half'; choose from 'zero', 'mean', 'resample'"),
        ({"how": "mean"}, r"how='mean' needs reference=, tokens \[batch pos\]$"),
        ({"neurons": torch.ones(3, dtype=torch.bool).to("meta")}, "neurons: got a meta tensor"),
        ({"neurons": np.array(["3"])}, "neurons: torch has no numbers of <U1"),
        ({"neurons": [torch.tensor([1, 2])]}, "neurons are whole numbers from 0"),
        ({"layer": float("nan")}, "layer are whole numbers from 0"),
        ({"how": "resample"}, "how='resample' needs source="),
        ({"reference": torch.zeros(2, 6)}, "reference= goes with how='mean', here how='zero'"),
        ({"how": "resample", "source": torch.zeros(1, 6)}, r"at least 2 examples, it is \[1, 6\]"),
    ],
)
def test_faults_are_one_line(arguments, message):
    with pytest.raises(CircuitsError, match=message) as caught:
        ablate.neurons(**{"layer": 0, "neurons": [0], **arguments})
    assert "\n" not in str(caught.value)


def test_each_neuron_in_one_sweep(both, tokens):
    variants = grid(ablate.neurons, {"layer": [0, 1], "neurons": [2, 3]})
    assert list(variants) == [f"layer {layer}, neuron {neuron}" for layer in (0, 1) for neuron in (2, 3)]
    frame = sweep(
        both, tokens, variants, metric=lambda output: output[:, -1].square().sum(-1), batch_size=3
    ).frame
    for row, (layer, neuron) in enumerate([(0, 2), (0, 3), (1, 2), (1, 3)]):
        expected = run(both, tokens, ablate.neurons(layer, neuron))[:, -1].square().sum(-1).mean()
        np.testing.assert_allclose(frame["value"][row], expected, rtol=1e-12)
    assert frame["layer"].tolist() == [0, 0, 1, 1]
    assert frame["head"].isna().all()


def test_description_and_equality(tokens):
    given = ablate.neurons(1, CHOSEN, how="mean", reference=tokens)
    described = json.loads(json.dumps(given.describe()))
    assert described["intervention"] == "ablate.neurons"
    assert described["places"] == [{"site": "mlp_post.1", "heads": None, "neurons": CHOSEN}]
    assert described["value"] == "mean"
    assert given == ablate.neurons(1, tuple(CHOSEN), how="mean", reference=tokens.clone())
    assert given != ablate.neurons(1, [1, 5], how="mean", reference=tokens)
    assert ablate.neurons(0, range(24)).label == "ablate.neurons(mlp_post.0, neurons 0,1,2,3,4,5,6,7,...)"
    assert hash(ablate.neurons(0, 1)) == hash(ablate.neurons(0, [1]))


def test_gated_and_normalised_neurons(family, make_model, tokens, by_hand, assert_same):
    """mlp_post is what the output weights read: after the gate."""
    model = make_model(family=family, gated_mlp=True, act_fn="silu", n_layers=1)
    expected = by_hand(model, tokens, at(0, torch.zeros_like))
    assert_same(run(model, tokens, ablate.neurons(0, CHOSEN)), expected, by_hand(model, tokens))
    seen = cache(model, tokens, ["mlp_post.0"])["mlp_post.0"]
    torch.testing.assert_close(seen, post(by_hand, model, tokens, 0))


def test_edits_and_patches_of_some_neurons_before_and_after_the_activation_function(
    both, tokens, other_tokens, by_hand, assert_same
):
    theirs = {}
    by_hand(both, other_tokens, lambda s, found, x: theirs.setdefault((s, found), x))
    for name in ("mlp_pre", "mlp_post"):

        def only(function, name=name):
            def write(s, found, x):
                if (s, found) != (name, 1):
                    return x
                x = x.clone()
                x[..., CHOSEN] = function(x)[..., CHOSEN]
                return x

            return by_hand(both, tokens, write)

        clean, site = by_hand(both, tokens), f"{name}.1"
        doubled = run(both, tokens, edit(site, lambda x: 2 * x + 1, neurons=CHOSEN))
        assert_same(doubled, only(lambda x: 2 * x + 1), clean)
        patched = run(both, tokens, patch.activations(site, other_tokens, neurons=CHOSEN))
        assert_same(patched, only(lambda x, at=(name, 1): theirs[at]), clean)
    with pytest.raises(CircuitsError, match="site z has no neurons; those are at mlp_pre and mlp_post"):
        edit("z", torch.zeros_like, neurons=[0])
