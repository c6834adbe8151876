"""The fast engine against one full forward per variant with plain hooks, which is its oracle."""

import copy
import functools
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from circuits import (
    CircuitsError,
    Prompts,
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
    run,
    sweep,
    transplant,
)
from circuits.engine.branches import branch_of
from circuits.engine.engine import Engine
from circuits.engine.replay import Replay
from circuits.interventions.apply import planned
from circuits.model.surface import Surface

ENGINES = ("auto", "naive")
# Of the statistics, which are the same function for both engines.
FEW = {"draws": 50, "flips": 50}

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
    "post-norm": {"norm": "post", "n_layers": 3, "attention_dir": "bidirectional", "act_fn": "gelu"},
    "post-norm, attention-only": {"norm": "post", "attn_only": True},
    "RMS": {"normalization_type": "RMS", "final_rms": True, "act_fn": "silu"},
}


@pytest.fixture(params=SHAPES)
def shaped(request, family, make_model):
    if family != "HookedTransformer" and "norm" in SHAPES[request.param]:
        pytest.skip("only HookedTransformer has a post-norm form")
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
                # The first, one inside and the last: what the others add is only time.
                {"head": heads("all", model), "positions": (0, tokens.shape[1] // 2, tokens.shape[1] - 1)},
            ).items()
        },
        "mean": ablate.mean("0.1, 0.2", reference=other),
        "mean over all": ablate.mean(Site("z", last), reference=other, over="batch,pos"),
        "mean pattern": ablate.mean_pattern("all", reference=other),
        "mean pattern of the edited": ablate.mean_pattern("all", reference=other, of="edited"),
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
        for column in ("value", "effect", "baseline", "value_ci_low", "effect_ci_high"):
            assert (ours[column] - rows[column]).abs().max() <= tolerance * largest, (metric, column)
    assert list(fast.frame["null_effect"]) == list(naive.frame["null_effect"])


def total(output):
    """A metric that tells outputs apart, example by example."""
    weights = torch.linspace(-1, 2, output[0].numel(), dtype=output.dtype).reshape(output.shape[1:])
    return (output * weights).flatten(1).sum(1)


def test_equal_to_plain_hooks(shaped, tokens, other_tokens):
    given = variants(shaped, tokens, other_tokens)
    fast = sweep(shaped, tokens, given, metric=total, **FEW)
    naive = sweep(shaped, tokens, given, metric=total, engine="naive", **FEW)
    assert set(fast.frame["engine"]) == {"fast"}
    assert set(naive.frame["engine"]) == {"naive"}
    same(fast, naive, 1e-10)


def test_in_single_precision(make_model, family, tokens, other_tokens):
    model = make_model(3, family).to(torch.float32)
    model.cfg.dtype = torch.float32
    given = variants(model, tokens, other_tokens)
    fast = sweep(model, tokens, given, metric=total, engine="fast", **FEW)
    same(fast, sweep(model, tokens, given, metric=total, engine="naive", **FEW), 1e-5)


@pytest.mark.parametrize(("chunks", "positions"), [((6, 100), [0, 3]), ((30, 10**6), [5])])
def test_positions_and_chunks(make_model, tokens, other_tokens, positions, chunks):
    model, tokens, other_tokens = make_model(3), tokens[:4], other_tokens[:4]
    given = variants(model, tokens, other_tokens)
    seen = []

    def read(output):
        seen.append(output)
        return total(output[:, positions])

    settings = {"metric": read, "positions": positions, **FEW}
    fast = [sweep(model, tokens, given, engine="fast", chunk=chunk, **settings) for chunk in chunks]
    for output in seen:
        finite = output.isfinite().all(-1).all(0)
        assert finite.nonzero().flatten().tolist() == positions
    naive = sweep(model, tokens, given, engine="naive", **settings)
    for one in fast:
        same(one, naive, 1e-10)


def test_without_a_metric(make_model, family, tokens):
    model = make_model(3, family)
    given = ablate.each(ablate.zero, heads("all", model))
    for positions in (None, [2]):
        fast, naive = (
            sweep(model, tokens, given, positions=positions, engine=one) for one in ("fast", "naive")
        )
        same(fast, naive, 1e-10)


def test_what_each_variant_moves_is_large_enough_to_be_compared(shaped, tokens, other_tokens):
    """Otherwise equal would mean little: every kind of edit moves the output by 1% of its s.d. at least."""
    given = variants(shaped, tokens, other_tokens)
    clean = shaped(tokens)
    for name, one in given.items():
        if name.startswith("source "):
            # By head and position: of these some move what few positions read.
            continue
        for each in getattr(one, "interventions", [one]):
            with intervene(shaped, *(each if isinstance(each, tuple) else [each])):
                moved = (shaped(tokens) - clean).std()
            # Positions that a causal model reads first have nothing to move.
            assert moved > 0.01 * clean.std() or "queries" in name or "position" in name, name


REASONS = {
    "weights": lambda model, other: transplant.weights(other, ["qkv"]),
    "another site": lambda model, other: edit("ln_final.hook_normalized", lambda x: 2 * x),
}


