"""Circuits on bridges with key-value groups, against a forward by hand with separate inputs per receiver."""

from functools import partial

import numpy as np
import pytest
import torch

from circuits import circuit, prompts, run

families = pytest.importorskip("tests.circuits.families")

HEADS, GROUPS, LAYERS, D_HEAD = 4, 2, 2, 8
SENDERS = ["embed", *(f"{layer}.{head}" for layer in range(LAYERS) for head in range(HEADS)), "mlp0", "mlp1"]


class ByHand:
    """A Llama's or a Gemma 2's forward on one prompt, from its own weights."""

    def __init__(self, model) -> None:
        config = model.original_model.config
        # The embedding's scale, which is no weight of theirs.
        self.gemma = config.model_type == "gemma2"
        self.scale = config.hidden_size**0.5 if self.gemma else 1.0
        self.config, self.w = config, model.state_dict()

    def norm(self, x, name):
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        weight = self.w[f"{name}.weight"]
        return x * (weight + 1 if self.gemma else weight)

    def rotated(self, x):
        angle = torch.arange(x.shape[0])[:, None] / 100 ** (torch.arange(0, D_HEAD, 2) / D_HEAD)
        cos, sin = angle.cos().to(x), angle.sin().to(x)
        one, two = x.chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)

    def __call__(self, tokens, hears=lambda sender, receiver, own: own):
        """hears(sender, receiver, what the sender writes in this run): what the receiver gets of it."""
        w, cap = self.w, self.config.attn_logit_softcapping if self.gemma else None
        self.written = written = {"embed": w["embed.weight"][tokens] * self.scale}

        def into(receiver):
            def of(sender):
                return hears(sender, receiver, written[sender])

            stream = of("embed")
            for layer in range(LAYERS):
                if f"{layer}.0" in written:
                    added = sum(of(f"{layer}.{head}") for head in range(HEADS))
                    stream = stream + (self.norm(added, f"blocks.{layer}.ln1_post") if self.gemma else added)
                if f"mlp{layer}" in written:
                    stream = stream + of(f"mlp{layer}")
            return stream

        far = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))  # query - key
        for layer in range(LAYERS):
            path = f"blocks.{layer}"

            def project(receiver, site, at, path=path):
                x = self.norm(into(receiver), f"{path}.ln1")
                return x @ w[f"{path}.attn.{site}.weight"].mT[:, at * D_HEAD : (at + 1) * D_HEAD]

            keys = [self.rotated(project(f"{layer}.k{one}.k", "k", one)) for one in range(GROUPS)]
            values = [project(f"{layer}.k{one}.v", "v", one) for one in range(GROUPS)]
            heads = {}
            for head in range(HEADS):
                query, group = self.rotated(project(f"{layer}.{head}.q", "q", head)), head * GROUPS // HEADS
                scale = self.config.query_pre_attn_scalar if self.gemma else D_HEAD
                scores = query @ keys[group].mT / scale**0.5
                scores = scores if cap is None else cap * torch.tanh(scores / cap)
                window = self.gemma and self.config.layer_types[layer] == "sliding_attention"
                hidden = (far < 0) | (far >= self.config.sliding_window) if window else far < 0
                z = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values[group]
                heads[f"{layer}.{head}"] = z @ w[f"{path}.attn.o.weight"].split(D_HEAD, 1)[head].mT
            written |= heads
            x = self.norm(into(f"mlp{layer}"), f"{path}.ln2")
            gate, inner = (x @ w[f"{path}.mlp.{name}.weight"].mT for name in ("gate", "in"))
            gelu = partial(torch.nn.functional.gelu, approximate="tanh")
            act = gelu if self.gemma else torch.nn.functional.silu
            x = (act(gate) * inner) @ w[f"{path}.mlp.out.weight"].mT
            written[f"mlp{layer}"] = self.norm(x, f"{path}.ln2_post") if self.gemma else x
        logits = self.norm(into("output"), "ln_final") @ w["unembed.weight"].mT
        last = self.config.final_logit_softcapping if self.gemma else None
        return logits if last is None else last * torch.tanh(logits / last)


def random_members(rng, names, positions):
    """By name, the text and where that belongs to the circuit: a function of the length, bool [pos 1]."""
    share, found = rng.choice([0.05, 0.5, 0.95]), {}
    for name in names:
        if rng.random() < share:
            some = sorted(rng.choice(positions, rng.integers(1, positions), replace=False).tolist())
            form = rng.choice(["", " @ ", " @ all but "], p=[0.5, 0.25, 0.25])
            text = f"{name}{form}{','.join(map(str, some)) if form else ''}"
            found[name] = text, partial(belongs, some, form)
    return found


def belongs(some, form, length):
    named = torch.isin(torch.arange(length), torch.tensor(some))[:, None]
    return named if form == " @ " else ~named if form else torch.ones_like(named)


def replaced(how, theirs, number, sender, own):
    """What a sender's edges carry outside: `theirs` has by prompt of the source what each sender writes there."""
    if how != "mean":
        return theirs[number][sender] * (how != "zero")
    reach = [[one[sender][at] for one in theirs if len(one[sender]) > at] for at in range(len(own))]
    return torch.stack([torch.stack(rows).mean(0) for rows in reach])


def hears(chosen, keep, other, sender, receiver, own):
    _, where = chosen.get(sender, chosen.get(f"{sender} -> {receiver}", (None, partial(belongs, [], " @ "))))
    return torch.where(where(len(own)) == keep, own, other(sender, own))


@pytest.mark.parametrize(("name", "how"), [("llama", "resample"), ("llama", "zero"), ("gemma2", "mean")])
@torch.no_grad()
def test_random_circuits_of_grouped_heads_at_positions_and_with_padding(hf_model, name, how):
    model = hf_model(name, dtype=torch.float32)
    by_hand, rng, moved = ByHand(model), np.random.default_rng(0), 0
    edges = list(circuit.full(model))
    assert "1.3 -> mlp1" in edges
    assert "0.3 -> 1.k1.v" in edges
    for index in range(12):
        lengths = [(5, 5, 5), (3, 6, 4)][index % 2]
        base, source = ([rng.integers(3, families.WORDS, n).tolist() for n in lengths] for _ in range(2))
        chosen = random_members(rng, SENDERS if index % 4 == 3 else edges, min(lengths))
        c = (circuit.nodes if index % 4 == 3 else circuit.edges)([text for text, _ in chosen.values()])
        theirs = []
        for row in source:
            by_hand(torch.tensor(row))
            theirs.append(by_hand.written)
        verb = ["keep", "cut"][index % 3 == 2]
        given = {} if how == "zero" else {"source": prompts(model, source, side="left")}
        found = run(model, prompts(model, base, side="right"), getattr(c, verb)(how=how, **given))
        for number, row in enumerate(base):
            other = partial(replaced, how, theirs, number)
            clean = by_hand(torch.tensor(row))
            expected = by_hand(torch.tensor(row), partial(hears, chosen, verb == "keep", other))
            largest = float(clean.abs().max())
            assert float((found[number, : len(row)] - expected).abs().max()) <= 1e-5 * largest
            moved += float((expected - clean).abs().max()) > 0.01 * largest
    assert moved >= 30
