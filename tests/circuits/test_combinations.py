"""Paths and circuits among other interventions, against one forward written by hand in which all of them act.

The forward knows nothing of `circuits`: it says in plain torch what DESIGN says the interventions mean. A longer
search: pytest tests/circuits/test_combinations.py --hypothesis-profile=campaign
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from circuits import Site, ablate, circuit, edit, intervene, patch, run, splice, sweep, transplant

BATCH, LENGTH, PERIOD, VOCAB = 3, 4, 3, 6
HEADS, D_HEAD, D_MODEL, D_MLP = 2, 3, 8, 5
# Beside the plain ones: blocks of Pythia, of Gemma 2, and both of these at once.
GEMMA = {
    "normalization_type": "RMS",
    "use_normalization_before_and_after": True,
    "attn_scores_soft_cap": 2.0,
    "output_logits_soft_cap": 3.0,
    "use_local_attn": True,
    "attn_types": ["local", "global", "local"],
    "window_size": 2,
    "n_key_value_heads": 1,
}
KINDS = {
    "parallel": {"parallel_attn_mlp": True},
    "parallel, shared keys": {"parallel_attn_mlp": True, "n_key_value_heads": 1, "normalization_type": None},
    "gemma": GEMMA,
    "gemma, parallel": GEMMA | {"parallel_attn_mlp": True, "n_key_value_heads": 2},
    "olmo 2": {
        "original_architecture": "Olmo2ForCausalLM",
        "normalization_type": "RMS",
        "d_model": HEADS * D_HEAD,
    },
}
#: Features of the autoencoders that some have in line, and where.
FEATURES = 6
SPLICED = ("mlp_out", "resid_post", "z")
Place = tuple[str, int | None]

# Read when this file is collected, with the profile that was asked for loaded.
some = settings(max_examples=max(1, settings().max_examples // 4))


def from_coordinates(pairs: Tensor) -> Tensor:
    """[n pos] from [n 2]: what else an example holds follows from its coordinates, as on a grid it must."""
    rest = [(pairs.sum(1) + place * pairs[:, 0]) % PERIOD + PERIOD for place in range(LENGTH - 2)]
    return torch.cat([pairs, torch.stack(rest, 1)], 1)


def tokens_of(seed: int, batch: int = BATCH) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return from_coordinates(torch.randint(0, PERIOD, (batch, 2), generator=generator))


GRID = from_coordinates(torch.cartesian_prod(torch.arange(PERIOD), torch.arange(PERIOD)))
TOKENS = tokens_of(7)

# ---- The forward by hand


@dataclass
class Writing:
    """What an intervention does at the sites of the run: site -> a function of the activation that is there."""

    at: dict[Place, Callable[[Tensor], Tensor]]


@dataclass
class Pattern:
    """What it does at patterns, given the scores of the same pass."""

    at: dict[int, Callable[[Tensor, Tensor], Tensor]]


@dataclass
class Weights:
    """The weights that are other ones, by name."""

    values: dict[str, Tensor]


@dataclass
class Edges:
    """Paths: by receiver (site, layer, head or None), what senders are there, (site, layer) -> new activation."""

    to: dict[tuple[str, int, int | None], dict[Place, Callable[[Tensor], Tensor]]]
    through_mlps: bool


Meaning = Writing | Pattern | Weights | Edges


class Linear:
    """An autoencoder of random weights."""

    def __init__(self, width: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.into, self.out = (
            torch.randn(shape, generator=generator, dtype=torch.float64)
            for shape in ((width, FEATURES), (FEATURES, width))
        )

    def encode(self, x: Tensor) -> Tensor:
        return (x @ self.into + 0.1).clamp(min=0)

    def decode(self, features: Tensor) -> Tensor:
        return features @ self.out - 0.1


@torch.no_grad()
def forward(
    model: Any,
    tokens: Tensor,
    meanings: list[Meaning] = (),
    keep: dict[Place, Tensor] | None = None,
    autoencoders: dict[Place, Linear] | None = None,
) -> Tensor:
    """The logits of a transformer under all of these; `keep` gets every activation of the run."""
    w = {name.replace("attn._", "attn."): value.detach() for name, value in model.named_parameters()}
    for one in meanings:
        if isinstance(one, Weights):
            w |= {name.replace("attn._", "attn."): value for name, value in one.values.items()}
    cfg, kept = model.cfg, {} if keep is None else keep
    edges = [one for one in meanings if isinstance(one, Edges)]
    receivers: dict[Any, dict[Place, list[Callable[[Tensor], Tensor]]]] = {}
    for one in edges:
        for receiver, senders in one.to.items():
            for place, new in senders.items():
                receivers.setdefault(receiver, {}).setdefault(place, []).append(new)
    through_mlps = any(one.through_mlps for one in edges)

    def edited(site: str, layer: int | None, x: Tensor, scores: Tensor | None = None) -> Tensor:
        for one in meanings:
            if isinstance(one, Writing) and (site, layer) in one.at:
                x = one.at[site, layer](x)
            if isinstance(one, Pattern) and site == "pattern" and layer in one.at:
                x = one.at[layer](x, scores)
        if (site, layer) in (autoencoders or {}):
            sae, flat = autoencoders[site, layer], x.flatten(2)
            features = sae.encode(flat)
            error = known(f"error.{site}", layer, (flat - sae.decode(features)).reshape(x.shape))
            features = known(f"features.{site}", layer, features)
            written = sae.decode(edited(f"features.{site}", layer, features))
            x = written.reshape(x.shape) + edited(f"error.{site}", layer, error)
        return x

    def sent(world: Any, site: str, layer: int | None, x: Tensor) -> Tensor:
        """An activation of the run as a receiver hears it."""
        for new in receivers.get(world, {}).get((site, layer), ()):
            x = new(x)
        return x

    def norm(x: Tensor, name: str) -> Tensor:
        if cfg.normalization_type is None:
            return x
        if cfg.normalization_type == "RMS":
            return x / (x.pow(2).mean(-1, keepdim=True) + cfg.eps).sqrt() * w[f"{name}.w"]
        x = x - x.mean(-1, keepdim=True)
        return x / (x.pow(2).mean(-1, keepdim=True) + cfg.eps).sqrt() * w[f"{name}.w"] + w[f"{name}.b"]

    olmo2 = cfg.original_architecture == "Olmo2ForCausalLM"

    def before(x: Tensor, name: str) -> Tensor:
        return x if olmo2 else norm(x, name)

    def after(x: Tensor, name: str) -> Tensor:
        if cfg.use_normalization_before_and_after:
            return norm(x, f"{name}_post")
        return norm(x, name) if olmo2 else x

    def capped(x: Tensor, cap: float) -> Tensor:
        return cap * (x / cap).tanh() if cap > 0 else x

    def known(site: str, layer: int | None, x: Tensor) -> Tensor:
        kept[site, layer] = x
        return x

    worlds = [None, *receivers]
    embed = known("embed", None, edited("embed", None, w["embed.W_E"][tokens]))
    table = w["pos_embed.W_pos"][: tokens.shape[1]].expand(len(tokens), -1, -1)
    positions = known("pos_embed", None, edited("pos_embed", None, table))
    x = {a: sent(a, "embed", None, embed) + sent(a, "pos_embed", None, positions) for a in worlds}
    for layer in range(cfg.n_layers):
        path = f"blocks.{layer}"
        coming = x
        x = {a: edited("resid_pre", layer, x[a]) for a in worlds}
        known("resid_pre", layer, x[None])
        made = {}
        for site in "qkv":
            weight, bias = w[f"{path}.attn.W_{site.upper()}"], w[f"{path}.attn.b_{site.upper()}"]
            heads = []
            for head in range(len(weight)):
                reads = x[site, layer, head] if (site, layer, head) in receivers else x[None]
                heads.append(before(reads, f"{path}.ln1") @ weight[head] + bias[head])
            made[site] = known(site, layer, edited(site, layer, torch.stack(heads, 2)))
        q, k, v = (
            made[site][:, :, [head * made[site].shape[2] // HEADS for head in range(HEADS)]] for site in "qkv"
        )
        if olmo2:
            q, k = (
                (
                    y.flatten(2)
                    / (y.flatten(2).pow(2).mean(-1, keepdim=True) + cfg.eps).sqrt()
                    * w[f"{path}.attn.{site}_norm.w"]
                ).reshape(y.shape)
                for y, site in ((q, "q"), (k, "k"))
            )
        scores = capped(torch.einsum("bqhe,bkhe->bhqk", q, k) / math.sqrt(D_HEAD), cfg.attn_scores_soft_cap)
        if cfg.attention_dir == "causal":
            length = tokens.shape[1]
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
            if cfg.use_local_attn and cfg.attn_types[layer] == "local":
                far = torch.ones(length, length).tril(-cfg.window_size).bool()
                scores = scores.masked_fill(far, -math.inf)
        scores = known("scores", layer, edited("scores", layer, scores))
        pattern = known("pattern", layer, edited("pattern", layer, scores.softmax(-1), scores))
        z = known("z", layer, edited("z", layer, torch.einsum("bhqk,bkhe->bqhe", pattern, v)))
        attended = dict(x)
        for a in worlds:
            out = torch.einsum("bqhe,hed->bqd", sent(a, "z", layer, z), w[f"{path}.attn.W_O"])
            out = edited("attn_out", layer, after(out + w[f"{path}.attn.b_O"], f"{path}.ln1"))
            if a is None:
                known("attn_out", layer, out)
            x[a] = x[a] + sent(a, "attn_out", layer, out)
        if not cfg.attn_only:
            if not cfg.parallel_attn_mlp:
                coming = x
                attended = x = {a: edited("resid_mid", layer, x[a]) for a in worlds}
                known("resid_mid", layer, x[None])

            def neurons(stream: Tensor, path: str = path, layer: int = layer) -> Tensor:
                pre = before(stream, f"{path}.ln2") @ w[f"{path}.mlp.W_in"] + w[f"{path}.mlp.b_in"]
                pre = edited("mlp_pre", layer, pre)
                return edited("mlp_post", layer, pre.clamp(min=0))

            post = known("mlp_post", layer, neurons(attended.get(("mlp_pre", layer, None), attended[None])))
            x = dict(x)
            for a in worlds:
                # Only MLPs between the two recompute: before the sender, its world is the run.
                between = through_mlps and not (
                    torch.equal(coming[a], coming[None]) and torch.equal(attended[a], attended[None])
                )
                its = neurons(attended[a]) if between else post
                its = sent(a, "mlp_post", layer, its)
                out = after(its @ w[f"{path}.mlp.W_out"] + w[f"{path}.mlp.b_out"], f"{path}.ln2")
                out = edited("mlp_out", layer, out)
                if a is None:
                    known("mlp_out", layer, out)
                x[a] = x[a] + sent(a, "mlp_out", layer, out)
        if ("resid_post", layer, None) in receivers:
            x[None] = x["resid_post", layer, None]
        x = {a: edited("resid_post", layer, x[a]) for a in worlds}
        known("resid_post", layer, x[None])
    logits = norm(x[None], "ln_final") @ w["unembed.W_U"] + w["unembed.b_U"]
    return capped(logits, cfg.output_logits_soft_cap)


# ---- Random interventions, each with what it means


class Lab:
    """One model, its clean activations, and what can be drawn for it."""

    def __init__(
        self,
        make_model: Any,
        causal: bool,
        normed: bool,
        mlps: bool,
        layers: int,
        spliced: bool = False,
        **changes: Any,
    ) -> None:
        settings = {
            "family": "HookedTransformer",
            "attention_dir": "causal" if causal else "bidirectional",
            "normalization_type": "LN" if normed else None,
            "attn_only": not mlps,
            "n_layers": layers,
            "d_model": D_MODEL,
            "n_ctx": LENGTH,
            "d_head": D_HEAD,
            "n_heads": HEADS,
            "d_mlp": D_MLP,
            "d_vocab": VOCAB,
        }
        self.make = functools.partial(make_model, **settings | changes)
        self.parts = ["q", "qkv", "o", "attn", "embed", "pos_embed", "unembed", *["mlp"] * mlps]
        if changes.get("normalization_type", normed):
            self.parts += ["ln1", "ln", "ln_final", *["ln2"] * mlps]
        self.key_heads = changes.get("n_key_value_heads", HEADS)
        self.parallel = "parallel_attn_mlp" in changes
        self.model, self.donor = self.make(), self.make(seed=1)
        self.layers, self.mlps, self.causal = range(layers), mlps, causal
        per_layer = ["resid_pre", "q", "k", "v", "scores", "pattern", "z", "attn_out", "resid_post"]
        per_layer += ["mlp_post", "mlp_out"] if mlps else []
        per_layer += ["resid_mid"] if mlps and not self.parallel else []
        self.sites: list[Place] = [("embed", None), ("pos_embed", None)]
        self.sites += [(site, layer) for layer in self.layers for site in per_layer]
        widths = {"z": HEADS * D_HEAD}
        self.autoencoders: dict[Place, Linear] = {}
        if spliced:
            self.autoencoders = {
                (site, layer): Linear(widths.get(site, D_MODEL), at)
                for at, (site, layer) in enumerate(zip(SPLICED, self.layers, strict=True))
            }
        for site, layer in self.autoencoders:
            self.sites += [(f"features.{site}", layer), (f"error.{site}", layer)] * 3

    def in_line(self) -> AbstractContextManager[Any]:
        """A block in which the model has its autoencoders."""
        if not self.autoencoders:
            return nullcontext()
        return splice(self.model, {Site(*place): sae for place, sae in self.autoencoders.items()})

    def forward(self, tokens: Tensor, meanings: Any = (), keep: Any = None) -> Tensor:
        return forward(self.model, tokens, meanings, keep, self.autoencoders)

    def named(self, site: str, layer: int, head: int) -> Any:
        """A head of a site as it is given: where keys are shared, their group."""
        shared = site in ("k", "v") and self.key_heads < HEADS
        return f"{layer}.k{head}" if shared else [(layer, head)]

    @functools.cache  # noqa: B019 one for each model
    def clean(self, seed: int | str, batch: int = BATCH) -> dict[Place, Tensor]:
        found: dict[Place, Tensor] = {}
        self.forward(GRID if seed == "grid" else tokens_of(seed, batch), keep=found)
        return found


def selection(rng: random.Random) -> Any:
    """Query positions, as they are given."""
    how = rng.choice(["all", "all", "positions", "mask", "line"])
    if how == "positions":
        return rng.sample(range(-LENGTH, LENGTH), rng.randint(1, 2))
    if how == "all":
        return None
    shape = (BATCH, LENGTH) if how == "mask" else (LENGTH,)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(rng.randrange(10**6))) < 0.6
    mask[..., rng.randrange(LENGTH)] = True
    return mask


def where(x: Tensor, site: str, queries: Any, heads: Any = None, neurons: Any = None) -> Tensor:
    """bool, as x: what an edit of these replaces."""
    axis = 2 if site in ("scores", "pattern") else 1
    chosen = torch.zeros(len(x), x.shape[axis], dtype=torch.bool)
    if queries is None:
        chosen[:] = True
    elif isinstance(queries, Tensor):
        chosen[:] = queries
    else:
        chosen[:, queries] = True
    shape = [1] * x.ndim
    shape[0], shape[axis] = chosen.shape
    found = chosen.reshape(shape).expand(x.shape).clone()
    if heads is not None:
        others = [head for head in range(x.shape[3 - axis]) if head not in heads]
        found[(slice(None),) * (1 if axis == 2 else 2) + (others,)] = False
    if neurons is not None:
        found[..., [one for one in range(x.shape[-1]) if one not in neurons]] = False
    return found


def replaced(
    site: str, new: Callable[[Tensor], Tensor], queries: Any, heads: Any = None, neurons: Any = None
):
    """The activation with new values at some heads and positions."""

    def function(x: Tensor) -> Tensor:
        return torch.where(where(x, site, queries, heads, neurons), new(x).expand(x.shape), x)

    return function


def deranged(seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(BATCH, generator=generator).tolist()
        if all(row != one for row, one in enumerate(order)):
            return order


def some_heads(lab: Lab, rng: random.Random) -> dict[int, list[int]]:
    every = [(layer, head) for layer in lab.layers for head in range(HEADS)]
    found: dict[int, list[int]] = {}
    for layer, head in rng.sample(every, rng.randint(1, 2)):
        found.setdefault(layer, []).append(head)
    return found


def spec(heads: dict[int, list[int]]) -> list[tuple[int, int]]:
    return [(layer, head) for layer, those in heads.items() for head in those]


def some_place(lab: Lab, rng: random.Random) -> tuple[Any, list[tuple[str, int | None, Any]]]:
    """Heads, a site or a layer, as they are given to `ablate`; and the (site, layer, heads) that they mean."""
    how = rng.choice(["heads", "site", "layer"])
    if how == "heads":
        heads = some_heads(lab, rng)
        return spec(heads), [("z", layer, those) for layer, those in heads.items()]
    if how == "layer":
        layer = rng.choice(lab.layers)
        return layer, [("z", layer, None)] + ([("mlp_post", layer, None)] if lab.mlps else [])
    site, layer = rng.choice(lab.sites)
    return Site(site, layer), [(site, layer, None)]


def finite(x: Tensor, new: Tensor) -> Tensor:
    """Masked scores stay masked."""
    return torch.where(x.isneginf(), x, new)


def shift(x: Tensor) -> Tensor:
    return x + 0.5


def bend(x: Tensor) -> Tensor:
    return x.masked_fill(x.isneginf(), 0).tanh().masked_fill(x.isneginf(), -math.inf) * 1.5


def drawn(lab: Lab, seed: int) -> tuple[str, Any, Meaning]:
    """An intervention, and what it means."""
    rng = random.Random(seed)
    kinds = ["uniform", "zero", "mean", "resample", "patch", "edit", "transplant"]
    # Paths are refused where an autoencoder is in line.
    kinds += ["features"] * 4 if lab.autoencoders else ["path"] * 8 + ["circuit"] * 6
    kind = rng.choice(kinds)
    queries, other = selection(rng), rng.randint(1, 3)
    if kind == "uniform":
        heads = some_heads(lab, rng)
        # Through a window late queries see none of these keys, which is refused.
        keys = rng.choice([None] if lab.model.cfg.use_local_attn else [None, [0], [0, 2]])

        def equal(x: Tensor, scores: Tensor) -> Tensor:
            seen = ~scores.isneginf()
            if keys is not None:
                seen = seen & torch.tensor([key in keys for key in range(LENGTH)])
            return seen.double() / seen.sum(-1, keepdim=True)

        def at(those: list[int]) -> Callable[[Tensor, Tensor], Tensor]:
            return lambda x, scores: torch.where(where(x, "pattern", queries, those), equal(x, scores), x)

        return (
            kind,
            ablate.uniform(spec(heads), keys, positions=queries),
            Pattern({layer: at(those) for layer, those in heads.items()}),
        )
    if kind == "features":
        (site, layer), those = rng.choice([*lab.autoencoders]), rng.sample(range(FEATURES), 2)
        clean, order = lab.clean(other)[f"features.{site}", layer], deranged(other)
        how = rng.choice(["zero", "mean", "resample"])
        new = {"zero": torch.zeros(1), "mean": clean.mean(0), "resample": clean[order]}[how]
        extra = {
            "mean": {"reference": tokens_of(other)},
            "resample": {"source": tokens_of(other), "seed": other},
        }
        return (
            kind,
            ablate.features(Site(site, layer), those, how, **extra.get(how, {}), positions=queries),
            Writing(
                {
                    (f"features.{site}", layer): replaced(
                        "features", lambda x: new.double(), queries, None, those
                    )
                }
            ),
        )
    if kind in ("zero", "mean", "resample"):
        what, places = some_place(lab, rng)
        pooled = rng.random() < 0.3 and not any(site in ("scores", "pattern") for site, *_ in places)
        order = deranged(other)
        meaning = {}
        for site, layer, heads in places:
            clean = lab.clean(other)[site, layer]
            new = {
                "zero": lambda x: finite(x, torch.zeros_like(x)),
                "mean": lambda x, c=clean: c.mean((0, 1) if pooled else 0),
                "resample": lambda x, c=clean: c[order],
            }[kind]
            meaning[site, layer] = replaced(site, new, queries, heads)
        made = {
            "zero": lambda: ablate.zero(what, positions=queries),
            "mean": lambda: ablate.mean(
                what, tokens_of(other), "batch,pos" if pooled else "batch", positions=queries
            ),
            "resample": lambda: ablate.resample(what, tokens_of(other), seed=other, positions=queries),
        }[kind]()
        return kind, made, Writing(meaning)
    if kind == "transplant":
        part = rng.choice(lab.parts)
        names = {
            "qkv": "qkv",
            "attn": "qkvo",
        }.get(part, part)
        of_layers = part in ("q", "qkv", "o", "attn", "mlp", "ln1", "ln2")
        layer = rng.choice([None, *lab.layers]) if of_layers else None
        layers = lab.layers if layer is None else [layer]
        theirs = {name: value.detach() for name, value in lab.donor.named_parameters()}
        if part in ("mlp", "ln1", "ln2"):
            modules = [f"blocks.{at}.{part}{post}." for at in layers for post in ("", "_post")]
            chosen = {name for name in theirs if name.startswith(tuple(modules))}
        elif part == "ln":
            chosen = {name for name in theirs if re.search(r"\bln(1|2|1_post|2_post|_final)\.", name)}
        elif of_layers:
            shared = "_" if lab.key_heads < HEADS or lab.model.cfg.n_key_value_heads else ""
            chosen = {
                f"blocks.{at}.attn.{shared if one in 'kv' else ''}{letter}_{one.upper()}"
                for at in layers
                for one in names
                for letter in "Wb"
            }
        else:
            chosen = {name for name in theirs if name.startswith(f"{part}.")}
        return (
            kind,
            transplant.weights(lab.donor, part, layer),
            Weights({name: theirs[name] for name in chosen}),
        )
    site, layer = rng.choice(lab.sites)
    heads = (
        rng.choice([None, [rng.randrange(lab.key_heads if site in ("k", "v") else HEADS)]])
        if site in ("q", "k", "v", "scores", "pattern", "z")
        else None
    )
    given = None if heads is None else lab.named(site, layer, heads[0])
    if kind == "patch":
        one = rng.random() < 0.5
        source = lab.clean(other, 1 if one else BATCH)[site, layer]
        return (
            kind,
            patch.activations(
                Site(site, layer), tokens_of(other, 1 if one else BATCH), given, positions=queries
            ),
            Writing({(site, layer): replaced(site, lambda x: source, queries, heads)}),
        )
    if kind == "edit":
        function = rng.choice([shift, bend])
        return (
            kind,
            edit(Site(site, layer), function, given, positions=queries),
            Writing({(site, layer): replaced(site, function, queries, heads)}),
        )
    if kind == "circuit":
        return kept_or_cut(lab, rng, other)
    assert kind == "path"
    return path(lab, rng, queries, other)


def path(lab: Lab, rng: random.Random, queries: Any, other: int) -> tuple[str, Any, Meaning]:
    senders: list[tuple[Any, Place, Any, float]] = [("embed", ("embed", None), None, -1)]
    receivers: list[tuple[Any, list[tuple[str, int, int | None]], float]] = []
    for layer in lab.layers:
        for head in range(HEADS):
            senders.append(([(layer, head)], ("z", layer), [head], layer))
            if lab.key_heads == HEADS:
                receivers.append(([(layer, head)], [(site, layer, head) for site in "qkv"], layer))
            elif head < lab.key_heads:
                receivers.append((f"{layer}.k{head}", [(site, layer, head) for site in "kv"], layer))
            site = rng.choice("qkv")
            its = head % lab.key_heads if site in "kv" else head
            receivers.append(((site, lab.named(site, layer, its)), [(site, layer, its)], layer))
        site = rng.choice("qkv")
        count = lab.key_heads if site in "kv" else HEADS
        receivers.append((f"{site}.{layer}", [(site, layer, head) for head in range(count)], layer))
        senders += [(f"z.{layer}", ("z", layer), None, layer)]
        senders += [(f"attn_out.{layer}", ("attn_out", layer), None, layer + 0.1)]
        if lab.mlps:
            # In parallel blocks the MLP reads what attention reads.
            heard = layer if lab.parallel else layer + 0.2
            receivers.append((f"mlp_pre.{layer}", [("mlp_pre", layer, None)], heard))
            senders += [(f"mlp_post.{layer}", ("mlp_post", layer), None, layer + 0.2)]
            senders += [(f"mlp_out.{layer}", ("mlp_out", layer), None, layer + 0.3)]
    receivers += [("output", [("resid_post", lab.layers[-1], None)], len(lab.layers))] * 2
    sender, place, heads, since = rng.choice(senders)
    receiver, ends, _ = rng.choice([one for one in receivers if one[2] > since])
    source = lab.clean(other)[place]
    new = replaced(place[0], lambda x: source, queries, heads)
    mlps = "mlps" if rng.random() < 0.2 else None
    return (
        "path",
        patch.path(sender, receiver, tokens_of(other), mlps, positions=queries),
        Edges({end: {place: new} for end in ends}, mlps == "mlps"),
    )


def sender_of(name: str) -> tuple[Place, int | None]:
    """What a node of a circuit writes, and its head."""
    if name in ("embed", "pos_embed"):
        return (name, None), None
    if name.startswith("mlp"):
        return ("mlp_out", int(name[3:])), None
    layer, head = map(int, name.split("."))
    return ("z", layer), head


def receiver_of(lab: Lab, name: str) -> tuple[str, int, int | None]:
    if name == "output":
        return "resid_post", lab.layers[-1], None
    if name.startswith("mlp"):
        return "mlp_pre", int(name[3:]), None
    layer, head, site = name.split(".")
    return site, int(layer), int(head.removeprefix("k"))


def kept_or_cut(lab: Lab, rng: random.Random, other: int) -> tuple[str, Any, Meaning]:
    """A circuit, some of whose members are there at some positions."""
    of_edges, keep = rng.random() < 0.7, rng.random() < 0.5
    how = rng.choice(["resample", "resample", "mean", "zero"])
    one = how == "resample" and rng.random() < 0.3
    names, inside = [], {}
    share = rng.choice([0.05, 0.5, 0.95])
    every = list(circuit.full(lab.model, "edges" if of_edges else "nodes"))
    for name in every:
        at = torch.zeros(LENGTH, dtype=torch.bool)
        if rng.random() < share:
            some = sorted(rng.sample(range(LENGTH), rng.randint(1, LENGTH)))
            form = rng.choice(["all", "all", "these", "others"])
            listed = ",".join(map(str, some))
            names.append(name + {"all": "", "these": f" @ {listed}", "others": f" @ all but {listed}"}[form])
            at[some if form == "these" else slice(None)] = True
            if form == "others":
                at[some] = False
        inside[name] = at
    new = {}
    for place in lab.sites:
        clean = lab.clean(other, 1 if one else BATCH)[place]
        new[place] = {"resample": clean, "mean": clean.mean(0), "zero": torch.zeros_like(clean[:1])}[how]

    def function(place: Place, parts: list[tuple[int | None, Tensor]]) -> Callable[[Tensor], Tensor]:
        def onto(x: Tensor) -> Tensor:
            for head, at in parts:
                chosen = where(x, place[0], at, None if head is None else [head])
                x = torch.where(chosen, new[place].expand(x.shape), x)
            return x

        return onto

    cuts: dict[Any, dict[Place, list[tuple[int | None, Tensor]]]] = {}
    selected = {name.partition(" @ ")[0] for name in names if " @ " in name}
    for name in every:
        at = ~inside[name] if keep else inside[name]
        # Which positions a run has is not known when edges are compared: one with a selection counts as cut.
        if at.any() or name in selected:
            sender, _, receiver = name.partition(" -> ")
            place, head = sender_of(sender)
            end = receiver_of(lab, receiver) if of_edges else None
            cuts.setdefault(end, {}).setdefault(place, []).append((head, at))
    to = {
        end: {place: function(place, parts) for place, parts in senders.items()}
        for end, senders in cuts.items()
    }
    source = {} if how == "zero" else {"source": tokens_of(other, 1 if one else BATCH)}
    c = (circuit.edges if of_edges else circuit.nodes)(names)
    made = (c.keep if keep else c.cut)(how=how, **source)
    return "circuit", made, Edges(to, False) if of_edges else Writing(to.get(None, {}))


def parts_of(meaning: Edges) -> set[Any]:
    """The edges, a head's as its layer's, an MLP's neurons as its output."""
    same = {"attn_out": "z", "mlp_post": "mlp_out"}
    return {(same.get(s, s), at, end) for end, senders in meaning.to.items() for s, at in senders}