def test_what_it_does_not_know_runs_with_plain_hooks(make_model, hooked_only, tokens):
    model, other = make_model(3), make_model(4)
    given = {"head": ablate.zero("0.1"), **{name: make(model, other) for name, make in REASONS.items()}}
    result = sweep(model, tokens, given)
    engines = result.frame.groupby("variant", sort=False)["engine"].first()
    assert dict(engines) == {"head": "fast", "weights": "naive", "another site": "naive"}
    assert list(engines.index) == list(given)
    assert result.settings["naive"] == {
        "weights": "it edits weights",
        "another site": "ln_final.hook_normalized is not replayed",
    }
    naive = sweep(model, tokens, given, engine="naive")
    same(
        sweep(model, tokens, given, metric=total),
        sweep(model, tokens, given, metric=total, engine="naive"),
        1e-10,
    )
    assert list(naive.frame["variant"]) == list(result.frame["variant"])
    with pytest.raises(
        CircuitsError, match="engine='fast': variant 'weights': it edits weights; use engine='auto'"
    ):
        sweep(model, tokens, given, engine="fast")


@pytest.mark.parametrize("where", ["blocks.0.attn.hook_z", "blocks.1", ""])
def test_hooks_of_others_are_not_passed_over(make_model, family, tokens, where):
    model = make_model(3, family)
    given = ablate.each(ablate.zero, heads("all", model))
    handle = model.get_submodule(where).register_forward_hook(lambda module, inputs, output: None)
    result = sweep(model, tokens, given)
    assert set(result.frame["engine"]) == {"naive"}
    (reason,) = set(result.settings["naive"].values())
    # A bridge's modules have several names.
    assert reason.startswith("there is a hook on ")
    assert reason.endswith(
        (where or "the model") if "Bridge" not in family else ("hook_in", "blocks.1", "component", "model")
    )
    handle.remove()
    assert set(sweep(model, tokens, given).frame["engine"]) == {"fast"}


def test_hooks_of_the_model_class_count(make_model, hooked_only, tokens):
    model = make_model(3)
    given = ablate.each(ablate.zero, heads("all", model))
    model.add_hook("blocks.1.attn.hook_z", lambda z, hook: 1.5 * z)
    same(
        sweep(model, tokens, given, metric=total),
        sweep(model, tokens, given, metric=total, engine="naive"),
        0,
    )


def test_inside_a_block_it_runs_naive(make_model, family, tokens):
    model = make_model(3, family)
    given = ablate.each(ablate.zero, heads("all", model))
    with intervene(model, ablate.uniform("1.2")):
        result = sweep(model, tokens, given, metric=total)
    assert set(result.frame["engine"]) == {"naive"}
    assert not sweep(model, tokens, given, metric=total).frame["value"].equals(result.frame["value"])


