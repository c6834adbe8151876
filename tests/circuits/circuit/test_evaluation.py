"""Faithfulness, completeness and minimality against runs made one by one, and curves with their areas."""

import itertools

import numpy as np
import pytest
import torch

from circuits import circuit, patch, run
from circuits.circuit import _circuit_runner
from tests.circuits.circuit.test_intervention import ByHand, sources

#: Random models tell clean from source by chance; what is counted here holds without a gap, too.
pytestmark = pytest.mark.filterwarnings("ignore:circuit.*the gap between clean and source run is")

FEW = {"draws": 50, "flips": 200}
CHAIN = "embed -> 0.1.v; embed -> 0.1.k; 0.1 -> 1.2.v; 0.1 -> mlp0; mlp0 -> 1.2.k; 1.2 -> mlp1; 1.2 -> output"
CHAIN += "; mlp1 -> output; mlp0 -> output; embed -> output"


def metric(output):
    return output[:, -1].square().sum(-1)


def pair(output, rows):
    """A sum and a count that differs between examples."""
    return output[:, -1].square().sum(-1), 1.0 + rows % 3


@pytest.fixture
def model(make_model):
    return make_model(n_layers=2)


def resampled(sums, counts, draws, seed=0):
    """Pooled ratios [draw run] of the same resamples that all intervals are made of."""
    n = sums.shape[1]
    weights = np.random.default_rng([seed, 1]).multinomial(n, np.full(n, 1 / n), size=draws).astype(float)
    return (weights @ sums.T) / (weights @ counts.T)


def pooled(model, tokens, edits, how=metric, rows=None):
    """Sums and counts [run example], run one by one."""
    sums, counts = [], []
    for one in edits:
        value = how(run(model, tokens, *one)) if rows is None else how(run(model, tokens, *one), rows)
        total, count = value if isinstance(value, tuple) else (value, torch.ones(len(value)))
        sums.append(total.double().numpy())
        counts.append(count.double().numpy())
    return np.stack(sums), np.stack(counts)


def by_hand(model, tokens, source, circuits, how="resample", measured=metric, rows=None, draws=50):
    """Metric, faithfulness and its resamples of circuits that are kept."""
    given = None if how == "zero" else source
    edits = [(), (circuit.edges([]).keep(given, how),), *((c.keep(given, how),) for c in circuits)]
    sums, counts = pooled(model, tokens, edits, measured, rows)
    value = sums.sum(1) / counts.sum(1)
    drawn = resampled(sums, counts, draws)
    share = (value[2:] - value[1]) / (value[0] - value[1])
    return value, share, (drawn[:, 2:] - drawn[:, 1:2]) / (drawn[:, :1] - drawn[:, 1:2])


def test_a_gap_that_may_be_none_is_warned_of_once_for_each_metric(model, tokens, other_tokens):
    """An easy mistake: the answers of other prompts."""

    def surely(output):
        assert not model.training
        return output.sum((1, 2)) * 0 + (output[:, 0, 0] > 1e9)

    def both(output):
        return {"none": surely(output), "differs": metric(output)}

    chain = circuit.edges(CHAIN.split("; "))
    with pytest.warns(
        UserWarning, match=r"none: the gap between clean and source run is 0 \[0, 0\]"
    ) as caught:
        found = circuit.evaluate(model, chain, tokens, other_tokens, both, random=1, subsets=1, **FEW)
    told = found.baseline.set_index("metric")
    unsure = (told["gap_ci_low"] <= 0) & (told["gap_ci_high"] >= 0)
    assert len(caught) == unsure.sum()


@pytest.mark.parametrize("how", ["resample", "mean", "zero"])
def test_faithfulness_against_runs_one_by_one(how, model, tokens, other_tokens):
    source = None if how == "zero" else other_tokens
    given = {
        "chain": circuit.edges(CHAIN),
        "nodes": circuit.nodes("embed; 0.1; 1.2; mlp1"),
        "at": circuit.edges(CHAIN.replace("embed -> 0.1.v", "embed -> 0.1.v @ 5")),
    }
    rows = torch.arange(8)
    # The last forward is of one example.
    options = {"random": 3, "subsets": 0, "minimality": False, "batch_size": 7, **FEW}
    found = circuit.evaluate(model, given, tokens, source, pair, batch=rows, how=how, **options)
    value, share, drawn = by_hand(model, tokens, other_tokens, given.values(), how, pair, rows)
    frame = found.frame.set_index("circuit")
    assert list(frame["size"]) == [len(c) for c in given.values()]
    np.testing.assert_allclose(frame["value"], value[2:], rtol=1e-9)
    np.testing.assert_allclose(frame["faithfulness"], share, rtol=1e-7)
    bounds = np.quantile(drawn, [0.025, 0.975], axis=0)
    np.testing.assert_allclose(frame["faithfulness_ci_low"], bounds[0], rtol=1e-6)
    np.testing.assert_allclose(frame["faithfulness_ci_high"], bounds[1], rtol=1e-6)
    assert len({round(x, 6) for x in share}) == 3
    base = found.baseline.iloc[0]
    np.testing.assert_allclose([base["clean"], base["source"]], value[:2], rtol=1e-9)
    np.testing.assert_allclose(base["gap"], value[0] - value[1], rtol=1e-9)
    assert base["gap_ci_low"] <= base["gap"] <= base["gap_ci_high"]