def fits(meanings: list[Meaning]) -> bool:
    """What is refused in one line is tested elsewhere: an edge cut twice, two ways through the MLPs."""
    paths = [one for one in meanings if isinstance(one, Edges)]
    edges = [part for one in paths for part in parts_of(one)]
    return len(set(edges)) == len(edges) and len({one.through_mlps for one in paths}) < 2


# ---- The test

LABS: list[Lab] = []


@pytest.fixture(autouse=True, scope="module")
def _labs(make_model):
    if "HookedTransformer" not in make_model.__globals__["FAMILIES"]:
        pytest.skip("the forward by hand is that of HookedTransformer")
    for normed in (True, False):
        for mlps in (True, False):
            LABS.extend(Lab(make_model, causal, normed, mlps, 2 if mlps else 3) for causal in (True, False))
    LABS.extend(Lab(make_model, True, True, True, 3, **changes) for changes in KINDS.values())
    LABS.extend(Lab(make_model, causal, True, True, 3, spliced=True) for causal in (True, False))
    yield
    LABS.clear()


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-10 * expected.abs().max().clamp(min=1))


def metric(output: Tensor) -> dict[str, Tensor]:
    flat = output.flatten(1)
    return {f"logit {entry}": flat[:, entry] for entry in range(0, flat.shape[1], 5)}