CHANGES = {
    "an activation function": lambda model: setattr(model.blocks[1].mlp, "act_fn", torch.tanh),
    "a finite mask": lambda model: model.blocks[1].attn.register_buffer("IGNORE", torch.tensor(-1.0)),
    "eps": lambda model: setattr(model.ln_final, "eps", 0.1),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_model_that_computes_something_else_is_found_out(make_model, hooked_only, tokens, what):
    model = make_model(3)
    CHANGES[what](model)
    given = ablate.each(ablate.zero, heads("all", model))
    result = sweep(model, tokens, given, metric=total)
    assert set(result.frame["engine"]) == {"naive"}
    (reason,) = set(result.settings["naive"].values())
    assert reason.startswith("the replay of two examples differs from the model at ")
    same(result, sweep(model, tokens, given, metric=total, engine="naive"), 0)


def test_no_effect_is_none_exactly(make_model, family, tokens):
    """Stacked and single forwards differ by rounding, which must not pass for an effect."""
    model = make_model(3, family)
    last = model.cfg.n_layers - 1
    given = {
        "the same": edit("z", lambda z: z.clone()),
        "of another position": ablate.zero(Site("z", last), queries=[1]),
        "its own activation": patch.activations("z.0", tokens),
        "an effect": ablate.zero("0.1"),
        "a small one": edit("z.0", lambda z: z * (1 + 1e-12)),
    }

    def metric(output):
        return {"last": output[:, -1].sum(-1), "all": output.flatten(1).sum(1)}

    for engine in ("fast", "naive"):
        frame = sweep(model, tokens, given, metric=metric, engine=engine).frame
        null = frame.set_index(["variant", "metric"])["null_effect"]
        assert null.to_dict() == {
            ("the same", "last"): True,
            ("the same", "all"): True,
            ("of another position", "last"): True,
            ("of another position", "all"): False,
            ("its own activation", "last"): True,
            ("its own activation", "all"): True,
            ("an effect", "last"): False,
            ("an effect", "all"): False,
            ("a small one", "last"): False,
            ("a small one", "all"): False,
        }, engine
        assert bool((frame["effect"] == 0).eq(frame["null_effect"]).all())


def test_modes_hooks_and_gradients_are_as_before(make_model, family, tokens, other_tokens):
    model = make_model(3, family)
    model.train()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    sweep(model, tokens, variants(model, tokens, other_tokens), metric=total, engine="fast")
    assert model.training
    assert torch.is_grad_enabled()
    assert all(bool((value == model.state_dict()[name]).all()) for name, value in weights.items())
    assert set(sweep(model, tokens, {"a": ablate.zero("0.1")}).frame["engine"]) == {"fast"}


def test_memory_is_reported(make_model, family, tokens):
    model = make_model(3, family)
    given = ablate.each(ablate.zero, heads("all", model))
    small, large = (sweep(model, tokens, given, chunk=chunk).settings["bytes"] for chunk in (6, 10**6))
    # z and the residual stream of one example; and, at the least, of eight, with those of eight heads' streams; beside
    # both a copy of the weights, by which writes to them are noticed.
    copied = sum(held.nbytes for held in (*model.parameters(), *model.buffers()))
    example, stream = 2 * 2 * 6 * 16 * 8, 6 * 16 * 8
    assert small - copied >= example
    assert large - copied >= 8 * (example + 8 * stream)
    assert large > 2 * small


def test_floating_point_operations(make_model, hooked_only):
    """Per head: what it adds, its layer's MLP, the later layers and the read-out; and one clean pass."""
    from torch.utils.flop_counter import FlopCounterMode

    sizes = {
        "n_layers": 4,
        "n_heads": 4,
        "d_model": 64,
        "d_head": 16,
        "d_mlp": 256,
        "n_ctx": 8,
        "d_vocab": 50,
    }
    model = make_model(0, hooked_only, **sizes)
    tokens = torch.randint(0, 50, (32, 8), generator=torch.Generator().manual_seed(0))

    def flops(function):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            function()
        return counter.get_total_flops()

    batch, pos, d_model, d_head, d_mlp, heads_, layers = 32, 8, 64, 16, 256, 4, 4
    rows = batch * pos
    mlp = 2 * rows * 2 * d_model * d_mlp
    block = mlp + 2 * rows * 4 * d_model**2 + 2 * 2 * batch * heads_ * pos * pos * d_head
    unembed = 2 * rows * d_model * 50
    clean = layers * block + unembed
    assert flops(lambda: model(tokens)) == clean
    two_examples = flops(lambda: model(tokens[:2]))
    # Once through the model itself, once through the replay.
    bound = 2 * clean + sum(
        heads_ * (mlp + (layers - 1 - layer) * block + unembed + 2 * rows * d_model**2)
        for layer in range(layers)
    )
    every = heads("all", model)
    # The self-check: two examples through the replay.
    check = two_examples
    given = {
        "zero": (ablate.each(ablate.zero, every), 0),
        "uniform": (ablate.each(ablate.uniform, every), 0),
        "patch": (ablate.each(lambda head: patch.activations("z", tokens.flip(0), heads=head), every), clean),
        "mean": (ablate.each(lambda head: ablate.mean(head, reference=tokens), every), clean),
    }
    for name, (grid_, passes) in given.items():
        counted = flops(
            lambda grid_=grid_: sweep(model, tokens, grid_, metric=total, engine="fast", draws=1, flips=1)
        )
        assert counted - check <= 1.10 * (bound + passes), name
        # And not so few that something was left out.
        assert counted - check >= 0.98 * (bound + passes), name


def test_a_stack_has_as_many_tokens_as_are_computed(make_model, hooked_only, tokens, monkeypatch):
    """Two heads in a chunk, and more of the last layer, where no other positions are computed than those read."""
    model = make_model(0, n_layers=3)
    sizes, whole = [], Engine._run_batch

    def counting(self, batch, *given):
        sizes.append([branch.start[0] for branch in batch.branches])
        return whole(self, batch, *given)

    def metric(output):
        return output[:, -1].square().sum(1)

    monkeypatch.setattr(Engine, "_run_batch", counting)
    given = ablate.each(ablate.zero, heads("all", model))
    options = {"metric": metric, "positions": [-1], "chunk": 2 * tokens.numel(), **FEW}
    found = sweep(model, tokens, given, engine="fast", **options)
    assert sizes == [[0, 0], [0, 0], [1, 1], [1, 1], [2, 2, 2, 2]]
    expected = sweep(model, tokens, given, engine="naive", **options)
    np.testing.assert_allclose(found.frame["effect"], expected.frame["effect"], rtol=1e-9)
    # An edit behind attention there makes all positions count.
    sizes.clear()
    sweep(model, tokens, {**given, "mlp": ablate.zero("mlp_post.2")}, engine="fast", **options)
    assert sizes == [[0, 0], [0, 0], [1, 1], [1, 1], [2, 2], [2, 2], [2]]


@contextmanager
def watching(model, called=lambda batches: None):
    """The batch of every run of the model, from a hook that only looks on, as torch's own do."""
    batches = []

    def look(module, inputs):
        if module is model:
            batches.append(len(inputs[0]))
            called(batches)

    look.__module__ = "torch.utils."
    handle = torch.nn.modules.module.register_module_forward_pre_hook(look)
    try:
        yield batches
    finally:
        handle.remove()


def test_forwards_of_the_model(make_model, hooked_only, tokens, other_tokens):
    """One to compare with and one per reference for each chunk, however many variants there are."""
    model = make_model(3)
    given = ablate.each(lambda head: patch.activations("z", other_tokens, heads=head), heads("all", model))
    with watching(model) as batches:
        sweep(model, tokens, given, metric=total, engine="fast")
    assert batches == [8, 8]
    with watching(model) as batches:
        sweep(model, tokens, given, metric=total, engine="fast", chunk=3 * tokens.shape[1])
    # The source comes after the first chunk's comparison, all of it, in forwards as large as the run's own.
    assert batches == [3, *(3, 3, 2), 3, 2]


def test_checkpoints(make_model, family, tokens):
    """Each with its own weights, from a model, a state_dict, or a function that loads one when its turn comes."""
    model, others = make_model(3, family), [make_model(seed, family) for seed in (4, 5, 6)]
    given = ablate.each(ablate.zero, heads("all", model))
    loaded = []

    def load():
        loaded.append(True)
        return others[2].state_dict()

    at = {"model": others[0], "state_dict": others[1].state_dict(), "loader": load}
    result = sweep(model, tokens, given, metric=total, checkpoints=at)
    assert set(result.frame["engine"]) == {"fast"}
    assert loaded == [True]
    for label, other in zip(at, others, strict=True):
        alone = sweep(other, tokens, given, metric=total)
        rows = result.frame[result.frame["checkpoint"] == label]
        assert np.abs(rows["value"].to_numpy() - alone.frame["value"].to_numpy()).max() < 1e-12


def altered(monkeypatch, change):
    """The replay, as if it were of a model that computes something else."""
    plain = Replay.of

    def of(surface, weights=None, length=None):
        return change(plain(surface, weights, length))

    monkeypatch.setattr(Replay, "of", staticmethod(of))


def limited(monkeypatch):
    """As if of a model that limits a bias, of which some checkpoints have more than its limit."""
    altered(
        monkeypatch,
        lambda replay: replace(
            replay, unembed=replace(replay.unembed, bias=replay.unembed.bias.clamp(max=3.0))
        ),
    )


def test_weights_that_a_checkpoint_adds_are_found_out(make_model, hooked_only, tokens, monkeypatch):
    """What is not replayed may be nothing at first: every checkpoint is compared with its replay."""
    model = make_model(3)
    limited(monkeypatch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    at = {"before": before, "after": {**before, "unembed.b_U": torch.arange(11.0, dtype=torch.float64)}}
    given = ablate.each(ablate.zero, heads("all", model))
    found = {
        engine: sweep(model, tokens, given, metric=total, checkpoints=at, engine=engine) for engine in ENGINES
    }
    engines = found["auto"].frame.groupby("checkpoint", sort=False)["engine"].unique()
    assert [list(used) for used in engines] == [["fast"], ["naive"]]
    same(found["auto"], found["naive"], 1e-10)


def test_mixed_precision_runs_naive(make_model, hooked_only, tokens):
    model = make_model(3)
    unused = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32))
    model.register_parameter("unused", unused)
    result = sweep(model, tokens, {"head": ablate.zero("0.1")}, metric=total)
    assert result.settings["naive"] == {"head": "mixed precision is not replayed"}


