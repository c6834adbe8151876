"""Resumed runs against one full forward per variant with plain hooks, which is their oracle."""

import gc
import itertools
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from circuits import (
    CircuitsError,
    Prompts,
    Site,
    ablate,
    cache,
    draws,
    edit,
    heads,
    patch,
    permute,
    sweep,
    transplant,
)
from circuits.engine import memory, resume
from circuits.engine.stacks import stacked
from circuits.interventions.apply import planned
from circuits.model.surface import Surface

FEW = {"draws": 20, "flips": 20}

GEMMA = {
    "n_layers": 3,
    "normalization_type": "RMS",
    "use_normalization_before_and_after": True,
    "positional_embedding_type": "rotary",
    "n_key_value_heads": 2,
    "gated_mlp": True,
    "act_fn": "gelu_new",
    "attn_scores_soft_cap": 2.0,
    "output_logits_soft_cap": 3.0,
    "use_local_attn": True,
    "attn_types": ["local", "global", "local"],
    "window_size": 2,
}
LLAMA = {
    "n_layers": 3,
    "normalization_type": "RMS",
    "positional_embedding_type": "rotary",
    "n_key_value_heads": 2,
    "gated_mlp": True,
    "act_fn": "silu",
}
# Whose positions the replay does not know.
NOT_REPLAYED = {**LLAMA, "positional_embedding_type": "alibi"}
PARALLEL = {"n_layers": 3, "parallel_attn_mlp": True, "positional_embedding_type": "rotary"}
SHAPES = {
    "six layers": (
        {"n_layers": 6, "normalization_type": "LNPre"},
        ("HookedTransformer", "TransformerBridge"),
    ),
    "llama": (LLAMA, ("HookedTransformer", "TransformerBridge")),
    "gemma": (GEMMA, ("HookedTransformer",)),
    "parallel": (PARALLEL, ("HookedTransformer",)),
    "alibi": ({"n_layers": 3, "positional_embedding_type": "alibi"}, ("HookedTransformer",)),
    "attention only": ({"n_layers": 3, "attn_only": True}, ("HookedTransformer",)),
    "post-norm": ({"n_layers": 3, "norm": "post"}, ("HookedTransformer",)),
    "every hook on": (
        {"n_layers": 3, "use_attn_result": True, "use_split_qkv_input": True, "use_hook_mlp_in": True},
        ("HookedTransformer",),
    ),
}


def total(output):
    """A metric that tells outputs apart, example by example; padding, which is NaN, counts as 0."""
    weights = torch.linspace(-1, 2, output[0].numel(), dtype=output.dtype).reshape(output.shape[1:])
    return (output * weights).nan_to_num().flatten(1).sum(1)


