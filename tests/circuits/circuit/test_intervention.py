"""Circuits that are kept and cut, against a forward written by hand in which every receiver has an input of its own."""

import numpy as np
import pytest
import torch
from torch import Tensor

from circuits import CircuitsError, cache, circuit, edit, intervene, patch, run

# Settings of random models; each circuit is of one of them.
MODELS = {
    "LN": {"n_layers": 3},
    "no norm, bidirectional": {"normalization_type": None, "attention_dir": "bidirectional"},
    "attention only": {"normalization_type": "LNPre", "attn_only": True, "n_layers": 3},
    "groups": {"n_key_value_heads": 2},
    "one layer": {"n_layers": 1, "act_fn": "gelu"},
    "parallel": {"parallel_attn_mlp": True, "n_layers": 3},
    "post-norm": {"norm": "post"},
}


class ByHand:
    """A model's forward from its parameters, with separate inputs for every receiver."""

    def __init__(self, model) -> None:
        self.cfg = model.cfg
        self.post = getattr(model.cfg, "norm", "pre") == "post"
        self.w = {name.replace("attn._", "attn."): value.detach() for name, value in model.named_parameters()}

    def norm(self, x, name):
        """What is read of a stream, which a post-norm model reads as it is."""
        return x if self.post else self.normed(x, name)

    def normed(self, x, name):
        kind = self.cfg.normalization_type
        if kind is None:
            return x
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + self.cfg.eps).sqrt()
        return x if kind == "LNPre" else x * self.w[f"{name}.w"] + self.w[f"{name}.b"]

    def __call__(self, tokens, hears=lambda sender, receiver, own: own):
        """hears(sender, receiver, what the sender writes in this run): what the receiver gets of it."""
        cfg, w = self.cfg, self.w
        batch, length = tokens.shape
        positions = w["pos_embed.W_pos"][:length].expand(batch, -1, -1)
        written = {"embed": w["embed.W_E"][tokens], "pos_embed": positions}

        def into(receiver):
            stream = torch.zeros_like(positions)
            for sender, own in written.items():
                if sender.startswith("norm "):
                    stream = self.normed(stream, sender[5:])
                    continue
                stream = stream + (own if sender.startswith("b_O") else hears(sender, receiver, own))
            return stream

        if self.post:
            written["norm ln_embed"] = None

        key_heads = w["blocks.0.attn.W_K"].shape[0]
        for layer in range(cfg.n_layers):
            attn = f"blocks.{layer}.attn"
            outputs, keys, values = {}, [], []
            for group in range(key_heads):
                name = f"{layer}.{group}" if key_heads == cfg.n_heads else f"{layer}.k{group}"
                for site, found in (("k", keys), ("v", values)):
                    x = self.norm(into(f"{name}.{site}"), f"blocks.{layer}.ln1")
                    found.append(
                        x @ w[f"{attn}.W_{site.upper()}"][group] + w[f"{attn}.b_{site.upper()}"][group]
                    )
            for head in range(cfg.n_heads):
                x = self.norm(into(f"{layer}.{head}.q"), f"blocks.{layer}.ln1")
                q = x @ w[f"{attn}.W_Q"][head] + w[f"{attn}.b_Q"][head]
                group = head // (cfg.n_heads // key_heads)
                scores = q @ keys[group].mT / cfg.d_head**0.5
                if cfg.attention_dir == "causal":
                    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
                z = scores.softmax(-1) @ values[group]
                outputs[f"{layer}.{head}"] = z @ w[f"{attn}.W_O"][head]
            outputs[f"b_O.{layer}"] = w[f"{attn}.b_O"]
            if not cfg.parallel_attn_mlp:
                written |= outputs
            if self.post:
                written[f"norm blocks.{layer}.ln1"] = None
            if not cfg.attn_only:
                mlp = f"blocks.{layer}.mlp"
                x = (
                    self.norm(into(f"mlp{layer}"), f"blocks.{layer}.ln2") @ w[f"{mlp}.W_in"]
                    + w[f"{mlp}.b_in"]
                )
                x = x.relu() if cfg.act_fn == "relu" else torch.nn.functional.gelu(x)
                written[f"mlp{layer}"] = x @ w[f"{mlp}.W_out"] + w[f"{mlp}.b_out"]
                if self.post:
                    written[f"norm blocks.{layer}.ln2"] = None
            # Beside the MLP, which then has not heard them.
            written |= outputs
        self.written = {sender: own for sender, own in written.items() if own is not None}
        return self.norm(into("output"), "ln_final") @ w["unembed.W_U"] + w["unembed.b_U"]

    def kept(self, tokens, theirs, names):
        """The forward in which an edge that is not in `names` carries `theirs`, by sender."""
        return self(
            tokens,
            lambda sender, receiver, own: own if f"{sender} -> {receiver}" in names else theirs[sender],
        )


