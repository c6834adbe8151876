"""Estimates of edges against derivatives along paths by hand, theorems and real patches."""

import numpy as np
import pytest
import torch

from circuits import cache, circuit, logit_difference, patch, prompts, run, sweep
from circuits.statistics import bootstrap_ratios
from tests.circuits.conftest import CAPS, RMS, SANDWICH
from tests.circuits.patch.by_hand import (
    ONE,
    assert_equal,
    by_name,
    curved,
    edges,
    midpoints,
    on_the_way,
    path_of,
    path_slope,
    weighed,
)


def test_edges_are_derivatives_along_paths_by_hand(model, tokens, other_tokens, by_hand):
    found = edges(model, tokens, other_tokens, curved, **ONE)
    names = found.frame["variant"].tolist()
    # Those of the graph, but position embeddings, which are the same in base and source.
    assert circuit.edges(names) == circuit.edges(
        [name for name in circuit.full(model) if not name.startswith("pos_embed")]
    )
    some = names[::3]
    slopes = {name: path_slope(by_hand, model, tokens, other_tokens, name, curved) for name in some}
    estimates = by_name(found)
    assert_equal({name: estimates[name] for name in some}, {n: float(x.mean()) for n, x in slopes.items()})
    assert edges(model, tokens[:1], other_tokens[:1], curved, exact=0).frame["estimate_ci_low"].isna().all()
    # Example by example, as the interval shows.
    again = bootstrap_ratios(np.stack([x.numpy() for x in slopes.values()]), np.ones((len(some), 8)), 0, 20)
    lows = by_name(found, column="estimate_ci_low")
    expected = dict(zip(some, np.quantile(again, 0.025, axis=0), strict=True))
    assert_equal({name: lows[name] for name in some}, expected)