def edits(model, tokens, other, donor):
    """Edits of every kind and site, alone and together; those that the model does not have are left out."""
    surface = Surface.of(model)
    last = surface.n_layers - 1
    mask = torch.rand(tokens.shape[:2], generator=torch.Generator().manual_seed(5)) < 0.5
    length = tokens.shape[1] if not isinstance(tokens, Prompts) else int(tokens.lengths.min())
    source = tokens[torch.arange(len(tokens)).roll(1)] if other is None else other

    def patches():
        for site in surface.site_names():
            per_layer = Site(site).kind.per_layer
            for layer in (0, 1, last) if per_layer else (None,):
                yield (
                    f"{site} {layer}",
                    lambda site=site, layer=layer: patch.activations(
                        Site(site, layer), source, positions=[0, length - 1]
                    ),
                )

    makers = {
        **{name: lambda name=name: ablate.zero(name) for name in ("0.1", "1.2", f"{last}.0", "0.3,1.1")},
        **(dict(patches()) if other is not None else {}),
        "function": lambda: edit("z.1", lambda z: z.reshape(len(z), -1).cumsum(1).reshape(z.shape)),
        "in place": lambda: edit(Site("attn_out", last), lambda x: x.mul_(1.5)),
        "two": lambda: (edit(Site("attn_out", 1), lambda x: -x), ablate.zero(f"{last}.1")),
        "same place twice": lambda: (edit("z.1", lambda z: z + 1), edit("z.1", lambda z: 2 * z, heads="1.0")),
        "uniform": lambda: ablate.uniform("1.0"),
        "uniform of edited scores": lambda: (ablate.zero(Site("scores", 1)), ablate.uniform("1.1")),
        "mask": lambda: ablate.zero("1.0-2", queries=mask),
        "mean": lambda: ablate.mean("1.1", reference=source),
        "mean pattern": lambda: ablate.mean_pattern("1.1", reference=source),
        "resample": lambda: ablate.resample("1.1", source=tokens, seed=3),
        "draws": lambda: draws(permute.positions, 2),
        "frequencies": lambda: ablate.frequencies("z.1", [1], [0, 1], 4, grid=GRID),
        "path": lambda: patch.path("1.1", "output", source),
        "path to an MLP": lambda: patch.path("0.2", f"mlp_pre.{last}", source),
        "path of an MLP to keys": lambda: patch.path(Site("mlp_out", 0), f"k.{last}", source),
        "path to heads of two layers": lambda: patch.path("0.1", f"1.2,{last}.0", source),
        "path of the embedding": lambda: patch.path("embed", ("q", f"{last}.2"), source),
        "path to a group": lambda: patch.path("0.1", f"{last}.k1", source),
        "paths of two senders": lambda: (
            patch.path("0.0", f"v.{last}", source),
            patch.path("0.1-2", f"v.{last}", tokens[torch.arange(len(tokens)).flip(0)]),
            patch.path("0.1", "q.1", source),
            patch.path("0.1", "output", source),
        ),
        "path and another edit": lambda: (patch.path("1.1", "output", source), ablate.zero("1.2")),
        "path through MLPs": lambda: patch.path("1.1", "output", source, "mlps"),
        "weights of a layer": lambda: transplant.weights(donor, ["attn"], [1]),
        "unembedding": lambda: transplant.weights(donor, ["unembed"]),
        "embedding": lambda: transplant.weights(donor, ["embed"]),
        "last norm": lambda: edit("ln_final.hook_normalized", lambda x: x * 1.5),
    }
    found = {}
    for name, make in makers.items():
        try:
            one = make()
            planned(one if isinstance(one, tuple) else getattr(one, "interventions", (one,)), surface)
        except CircuitsError:
            continue
        found[name] = one
    return found


GRID = torch.cartesian_prod(torch.arange(4), torch.arange(4))
GRID = torch.cat([GRID, (GRID.sum(1, keepdim=True) + torch.arange(4)) % 4 + 4], 1)


def of_type(dtype, model):
    model.cfg.dtype = dtype
    return model.to(dtype)


def same(model, tokens, given, tolerance, **options):
    resumed, naive = (
        sweep(model, tokens, given, metric=total, engine=engine, **options, **FEW)
        for engine in ("resumed", "naive")
    )
    assert set(resumed.frame["engine"]) == {"resumed"}
    largest = naive.frame["effect"].abs().max()
    assert largest > 0
    for column in ("value", "effect", "baseline", "value_ci_low", "effect_ci_high"):
        assert (resumed.frame[column] - naive.frame[column]).abs().max() <= tolerance * largest, column
    assert list(resumed.frame["null_effect"]) == list(naive.frame["null_effect"])
    return resumed


@pytest.fixture(params=[(name, kind) for name, (_, kinds) in SHAPES.items() for kind in kinds], ids=str)
def shaped(request, make_model):
    name, kind = request.param
    if kind not in make_model.__globals__["FAMILIES"]:
        pytest.skip(f"the installed transformer-lens has no {kind}")
    return make_model, {"family": kind, **SHAPES[name][0]}


def test_equal_to_plain_hooks(shaped):
    make, settings = shaped
    model, donor = make(seed=3, **settings), make(seed=4, **settings)
    rows = GRID[torch.randperm(len(GRID), generator=torch.Generator().manual_seed(1))]
    given = edits(model, rows[:6], rows[6:12], donor)
    # Chunks of four examples and of two, up to three variants in a stack.
    assert len(given) > 35
    same(model, rows[:6], given, 1e-10, chunk=72)