def sources(by_hand, source, how):
    """What each sender writes on the source, by sender."""
    by_hand(source)
    written = by_hand.written
    if how == "mean":
        return {sender: x.mean(0, keepdim=True) for sender, x in written.items()}
    return {sender: x * (how != "zero") for sender, x in written.items()}


def agrees(found: Tensor, expected: Tensor, clean: Tensor) -> None:
    """To the tolerance of the number format, relative to the largest entry; the circuit must do something."""
    tolerance = 1e-10 if found.dtype == torch.float64 else 1e-5
    assert float((found - expected).abs().max()) <= tolerance * float(clean.abs().max())


def random_circuits(count: int, make_model, seed: int) -> None:
    """Compares `count` random circuits on random models, about half of them in float32."""
    rng = np.random.default_rng(seed)
    built, moved = {}, 0
    for index in range(count):
        name, weights = list(MODELS)[index % len(MODELS)], int(rng.integers(3))
        wide = bool(index // len(MODELS) % 2)
        if (name, weights, wide) not in built:
            model = make_model(weights, "HookedTransformer", **MODELS[name])
            if not wide:
                model.float().cfg.dtype = torch.float32
            built[name, weights, wide] = model, ByHand(model), list(circuit.full(model))
        model, by_hand, names = built[name, weights, wide]
        generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
        tokens, source = torch.randint(0, 11, (2, 3, 5), generator=generator)
        source = source[: 1 if index % 4 == 0 else 3]
        how = ("resample", "mean", "zero")[int(rng.integers(3))]
        chosen = {one for one in names if rng.random() < rng.choice([0.05, 0.5, 0.95])}
        theirs = sources(by_hand, source, how)
        given = {} if how == "zero" else {"source": source}
        c = circuit.edges(sorted(chosen))
        with torch.no_grad():
            expected, clean = by_hand.kept(tokens, theirs, chosen), by_hand(tokens)
            agrees(run(model, tokens, c.keep(how=how, **given)), expected, clean)
            # What is cut is what keeping the complement cuts.
            agrees(run(model, tokens, (circuit.full(model) - c).cut(how=how, **given)), expected, clean)
        moved += bool((expected - clean).abs().max() > 0.05 * clean.abs().max())
    assert moved >= 0.9 * count


def test_random_circuits_against_separate_inputs_by_hand(hooked_only, make_model):
    random_circuits(14, make_model, 0)


@pytest.fixture
def two_layers(hooked_only, make_model):
    return make_model(0, hooked_only)


@pytest.mark.parametrize("kind", ["edges", "nodes"])
def test_the_empty_circuit_is_the_source_run_and_the_full_one_the_clean_run(
    kind, featured, tokens, other_tokens, assert_same
):
    source, clean = run(featured, other_tokens), run(featured, tokens)
    empty, full = (circuit.edges([]), circuit.nodes([]))[kind == "nodes"], circuit.full(featured, kind)
    assert_same(run(featured, tokens, empty.keep(other_tokens)), source, clean)
    assert_same(run(featured, tokens, full.cut(other_tokens)), source, clean)
    for unchanged in (full.keep(other_tokens), empty.cut(other_tokens), full.keep(how="zero")):
        assert torch.equal(run(featured, tokens, unchanged), clean)


def test_sources_as_tokens_and_as_activations_of_the_run_or_of_one_example(two_layers, tokens, other_tokens):
    c = circuit.edges(["embed -> 0.1.v", "0.1 -> output", "mlp0 -> mlp1"])
    for source in (other_tokens, other_tokens[:1]):
        stored = cache(two_layers, source, ["embed", "pos_embed", "z", "mlp_out", "resid_post"])
        expected = run(two_layers, tokens, c.keep(source))
        assert torch.equal(run(two_layers, tokens, c.keep(stored)), expected)
        _, theirs = two_layers.run_with_cache(source)
        assert torch.equal(run(two_layers, tokens, c.keep(theirs)), expected)
    with pytest.raises(CircuitsError, match=r"source .*2.*, the run .*8|batch"):
        run(two_layers, tokens, c.keep(other_tokens[:2]))


def test_edits_act_on_the_run_that_is_kept(two_layers, tokens, other_tokens):
    """An edge of the circuit carries what the edited run computes."""
    by_hand, c = ByHand(two_layers), {"embed -> 0.1.v", "0.1 -> output", "0.1 -> 1.0.k", "1.0 -> output"}
    theirs = sources(by_hand, other_tokens, "resample")

    def hears(sender, receiver, own):
        if f"{sender} -> {receiver}" not in c:
            return theirs[sender]
        return 2 * own if sender == "0.1" else own

    expected, clean = by_hand(tokens, hears), by_hand(tokens)
    double = edit("z", lambda z: 2 * z, heads="0.1")
    for order in (
        (double, circuit.edges(c).keep(other_tokens)),
        (circuit.edges(c).keep(other_tokens), double),
    ):
        agrees(run(two_layers, tokens, *order), expected, clean)


def test_an_edit_of_an_inner_block_is_seen_by_cuts_of_an_outer_one(causal, tokens, other_tokens):
    """An MLP hears what the edit makes of its own stream, whichever block the edit stands in."""
    kept = (circuit.full(causal) - circuit.edges(["embed -> mlp1", "0.1 -> mlp1"])).keep(other_tokens)
    bent = edit("resid_mid.1", lambda x: (1.3 * x).tanh())
    together = run(causal, tokens, kept, bent)
    with intervene(causal, kept):
        inner = run(causal, tokens, bent)
    assert float((together - run(causal, tokens, bent)).abs().max()) > 0.001
    torch.testing.assert_close(inner, together, rtol=0, atol=1e-12)


# ---- Nodes that write zeros


def with_zeros(model):
    """Token 0 has a zero embedding, as padding tokens often do, and so has position 2; no biases behind heads."""
    with torch.no_grad():
        weights = dict(model.named_parameters())
        weights["embed.W_E"][0] = 0
        if "pos_embed.W_pos" in weights:
            weights["pos_embed.W_pos"][2] = 0
        for name, weight in weights.items():
            if name.endswith("b_O"):
                weight.zero_()
    return model


ROTARY = {"positional_embedding_type": "rotary", "rotary_dim": 4, "n_layers": 3}


@pytest.mark.parametrize("settings", [ROTARY, {"n_layers": 3}], ids=["rotary", "table"])
def test_a_sender_that_is_zero_in_the_run_is_heard_where_its_replacement_is_not(
    settings, hooked_only, make_model, tokens, assert_same
):
    model = with_zeros(make_model(0, hooked_only, **settings))
    tokens, source = tokens.clone(), tokens % 10 + 1
    tokens[:, 2] = 0
    names = [name for name in circuit.full(model) if name.startswith("embed ->")]
    whole = patch.activations("embed", source=source)
    for c in (circuit.edges(names), circuit.nodes(["embed"])):
        assert_same(run(model, tokens, c.cut(source)), run(model, tokens, whole), run(model, tokens))