def test_a_metric_that_works_in_place(make_model, family, tokens):
    model = make_model(3, family)
    given = {"nothing": edit("z", lambda z: z.clone()), "head": ablate.zero("0.1")}

    def metric(output):
        output *= 2
        output += 1
        return total(output)

    fast, naive = (sweep(model, tokens, given, metric=metric, engine=engine) for engine in ENGINES)
    assert set(fast.frame["engine"]) == {"fast"}
    same(fast, naive, 1e-10)


@pytest.mark.parametrize("positions", [None, [5]])
def test_examples_that_an_edit_leaves_as_they_are(make_model, family, tokens, positions):
    """Their effect is none, and rounding gives it no sign: p-values are those of plain hooks."""
    # In double precision the test of signs takes rounding for ties.
    model = make_model(3, family).to(torch.float32)
    model.cfg.dtype = torch.float32
    same_but = tokens.clone()
    same_but[:3] = (same_but[:3] + 1) % 11
    given = ablate.each(lambda head: patch.activations("z", same_but, heads=head), heads("all", model))

    def metric(output):
        return {"first": output[:, -1, 0], "right": (output[:, -1].argmax(-1) == 2).double()}

    fast, naive = (
        sweep(model, tokens, given, metric=metric, engine=one, positions=positions) for one in ENGINES
    )
    assert set(fast.frame["engine"]) == {"fast"}
    # 2^5 arrangements of the examples that are left as they are, all equal to the observed one.
    first = naive.frame[naive.frame["metric"] == "first"]
    assert (first["p_value"] >= 32 / 256).all()
    assert (fast.frame["p_value"] - naive.frame["p_value"]).abs().max() < 1e-12


@pytest.mark.parametrize("fill", [-torch.inf, torch.nan])
def test_queries_that_see_nothing(make_model, family, tokens, fill):
    """Both engines do as the model class does: HookedTransformer forgives NaN, a bridge minus infinity alone."""
    model = make_model(3, family)
    given = {"blind": edit("scores.0", lambda scores: torch.full_like(scores, fill), positions=[2])}
    if family == "TransformerBridge" and fill != fill:
        for engine in ("fast", "naive"):
            with pytest.raises(CircuitsError, match="variant 'blind': the output is not finite"):
                sweep(model, tokens, given, metric=total, engine=engine)
        return
    fast, naive = (sweep(model, tokens, given, metric=total, engine=one) for one in ("fast", "naive"))
    same(fast, naive, 1e-10)


@pytest.mark.parametrize("site", ["q", "k", "v", "z", "scores", "pattern", "attn_out", "pos_embed"])
def test_a_function_gets_an_activation_it_can_view(make_model, family, tokens, site):
    model = make_model(3, family)
    at = site if site == "pos_embed" else Site(site, 1)
    viewed = edit(at, lambda x: x.view(-1).mul(1.5).view(x.shape))
    # Scores are computed for all variants of a stack where one of them edits some.
    given = {"viewed": viewed, "scores": (ablate.zero(Site("scores", 1)), viewed)}
    assert set(sweep(model, tokens, given, metric=total, engine="fast").frame["engine"]) == {"fast"}


