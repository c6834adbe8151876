"""Circuits that are kept and cut, against a forward written by hand in which every receiver has an input of its own."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from circuits import CircuitsError, ablate, cache, circuit, intervene, patch, run, sweep

# Settings of random models; each circuit is of one of them.
MODELS = {
    "LN": {"n_layers": 3},
    "no norm, bidirectional": {"normalization_type": None, "attention_dir": "bidirectional"},
    "attention only": {"normalization_type": "LNPre", "attn_only": True, "n_layers": 3},
    "groups": {"n_key_value_heads": 2},
    "one layer": {"n_layers": 1, "act_fn": "gelu"},
}


class ByHand:
    """A pre-norm model's forward from its parameters, with separate inputs for every receiver."""

    def __init__(self, model) -> None:
        self.cfg = model.cfg
        self.w = {name.replace("attn._", "attn."): value.detach() for name, value in model.named_parameters()}

    def norm(self, x, name):
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
        bias = torch.zeros_like(positions)

        def into(receiver):
            return sum(hears(sender, receiver, own) for sender, own in written.items()) + bias

        key_heads = w["blocks.0.attn.W_K"].shape[0]
        for layer in range(cfg.n_layers):
            attn = f"blocks.{layer}.attn"
            outputs, keys, values = {}, [], []
            for group in range(key_heads):
                name = f"{layer}.{group}" if key_heads == cfg.n_heads else f"{layer}.k{group}"
                for site, found in (("k", keys), ("v", values)):
                    x = self.norm(into(f"{name}.{site}"), f"blocks.{layer}.ln1")
                    found.append(x @ w[f"{attn}.W_{site.upper()}"][group] + w[f"{attn}.b_{site.upper()}"][group])
            for head in range(cfg.n_heads):
                x = self.norm(into(f"{layer}.{head}.q"), f"blocks.{layer}.ln1")
                q = x @ w[f"{attn}.W_Q"][head] + w[f"{attn}.b_Q"][head]
                group = head // (cfg.n_heads // key_heads)
                scores = q @ keys[group].mT / cfg.d_head**0.5
                if cfg.attention_dir == "causal":
                    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
                z = scores.softmax(-1) @ values[group]
                outputs[f"{layer}.{head}"] = z @ w[f"{attn}.W_O"][head]
            written |= outputs
            bias = bias + w[f"{attn}.b_O"]
            if not cfg.attn_only:
                mlp = f"blocks.{layer}.mlp"
                x = self.norm(into(f"mlp{layer}"), f"blocks.{layer}.ln2") @ w[f"{mlp}.W_in"] + w[f"{mlp}.b_in"]
                x = x.relu() if cfg.act_fn == "relu" else torch.nn.functional.gelu(x)
                written[f"mlp{layer}"] = x @ w[f"{mlp}.W_out"] + w[f"{mlp}.b_out"]
        self.written = written
        return self.norm(into("output"), "ln_final") @ w["unembed.W_U"] + w["unembed.b_U"]

    def kept(self, tokens, theirs, names):
        """The forward in which an edge that is not in `names` carries `theirs`, by sender."""
        return self(tokens, lambda sender, receiver, own: own if f"{sender} -> {receiver}" in names else theirs[sender])


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
    random_circuits(60, make_model, 0)


@pytest.mark.slow
def test_a_thousand_random_circuits(hooked_only, make_model):
    random_circuits(1000, make_model, 1)
