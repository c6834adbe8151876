"""Estimates of nodes and edges against derivatives along patches, forwards by hand, theorems and real patches."""

import re
from functools import partial

import numpy as np
import pytest
import torch

from circuits import (
    CircuitsError,
    ablate,
    cache,
    circuit,
    edit,
    heads,
    intervene,
    logit_difference,
    patch,
    prompts,
    run,
    sweep,
    transplant,
)
from circuits.patch._gradients import Pair
from circuits.statistics import bootstrap

WEIGHT = torch.randn(6, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
FEW = {"draws": 20, "flips": 20}
ONE = {**FEW, "exact": 1}

# The plain gradient, where a test does not ask for another method.
nodes, edges = (partial(one, method="gradient") for one in (patch.screen, patch.edges))


def weighed(output):
    """Linear in the output; every position and class counts."""
    return (output * WEIGHT[:, : output.shape[-1]]).sum((1, 2))


def curved(output):
    return (output.log_softmax(-1) * WEIGHT).sum((1, 2))


def activations(forward, model, tokens, edited=lambda s, at, x: x):
    """Every activation as (site, layer) -> tensor, after `edited`; and the output."""
    found = {}

    def keep(s, at, x):
        found[s, at] = edited(s, at, x)
        return found[s, at]

    return found, forward(model, tokens, keep)


def on_the_way(by_hand, model, base, source, fraction):
    """What puts the embeddings a fraction of the way from base to source."""
    (ours, _), (theirs, _) = (activations(by_hand, model, tokens) for tokens in (base, source))
    embed = ours["embed", None] + fraction * (theirs["embed", None] - ours["embed", None])
    return lambda s, at, x: embed if s == "embed" else x


def midpoints(steps):
    return [(step + 0.5) / steps for step in range(steps)]


def by_name(result, metric=None, column="estimate"):
    frame = result.frame if metric is None else result.frame[result.frame["metric"] == metric]
    return dict(zip(frame["variant"], frame[column], strict=True))


def assert_equal(found, expected, tolerance=1e-9):
    assert expected
    assert set(found) == set(expected)
    largest = max(map(abs, expected.values()))
    assert largest > 0.01
    for name, value in expected.items():
        assert abs(found[name] - value) <= tolerance * largest, name


# Nodes


def test_nodes_of_all_sites_are_those_of_each_alone(model, tokens, other_tokens):
    sites = ["embed", "z"] + ([] if model.cfg.attn_only else ["mlp_out"])
    found = nodes(model, tokens, other_tokens, weighed, **ONE)
    expected, bounds = {}, {}
    for site in sites:
        by = "head" if site == "z" else "layer"
        frame = patch.attribution(model, tokens, other_tokens, weighed, site, by=by, **FEW).frame
        expected |= dict(zip(frame["variant"], frame["effect"], strict=True))
        bounds |= dict(zip(frame["variant"], frame["effect_ci_low"], strict=True))
    assert_equal(by_name(found), expected)
    assert_equal(by_name(found, column="estimate_ci_low"), bounds)
    assert set(found.frame["site"]) == set(sites)
    assert found.settings["sites"][0] == "embed"
    by_rank = found.frame.sort_values("rank")
    assert by_rank["rank"].tolist() == list(range(1, len(expected) + 1))
    assert by_rank["estimate"].abs().is_monotonic_decreasing


def integrated_by_hand(by_hand, model, base, source, steps, metric):
    """(source − base) · the mean of the gradients at z on the line of inputs, by head."""
    forward = by_hand.__wrapped__
    (ours, _), (theirs, _) = (activations(by_hand, model, tokens) for tokens in (base, source))
    total = {}
    for fraction in midpoints(steps):
        moved, at_z = on_the_way(by_hand, model, base, source, fraction), {}

        def keep(s, at, x, moved=moved, at_z=at_z):
            x = moved(s, at, x)
            if s == "z":
                x = at_z[at] = x.clone() if x.requires_grad else x.requires_grad_()
            return x

        slopes = torch.autograd.grad(metric(forward(model, base, keep)).sum(), list(at_z.values()))
        for layer, slope in zip(at_z, slopes, strict=True):
            change = theirs["z", layer] - ours["z", layer]
            for head in range(slope.shape[2]):
                share = (change * slope)[:, :, head].sum((1, 2)).mean() / steps
                total[f"{layer}.{head}"] = total.get(f"{layer}.{head}", 0) + float(share)
    return total


def test_integrated_along_the_input_against_a_forward_by_hand(model, tokens, other_tokens, by_hand):
    given = {"method": "integrated", "steps": 3, "sites": "z"}
    found = nodes(model, tokens, other_tokens, curved, **given, **ONE)
    assert_equal(by_name(found), integrated_by_hand(by_hand, model, tokens, other_tokens, 3, curved))
    assert found.settings["steps"] == 3


def test_completeness_along_the_input(make_model, tokens, other_tokens):
    """The integral over the embeddings of all positions is the whole difference between the two runs."""
    model = make_model(act_fn="gelu_new")
    whole = float((weighed(run(model, other_tokens)) - weighed(run(model, tokens))).mean())
    off = []
    for steps in (20, 80):
        found = nodes(
            model,
            tokens,
            other_tokens,
            weighed,
            "embed",
            by="position",
            method="integrated",
            steps=steps,
            **ONE,
        )
        assert len(found.frame) == 6
        off.append(abs(found.frame["estimate"].sum() - whole))
    # The midpoint rule's error falls with the square of the steps.
    assert off[0] > 10 * off[1]
    assert off[1] < 1e-3 * abs(whole)


def test_completeness_along_a_site(make_model, tokens, other_tokens):
    """The heads of a layer add up to the effect of patching all of them, and an MLP's positions to all of it."""
    model = make_model(act_fn="gelu_new")
    wholes = {site: patch.activations(site, other_tokens) for site in ("z.0", "mlp_out.0")}
    real = by_name(sweep(model, tokens, wholes, metric=weighed, **FEW), column="effect")
    given = {"method": "integrated", "line": "site"}
    for site, by in (("z.0", "component"), ("mlp_out.0", "position")):
        off = []
        for steps in (10, 40):
            found = nodes(model, tokens, other_tokens, weighed, site, by=by, steps=steps, **given, **ONE)
            off.append(abs(found.frame["estimate"].sum() - real[site]))
        assert off[0] > 10 * off[1]
        assert off[1] < 1e-3 * abs(real[site])
    # With one component on the line the estimate is the exact effect.
    found = nodes(model, tokens, other_tokens, weighed, "mlp_out.0", steps=40, **given, **ONE)
    assert found.frame["effect"][0] == pytest.approx(real["mlp_out.0"], rel=1e-12)
    assert found.frame["estimate"][0] == pytest.approx(real["mlp_out.0"], rel=1e-3)


def test_what_moves_alone(causal, tokens, other_tokens):
    """Along a site nothing else moves, whatever other sites are asked for; along the input all do."""
    given = {"method": "integrated", "steps": 2, **ONE}
    along = {"site": None, "input": None}
    for line in along:
        joint = by_name(nodes(causal, tokens, other_tokens, curved, ["z", "mlp_out"], line=line, **given))
        alone = {}
        for site in ("z.0", "z.1", "mlp_out.0", "mlp_out.1"):
            alone |= by_name(nodes(causal, tokens, other_tokens, curved, site, line=line, **given))
        assert_equal(joint, alone)
        along[line] = joint
    assert any(abs(along["site"][name] / along["input"][name] - 1) > 0.1 for name in along["site"])


def test_one_midpoint_is_exact_for_a_quadratic_metric(make_model, tokens, other_tokens):
    model = make_model(normalization_type=None)

    def quadratic(output):
        return (output.square() * WEIGHT).sum((1, 2))

    given = {"method": "integrated", "line": "site", "steps": 1, **FEW}
    found = nodes(model, tokens, other_tokens, quadratic, ["resid_post.1", "mlp_out.1"], **given)
    np.testing.assert_allclose(found.frame["estimate"], found.frame["effect"], rtol=1e-9)
    plain = nodes(model, tokens, other_tokens, quadratic, ["resid_post.1", "mlp_out.1"], **FEW)
    assert not np.allclose(plain.frame["estimate"], plain.frame["effect"], rtol=0.1)


def test_one_forward_for_all_sites_and_a_backward_per_metric(causal, tokens, other_tokens, monkeypatch):
    runs, backwards = [], []
    plain_run, plain_grad = Pair.run, torch.autograd.grad

    def counted_run(self, tokens, hooks, moved=None, graph=False, columns=None):
        runs.append(graph)
        return plain_run(self, tokens, hooks, moved, graph, columns)

    def counted_grad(*args, **kwargs):
        backwards.append(len(args[1]))
        return plain_grad(*args, **kwargs)

    def two(output):
        return {"a": weighed(output), "b": curved(output)}

    monkeypatch.setattr(Pair, "run", counted_run)
    monkeypatch.setattr(torch.autograd, "grad", counted_grad)
    nodes(causal, tokens, other_tokens, two, **ONE)
    assert sum(runs) == 1
    assert backwards == [5, 5]
    runs.clear()
    nodes(causal, tokens, other_tokens, two, method="integrated", steps=4, **ONE)
    assert sum(runs) == 4


def test_what_gets_a_row(causal, tokens, other_tokens):
    found = nodes(causal, tokens, other_tokens, weighed, ["z", "mlp_out.1"], by="position", **ONE).frame
    assert len(found) == 2 * 4 * 6 + 6
    row = found.set_index("variant").loc["1.2, position 3"]
    assert (row["site"], row["layer"], row["head"], row["position"]) == ("z", 1, 2, 3)
    expected = patch.attribution(causal, tokens, other_tokens, weighed, "z.1", by="head,position", **FEW)
    assert row["estimate"] == pytest.approx(by_name(expected, column="effect")["1.2, position 3"], rel=1e-9)
    assert "mlp_out.1, position 5" in set(found["variant"])
    names = nodes(causal, tokens, other_tokens, weighed, ["z.0", "q.0", "z"], **ONE).frame["variant"]
    assert set(names) == {f"{layer}.{head}" for layer in (0, 1) for head in range(4)} | {
        f"0.{head}.q" for head in range(4)
    }
    neurons = nodes(causal, tokens, other_tokens, weighed, "mlp_post.1", by="neuron", **FEW)
    assert len(neurons.frame) == 24
    expected = patch.attribution(causal, tokens, other_tokens, weighed, "mlp_post.1", by="neuron", **FEW)
    assert_equal(by_name(neurons), by_name(expected, column="effect"))
    assert found["intervention"].unique().tolist() == ["patch.activations (source -> run)"]
    assert neurons.settings["direction"] == "source -> run"


# The exact values beside them


def test_exact_values_are_those_of_a_sweep(causal, tokens, other_tokens):
    def two(output, rows):
        early = output[:, 1].log_softmax(-1) @ WEIGHT[1]
        return {"a": weighed(output), "b": (early, torch.arange(1, 9)[rows])}

    given = {"metric": two, "batch": torch.arange(8)}
    found = nodes(causal, tokens, other_tokens, exact=2, by="position", **given, **FEW)
    frame = found.frame
    assert len(frame) == 2 * (6 + 48 + 12)
    # Rows stand by exact effects; which are measured, by estimates.
    top = set(frame.loc[frame["rank"] <= 2, "variant"])
    assert len(top) > 2
    assert set(frame.loc[frame["effect"].notna(), "variant"]) == top
    assert frame["effect"].notna().sum() == 2 * len(top)
    patches = {}
    for name in found.exact.interventions:
        where, at = name.split(", position ")
        site, chosen = ("z", where) if where[0].isdigit() else (where, None)
        patches[name] = patch.activations(site, other_tokens, heads=chosen, positions=int(at))
        assert [patches[name].describe()] == found.exact.interventions[name]
    real = sweep(causal, tokens, patches, **given, **FEW).frame
    columns = ["value", "effect", "effect_ci_low", "effect_ci_high", "p_value", "p_adjusted", "baseline", "n"]
    merged = frame[frame["effect"].notna()].merge(real, on=["variant", "metric"])
    assert len(merged) == 2 * len(top)
    for column in columns:
        np.testing.assert_allclose(
            merged[f"{column}_x"].astype(float), merged[f"{column}_y"].astype(float), rtol=1e-10, atol=1e-13
        )
    paths = edges(causal, tokens, other_tokens, exact=3, **given, **FEW)
    patches = {name: path_of(name, other_tokens) for name in paths.exact.interventions}
    for name, given_path in patches.items():
        assert [given_path.describe()] == paths.exact.interventions[name]
    real = sweep(causal, tokens, patches, **given, **FEW).frame
    merged = paths.frame[paths.frame["effect"].notna()].merge(real, on=["variant", "metric"])
    np.testing.assert_allclose(merged["effect_x"], merged["effect_y"], rtol=1e-10, atol=1e-13)
    assert len(merged) == len(real)


def test_correlation_against_ranks_by_hand(causal, tokens, other_tokens):
    """Spearman's 1 − 6Σd²/(n(n² − 1)), and again for every resample of the examples."""
    found = nodes(causal, tokens, other_tokens, weighed, "z", exact="all", draws=7, flips=20)
    names = [str(head) for head in heads("all", causal)]
    clean = weighed(run(causal, tokens))
    exact = [
        (weighed(run(causal, tokens, patch.activations("z", other_tokens, name))) - clean).numpy()
        for name in names
    ]
    single = [
        by_name(nodes(causal, tokens[i : i + 1], other_tokens[i : i + 1], weighed, "z", **ONE))
        for i in range(8)
    ]
    estimates = [[one[name] for one in single] for name in names]

    def rank_correlation(one, other):
        gaps = np.argsort(np.argsort(one)) - np.argsort(np.argsort(other))
        return 1 - 6 * (gaps**2).sum() / (8 * 63)

    observed = rank_correlation(np.mean(estimates, 1), np.mean(exact, 1))
    row = found.correlation.iloc[0]
    assert row["spearman"] == pytest.approx(observed, abs=1e-12)
    assert 0 < abs(observed) < 1
    ones = np.ones((8, 8))
    again = [bootstrap(np.array(values), ones, 0, 7) for values in (estimates, exact)]
    drawn = [rank_correlation(one, other) for one, other in zip(*again, strict=True)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert (row["spearman_ci_low"], row["spearman_ci_high"]) == (
        pytest.approx(low, abs=1e-12),
        pytest.approx(high, abs=1e-12),
    )
    assert low < high


# Edges


def path_of(name, source):
    """The `patch.path` of an edge's name."""
    sender, receiver = name.split(" -> ")
    head, _, site = receiver.partition(" ")[0].rpartition(".")
    return patch.path(sender, (site, head) if head[:1].isdigit() else receiver, source)


def end_of(name):
    """(site, layer), head."""
    if match := re.fullmatch(r"(\d)\.(\d)(?:\.(\w))?", name):
        return (match[3] or "z", int(match[1])), int(match[2])
    site, _, layer = name.partition(".")
    return (site, int(layer) if layer else None), None


def path_slope(by_hand, model, base, source, name, metric, around=lambda s, at, x: x):
    """The derivative of the metric [batch] as the sender starts from its value towards `source`, in three passes."""
    forward, (sender, receiver) = by_hand.__wrapped__, map(end_of, name.split(" -> "))
    if receiver[0][0] == "output":
        receiver = ("resid_post", model.cfg.n_layers - 1), None
    (ours, _), (theirs, _) = (activations(by_hand, model, tokens) for tokens in (base, source))
    clean, _ = activations(by_hand, model, base, around)
    size = torch.zeros(len(base), dtype=torch.float64, requires_grad=True)

    def only(x, end, new):
        chosen = torch.zeros_like(x)
        chosen[(slice(None), slice(None), *([] if end[1] is None else [end[1]]))] = 1
        return x + chosen * (new - x)

    def send(s, at, x):
        x = clean[s, at] if s in ("z", "mlp_out") else around(s, at, x)
        if (s, at) != sender[0]:
            return x
        along = size.reshape(-1, *[1] * (x.ndim - 1)) * (theirs[s, at] - ours[s, at])
        return only(x, sender, x + along)

    received, _ = activations(forward, model, base, send)

    def receive(s, at, x):
        return only(x, receiver, received[s, at]) if (s, at) == receiver[0] else around(s, at, x)

    (slope,) = torch.autograd.grad(metric(forward(model, base, receive)).sum(), size)
    return slope


def every_edge(model):
    """Names of all edges, from the order of computation."""
    mlps = not model.cfg.attn_only
    found = []
    for to in range(model.cfg.n_layers):
        before = ["embed"]
        for layer in range(to):
            before += [f"{layer}.{head}" for head in range(4)] + ([f"mlp_out.{layer}"] if mlps else [])
        found += [f"{u} -> {to}.{head}.{x}" for u in before for head in range(4) for x in "qkv"]
        heads_here = [f"{to}.{head}" for head in range(4)]
        # In parallel blocks the MLP does not hear the heads beside it.
        heard = before if getattr(model.cfg, "parallel_attn_mlp", False) else before + heads_here
        found += [f"{u} -> mlp_pre.{to}" for u in heard] if mlps else []
        before += heads_here + ([f"mlp_out.{to}"] if mlps else [])
    return found + [f"{u} -> output" for u in before]


def test_edges_are_derivatives_along_paths_by_hand(model, tokens, other_tokens, by_hand):
    found = edges(model, tokens, other_tokens, curved, **ONE)
    names = every_edge(model)
    assert set(found.frame["variant"]) == set(names)
    # Of three layers there are many: one in three.
    some = names if model.cfg.n_layers < 3 else names[::3]
    slopes = {name: path_slope(by_hand, model, tokens, other_tokens, name, curved) for name in some}
    estimates = by_name(found)
    assert_equal({name: estimates[name] for name in some}, {n: float(x.mean()) for n, x in slopes.items()})
    # Example by example, as the interval shows.
    again = bootstrap(np.stack([x.numpy() for x in slopes.values()]), np.ones((len(some), 8)), 0, 20)
    lows = by_name(found, column="estimate_ci_low")
    expected = dict(zip(some, np.quantile(again, 0.025, axis=0), strict=True))
    assert_equal({name: lows[name] for name in some}, expected)


def test_integrated_edges_against_passes_by_hand(model, tokens, other_tokens, by_hand):
    found = by_name(edges(model, tokens, other_tokens, curved, method="integrated", steps=2, **ONE))
    some = every_edge(model)[:: 5 if model.cfg.n_layers > 1 else 2]
    expected = {}
    for name in some:
        slopes = [
            path_slope(
                by_hand,
                model,
                tokens,
                other_tokens,
                name,
                curved,
                on_the_way(by_hand, model, tokens, other_tokens, fraction),
            )
            for fraction in midpoints(2)
        ]
        expected[name] = float(sum(slopes).mean() / 2)
    assert_equal({name: found[name] for name in some}, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel_attn_mlp": True, "act_fn": "gelu"},
        {
            "normalization_type": "RMS",
            "use_normalization_before_and_after": True,
            "attn_scores_soft_cap": 2.0,
            "output_logits_soft_cap": 3.0,
        },
        {
            "original_architecture": "Olmo2ForCausalLM",
            "normalization_type": "RMS",
            "use_local_attn": True,
            "attn_types": ["local", "global"],
            "window_size": 3,
        },
    ],
    ids=["parallel", "gemma", "olmo2"],
)
@pytest.mark.parametrize("steps", [None, 2])
def test_edges_of_other_blocks_against_passes_by_hand(
    make_model, hooked_only, tokens, other_tokens, by_hand, changes, steps
):
    """Where a norm follows a head, also its derivative is that of the run on the way."""
    model = make_model(family=hooked_only, **changes)
    given = {"method": "gradient"} if steps is None else {"method": "integrated", "steps": steps}
    found, names = by_name(edges(model, tokens, other_tokens, curved, **given, **ONE)), every_edge(model)
    assert set(found) == set(names)
    some = names[::5]
    ways = [
        [] if steps is None else [on_the_way(by_hand, model, tokens, other_tokens, fraction)]
        for fraction in ([0.0] if steps is None else midpoints(steps))
    ]
    expected = {
        name: float(
            sum(path_slope(by_hand, model, tokens, other_tokens, name, curved, *way).mean() for way in ways)
            / len(ways)
        )
        for name in some
    }
    assert_equal({name: found[name] for name in some}, expected)


def test_edges_are_the_slope_of_the_path_patched_metric(featured, tokens, other_tokens):
    """Finite differences along `patch.path` itself, for every kind of block that is supported."""
    model = featured
    # The RMS norm of a bridge computes in single precision.
    norms = f"{model.cfg.normalization_type}{' RMS' * bool(getattr(model.cfg, 'final_rms', False))}"
    single = type(model).__name__ == "TransformerBridge" and "RMS" in norms
    step, tolerance = (3e-3, 3e-3) if single else (1e-5, 1e-6)
    names = by_name(edges(model, tokens, other_tokens, weighed, **ONE))
    largest = max(map(abs, names.values()))
    sites = [name for name in ("embed", "z", "mlp_out") if name != "mlp_out" or not model.cfg.attn_only]
    ours, theirs = (cache(model, given, sites) for given in (tokens, other_tokens))
    ahead, behind = (
        {name: ours[name] + sign * step * (theirs[name] - ours[name]) for name in ours} for sign in (1, -1)
    )
    # Some twenty, from the largest to the smallest.
    for name in list(names)[:: max(1, len(names) // 20)]:
        values = [weighed(run(model, tokens, path_of(name, source))).mean() for source in (ahead, behind)]
        slope = float(values[0] - values[1]) / (2 * step)
        assert abs(names[name] - slope) <= tolerance * largest, name


@pytest.mark.parametrize("how", ["mean", "zero"])
def test_edges_of_means_and_zeros_are_slopes_and_effects_of_stored_ones(model, tokens, other_tokens, how):
    """What takes a sender's place is computed by hand from its activations, and patched as a stored source."""
    source = torch.cat([other_tokens, tokens.flip(0)[:2]]) if how == "mean" else None
    sites = [
        name
        for name in ("embed", "pos_embed", "z", "mlp_out")
        if name != "mlp_out" or not model.cfg.attn_only
    ]
    ours = cache(model, tokens, sites)
    values = {name: torch.zeros_like(x) for name, x in ours.items()}
    if how == "mean":
        theirs = cache(model, source, sites)
        values = {name: theirs[name].mean(0, keepdim=True).expand_as(x).clone() for name, x in ours.items()}
    found = edges(model, tokens, source, weighed, how=how, **{**ONE, "exact": "all"})
    estimates, effects = by_name(found), by_name(found, column="effect")
    senders = set(found.frame["sender"])
    assert "embed" in senders
    assert ("pos_embed" in senders) == (how == "zero")
    step = 1e-5
    ahead, behind = (
        {name: ours[name] + sign * step * (values[name] - ours[name]) for name in ours} for sign in (1, -1)
    )
    clean, largest = float(weighed(run(model, tokens)).mean()), max(map(abs, estimates.values()))
    some = list(estimates)[:: max(1, len(estimates) // 12)]
    if how == "zero":
        some += [name for name in list(estimates)[: len(estimates) // 2] if name.startswith("pos_embed")][:1]
        assert some[-1].startswith("pos_embed")
    for name in some:
        near = [weighed(run(model, tokens, path_of(name, given))).mean() for given in (ahead, behind)]
        assert abs(estimates[name] - float(near[0] - near[1]) / (2 * step)) <= 1e-5 * largest, name
        there = float(weighed(run(model, tokens, path_of(name, values))).mean()) - clean
        assert abs(effects[name] - there) <= 1e-9 * largest, name
    assert found.settings["how"] == how
    assert how in found.frame["intervention"][0]


def test_edges_of_means_over_prompts_of_unequal_length(make_model, tokens):
    """A batch of padded prompts under means over padded prompts, against each prompt alone with means by hand."""
    model = make_model()
    base = prompts(model, [tokens[0, :4].tolist(), tokens[1].tolist()])
    reference = [tokens[2, :3].tolist(), tokens[3].tolist(), tokens[4].tolist()]
    found = edges(
        model, base, prompts(model, reference), logit_difference(3, 1), how="mean", **{**ONE, "exact": "all"}
    )
    each = [cache(model, torch.tensor([row]), ["embed", "pos_embed", "z", "mlp_out"]) for row in reference]
    effects, estimates = by_name(found, column="effect"), by_name(found)
    for name in list(effects)[::9]:
        total = 0.0
        for row in (tokens[0, :4], tokens[1]):
            means = {}
            for hook in each[0]:
                at = [
                    torch.stack(
                        [one[hook][0, position] for one in each if one[hook].shape[1] > position]
                    ).mean(0)
                    for position in range(len(row))
                ]
                means[hook] = torch.stack(at)[None]
            patched, plain = (run(model, row[None], *given) for given in ([path_of(name, means)], []))
            total += float((patched - plain)[0, -1, 3] - (patched - plain)[0, -1, 1]) / 2
        assert abs(effects[name] - total) <= 1e-9 * max(map(abs, effects.values())), name
    assert set(estimates) == set(effects)
    with pytest.raises(CircuitsError, match="no mean at its last positions"):
        edges(model, base, prompts(model, [row[:4] for row in reference]), logit_difference(3, 1), how="mean")


def test_edges_of_a_sender_add_up_to_its_node(model, tokens, other_tokens):
    """The chain rule: every way out of a component is one of its edges."""
    for method in ("gradient", "integrated"):
        given = {"method": method, "steps": 2, **ONE}
        of_nodes = nodes(model, tokens, other_tokens, curved, **given)
        of_edges = edges(model, tokens, other_tokens, curved, **given)
        assert_equal(of_edges.frame.groupby("sender")["estimate"].sum().to_dict(), by_name(of_nodes))


def test_edges_of_a_sender_add_up_to_its_node_where_mlps_are_gated(family, make_model, tokens, other_tokens):
    """What a gated MLP reads is more than its pre-activations."""
    model = make_model(family=family, gated_mlp=True, act_fn="gelu_new")
    of_nodes = nodes(model, tokens, other_tokens, curved, **ONE)
    of_edges = edges(model, tokens, other_tokens, curved, **ONE)
    assert_equal(of_edges.frame.groupby("sender")["estimate"].sum().to_dict(), by_name(of_nodes))


def test_exact_edges_where_all_is_linear(make_model, tokens, other_tokens):
    model = make_model(attn_only=True, normalization_type=None, n_heads=2)
    found = edges(model, tokens, other_tokens, weighed, exact="all", **FEW).frame
    linear = found["receiver"].str.fullmatch(r"output|1\.\d\.v")
    assert linear.sum() == 5 + 3 * 2
    np.testing.assert_allclose(found["estimate"][linear], found["effect"][linear], rtol=1e-9, atol=1e-11)
    rest = found[found["receiver"].str.fullmatch(r"1\.\d\.[qk]")]
    assert not np.allclose(rest["estimate"], rest["effect"], rtol=0.1)


GROUPS = ("k0", "heads 0,1"), ("k1", "heads 2,3")


def test_key_value_groups_receive_by_their_own_names(family, make_model, tokens, other_tokens):
    model = make_model(family=family, n_key_value_heads=2)
    receivers = set(edges(model, tokens, other_tokens, weighed, **ONE).frame["receiver"])
    of_groups = {
        f"{layer}.{group}.{site} ({served})"
        for layer in range(2)
        for group, served in GROUPS
        for site in "kv"
    }
    queries = {f"{layer}.{head}.q" for layer in range(2) for head in range(4)}
    assert receivers == of_groups | queries | {"mlp_pre.0", "mlp_pre.1", "output"}


def test_nodes_of_key_value_groups_against_patches_by_hand(family, make_model, tokens, other_tokens, by_hand):
    model = make_model(family=family, n_key_value_heads=2)
    found = nodes(model, tokens, other_tokens, weighed, ["k", "q.0"], **{**FEW, "exact": "all"}).frame
    assert set(found["variant"]) == {
        *(f"{layer}.{group}.k ({served})" for layer in range(2) for group, served in GROUPS),
        *(f"0.{head}.q" for head in range(4)),
    }
    shared = found["site"] == "k"
    # The column of heads is for one head.
    assert found["head"][shared].isna().all()
    assert sorted(found["head"][~shared]) == [0, 1, 2, 3]
    effects = found.set_index("variant")["effect"]
    (theirs, _), clean = activations(by_hand, model, other_tokens), weighed(by_hand(model, tokens))
    for layer in range(2):
        for number, (group, served) in enumerate(GROUPS):

            def put(s, at, x, here=("k", layer), number=number):
                x = x.clone()
                if (s, at) == here:
                    x[:, :, number] = theirs[here][:, :, number]
                return x

            expected = float((weighed(by_hand(model, tokens, put)) - clean).mean())
            assert abs(expected) > 1e-6
            assert effects[f"{layer}.{group}.k ({served})"] == pytest.approx(expected, rel=1e-9)


# What both share

BOTH = [pytest.param(nodes, id="screen"), pytest.param(edges, id="edges")]


@pytest.mark.parametrize("screened", BOTH)
def test_pieces_and_a_source_of_one_example(screened, causal, tokens, other_tokens):
    hidden = torch.rand(8, 6, generator=torch.Generator().manual_seed(1)) < 0.4
    hidden[2] = False

    def metric(output, rows):
        loss = output.square().mean(-1)
        return {"hidden": ((loss * hidden[rows]).sum(1), hidden[rows].sum(1)), "last": loss[:, -1]}

    given = {"metric": metric, "batch": torch.arange(8), "method": "integrated", "steps": 2, **FEW}
    for source, as_many in ((other_tokens, other_tokens), (other_tokens[:1], other_tokens[:1].expand(8, -1))):
        whole = screened(causal, tokens, as_many, **given)
        pieces = screened(causal, tokens, source, batch_size=3, **given)
        for column in ("estimate", "estimate_ci_high", "effect", "baseline"):
            for name in ("hidden", "last"):
                pairs = zip(
                    by_name(pieces, name, column).values(), by_name(whole, name, column).values(), strict=True
                )
                np.testing.assert_allclose(*zip(*pairs, strict=True), rtol=1e-8, atol=1e-11)
        np.testing.assert_allclose(pieces.correlation["spearman"], whole.correlation["spearman"])
    # A pair pools over its entries.
    loss = run(causal, tokens).square().mean(-1)
    assert whole.frame["baseline"].max() == pytest.approx(
        max(float((loss * hidden).sum() / hidden.sum()), float(loss[:, -1].mean())), rel=1e-9
    )


@pytest.mark.parametrize("screened", BOTH)
def test_without_a_metric_the_logit_difference_of_base(screened, causal, tokens, other_tokens):
    order = run(causal, tokens).topk(2, -1).indices

    def difference(output, order):
        gap = output.gather(-1, order)
        return (gap[..., 0] - gap[..., 1]).mean(1)

    found = screened(causal, tokens, other_tokens, **ONE)
    expected = screened(causal, tokens, other_tokens, difference, batch=order, **ONE)
    assert found.metrics == ["logit_diff"]
    for column in ("estimate", "effect"):
        np.testing.assert_allclose(found.frame[column], expected.frame[column], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("screened", BOTH)
def test_a_distance_from_base_has_no_gradient_there(screened, causal, tokens, other_tokens):
    own = run(causal, tokens)

    def distance(output, own):
        return (output - own).square().mean((1, 2))

    given = {"metric": distance, "batch": own, "exact": 4, **FEW}
    assert (screened(causal, tokens, other_tokens, **given).frame["estimate"] == 0).all()
    found = screened(causal, tokens, other_tokens, method="integrated", steps=2, **given)
    assert (found.frame["estimate"] != 0).all()
    assert (found.frame["effect"].dropna() > 0).all()


def test_hooks_of_the_users_own_are_part_of_the_model(causal, tokens, other_tokens):
    """Doubled on its way into the residual stream, a head sends twice as much."""
    before = by_name(edges(causal, tokens, other_tokens, weighed, **ONE))
    causal.add_hook("blocks.0.hook_attn_out", lambda x, hook: 2 * x)
    found = by_name(edges(causal, tokens, other_tokens, weighed, **ONE))
    ours, theirs = (cache(causal, given, ["z"]) for given in (tokens, other_tokens))
    for name in ("0.1 -> 1.3.v", "0.2 -> mlp_pre.0", "0.0 -> output"):
        values = [
            weighed(
                run(
                    causal,
                    tokens,
                    path_of(name, {hook: ours[hook] + size * (theirs[hook] - ours[hook]) for hook in ours}),
                )
            ).mean()
            for size in (1e-5, -1e-5)
        ]
        assert found[name] == pytest.approx(float(values[0] - values[1]) / 2e-5, rel=1e-5)
        assert found[name] != pytest.approx(before[name], rel=0.01)


@pytest.mark.parametrize("screened", BOTH)
def test_refused_inside_a_block_that_edits_the_model(screened, causal, tokens, other_tokens):
    """Also where the edit does not show in the first example, or in none but a patched run."""
    later = torch.arange(len(tokens))[:, None].expand(tokens.shape) > 0
    for edited in (
        ablate.zero("0.1"),
        edit("z.0", lambda z: 2 * z, positions=later),
        edit("mlp_out.1", lambda x: x.clamp(max=1e3)),
        patch.path("0.1", "output", other_tokens),
        transplant.weights(causal.state_dict(), ["ln1"]),
    ):
        with intervene(causal, edited):
            with pytest.raises(CircuitsError, match="a block around this call edits the model"):
                screened(causal, tokens, other_tokens, weighed, **ONE)
            causal(tokens)
    with intervene(causal):
        screened(causal, tokens, other_tokens, weighed, **ONE)


@pytest.mark.parametrize("screened", BOTH)
def test_a_single_example_has_no_interval(screened, causal, tokens, other_tokens):
    found = screened(causal, tokens[:1], other_tokens[:1], weighed, exact=4, **FEW)
    assert found.frame[["estimate_ci_low", "estimate_ci_high"]].isna().all().all()
    assert found.correlation[["spearman_ci_low", "spearman_ci_high"]].isna().all().all()
    assert found.correlation["spearman"].notna().all()


def test_lines_are_of_nodes(causal, tokens, other_tokens):
    with pytest.raises(CircuitsError, match="line='output'; choose from 'input', 'site'"):
        nodes(causal, tokens, other_tokens, weighed, line="output")
    with pytest.raises(
        CircuitsError, match=r"patch\.edges: no argument line=; .* exact= measures the largest"
    ):
        edges(causal, tokens, other_tokens, weighed, line="site")


@pytest.mark.parametrize("screened", BOTH)
def test_faults_are_one_line(screened, causal, tokens, other_tokens):
    for arguments, message in (
        (
            {"source": other_tokens[:3]},
            r"source is \[3, 6\], base \[8, 6\]; the source must have base's shape, or",
        ),
        ({"method": "grad"}, "method='grad'; choose from 'gradient', 'integrated'"),
        ({"steps": 0}, "steps=0; give a whole number of points, at least 1"),
        ({"exact": 0}, 'exact=0; give how many top rows to measure, exact=10, or exact="all"'),
        ({"exact": "verified"}, 'give how many top rows to measure, exact=10, or exact="all"'),
        ({"exact": True}, "exact=True"),
        ({"draws": 0}, "draws and flips are positive numbers, got 0 and 9999"),
        ({"seed": -1}, "seed=-1"),
        ({"metric": lambda output: output.detach()[:, -1, 0]}, "no gradient"),
        ({"metric": lambda output: (0 * output[:, -1, 0]).sqrt()}, "is not finite"),
        (
            {"batch": [1, 2], "metric": lambda output, rows: output[:, 0, 0]},
            "8 examples, batch has 2",
        ),
    ):
        given = {"base": tokens, "source": other_tokens, "metric": weighed, **arguments}
        with pytest.raises(CircuitsError, match=message) as caught:
            screened(causal, **given)
        assert "\n" not in str(caught.value)


# Signs that cancel


@pytest.mark.parametrize("screened", [nodes, edges], ids=["nodes", "edges"])
def test_effects_of_either_sign_are_noticed_and_ranked_by_size(model, tokens, other_tokens, screened):
    """Two copies of the examples, the metric of the second with the other sign: every mean is 0, no size is."""
    tokens, other_tokens = tokens[:2], other_tokens[:2]
    twice, others = tokens.repeat(2, 1), other_tokens.repeat(2, 1)
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)

    def signed(output, sign):
        return weighed(output) * sign

    assert screened(model, tokens[:1], other_tokens[:1], weighed, **ONE).notes == ()
    (note,) = screened(model, twice, others, signed, batch=signs, **ONE).notes
    assert "keep 0%" in note
    assert 'rank="size"' in note
    ranked = screened(model, twice, others, signed, batch=signs, rank="size", **ONE)
    assert ranked.notes == ()
    alone = [screened(model, tokens[row, None], other_tokens[row, None], weighed, **ONE) for row in (0, 1)]
    sizes = {name: sum(abs(by_name(one)[name]) for one in alone) / 2 for name in by_name(ranked)}
    assert_equal(by_name(ranked, column="size"), sizes)
    assert np.abs(ranked.frame["estimate"]).max() < 1e-9 * max(sizes.values())
    assert ranked.ranking(by="estimate") == sorted(sizes, key=sizes.__getitem__, reverse=True)
    (measured,) = ranked.frame[ranked.frame["effect_size"].notna()].to_dict("records")
    assert measured["rank"] == 1
    assert abs(measured["effect"]) < 1e-9 < measured["effect_size"]


def test_sizes_weigh_examples_by_their_entries(causal, tokens, other_tokens):
    tokens, other_tokens = tokens[:3], other_tokens[:3]
    counts = torch.arange(1.0, len(tokens) + 1, dtype=torch.float64)
    rows, sizes = range(len(tokens)), {"size": {}, "effect_size": {}}
    asked = {"sites": "z", "exact": "all", **FEW}
    alone = [
        nodes(causal, tokens[row, None], other_tokens[row, None], weighed, **asked).frame for row in rows
    ]
    for column, own in (("size", "estimate"), ("effect_size", "effect")):
        for row in rows:
            for name, value in zip(alone[row]["variant"], alone[row][own].abs(), strict=True):
                share = float(counts[row] / counts.sum())
                sizes[column][name] = sizes[column].get(name, 0) + share * value
    found = nodes(causal, tokens, other_tokens, lambda o: (weighed(o) * counts, counts), **asked)
    for column, expected in sizes.items():
        assert_equal(by_name(found, column=column), expected)


@pytest.mark.parametrize("steps", [1, 3])
def test_backward_passes_of_edges(make_model, hooked_only, tokens, other_tokens, monkeypatch, steps):
    """One through the model for each point; then one for all heads of a hook, whatever the number of senders. Before
    the first, two per layer carry the changes of its heads to the stream.
    """
    layers = 3
    model = make_model(0, hooked_only, n_layers=layers, n_key_value_heads=2, gated_mlp=True)
    count, grad = [], torch.autograd.grad

    def counted(*args, **kwargs):
        count.append(args)
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    found = edges(model, tokens, other_tokens, curved, method="integrated", steps=steps, **ONE)
    assert len(found.frame) > 100
    hooks = 4 * layers  # q, k, v and the MLP; the output is a site of the stream
    assert len(count) == 2 * layers + steps * (1 + hooks)


def test_a_backward_that_knows_no_batch(model, tokens, other_tokens):
    """A hook with an autograd function of the user's own: its backward passes are made one by one."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    def doubled(function):
        with model.hooks([("blocks.0.attn.hook_q", lambda x, hook: function(x))]):
            return by_name(edges(model, tokens, other_tokens, curved, **ONE))

    found = doubled(Doubled.apply)
    assert_equal(found, doubled(lambda x: 2 * x))
    assert found != doubled(lambda x: x)


@pytest.mark.parametrize("exact", [2, "all"])
@pytest.mark.parametrize("rank", ["mean", "size"])
def test_rows_are_in_the_order_of_exact_effects_where_measured(make_model, tokens, rank, exact):
    """A circuit of the first rows is that of `top`, and print begins with them; `rank` is that of the estimates."""

    def two(output):
        return {"squared": output[:, -1].square().sum(-1), "first": output[:, -1, 0]}

    model = make_model(0)
    found = patch.edges(model, tokens, tokens.roll(1, 0), two, exact=exact, rank=rank, method="gradient")
    estimate, effect = ("size", "effect_size") if rank == "size" else ("estimate", "effect")
    for metric in found.metrics:
        rows = found.frame[found.frame["metric"] == metric]
        size = rows[effect].abs().fillna(rows[estimate].abs())
        assert size.is_monotonic_decreasing
        assert rows.sort_values("rank")[estimate].abs().is_monotonic_decreasing
        assert exact != "all" or not rows["rank"].is_monotonic_increasing
        first = rows["variant"].tolist()
        assert found.ranking(metric) == first
        assert found.top(5, metric) == circuit.edges(first[:5])
    first_row = next(line for line in repr(found).split("\n") if line.split()[0].isdigit())
    assert first_row.split()[0] == str(found.frame["rank"].iloc[0])