def test_what_the_clean_pass_keeps_is_all_that_it_holds(make_model, family, tokens):
    """No view of something larger, which would stay in memory with it."""
    model = make_model(3, family)
    surface = Surface.of(model)
    plans = [planned((ablate.uniform(head),), surface) for head in heads("all", model)]
    branches = [branch_of(index, plan, surface.n_layers) for index, plan in enumerate(plans)]
    with torch.no_grad():
        _, kept = Engine(surface, Prompts(tokens), None).clean(tokens, branches)
    parts = (kept.before, kept.at_z, kept.between, kept.z, kept.v, kept.mlp_out)
    tensors = [x for part in parts for x in part.values()]
    assert sum(x.untyped_storage().nbytes() for x in tensors) == kept.nbytes
    assert kept.nbytes > 0


def test_settings_that_do_not_fit_the_weights(make_model, tokens):
    """A bridge runs by its weights, and its settings may say something else."""
    model = make_model(3, "TransformerBridge")
    model.cfg.d_head = 8
    result = sweep(model, tokens, {"head": ablate.zero("0.1")}, metric=total)
    assert result.settings["naive"] == {"head": "its weights have other shapes than its settings say"}


def deep(make_model, family, scale=6.0):
    """Twelve layers in single precision, whose large attention weights make much of every rounding."""
    model = make_model(1, family, n_layers=12)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".attn.W_" in name or (".attn." in name and name.endswith(".weight")):
                weight.mul_(scale)
    model = model.to(torch.float32)
    model.cfg.dtype = torch.float32
    return model


def test_a_deep_replay_in_single_precision(make_model, family, tokens):
    """Rounding grows from layer to layer, to more than 1e-5 of the output: each layer is compared by itself."""
    model = deep(make_model, family)
    with torch.no_grad():
        apart = (copy.deepcopy(model).double()(tokens) - model(tokens)).abs().max() / model(
            tokens
        ).abs().max()
    assert apart > 1e-5
    result = sweep(model, tokens, {"0.1": ablate.zero("0.1")}, metric=total)
    assert set(result.frame["engine"]) == {"fast"}


def _without(replay, layer, share):
    """The MLP of a layer less a part of its output bias."""
    blocks = list(replay.blocks)
    mlp = blocks[layer].mlp
    outer = replace(mlp.outer, bias=(1 - share) * mlp.outer.bias)
    blocks[layer] = replace(blocks[layer], mlp=replace(mlp, outer=outer))
    return replace(replay, blocks=tuple(blocks))


@pytest.mark.parametrize(
    ("what", "layer"), [("a bias", 0), ("a bias", 11), ("a part of a bias", 11), ("eps", 0)]
)
def test_a_deep_replay_that_is_slightly_wrong(make_model, hooked_only, tokens, monkeypatch, layer, what):
    model = deep(make_model, hooked_only)
    if what == "eps":
        with torch.no_grad():
            # Where the residual stream is small eps counts: what other libraries have instead of 1e-5.
            for weight in (model.embed.W_E, model.pos_embed.W_pos):
                weight.mul_(0.05)
        model.blocks[0].ln1.eps = 1e-6
    else:
        share = 1.0 if what == "a bias" else 0.02
        altered(monkeypatch, lambda replay: _without(replay, layer, share))
    result = sweep(model, tokens, {"0.1": ablate.zero("0.1")}, metric=total)
    where = "blocks.0.attn.hook_z" if what == "eps" else f"blocks.{layer}.hook_resid_post"
    reason = result.settings["naive"].get("0.1", "none")
    assert reason.startswith(f"the replay of two examples differs from the model at {where} by ")


# ---- Stacked checkpoints


def stackable(model, tokens, other):
    """Every kind of edit that is stacked."""
    last = model.cfg.n_layers - 1
    mask = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(5)) < 0.5
    found = {
        "zero": ablate.zero("0.1"),
        "last": ablate.zero(Site("z", last)),
        "uniform": ablate.uniform("0.1", queries=mask),
        "mean": ablate.mean("0.1, 0.2", reference=other),
        "resample": ablate.resample("all", source=tokens, seed=3),
        "pattern": ablate.mean_pattern("all", reference=other),
        "uniform of edited scores": (ablate.zero(Site("scores", 0)), ablate.uniform("0.1")),
        "keys": patch.activations("k", other, heads="0.3"),
        "queries": patch.activations(Site("q", last), other, heads=f"{last}.3"),
        "stream": patch.activations(Site("resid_pre", last), other, positions=[2]),
        "after": patch.activations(Site("resid_post", last), other, positions=[5]),
        "embed": ablate.zero("embed", queries=[1]),
        "its own": patch.activations("z.0", tokens),
    }
    if not model.cfg.attn_only:
        found["neurons"] = ablate.neurons(last, [1, 5, 7], how="mean", reference=other)
        found["layer"] = ablate.zero(0)
    return found


