"""Path patching against the three passes written out by hand; several paths at once."""

import itertools

import pytest
import torch

from circuits import CircuitsError, ablate, cache, circuit, edit, intervene, patch, run, sweep
from circuits.model.hooked_model import HookedModel
from tests.circuits.conftest import CAPS, LOCAL, RMS, SANDWICH, activations

POSITIONS = (1, 4)


def put(x, new, heads=None, positions=None):
    """`x` [batch pos (head) ...] with some heads and positions of `new` in it."""
    x = x.clone()
    new = new.expand_as(x)
    where = torch.zeros(x.shape, dtype=torch.bool)
    index = [slice(None)] * x.ndim
    index[1] = slice(None) if positions is None else list(positions)
    where[tuple(index)] = True
    if heads is not None:
        chosen = torch.zeros(x.shape, dtype=torch.bool)
        chosen[:, :, heads] = True
        where &= chosen
    return torch.where(where, new, x)


def unchanged(s, at, x):
    return x


def path_by_hand(
    by_hand, model, tokens, theirs, senders, receivers, through=None, positions=None, around=unchanged
):
    """Three passes. theirs: the source's activations; senders, receivers: (site, layer) -> heads, or None for all;
    around: what hooks of the user's own do.
    """
    clean, _ = activations(by_hand, model, tokens, around)

    def only_the_sender(s, at, x):
        x = around(s, at, x)
        own_neurons_send = s == "mlp_out" and ("mlp_post", at) in senders
        if s == "z" or (s == "mlp_out" and through is None and not own_neurons_send):
            x = clean[s, at]
        return put(x, theirs[s, at], senders[s, at], positions) if (s, at) in senders else x

    received, _ = activations(by_hand, model, tokens, only_the_sender)

    def with_the_receiver(s, at, x):
        x = around(s, at, x)
        return put(x, received[s, at], receivers[s, at]) if (s, at) in receivers else x

    return by_hand(model, tokens, with_the_receiver)


SENDERS = {
    "0.1": {("z", 0): [1]},
    "0.1+0.3": {("z", 0): [1, 3]},
    "z.0": {("z", 0): None},
    "attn_out.0": {("attn_out", 0): None},
    "mlp_post.0": {("mlp_post", 0): None},
    "mlp_out.0": {("mlp_out", 0): None},
    "embed": {("embed", None): None},
    "pos_embed": {("pos_embed", None): None},
}
RECEIVERS = {
    "2.2": {("q", 2): [2], ("k", 2): [2], ("v", 2): [2]},
    "q.2": {("q", 2): None},
    "k.1": {("k", 1): None},
    "v.2": {("v", 2): None},
    "mlp_pre.2": {("mlp_pre", 2): None},
    "output": {("resid_post", 2): None},
    ("v", "1.0"): {("v", 1): [0]},
    ("k.2", "2.1+2.3"): {("k", 2): [1, 3]},
}


BLOCKS = {
    "pre-norm": {},
    "post-norm": {"norm": "post"},
    "parallel": {"parallel_attn_mlp": True},
    "shortformer": {"positional_embedding_type": "shortformer"},
    "gemma": {**RMS, **SANDWICH, **CAPS, **LOCAL, "attn_types": ["local", "global", "local"]},
}


@pytest.fixture(params=list(BLOCKS))
def deep(request, family, make_model):
    if request.param != "pre-norm" and family != "HookedTransformer":
        pytest.skip("only HookedTransformer has such blocks")
    return make_model(family=family, n_layers=3, **BLOCKS[request.param])


@pytest.fixture
def theirs(deep, other_tokens, by_hand):
    found, _ = activations(by_hand, deep, other_tokens)
    # Position embeddings do not depend on the tokens; as a source of them serves a tensor.
    found["pos_embed", None] = found["pos_embed", None].flip(1)
    return found


# Every sender and every receiver, each in two combinations: all pairs would take long.
@pytest.mark.parametrize(("shift", "through"), [(5, None), (3, "mlps")])
def test_senders_and_receivers_against_three_passes_by_hand(
    deep, tokens, other_tokens, theirs, by_hand, assert_same, shift, through
):
    clean = by_hand(deep, tokens)
    for index, (sender, senders) in enumerate(SENDERS.items()):
        receiver, receivers = list(RECEIVERS.items())[(index + shift) % len(RECEIVERS)]
        positions = POSITIONS if index % 2 else None
        source = {"hook_pos_embed": theirs["pos_embed", None]} if sender == "pos_embed" else other_tokens
        given = patch.path(sender, receiver, source, through, positions=positions)
        if sender == "pos_embed" and sender not in HookedModel(deep).embeddings:
            with pytest.raises(CircuitsError, match="but to what all queries and keys read; edit it with"):
                run(deep, tokens, given)
            continue
        expected = path_by_hand(by_hand, deep, tokens, theirs, senders, receivers, through, positions)
        assert_same(run(deep, tokens, given), expected, clean)