def table(lab: Lab, interventions: Any, engine: str, batch_size: int) -> Tensor:
    options = {"metric": metric, "engine": engine, "batch_size": batch_size, "draws": 2, "flips": 2}
    frame = sweep(lab.model, TOKENS, {"all": interventions, "again": interventions}, **options).frame
    frame = frame[frame["variant"] == "all"]
    return torch.tensor(frame["value"].to_numpy())


def check(number: int, seeds: list[int]) -> None:
    """One tuple of interventions, on each way to run it."""
    lab, rng = LABS[number % len(LABS)], random.Random(number)
    interventions: list[Any] = []
    meanings: list[Meaning] = []
    for seed in seeds:
        kind, intervention, meaning = drawn(lab, seed)
        if fits([*meanings, meaning]):
            interventions.append(intervention)
            meanings.append(meaning)
            event(kind)
    event(f"{sum(isinstance(one, Edges) for one in meanings)} paths")
    expected = lab.forward(TOKENS, meanings)
    with lab.in_line():
        compare(lab, rng, interventions, expected)


def compare(lab: Lab, rng: random.Random, interventions: list[Any], expected: Tensor) -> None:
    """Holds that they act as expected, at once, in nested blocks and in sweeps."""
    assert close(run(lab.model, TOKENS, *interventions), expected)
    with ExitStack() as stack, torch.no_grad():
        blocks = sorted({0, *(at for at in range(1, len(interventions)) if rng.random() < 0.5)})
        for start, end in zip(blocks, [*blocks[1:], len(interventions)], strict=True):
            stack.enter_context(intervene(lab.model, *interventions[start:end]))
        assert close(lab.model(TOKENS), expected)
    values = torch.stack([one.mean() for one in metric(expected).values()])
    for engine in ("naive", "auto"):
        assert close(table(lab, tuple(interventions), engine, rng.choice([1, 2, 16])), values)


tuples = st.integers(1, 6).flatmap(
    lambda count: st.lists(st.integers(0, 10**9), min_size=count, max_size=count, unique=True)
)


@given(number=st.integers(0, 10**6), seeds=tuples)
@some
def test_all_of_them_act_as_in_one_forward_by_hand(number, seeds):
    check(number, seeds)