@pytest.mark.parametrize(
    ("shape", "positions", "dtype"),
    [
        ("causal", [5], torch.float64),
        ("causal", None, torch.float32),
        ("bidirectional", None, torch.float64),
        ("attention-only", [5], torch.float64),
        ("RMS", None, torch.float64),
    ],
)
def test_stacked_checkpoints_equal_plain_hooks(
    make_model, family, tokens, other_tokens, shape, positions, dtype
):
    tokens, other_tokens = tokens[:3], other_tokens[:3]
    states = {}
    for seed in range(5):
        model = make_model(seed, family, **SHAPES[shape]).to(dtype)
        model.cfg.dtype = dtype
        states[str(seed)] = copy.deepcopy(model.state_dict())
    given = stackable(model, tokens, other_tokens)

    def read(output):
        return total(output if positions is None else output[:, positions])

    # Room for three: the first is alone, then come three and one.
    options = {"metric": read, "positions": positions, "checkpoints": states, **FEW}
    fast = sweep(model, tokens, given, engine="fast", chunk=3 * tokens.numel() * len(given), **options)
    naive = sweep(model, tokens, given, engine="naive", **options)
    assert (fast.settings["stacked"], naive.settings["stacked"]) == (3, 1)
    assert list(fast.frame["checkpoint"]) == list(naive.frame["checkpoint"])
    same(fast, naive, 1e-10 if dtype == torch.float64 else 1e-5)
    # Checkpoints are told apart: no two give the same numbers.
    assert fast.frame[fast.frame["variant"] == "zero"]["value"].nunique() == 5


def test_a_stack_is_bounded_and_its_memory_is_reported(make_model, family, tokens):
    model = make_model(0, family)
    states = [(str(seed), make_model(seed, family).state_dict()) for seed in range(6)]
    given = ablate.each(ablate.zero, heads("all", model))
    found = {}
    for room in (1, 2, 4):
        chunk = room * tokens.numel() * len(given)
        found[room] = sweep(
            model, tokens, given, metric=total, checkpoints=states, chunk=chunk, **FEW
        ).settings
        assert found[room]["stacked"] == room
    weights = sum(value.numel() * 8 for value in model.parameters())
    assert found[1]["bytes"] + 2 * 2 * weights <= found[2]["bytes"] < found[4]["bytes"] - 2 * 2 * weights


def test_stacked_checkpoints_are_asked_for_as_they_are_needed(make_model, family, tokens):
    """No more than fit into a stack; and what was measured belongs to them, though the state_dict is used again."""
    model, training = make_model(0, family), make_model(0, family)
    given = {"zero": ablate.zero("0.1"), "uniform": ablate.uniform("0.2")}
    asked, calls = [], []

    def states():
        for seed in range(8):
            asked.append(seed)
            training.load_state_dict(make_model(seed, family).state_dict())
            yield seed, training.state_dict()

    def metric(output):
        calls.append((len(asked), len(output)))
        # A metric may run the model, which then has the weights of the checkpoint that is measured.
        return total(output) + 10 * total(run(model, tokens))

    chunk = 3 * tokens.numel() * len(given)
    result = sweep(model, tokens, given, metric=metric, checkpoints=states(), chunk=chunk, **FEW)
    assert set(result.frame["engine"]) == {"fast"}
    # Once for each variant and the unedited model.
    assert calls == [(1, 8)] * 3 + [(4, 8)] * 9 + [(7, 8)] * 9 + [(8, 8)] * 3
    for seed in range(8):
        rows = result.frame[result.frame["checkpoint"] == str(seed)].set_index("variant")["value"]
        alone = make_model(seed, family)
        for name, edited in given.items():
            expected = (total(run(alone, tokens, edited)) + 10 * total(run(alone, tokens))).mean()
            assert abs(rows[name] - expected) < 1e-9