# ---- Several paths


def single_edges(model, source):
    """A path along every edge of the graph: single heads, key-value groups, MLPs, embeddings."""
    return [patch.path(*edge.split(" -> "), source) for edge in circuit.full(model)]


def test_all_single_edges_from_noise_are_the_noise_in_the_stream(featured, tokens, other_tokens, assert_same):
    """No run has these values, so every sender's change counts; and what a norm after some heads makes of all of
    their changes is not the sum of what it makes of each.
    """
    if featured.cfg.n_layers > 3:
        pytest.skip("thousands of edges")
    sites = [
        name for name in ("embed", "pos_embed", "z", "mlp_out") if name in HookedModel(featured).site_names()
    ]
    noise = {
        hook: x.expand(len(tokens), *x.shape[1:])
        + torch.randn(len(tokens), *x.shape[1:], generator=torch.Generator().manual_seed(at), dtype=x.dtype)
        for at, (hook, x) in enumerate(cache(featured, other_tokens, sites).items())
    }
    expected = run(featured, tokens, *(patch.activations(site, noise) for site in sites))
    assert_same(run(featured, tokens, *single_edges(featured, noise)), expected, run(featured, tokens))


@pytest.mark.parametrize("through", [None, "mlps"])
def test_a_path_is_of_the_run_with_all_other_edits(
    deep, tokens, other_tokens, theirs, by_hand, assert_same, through
):
    """In any order, in one block or nested ones, and in a sweep; the source is the model without them."""
    ramp = torch.linspace(-1, 1, 16, dtype=torch.float64)

    def around(s, at, x):
        if (s, at) == ("mlp_out", 0):
            return x + ramp
        return put(x, torch.zeros_like(x), [2]) if (s, at) == ("z", 1) else x

    path = patch.path("0.1", "2.2", other_tokens, through)
    expected = path_by_hand(
        by_hand, deep, tokens, theirs, SENDERS["0.1"], RECEIVERS["2.2"], through, around=around
    )
    clean = by_hand(deep, tokens)
    for edits in itertools.permutations([path, edit("mlp_out.0", lambda x: x + ramp), ablate.zero("1.2")]):
        assert_same(run(deep, tokens, *edits), expected, clean)
        with torch.no_grad(), intervene(deep, edits[0]), intervene(deep, *edits[1:]):
            assert_same(deep(tokens), expected, clean)
        found = sweep(deep, tokens, {"all": edits}, lambda output: output[:, -1, 0], draws=1, flips=1)
        assert found.frame["value"][0] == pytest.approx(float(expected[:, -1, 0].mean()), rel=1e-9)


@pytest.mark.parametrize("through", [None, "mlps"])
def test_paths_to_two_heads_of_a_layer_are_each_alone(deep, tokens, other_tokens, through):
    ends = (("0.1", "1.0"), ("mlp0", "1.1"))
    paths = [patch.path(sender, receiver, other_tokens, through) for sender, receiver in ends]
    both, first, second = (
        run(deep, tokens, *given, cache="z.1")[1]["z.1"] for given in (paths, paths[:1], paths[1:])
    )
    torch.testing.assert_close(both, torch.cat([first[:, :, :1], second[:, :, 1:]], 2))


def test_gradients_are_those_of_the_run_that_a_path_changes(deep, tokens, other_tokens):
    """Against differences; and the mode is the run's own."""
    seen = []
    block = deep.get_submodule("blocks.0")
    block.register_forward_hook(lambda *_: seen.append((block.training, torch.is_grad_enabled())))
    deep.train()
    paths = [
        patch.path("0.1", "1.2", source=cache(deep, other_tokens, "z")),
        patch.path("embed", "mlp_pre.1", other_tokens, positions=POSITIONS),
    ]
    weight = HookedModel(deep).named_weights()
    name = next(
        name for name in weight if name.startswith("blocks.0.mlp") and name.endswith(("W_in", "in.weight"))
    )
    seen.clear()
    with intervene(deep, *paths):
        deep(tokens).square().sum().backward()
    # The clean pass of the second source, then the run: no pass of the paths' own.
    assert seen == [(False, False), (True, True)]
    way = torch.randn(weight[name].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for sign in (1, -1):
        with torch.no_grad():
            weight[name] += sign * 1e-5 * way
            with intervene(deep, *paths):
                found.append(float(deep(tokens).square().sum()))
            weight[name] -= sign * 1e-5 * way
    assert abs(float((weight[name].grad * way).sum()) / ((found[0] - found[1]) / 2e-5) - 1) < 1e-6