def test_single_precision_and_positions(make_model, hooked_only):
    model = of_type(torch.float32, make_model(3, hooked_only, **LLAMA))
    tokens = GRID[3:11]
    given = edits(model, tokens, GRID[:8], of_type(torch.float32, make_model(4, hooked_only, **LLAMA)))
    # Sums over all positions lose more digits than the outputs that they are of.
    found = same(model, tokens, given, 1e-5, positions=[5], chunk=10**6)
    assert found.settings["engines"]["0.1"] == {"fast": 'engine="resumed"'}


@pytest.mark.parametrize("name", ["gpt2", "pythia", "llama", "gemma2", "qwen3", "gptj", "opt", "bert"])
def test_bridges_around_hugging_face_models(hf_model, name):
    model = hf_model(name)
    generator = torch.Generator().manual_seed(1)
    tokens, other = (torch.randint(3, 50, (4, 5), generator=generator) for _ in range(2))
    given = edits(model, tokens, other, hf_model(name))
    given = {
        name: one for name, one in given.items() if name not in ("frequencies", "embedding", "unembedding")
    }
    given.pop("weights of a layer", None)
    same(model, tokens, given, 1e-10, chunk=60)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["HookedTransformer", "TransformerBridge", "gpt2", "llama"])
def test_padding(make_model, hf_model, name, side):
    families = make_model.__globals__["FAMILIES"]
    if name == "HookedTransformer" and name not in families:
        pytest.skip(f"the installed transformer-lens has no {name}")
    model = make_model(3, name, **LLAMA) if name.endswith(("er", "ge")) else hf_model(name)
    lengths, generator = torch.tensor([6, 4, 6, 3]), torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 11, (4, 6), generator=generator)
    real = torch.arange(6) < lengths[:, None]
    prompts = Prompts(tokens, real if side == "right" else real.flip(1))
    given = edits(model, prompts, None, model)
    given = {
        key: one
        for key, one in given.items()
        if not key.startswith(("weights", "un", "emb", "freq", "res", "draws", "path"))
    }
    same(model, prompts, given, 1e-10, chunk=24)

    def nan_where_padded(output):
        assert torch.equal(~output.isnan().any(-1), prompts.mask)
        return total(output)

    sweep(model, prompts, {"a": ablate.zero("1.1")}, metric=nan_where_padded, engine="resumed", **FEW)


def test_checkpoints_are_resumed_by_themselves(make_model, hooked_only, tokens):
    model, states = make_model(0, hooked_only, **LLAMA), [make_model(s, hooked_only, **LLAMA) for s in (1, 2)]
    given = ablate.each(ablate.zero, heads("all", model))
    labelled = {str(at): one.state_dict() for at, one in enumerate(states)}
    same(model, tokens, given, 1e-10, checkpoints=labelled)


# ---- What is run


@pytest.fixture
def block_rows(monkeypatch, hooked_only):
    """Counts the rows that go through attention, block by block, and the calls."""
    from transformer_lens.components.abstract_attention import AbstractAttention

    rows, calls = Counter(), Counter()
    forward = AbstractAttention.forward

    def counted(self, query_input, *args, **kwargs):
        rows[self.layer_id] += len(query_input)
        calls[self.layer_id] += 1
        return forward(self, query_input, *args, **kwargs)

    monkeypatch.setattr(AbstractAttention, "forward", counted)
    return rows, calls