def test_one_checkpoint_of_a_stack_that_is_not_replayed(make_model, hooked_only, tokens, monkeypatch):
    """The others of its stack are, and the reason is told."""
    model = make_model(3)
    limited(monkeypatch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    at = {str(step): before for step in range(4)}
    at["2"] = {**before, "unembed.b_U": torch.arange(11.0, dtype=torch.float64)}
    given = ablate.each(ablate.zero, heads("all", model))
    found = [sweep(model, tokens, given, metric=total, checkpoints=at, engine=one, **FEW) for one in ENGINES]
    engines = found[0].frame.groupby("checkpoint", sort=False)["engine"].unique()
    assert [list(used) for used in engines] == [["fast"], ["fast"], ["naive"], ["fast"]]
    assert "differs from the model at the output" in next(iter(found[0].settings["naive"].values()))
    same(*found, 1e-10)
    with pytest.raises(CircuitsError, match="the replay of two examples differs from the model"):
        sweep(model, tokens, given, metric=total, checkpoints=at, engine="fast")


@pytest.mark.parametrize("fails", [False, True])
def test_a_stack_goes_through_the_model_once(make_model, hooked_only, tokens, fails):
    """With all its weights; the parameters are the model's own again, also after Ctrl-C."""
    model = make_model(0)
    states = {str(seed): make_model(seed).state_dict() for seed in range(5)}
    before = [(id(weight), weight.detach().clone()) for weight in model.parameters()]

    def interrupted(batches):
        if fails and len(batches) == 2:
            raise KeyboardInterrupt

    given = {"zero": ablate.zero("0.1")}
    with watching(model, interrupted) as batches:
        if fails:
            with pytest.raises(KeyboardInterrupt):
                sweep(model, tokens, given, metric=total, checkpoints=states, **FEW)
        else:
            result = sweep(model, tokens, given, metric=total, checkpoints=states, **FEW)
            assert result.settings["stacked"] == 4
            assert set(result.frame["engine"]) == {"fast"}
    assert batches == [8, 8]
    for weight, (same_one, value) in zip(model.parameters(), before, strict=True):
        assert id(weight) == same_one
        assert torch.equal(weight, value)


def test_edits_that_run_the_model_are_not_stacked(make_model, family, tokens, other_tokens):
    """Or that are functions, which may: they would see it with the weights of no checkpoint."""
    model = make_model(0, family)
    states = {str(seed): make_model(seed, family).state_dict() for seed in range(4)}

    def scaled(z):
        return z * next(model.parameters()).abs().mean()

    given = {"function": edit("z.0", scaled)}
    for name, one in given.items():
        fast, naive = (
            sweep(model, tokens, {name: one}, metric=total, checkpoints=states, engine=engine, **FEW)
            for engine in ENGINES
        )
        assert fast.settings["stacked"] == 1
        assert set(fast.frame["engine"]) == {"fast"}
        same(fast, naive, 1e-10)


# ---- Code that is not the library's, and what two examples do not show


PADDING = 10


class Padded(torch.nn.Module):
    """An embedding that is nothing for padding."""

    def __init__(self, inner):
        super().__init__()
        self.W_E = inner.W_E

    def forward(self, tokens):
        return self.W_E[tokens] * (tokens != PADDING)[..., None]


class Doubling(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def patched(embed):
    """Its forward on this object, its class as it was."""
    plain = embed.forward
    embed.forward = lambda tokens: plain(tokens) * (tokens != PADDING)[..., None]


def inherits(embed):
    embed.__class__ = type(
        "Embed", (type(embed),), {"forward": lambda self, x: self.W_E[x] * (x != PADDING)[..., None]}
    )


FOREIGN = {
    "a module": (
        lambda model: setattr(model, "embed", Padded(model.embed)),
        "its class Padded is not the library's",
    ),
    "an object": (lambda model: patched(model.embed), "embed has a forward of its own"),
    "a subclass": (lambda model: inherits(model.embed), "its class Embed is not the library's"),
    "a parametrization": (
        lambda model: torch.nn.utils.parametrize.register_parametrization(model.embed, "W_E", Doubling()),
        "the model has no weight embed.W_E",
    ),
    "a method": (
        lambda model: setattr(
            model.blocks[0].attn,
            "calculate_z_scores",
            lambda *given: type(model.blocks[0].attn).calculate_z_scores(model.blocks[0].attn, *given),
        ),
        "blocks.0.attn has a calculate_z_scores of its own",
    ),
}


def padded_tokens(count=8):
    """Padding in the middle examples alone."""
    tokens = torch.randint(0, PADDING, (count, 6), generator=torch.Generator().manual_seed(1))
    tokens[3, 2:] = PADDING
    return tokens


@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.parametrize("stacked", [False, True])
def test_code_that_is_not_the_librarys_runs_naive(make_model, hooked_only, what, stacked):
    model, tokens = make_model(3), padded_tokens()
    change, reason = FOREIGN[what]
    change(model)
    given = ablate.each(ablate.zero, heads("all", model))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    # Parametrized weights have other names than the table of what a state_dict may hold.
    at = {str(step): state for step in range(4)} if stacked else None
    fast, naive = (
        sweep(model, tokens, given, metric=total, checkpoints=at, engine=one, **FEW) for one in ENGINES
    )
    assert set(fast.frame["engine"]) == {"naive"}
    assert fast.settings["naive"]["0.0"] == reason
    same(fast, naive, 0)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_class_whose_forward_was_replaced_runs_naive(make_model, hooked_only, monkeypatch, wrapped):
    model, tokens = make_model(3), padded_tokens()
    kind = type(model.embed)
    plain = kind.forward

    def forward(self, tokens):
        return plain(self, tokens) * (tokens != PADDING)[..., None]

    monkeypatch.setattr(kind, "forward", functools.wraps(plain)(forward) if wrapped else forward)
    given = ablate.each(ablate.zero, heads("all", model))
    fast, naive = (sweep(model, tokens, given, metric=total, engine=one, **FEW) for one in ENGINES)
    assert fast.settings["naive"]["0.0"] == "Embed.forward is not the library's"
    same(fast, naive, 0)


class Declared(torch.nn.Module):
    """An embedding of a user's own, which is what the table says."""

    tokens_enter_by_embeddings_alone = True

    def __init__(self, inner):
        super().__init__()
        self.W_E = inner.W_E

    def forward(self, tokens):
        return self.W_E[tokens]


class Lying(torch.nn.Module):
    """It says so too, and is nothing for padding."""

    tokens_enter_by_embeddings_alone = True

    def __init__(self, inner):
        super().__init__()
        self.W_E = inner.W_E

    def forward(self, tokens):
        return self.W_E[tokens] * (tokens != PADDING)[..., None]


class Heir(Declared):
    """What its base says it has not said."""

    def forward(self, tokens):
        return super().forward(tokens)


def test_a_class_of_ones_own_that_declares_itself_is_replayed(make_model, hooked_only):
    tokens = padded_tokens()
    for kind, reason in ((Declared, None), (Heir, "its class Heir is not the library's")):
        model = make_model(3)
        model.embed = kind(model.embed)
        given = ablate.each(ablate.zero, heads("all", model))
        found, naive = (sweep(model, tokens, given, metric=total, engine=one, **FEW) for one in ENGINES)
        assert set(found.frame["engine"]) == {"naive" if reason else "fast"}
        assert found.settings["naive"].get("0.0") == reason
        same(found, naive, 1e-10)


def test_a_declared_class_whose_methods_are_of_another_module_runs_naive(
    make_model, hooked_only, monkeypatch
):
    """It has not declared what somebody else has put there."""
    model, tokens = make_model(3), padded_tokens()
    model.embed = Declared(model.embed)
    plain = Declared.forward
    elsewhere: dict = {"__name__": "elsewhere", "plain": plain, "PADDING": PADDING}
    exec("def forward(self, x): return plain(self, x) * (x != PADDING)[..., None]", elsewhere)
    monkeypatch.setattr(Declared, "forward", elsewhere["forward"])
    given = {"0.1": ablate.zero("0.1")}
    found, naive = (sweep(model, tokens, given, metric=total, engine=one, **FEW) for one in ENGINES)
    assert found.settings["naive"]["0.1"] == "Declared.forward is not the library's"
    same(found, naive, 0)


@pytest.mark.parametrize("chunk", [10**6, 12])
def test_a_class_that_declares_what_it_does_not_keep_is_met_in_its_chunk(make_model, hooked_only, chunk):
    """The two examples that are looked at layer by layer have no padding."""
    model, tokens = make_model(3), padded_tokens()
    model.embed = Lying(model.embed)
    given = ablate.each(ablate.zero, heads("all", model))
    found, naive = (
        sweep(model, tokens, given, metric=total, engine=one, chunk=chunk, **FEW) for one in ENGINES
    )
    assert found.settings["naive"]["0.0"].startswith("the replay of a chunk differs from the model at ")
    assert set(found.frame["engine"]) == {"naive"}
    same(found, naive, 0)
    plain = tokens.where(tokens != PADDING, 0)
    assert set(sweep(model, plain, given, metric=total, **FEW).frame["engine"]) == {"fast"}


def without_padding(replay):
    """As if of a model that has another embedding of padding."""
    embed = replay.embed.clone()
    embed[..., PADDING, :] = 0
    return replace(replay, embed=embed)


@pytest.mark.parametrize("chunk", [10**6, 12, 18])
def test_what_two_examples_do_not_show_is_met_in_its_chunk(make_model, family, monkeypatch, chunk):
    """In the first chunk or a later one: then all of them run naive, those that were measured before too."""
    model, tokens = make_model(3, family), padded_tokens()
    altered(monkeypatch, without_padding)
    given = {**ablate.each(ablate.zero, heads("0.0-2", model)), "weights": transplant.weights(model, ["qkv"])}
    fast = sweep(model, tokens, given, metric=total, chunk=chunk, **FEW)
    naive = sweep(model, tokens, given, metric=total, engine="naive", chunk=chunk, **FEW)
    assert set(fast.frame["engine"]) == {"naive"}
    assert list(fast.settings["naive"]) == list(given)
    assert fast.settings["naive"]["0.0"].startswith("the replay of a chunk differs from the model at ")
    assert fast.settings["naive"]["weights"] == "it edits weights"
    same(fast, naive, 0)
    with pytest.raises(
        CircuitsError, match=r"engine='fast': the replay of a chunk differs .*; use engine='auto'"
    ):
        sweep(model, tokens, {"a": ablate.zero("0.1")}, metric=total, engine="fast", chunk=chunk, **FEW)
    # Without padding the altered replay is the model's.
    plain = tokens.where(tokens != PADDING, 0)
    assert set(sweep(model, plain, ablate.each(ablate.zero, ["0.1"]), metric=total).frame["engine"]) == {
        "fast"
    }


def test_what_two_examples_do_not_show_in_a_stack(make_model, family, monkeypatch):
    model, tokens = make_model(0, family), padded_tokens()
    altered(monkeypatch, without_padding)
    states = {str(seed): make_model(seed, family).state_dict() for seed in range(4)}
    tokens[0], tokens[-1] = tokens[3], tokens[3]
    plain = tokens.where(tokens != PADDING, 0)
    middle = plain.clone()
    middle[3] = tokens[3]
    given = ablate.each(ablate.zero, heads("0.0-2", model))
    for batch, engine in ((plain, "fast"), (middle, "naive")):
        found, naive = (
            sweep(model, batch, given, metric=total, checkpoints=states, engine=one, **FEW) for one in ENGINES
        )
        assert set(found.frame["engine"]) == {engine}
        same(found, naive, 1e-10)


@pytest.mark.parametrize("bias", [0.0, 1e2, 1e4, 1e6])
def test_a_head_that_is_large(make_model, family, tokens, bias):
    """What is left of the residual stream when it goes has all its digits."""
    model = make_model(3, family).to(torch.float32)
    model.cfg.dtype = torch.float32
    with torch.no_grad():
        (values,) = (
            weight
            for name, weight in model.named_parameters()
            if name.replace("_original_component.", "").endswith(("blocks.0.attn.b_V", "0.attn.v.bias"))
        )
        values.view(4, 4)[1] += bias
    given = {
        **ablate.each(ablate.zero, heads("all", model)),
        "uniform": ablate.uniform("0.1"),
        "other": (ablate.zero("0.1"), ablate.uniform("0.2")),
        "source": patch.activations("z", tokens.flip(0), heads="0.1"),
    }

    def metric(output):
        return output[..., 0].double().sum(1)

    found = sweep(model, tokens, given, metric=metric, engine="fast", **FEW)
    same(found, sweep(model, tokens, given, metric=metric, engine="naive", **FEW), 1e-5)