def test_integrated_edges_where_a_norm_follows_a_head(make_model, hooked_only, tokens, other_tokens, by_hand):
    """Also its derivative is that of the run on the way."""
    model = make_model(family=hooked_only, **RMS, **SANDWICH, **CAPS)
    found = by_name(edges(model, tokens, other_tokens, curved, method="integrated", steps=2, **ONE))
    given, some = (model, tokens, other_tokens), list(found)[::8]
    ways = [on_the_way(by_hand, *given, fraction) for fraction in midpoints(2)]
    slopes = {name: [path_slope(by_hand, *given, name, curved, way) for way in ways] for name in some}
    expected = {name: sum(float(slope.mean()) / 2 for slope in both) for name, both in slopes.items()}
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
    # Some ten, from the largest to the smallest.
    for name in list(names)[:: max(1, len(names) // 10)]:
        values = [weighed(run(model, tokens, path_of(name, source))).mean() for source in (ahead, behind)]
        slope = float(values[0] - values[1]) / (2 * step)
        assert abs(names[name] - slope) <= tolerance * largest, name


@pytest.mark.parametrize("how", ["mean", "zero"])
def test_edges_of_means_and_zeros_are_slopes_and_effects_of_stored_ones(model, tokens, other_tokens, how):
    """What takes a sender's place is computed by hand from its activations, and patched as a stored source."""
    source = torch.cat([other_tokens, tokens.flip(0)[:2]]) if how == "mean" else None
    sites = ["embed", "pos_embed", "z"] + ([] if model.cfg.attn_only else ["mlp_out"])
    ours = cache(model, tokens, sites)
    values = {name: torch.zeros_like(x) for name, x in ours.items()}
    if how == "mean":
        theirs = cache(model, source, sites)
        values = {name: theirs[name].mean(0, keepdim=True).expand_as(x).clone() for name, x in ours.items()}
    found = edges(model, tokens, source, weighed, how=how, **{**ONE, "exact": 4})
    estimates, effects = by_name(found), by_name(found, column="effect")
    senders = set(found.frame["sender"])
    assert "embed" in senders
    assert ("pos_embed" in senders) == (how == "zero")
    step = 1e-5
    ahead, behind = (
        {name: ours[name] + sign * step * (values[name] - ours[name]) for name in ours} for sign in (1, -1)
    )
    clean, largest = float(weighed(run(model, tokens)).mean()), max(map(abs, estimates.values()))
    some = list(estimates)[:: max(1, len(estimates) // 4)]
    if how == "zero":
        some += [name for name in list(estimates)[: len(estimates) // 2] if name.startswith("pos_embed")][:1]
        assert some[-1].startswith("pos_embed")
    for name in some:
        near = [weighed(run(model, tokens, path_of(name, given))).mean() for given in (ahead, behind)]
        assert abs(estimates[name] - float(near[0] - near[1]) / (2 * step)) <= 1e-5 * largest, name
    measured = [name for name, effect in effects.items() if effect == effect]
    assert len(measured) == 4
    for name in measured:
        there = float(weighed(run(model, tokens, path_of(name, values))).mean()) - clean
        assert abs(effects[name] - there) <= 1e-9 * largest, name
    assert found.settings["how"] == how
    assert how in found.frame["intervention"][0]


def test_edges_of_means_over_prompts_of_unequal_length(make_model, tokens):
    """A batch of padded prompts under means over padded prompts, against each prompt alone with means by hand."""
    model = make_model()
    base = prompts(model, [tokens[0, :4].tolist(), tokens[1].tolist()], "left")
    reference = [tokens[2, :3].tolist(), tokens[3].tolist(), tokens[4].tolist()]
    asked = {"how": "mean", **ONE, "exact": 5}
    source, metric = prompts(model, reference), logit_difference(3, 1)
    found = edges(model, base, source, metric, **asked)
    alone = [by_name(edges(model, row[None], source, metric, **asked)) for row in (tokens[0, :4], tokens[1])]
    assert_equal(by_name(found), {name: sum(one[name] for one in alone) / 2 for name in alone[0]})
    each = [cache(model, torch.tensor([row]), ["embed", "pos_embed", "z", "mlp_out"]) for row in reference]
    effects = {name: effect for name, effect in by_name(found, column="effect").items() if effect == effect}
    for name in effects:
        total = 0.0
        for row in (tokens[0, :4], tokens[1]):
            means = {}
            for hook in each[0]:
                reach = [[x[hook][0, at] for x in each if x[hook].shape[1] > at] for at in range(len(row))]
                means[hook] = torch.stack([torch.stack(some).mean(0) for some in reach])[None]
            patched, plain = (run(model, row[None], *given) for given in ([path_of(name, means)], []))
            total += float((patched - plain)[0, -1, 3] - (patched - plain)[0, -1, 1]) / 2
        assert abs(effects[name] - total) <= 1e-9 * max(map(abs, effects.values())), name


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


@pytest.mark.parametrize(("rank", "exact"), [("mean", 2), ("size", 2), ("mean", 0), ("size", 0)])
def test_rows_are_in_the_order_of_exact_effects_where_measured(make_model, tokens, rank, exact):
    """A circuit of the first rows is that of `top`, and print begins with them; `rank` is that of the estimates."""

    def two(output):
        return {"squared": output[:, -1].square().sum(-1), "first": output[:, -1, 0]}

    found = edges(make_model(0), tokens, tokens.roll(1, 0), two, exact=exact, rank=rank)
    estimate, effect = ("size", "effect_size") if rank == "size" else ("estimate", "effect")
    for metric, rows in found.frame.groupby("metric"):
        assert (rows[effect].count() > 0) == (exact > 0) == (found.exact is not None)
        assert rows[effect].abs().fillna(rows[estimate].abs()).is_monotonic_decreasing
        assert rows.sort_values("rank")[estimate].abs().is_monotonic_decreasing
        assert found.ranking(metric) == list(rows["variant"])
        assert found.top(5, metric) == circuit.edges(rows["variant"].head(5))
    first_row = next(line for line in repr(found).split("\n") if line.split()[0].isdigit())
    assert first_row.split()[0] == str(found.frame["rank"].iloc[0])


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_every_precision_of_hugging_face(hf_model, name):
    """Estimates are those of float64."""
    base, source = torch.randint(3, 50, (2, 3, 6), generator=torch.Generator().manual_seed(1))

    def metric(output):
        return output.double()[:, -1, 3] - output.double()[:, -1, 5]

    def estimates(dtype):
        model = hf_model(name, dtype=dtype) if dtype else hf_model(name)
        found = patch.edges(model, base, source, metric, how="mean", steps=2, **ONE).frame
        return found.set_index("variant")["estimate"].sort_index().to_numpy()

    expected = estimates(None)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.15)):
        assert np.abs(estimates(dtype) - expected).max() <= tolerance * np.abs(expected).max(), dtype


def test_edges_at_spans_are_paths_there(causal, tokens, other_tokens):
    """Estimates of spans that cover all positions add up; exact ones are those of a path, and a circuit holds both."""
    spans = {"start": [0, 1], "rest": range(2, tokens.shape[1])}
    asked = {"method": "gradient", "exact": 6, "draws": 9, "flips": 9}
    whole = patch.edges(causal, tokens, other_tokens, curved, **asked).frame
    found = patch.edges(causal, tokens, other_tokens, curved, spans=spans, **asked)
    ends = ["sender", "receiver"]
    summed = found.frame.groupby(ends)["estimate"].sum()
    assert summed.to_dict() == pytest.approx(whole.set_index(ends)["estimate"].to_dict(), abs=1e-6)
    for _, row in found.frame.dropna(subset="effect").iterrows():
        edge = f"{row['sender']} -> {row['receiver']} @ {row['positions']}"
        cut = circuit.edges(edge, causal).cut(other_tokens)
        values = [curved(run(causal, tokens, *edit)).mean().item() for edit in ((cut,), ())]
        assert row["effect"] == pytest.approx(values[0] - values[1], abs=1e-6)
    every = found.top(len(found.frame))
    assert len(every) == len(whole)
    # An edge at both spans has no effect of its own.
    assert {*dict(every.effects).values()} == {("curved", None, None)}


def test_spans_count_from_the_end_of_each_prompt(causal, tokens, other_tokens):
    """Two prompts of unequal length give the mean of what each alone gives at its own last position."""
    asked = {"method": "gradient", "exact": 6, "draws": 9, "flips": 9, "metric": logit_difference(3, 1)}
    base, source = ([given[0, :4].tolist(), given[1].tolist()] for given in (tokens, other_tokens))
    found = patch.edges(causal, base, source, spans={"start": [0], "end": [-1]}, **asked).frame
    alone = [
        patch.edges(causal, [row], [other], spans={"end": [len(row) - 1]}, **asked | {"exact": "all"}).frame
        for row, other in zip(base, source, strict=True)
    ]
    ends, at_end = ["sender", "receiver"], found[found["positions"] == "-1"]
    for column in ("estimate", "effect"):
        means = sum(one.set_index(ends)[column] for one in alone) / 2
        got = at_end.dropna(subset=column).set_index(ends)[column]
        assert len(got)
        assert got.to_dict() == pytest.approx(means[got.index].to_dict(), abs=1e-5), column
    (sender, receiver), effect = got.index[0], got.iloc[0]
    cut = circuit.edges(f"{sender} -> {receiver} @ -1", causal).cut(source)
    assert sweep(causal, base, cut, asked["metric"]).frame["effect"][0] == pytest.approx(effect, abs=1e-5)