@pytest.mark.parametrize("chunk", [10**6, 5 * 6 * 8])
def test_the_blocks_that_run(make_model, hooked_only, tokens, block_rows, monkeypatch, chunk):
    monkeypatch.setitem(memory.CALL, "cpu", 0)
    layers, heads_, batch = 4, 4, len(tokens)
    model = make_model(0, hooked_only, **{**LLAMA, "n_layers": layers})
    given = ablate.each(ablate.zero, heads("all", model))
    rows, calls = block_rows
    sweep(model, tokens, given, metric=total, chunk=chunk, engine="resumed", **FEW)
    width = chunk // tokens.numel()
    for layer in range(layers):
        starts = layer + 1  # blocks in which a variant that runs this one may begin
        # Clean, alone in the check; perturbed, and twice alone; every variant that begins here or before.
        expected = batch + (batch + 2 * 2 if layer else 0) + 2 + starts * heads_ * batch
        # And the unedited copy, which begins in the first block.
        assert rows[layer] == expected + batch, layer
        stacks = sum(-(-(heads_ + (start == 0)) // width) for start in range(starts))
        assert calls[layer] == 2 + (2 if layer else 0) + stacks


@pytest.mark.parametrize("settings", [LLAMA, GEMMA, PARALLEL], ids=["llama", "gemma", "parallel"])
def test_edges_run_no_block_before_their_receivers(
    make_model, hooked_only, block_rows, monkeypatch, settings
):
    """Beside the clean pass: the block of each sender once, and of every edge the receiver's block and later ones."""
    monkeypatch.setitem(memory.CALL, "cpu", 0)
    layers, batch = 3, 4
    model = make_model(0, hooked_only, **settings)
    generator = torch.Generator().manual_seed(4)
    tokens, source = (torch.randint(0, 11, (batch, 6), generator=generator) for _ in range(2))
    senders = ("embed", "0.0", "0.2", Site("mlp_out", 0))
    given = {
        f"{sender} -> {receiver}": patch.path(sender, receiver, source)
        for sender in senders
        for receiver in (("q", "2.1"), "k.2", ("q", "2.0,2.2"), "mlp_pre.2", "output")
    }
    rows, _ = block_rows
    assert not same(model, tokens, given, 1e-10, chunk=10**6).frame["null_effect"].any()
    rows.clear()
    sweep(model, tokens, given, metric=total, engine="resumed", chunk=10**6, **FEW)
    into_last = sum(not name.endswith("output") for name in given)
    # Clean, on the source, perturbed, and alone for its senders; no check, as no run begins with it.
    assert rows[0] == batch + batch + 2 + batch
    assert rows[1] == batch + batch + 2
    # Alone in the check and twice perturbed; the edges that end here, and an unedited copy.
    assert rows[layers - 1] == batch + batch + 2 + batch + 2 * 2 + (into_last + 1) * batch


def test_few_senders_at_a_time(make_model, hooked_only, block_rows, monkeypatch):
    """Of as many senders as variants fit in a stack: their changes of the stream are in memory together."""
    monkeypatch.setitem(memory.CALL, "cpu", 0)
    model = make_model(0, hooked_only, **LLAMA)
    generator = torch.Generator().manual_seed(4)
    tokens, source = (torch.randint(0, 11, (4, 6), generator=generator) for _ in range(2))
    receivers = ("q.2", "k.2", "mlp_pre.2", "output")
    given = {
        f"0.{head} -> {receiver}": patch.path(f"0.{head}", receiver, source)
        for receiver in receivers
        for head in range(4)
    }
    same(model, tokens, given, 1e-10, chunk=2 * tokens.numel())
    rows, _ = block_rows
    rows.clear()
    sweep(model, tokens, given, metric=total, engine="resumed", chunk=2 * tokens.numel(), **FEW)
    assert rows[0] == 4 + 4 + 2 + 2 * 4  # clean, on the source, perturbed, and twice for two senders


@pytest.mark.parametrize("side", ["left", "right"])
def test_edges_of_padded_prompts(make_model, family, side):
    model = make_model(3, family, **{**LLAMA, "n_key_value_heads": None})
    real = torch.arange(6) < torch.tensor([6, 4, 6, 3])[:, None]
    generator = torch.Generator().manual_seed(1)
    base, source = (
        Prompts(torch.randint(3, 11, (4, 6), generator=generator), real if side == "right" else real.flip(1))
        for _ in range(2)
    )
    given = {
        f"{sender} -> {receiver}": patch.path(sender, receiver, source)
        for sender in ("embed", "0.1")
        for receiver in ("k.2", "1.1", "mlp_pre.1", "output")
    }
    same(model, base, given, 1e-10)


def test_stacks_are_the_cheapest():
    generator = torch.Generator().manual_seed(0)

    def cost(sizes, starts, layers, per_call):
        at, found = 0, 0.0
        for size in sizes:
            found += (layers + 1 - starts[at]) * (size + per_call)
            at += size
        return found

    def divisions(count, width):
        if count == 0:
            yield ()
        for size in range(1, min(count, width) + 1):
            for rest in divisions(count - size, width):
                yield (size, *rest)

    seen = set()
    for _ in range(40):
        count, layers, width = (int(torch.randint(1, 8, (), generator=generator)) for _ in range(3))
        starts = torch.randint(0, layers + 1, (count,), generator=generator).tolist()
        per_call = float(torch.rand((), generator=generator)) * 4
        found = stacked(starts, layers, width, per_call)
        assert sorted(itertools.chain.from_iterable(one.members for one in found)) == list(range(count))
        assert all(one.start == min(starts[at] for at in one.members) for one in found)
        sizes = [len(one.members) for one in found]
        assert max(sizes) <= width
        best = min(cost(each, sorted(starts), layers, per_call) for each in divisions(count, width))
        assert cost(sizes, sorted(starts), layers, per_call) == pytest.approx(best)
        seen.add(len(sizes) < len(set(starts)))
    assert seen == {True, False}


def test_floating_point_operations(make_model, hooked_only, monkeypatch):
    """At least 0.9 of them are those of a clean pass, and of each variant from its block on."""
    monkeypatch.setitem(memory.CALL, "cpu", 0)
    layers = 12
    sizes = {"n_heads": 12, "d_model": 48, "d_head": 4, "d_mlp": 192, "n_ctx": 16, "d_vocab": 20}
    settings = {**LLAMA, **sizes, "n_layers": layers, "n_key_value_heads": 4}
    model = of_type(torch.float32, make_model(0, hooked_only, **settings))
    tokens = torch.randint(0, 20, (4, 16), generator=torch.Generator().manual_seed(0))

    def flops(function):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            function()
        return counter.get_total_flops()

    whole = flops(lambda: model(tokens))
    unembed = 2 * 4 * 16 * 48 * 20
    block = (whole - unembed) / layers
    exact = whole + sum(12 * ((layers - layer) * block + unembed) for layer in range(layers))
    given = ablate.each(ablate.zero, heads("all", model))
    found = sweep(model, tokens, given, metric=total, engine="resumed", **FEW)
    assert set(found.frame["engine"]) == {"resumed"}
    used = flops(lambda: sweep(model, tokens, given, metric=total, engine="resumed", **FEW))
    assert 0.9 <= exact / used <= 1


def test_half_precision(make_model, hooked_only, block_rows):
    rows, _ = block_rows
    model = of_type(torch.float32, make_model(0, hooked_only, **{**LLAMA, "n_layers": 4}))
    tokens = torch.randint(0, 11, (8, 6), generator=torch.Generator().manual_seed(1))
    given = ablate.each(ablate.zero, heads("all", model))
    sweep(model, tokens, given, metric=total, engine="resumed", **FEW)
    single = sum(rows.values())
    model = of_type(torch.bfloat16, model)
    naive = sweep(model, tokens, given, metric=lambda out: total(out.float()), engine="naive", **FEW)
    rows.clear()
    found = sweep(model, tokens, given, metric=lambda out: total(out.float()), engine="resumed", **FEW)
    largest = naive.frame["effect"].abs().max()
    assert (found.frame["effect"] - naive.frame["effect"]).abs().max() <= 0.05 * largest
    # Rounding is measured, so that most variants are not run once more.
    assert sum(rows.values()) < single + 0.5 * len(given) * 4 * len(tokens)


# ---- Which engine


def test_the_fastest_that_fits(make_model, hooked_only, tokens, other_tokens):
    model = make_model(0, hooked_only, n_layers=6)
    given = {
        **ablate.each(ablate.zero, ["0.1", "3.2"]),
        **{
            str(layer): transplant.weights(make_model(1, hooked_only, n_layers=6), ["mlp"], [layer])
            for layer in (3, 4, 5)
        },
        **{f"path {head}": patch.path(f"5.{head}", "output", other_tokens) for head in range(4)},
    }
    found = sweep(model, tokens, given, metric=total, **FEW)
    engines = found.frame.set_index("variant")["engine"]
    assert set(engines[["0.1", "3.2"]]) == {"fast"}
    assert set(engines.drop(["0.1", "3.2"])) == {"resumed"}
    assert found.settings["naive"] == {}
    assert found.settings["engines"]["3"] == {"fast": "it edits weights"}
    naive = sweep(model, tokens, given, metric=total, engine="naive", **FEW)
    assert (found.frame["effect"] - naive.frame["effect"]).abs().max() <= 1e-10 * naive.frame[
        "effect"
    ].abs().max()


def test_it_does_not_resume_where_that_saves_nothing(make_model, hooked_only, tokens):
    model = make_model(0, hooked_only, **LLAMA)
    given = {"a": transplant.weights(make_model(1, hooked_only, **LLAMA), ["qkv"], [0])}
    found = sweep(model, tokens, given, metric=total, **FEW)
    assert set(found.frame["engine"]) == {"naive"}
    assert found.settings["engines"]["a"]["resumed"] == "to resume would take no fewer blocks"
    found = sweep(model, tokens, given, metric=total, engine="resumed", **FEW)
    assert set(found.frame["engine"]) == {"resumed"}


class Remembers(nn.Module):
    """An MLP that keeps what it makes."""

    def __init__(self, inner, memory):
        super().__init__()
        self.inner, self.memory = inner, memory

    def forward(self, x):
        self.memory["made"] = self.inner(x)
        return self.memory["made"]


class Recalls(Remembers):
    """An MLP of a later block that adds what an earlier one has kept, where a condition holds."""

    where = None

    def forward(self, x):
        made = self.memory["made"]
        return self.inner(x) + (made if self.where is None else torch.where(self.where(x), made, 0.0))


class Centres(Remembers):
    """An MLP that takes the mean over the examples away."""

    where = None

    def forward(self, x):
        made = self.inner(x)
        centred = made - made.mean(0)
        return centred if self.where is None else torch.where(self.where(x), centred, made)


class Drops(Remembers):
    """An MLP with dropout that evaluation does not switch off."""

    def forward(self, x):
        return nn.functional.dropout(self.inner(x), 0.1, training=True)


def unusual(model, kind):
    memory = {}
    middle = kind.startswith("rare")
    model.blocks[0].mlp = Remembers(model.blocks[0].mlp, memory)
    made = {"state": Recalls, "batch": Centres, "chance": Drops}[kind.split()[-1]]
    last = made(model.blocks[2].mlp, memory)
    if middle:
        # Only where the stream is that of an example which is neither the first nor the last.
        seen = cache(model, torch.full((1, 6), 10), ["resid_mid.2"])["resid_mid.2"]
        norm = model.blocks[2].ln2(seen)
        last.where = lambda x: ((x - norm).abs() < 1e-6).all(-1, keepdim=True).all(1, keepdim=True)
    model.blocks[2].mlp = last
    return model


@pytest.mark.parametrize("kind", ["state", "batch", "chance", "rare state"])
def test_blocks_that_are_not_by_themselves_are_not_resumed(make_model, hooked_only, kind):
    tokens = torch.randint(0, 10, (8, 6), generator=torch.Generator().manual_seed(1))
    tokens[4] = 10
    given = ablate.each(ablate.zero, heads("all", make_model(0, hooked_only, **LLAMA)))
    model = unusual(make_model(0, hooked_only, **LLAMA), kind)
    with pytest.raises(CircuitsError, match=r"engine='resumed': .*use engine='auto'"):
        sweep(model, tokens, given, metric=total, engine="resumed", **FEW)
    found = sweep(model, tokens, given, metric=total, **FEW)
    assert set(found.frame["engine"]) == {"naive"}
    assert found.settings["engines"]["0.1"]["resumed"].startswith("block 2 d")


def test_rows_that_see_each_other_beside_edited_ones(make_model, hooked_only):
    """The streams of single blocks show it in no example that is checked; the unedited copy among edited ones does."""
    tokens = torch.randint(0, 10, (8, 6), generator=torch.Generator().manual_seed(1))
    model = make_model(0, hooked_only, **LLAMA)
    given = ablate.each(ablate.zero, heads("all", model))
    inner = model.blocks[2].mlp

    class Crowded(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            made = self.inner(x)
            return made if len(x) <= 8 else made + 0.1 * (made - made.mean(0))

    model.blocks[2].mlp = Crowded()
    found = sweep(model, tokens, given, metric=total, **FEW)
    assert set(found.frame["engine"]) == {"naive"}
    assert "an unedited run beside edited ones" in found.settings["engines"]["0.1"]["resumed"]


def test_hooks_of_others_and_runs_inside_a_run(make_model, hooked_only, tokens):
    model = make_model(0, hooked_only, **NOT_REPLAYED)
    given = ablate.each(ablate.zero, heads("all", model))
    handle = model.blocks[1].hook_resid_mid.register_forward_hook(lambda *_: None)
    with pytest.raises(CircuitsError, match=r"there is a hook on blocks.1.hook_resid_mid"):
        sweep(model, tokens, given, metric=total, engine="resumed", **FEW)
    handle.remove()
    model.add_hook("blocks.1.hook_resid_mid", lambda x, hook: x)
    with pytest.raises(CircuitsError, match=r"there is a hook on blocks.1.hook_resid_mid"):
        sweep(model, tokens, given, metric=total, engine="resumed", **FEW)
    model.reset_hooks()
    depth = []

    def calls_the_model(z):
        depth.append(1)
        scale = model(tokens).mean() if len(depth) == 1 else 1.0
        depth.pop()
        return z * scale

    inside = edit("z.2", calls_the_model)
    with pytest.raises(CircuitsError, match="an edit runs the model inside its run; use engine='auto'"):
        sweep(model, tokens, {**given, "inside": inside}, metric=total, engine="resumed", **FEW)


@pytest.mark.parametrize("engine", ["auto", "naive"])
def test_a_hook_that_never_fires_is_an_error_as_with_plain_hooks(make_model, hooked_only, tokens, engine):
    model = make_model(0, hooked_only, **LLAMA)
    given = {str(n): edit("blocks.2.attn.hook_result", lambda x: x) for n in range(20)}
    with pytest.raises(CircuitsError, match="hook_result never fired"):
        sweep(model, tokens, given, metric=total, engine=engine, **FEW)


def test_the_passes_of_senders_are_gone_as_they_end(make_model, hooked_only, monkeypatch):
    """Activations that only a collection of cycles would free add up, as the collector counts no bytes."""
    model = make_model(0, hooked_only, **LLAMA)
    generator = torch.Generator().manual_seed(4)
    tokens, source = (torch.randint(0, 11, (4, 6), generator=generator) for _ in range(2))
    given = {f"0.{head} -> output": patch.path(f"0.{head}", "output", source) for head in range(4)}
    collecting, calls = resume.collecting, []

    def noting(surface, senders, groups, call):
        calls.append(weakref.ref(call))
        return collecting(surface, senders, groups, call)

    monkeypatch.setattr(resume, "collecting", noting)
    gc.disable()
    try:
        sweep(model, tokens, given, metric=total, engine="resumed", **FEW)
        assert calls
        assert not any(call() for call in calls)
    finally:
        gc.enable()


def test_nothing_is_left_on_the_model(make_model, hooked_only, tokens):
    model = make_model(0, hooked_only, **LLAMA)
    with torch.no_grad():
        before = model(tokens)

    def fails(z):
        raise KeyboardInterrupt

    for function in (lambda z: 2 * z, fails):
        try:
            sweep(model, tokens, {"a": edit("z.2", function)}, metric=total, engine="resumed", **FEW)
        except KeyboardInterrupt:
            assert function is fails
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(tokens), before)