def test_the_ends_are_zero_and_one_and_cost_nothing(model, tokens, other_tokens):
    """Position embeddings carry the same in both runs, so that a circuit may have them or not."""
    full = circuit.full(model)
    positions = circuit.edges([name for name in full if name.startswith("pos_embed")])
    given = {"full": full, "without": full - positions, "empty": circuit.edges([]), "positions": positions}
    given |= {"nodes": circuit.full(model, "nodes"), "none": circuit.nodes([])}
    options = {"random": 0, "subsets": 0, "minimality": False, **FEW}
    found = circuit.evaluate(model, given, tokens, other_tokens, metric, **options)
    assert list(found.frame["faithfulness"]) == [1, 1, 0, 0, 1, 0]
    assert found.frame["p_random"].isna().all()
    assert found.frame["random_mean"].isna().all()
    assert found.settings["forwards"] == 2
    means = circuit.evaluate(model, given, tokens, other_tokens, metric, how="mean", **options)
    assert means.settings["forwards"] == 3
    # A source that runs alone is rounded otherwise, which ranks no circuits that do as it does.
    options["random"] = 19
    alone = circuit.evaluate(model, circuit.nodes("1.2"), tokens, other_tokens[:1], metric, **options)
    assert alone.frame["p_random"][0] == 1


def test_completeness_takes_subsets_out_of_the_circuit_and_of_the_model(model, tokens, other_tokens):
    c = circuit.edges(CHAIN)
    found = circuit.evaluate(
        model, c, tokens, other_tokens, metric, random=0, subsets=5, minimality=False, **FEW
    )
    rows = found.completeness
    assert len(rows) == 5
    assert rows["removed"].nunique() > 3
    for row in rows.to_dict("records"):
        removed = circuit.edges(row["removed"])
        assert len(removed) == row["size"] >= 1
        assert removed <= c
        rest = circuit.full(model) - removed
        _, share, drawn = by_hand(model, tokens, other_tokens, [c - removed, rest])
        np.testing.assert_allclose([row["without"], row["model_without"]], share, rtol=1e-8, atol=1e-12)
        np.testing.assert_allclose(row["difference"], share[0] - share[1], rtol=1e-8, atol=1e-12)
        bounds = np.quantile(drawn[:, 0] - drawn[:, 1], [0.025, 0.975])
        found_bounds = [row["difference_ci_low"], row["difference_ci_high"]]
        np.testing.assert_allclose(found_bounds, bounds, rtol=1e-6)


@pytest.mark.parametrize("how", ["resample", "mean", "zero"])
def test_effects_of_one_edge_are_those_of_forwards_with_separate_inputs_by_hand(
    how, hooked_only, make_model, tokens, other_tokens
):
    """Exact effects are of the whole model without an edge, shares of minimality of a circuit without it."""
    model, given = make_model(family=hooked_only), None if how == "zero" else other_tokens
    hand, every = ByHand(model), {*circuit.full(model)}
    theirs = sources(hand, other_tokens, how)

    def agrees(rows, columns, kept, rests, unit=1.0):
        """Compares changes from rests [row] to what is kept, each test by all 2^8 flips and by Holm."""
        measured = [metric(hand.kept(tokens, theirs, names)).detach().numpy() for names in (*rests, kept)]
        change = np.array(measured[:-1]) - measured[-1]
        flipped = np.abs(change @ np.array(list(itertools.product([1, -1], repeat=8))).T)
        p = np.mean(flipped >= np.abs(change.sum(1, keepdims=True)) - 1e-9, axis=1)
        adjusted = [min(1, max((p >= one).sum() * one for one in p if one <= own)) for own in p]
        for column, expected in zip(columns, (change.mean(1) / unit, p, adjusted), strict=True):
            np.testing.assert_allclose(rows[column].astype(float), expected, rtol=1e-7, atol=1e-10)

    asked = {"how": how, "draws": 50, "flips": 256}
    found = patch.edges(model, tokens, given, metric, exact=6, **asked)
    rows = found.frame.dropna(subset="effect")
    agrees(rows, ["effect", "p_value", "p_adjusted"], every, [every - {edge} for edge in rows["variant"]])
    # Of the six strongest and six others, one of which ends at a head that the circuit lacks.
    c = found.top(6) | circuit.edges(["embed -> 0.3.q", *found.ranking()[20:25]], model)
    rows = circuit.evaluate(model, c, tokens, given, metric, random=0, subsets=0, **asked).minimality
    assert list(rows["member"]) == list(c)
    ends = [metric(hand.kept(tokens, theirs, names)).mean().item() for names in (every, ())]
    columns, unit = ["share", "p_value", "p_adjusted"], ends[1] - ends[0]
    agrees(rows, columns, {*c}, [{*c} - {edge} for edge in c], unit)


def test_controls_are_random_circuits_of_what_can_matter_as_large_and_at_as_many_positions(
    model, tokens, other_tokens, monkeypatch
):
    asked, runner = [], _circuit_runner.CircuitRunner
    kept = runner.measure_circuit
    monkeypatch.setattr(runner, "measure_circuit", lambda m, c: asked.append(c) or kept(m, c))
    full, chain = circuit.full(model), circuit.edges(CHAIN)
    positions = [name for name in full if name.startswith("pos_embed")]
    given = {"edges": chain | circuit.edges(positions), "full": full}
    given["nodes"] = circuit.nodes("0.1 @ 2; mlp1 @ all but 0; 0.2 @ 1,3")
    few = {"random": 8, "subsets": 0, "minimality": False, **FEW}
    frame = circuit.evaluate(model, given, tokens, other_tokens, metric, **few).frame
    assert frame["size"].tolist() == [len(chain) + len(positions), len(full), 3]
    nodes = len(circuit.full(model, "nodes")) - 1  # but pos_embed
    shares = [len(chain) / (len(full) - len(positions)), 1, (1 + 5 + 2) / (nodes * 6)]
    assert frame["share"].tolist() == pytest.approx(shares)
    assert {len(one) for one in asked[1:9]} == {len(chain)}
    assert not any("pos_embed" in member for one in asked[1:9] for member in one)
    for one in asked[19:]:
        assert sorted(name.partition(" @ ")[2] for name in one) == ["1,3", "2", "all but 0"]
    for start, name in ((0, "edges"), (18, "nodes")):
        controls = asked[start + 1 : start + 9]
        assert asked[start] == given[name]
        assert len(set(controls)) > 6
        _, share, _ = by_hand(model, tokens, other_tokens, [given[name], *controls])
        row, others = frame.set_index("circuit").loc[name], share[1:]
        expected = [others.mean(), others.min(), others.max(), (1 + (others >= share[0]).sum()) / 9]
        columns = ["random_mean", "random_low", "random_high", "p_random"]
        np.testing.assert_allclose(list(row[columns]), expected, rtol=1e-8, atol=1e-12)


def test_equal_runs_have_no_faithfulness(model, tokens):
    same = circuit.evaluate(model, circuit.edges(CHAIN), tokens, tokens, metric, random=1, subsets=1, **FEW)
    assert same.frame[["faithfulness", "random_mean", "p_random"]].isna().all().all()
    assert same.baseline["gap"][0] == 0


# ---- Curves


@pytest.fixture
def found(model, tokens, other_tokens):
    return {
        "exact": patch.edges(model, tokens, other_tokens, metric, exact="all", **FEW),
        "gradient": patch.edges(model, tokens, other_tokens, metric, method="gradient", exact=1, **FEW),
    }


def test_curves_and_their_areas(model, tokens, other_tokens, found):
    rankings = {
        "exact": found["exact"],
        "gradient": found["gradient"].ranking(by="estimate"),
        "nodes": ["embed", "1.2", "0.1", "mlp1"],
    }
    result = circuit.curve(model, rankings, tokens, other_tokens, metric, sizes=[1, 3, 0.5, 10, 4], draws=50)
    n_edges = len(found["exact"].frame)
    expected_sizes = {
        "exact": [0, 1, 3, 4, 10, n_edges // 2, n_edges],
        "gradient": [0, 1, 3, 4, 10, n_edges // 2, n_edges],
        # Half of eleven nodes is five, and the ranking has four.
        "nodes": [0, 1, 3, 4, 11],
    }
    for name, rows in result.frame.groupby("ranking"):
        assert list(rows["size"]) == expected_sizes[name]
        ranking = rankings[name].ranking() if name == "exact" else rankings[name]
        make = circuit.nodes if name == "nodes" else circuit.edges
        kept = [make(ranking[:size]) for size in rows["size"][1:-1]]
        _, share, drawn = by_hand(model, tokens, other_tokens, kept)
        share, drawn = np.array([0, *share, 1]), np.pad(drawn, ((0, 0), (1, 1)), constant_values=(0, 1))
        np.testing.assert_allclose(rows["faithfulness"], share, rtol=1e-8, atol=1e-12)
        bounds = np.quantile(drawn, [0.025, 0.975], axis=0)
        np.testing.assert_allclose(rows["faithfulness_ci_low"], bounds[0], rtol=1e-6, atol=1e-12)
        x = rows["size"].to_numpy() / rows["size"].max()
        np.testing.assert_allclose(rows["share"], x)
        areas = result.areas.set_index("ranking").loc[name]
        np.testing.assert_allclose(areas["CPR"], np.trapezoid(share, x))
        np.testing.assert_allclose(areas["CMD"], np.trapezoid(np.abs(1 - share), x))
        np.testing.assert_allclose(
            [areas["CMD_ci_low"], areas["CMD_ci_high"]],
            np.quantile(np.trapezoid(np.abs(1 - drawn), x, axis=1), [0.025, 0.975]),
        )
    assert list(result.areas["ranking"]) == list(rankings)
    # The figure has a line and a band of numbers for each ranking: those of the table.
    figure = result.plot()
    assert "Bands: 95% intervals" in figure.layout.title.subtitle.text
    drawn = {trace.name: trace for trace in figure.data}
    for name, rows in result.frame.groupby("ranking"):
        np.testing.assert_array_equal(drawn[name].y, rows["faithfulness"])
        low, high = rows["faithfulness_ci_low"].to_numpy(), rows["faithfulness_ci_high"].to_numpy()
        np.testing.assert_array_equal(drawn[f"{name}, band"].y, [*high, *low[::-1]])


def test_the_smallest_circuit_is_faithful_enough_and_one_member_less_is_not(
    model, tokens, other_tokens, found
):
    ranking = found["exact"].ranking()
    for least in (0.3, 0.9, 1.0):
        c = circuit.smallest(model, found["exact"], tokens, other_tokens, metric, least)
        assert c == circuit.edges(ranking[: len(c)])
        assert c.effects == found["exact"].top(len(c)).effects
        assert c == circuit.smallest(model, ranking, tokens, other_tokens, metric, least)
        _, share, _ = by_hand(
            model, tokens, other_tokens, [c, *([circuit.edges(ranking[: len(c) - 1])] if len(c) > 1 else [])]
        )
        assert share[0] >= least - 1e-9
        assert len(c) == 1 or share[1] < least


def test_a_ranking_of_members_at_positions_adds_one_entry_after_the_other(model, tokens, other_tokens):
    asked = {"sites": ["embed", "z", "mlp_out"], "by": "position", "exact": 2, **FEW}
    found = patch.screen(model, tokens, other_tokens, metric, **asked)
    edges = ["0.1 -> output @ 5", "embed -> 0.1.v @ 1,4", "0.1 -> output @ 4,5", "0.2 -> output @ 5"]
    rankings, sizes = {"nodes": found, "edges": edges}, [1, 2, 3, 4, 7, 33]
    # The last as a share: half of 66.
    given = [*sizes[:-1], 0.5]
    result = circuit.curve(model, rankings, tokens, other_tokens, metric, sizes=given, draws=20)
    of = dict(iter(result.frame.groupby("ranking")))
    every = len(found.frame)
    assert every == 11 * 6
    total = sum("pos_embed" not in name for name in circuit.full(model)) * 6
    shares = {"nodes": [*sizes, every], "edges": [1, 3, 4, 5, total]}
    kept = {
        "nodes": [found.top(size) for size in sizes],
        "edges": [circuit.edges(edges[:size]) for size in range(1, 5)],
    }
    for name, rows in of.items():
        assert list(rows["size"]) == {"nodes": [0, *sizes, every], "edges": [0, 1, 2, 3, 4, total]}[name]
        np.testing.assert_allclose(rows["share"], np.array([0, *shares[name]]) / shares[name][-1])
        _, share, _ = by_hand(model, tokens, other_tokens, kept[name])
        np.testing.assert_allclose(rows["faithfulness"], [0, *share, 1], rtol=1e-8, atol=1e-10)


def test_pruning_removes_what_is_missed_least_by_hand(model, tokens, other_tokens, found):
    """Of seven edges a round weighs the last two that are left, and removes the one without which f is nearer to 1."""
    order = found["exact"].ranking()[:7]
    left, gone = order[::-1], []
    while left:
        without = [circuit.edges([one for one in left if one != edge]) for edge in left[:2]]
        _, share, _ = by_hand(model, tokens, other_tokens, without)
        gone += [left.pop(int(np.argmin(abs(1 - share))))]
    assert circuit.prune(model, order, tokens, other_tokens, metric) == gone[::-1]
