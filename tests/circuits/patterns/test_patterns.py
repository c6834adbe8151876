"""Attention by numbers: against a forward written by hand, closed forms, and heads whose attention is set by hand."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from circuits import ablate, edit, heads, intervene, patterns
from circuits.interventions.replacements import derangement
from circuits.model.heads import Head
from circuits.model.hooked_model import HookedModel
from tests.circuits.conftest import activations

LENGTH = 6


@pytest.fixture
def seen(by_hand):
    """Patterns of a model, [layer] -> [batch head query key], from a forward written by hand."""

    def look(model, tokens):
        found, _ = activations(by_hand, model, tokens)
        return {layer: x.numpy() for (site, layer), x in found.items() if site == "pattern"}

    return look


@pytest.fixture
def grid(make_model, family):
    """A bidirectional model on six positions: a matrix of two rows and three columns."""
    return make_model(family=family, attention_dir="bidirectional")


@pytest.fixture
def mask(tokens):
    """Per example, some positions; none in the first example, all in the second."""
    found = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(5)) < 0.4
    found[0], found[1] = False, True
    return found


def attending(pattern, heads="all"):
    """Attention set by hand: [query key], the same in every example."""
    return edit("pattern", lambda current: pattern.to(current).expand_as(current).clone(), heads)


def spread(keys):
    """Equal attention to the keys of a template."""
    return keys.double() / keys.sum(-1, keepdim=True)


def scored(pattern, keys, may_see, chosen):
    """One head and template, by loops: sums over queries of an example of mass and chance, and their number."""
    sums = np.zeros((3, len(pattern)))
    for example in range(len(pattern)):
        for query in range(pattern.shape[1]):
            visible = [key for key in range(pattern.shape[2]) if may_see[example, query, key]]
            on = [key for key in visible if keys[example, query, key]]
            if on and chosen[example, query]:
                mass = sum(pattern[example, query, key] for key in on)
                sums[:, example] += [mass, len(on) / len(visible), 1]
    return sums


def test_scores_of_every_shape_against_loops(model, tokens, mask, seen):
    marked = patterns.marked(mask)
    templates = {"first": patterns.constant(LENGTH, 0), "before": patterns.previous(LENGTH), "marked": marked}
    expected = seen(model, tokens)
    may_see = np.ones((8, LENGTH, LENGTH), bool)
    if model.cfg.attention_dir == "causal":
        may_see = np.tril(may_see)
    found = patterns.scores(model, tokens, templates, positions=~mask)
    assert len(found.frame) == len(expected) * 4 * 3
    for row in found.frame.itertuples():
        keys = templates[row.template].expand(8, -1, -1).numpy()
        mass, chance, count = scored(expected[row.layer][:, row.head], keys, may_see, (~mask).numpy())
        assert row.score == pytest.approx(mass.sum() / count.sum(), abs=1e-12)
        assert row.chance == pytest.approx(chance.sum() / count.sum(), abs=1e-12)
        assert row.effect == pytest.approx(row.score - row.chance, abs=1e-15)
        assert row.corrected == pytest.approx((row.score - row.chance) / (1 - row.chance), abs=1e-12)
        assert (row.queries, row.n) == (count.sum(), 8)
        at = row.layer * 4 + row.head, found.templates.index(row.template)
        np.testing.assert_allclose(found.mass[at], mass, atol=1e-12)


def test_which_keys_are_visible_is_read_off_the_model(featured, tokens, seen):
    """Local attention, soft caps, grouped heads: uniform attention to what may be seen scores its chance."""
    expected = {layer: (pattern > 0) for layer, pattern in seen(featured, tokens).items()}
    before = patterns.previous(LENGTH)
    found = patterns.scores(featured, tokens, {"before": before})
    for row in found.frame.itertuples():
        sees = expected[row.layer][:, row.head][:, 1:]
        share = (sees & before.numpy()[1:]).sum(-1) / sees.sum(-1)
        assert row.chance == pytest.approx(share.mean(), abs=1e-12)


def test_templates_that_depend_on_the_batch(grid, tokens, mask):
    """Functions of the tokens, or of the batch that is given, see the rows of each forward."""
    same = patterns.marked(tokens == tokens[0, 0])
    whole = {"tokens": same, "mask": patterns.marked(mask) & patterns.row(2, 3)}
    expected = patterns.scores(grid, tokens, whole).frame
    made = {
        "tokens": (lambda rows: patterns.marked(rows == tokens[0, 0]), None),
        "mask": (lambda marks: patterns.marked(marks) & patterns.row(2, 3), mask),
    }
    for name, (function, batch) in made.items():
        own = expected[expected["template"] == name]
        for size in (None, 3):
            found = patterns.scores(grid, tokens, {name: function}, batch=batch, batch_size=size).frame
            for column in ("score", "score_ci_low"):
                np.testing.assert_allclose(found[column], own[column], rtol=0, atol=1e-12)


def test_what_was_recorded_gives_what_the_tokens_give_and_runs_once(model, tokens, other_tokens, mask):
    runs = []
    groups = torch.arange(tokens.shape[1]) % 2
    here, there = torch.zeros(2, len(tokens), dtype=torch.long) + torch.tensor([[0], [1]])

    def measured(one, two):
        return [
            patterns.scores(
                model, one, {"identity": patterns.identity(tokens.shape[1])}, positions=mask
            ).frame,
            patterns.movement(model, one, two, positions=mask).frame,
            patterns.follow(model, one, two, groups, here, there).frame,
        ], patterns.attention(model, one)

    tables, maps = measured(tokens, other_tokens)
    handle = model.register_forward_pre_hook(lambda module, args: runs.append(len(args[0])))
    recorded = patterns.record(model, tokens, batch_size=4), patterns.record(model, other_tokens)
    assert sum(runs) == 2 * len(tokens)
    again, maps_again = measured(*recorded)
    handle.remove()
    assert sum(runs) == 2 * len(tokens)
    for table, same in zip(tables, again, strict=True):
        pd.testing.assert_frame_equal(table, same, rtol=1e-9)
    torch.testing.assert_close(maps.mean, maps_again.mean)


def test_intervals_are_those_of_a_bootstrap_by_hand(grid, tokens, mask):
    found = patterns.scores(grid, tokens, {"marked": patterns.marked(mask)}, seed=3, draws=200)
    weights = np.random.default_rng([3, 1]).multinomial(8, np.full(8, 1 / 8), size=200)
    for index, row in enumerate(found.frame.itertuples()):
        mass, chance, count = (part[index, 0] for part in (found.mass, found.chance, found.queries))
        drawn = np.stack([weights @ mass, weights @ (mass - chance), weights @ (mass - chance)], 1)
        drawn /= np.stack([weights @ count, weights @ count, weights @ (count - chance)], 1)
        low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
        for end, expected in (("low", low), ("high", high)):
            bounds = [getattr(row, f"{name}_ci_{end}") for name in ("score", "effect", "corrected")]
            assert bounds == pytest.approx(list(expected), abs=1e-12)
    assert (found.frame["score_ci_low"] < found.frame["score_ci_high"]).all()


def test_bits_are_the_divergence_of_two_level_attention_from_uniform():
    for score in (0.3, 0.5, 0.9, 1.0):
        attention = np.r_[np.full(4, score / 4), np.full(12, (1 - score) / 12)]
        gain = sum(p * math.log2(p * 16) for p in attention if p)
        assert patterns.bits(score, 4 / 16) == pytest.approx(gain)
    found = patterns.bits(np.array([1.0, 0.25, 0.1]), np.array([1 / 16, 0.25, 0.25]))
    assert found.tolist() == [4.0, 0.0, 0.0]
    assert np.isnan(patterns.bits(np.array(np.nan), np.array(np.nan)))


TEMPLATES = {
    "identity": patterns.identity(LENGTH),
    "row": patterns.row(2, 3),
    "column": patterns.column(2, 3),
    "previous": patterns.previous(LENGTH),
}


def test_each_head_gets_the_template_it_attends_by(grid, tokens):
    """Among nested templates too: all of identity's attention is on its row and on its column."""
    own, row, column = (spread(TEMPLATES[name]) for name in ("identity", "row", "column"))
    half = 0.5 * own + 0.5 / LENGTH
    edits = [
        attending(pattern, head)
        for head, pattern in {
            "0.0": own,
            "0.1": row,
            "0.2": column,
            "0.3": torch.full((LENGTH, LENGTH), 1 / LENGTH),
            # A row head with more on itself than on its neighbours, and one with nearly all of it on itself.
            "1.0": 0.7 * row + 0.3 * own,
            "1.1": 0.1 * row + 0.9 * own,
            "1.2": half,
            "1.3": 0.5 * row + 0.5 / LENGTH,
        }.items()
    ]
    with intervene(grid, *edits):
        found = patterns.scores(grid, tokens, TEMPLATES)
    classes = patterns.classify(found, threshold=0.4)
    wanted = {
        "identity": (Head(0, 0), Head(1, 1), Head(1, 2)),
        "row": (Head(0, 1), Head(1, 0), Head(1, 3)),
        "column": (Head(0, 2),),
        "other": (Head(0, 3),),
    }
    assert classes.groups == wanted
    assert classes[0, 2] == "column"
    with pytest.raises(KeyError):
        classes[7, 0]
    assert classes.frame["class"].tolist()[:4] == ["identity", "row", "column", "other"]
    assert "at least 0.4" in classes.rule
    best = classes.frame.set_index(["layer", "head"]).loc[1, 1]
    assert (best["template"], best["rival"]) == ("identity", "column")
    told = [patterns.bits(0.9 + 0.1 / 3, chance) for chance in (1 / 6, 2 / 6)]
    assert best["lead"] == pytest.approx(told[0] - told[1])
    # Corrected for chance the half-way heads are at exactly one half.
    assert patterns.classify(found, threshold=0.51).groups["other"] == heads("0.3, 1.2, 1.3", grid)
    ablate.uniform(classes.groups["row"]).plan(HookedModel(grid))


def test_a_class_needs_an_interval_above_the_threshold(grid, tokens):
    """Four examples attend to their row, four nowhere in particular: the mean is above one half, surely it is not."""
    share = torch.tensor([1.0, 1, 1, 1, 0.2, 0.2, 0.2, 0.2])[:, None, None, None]

    def mixed(pattern):
        return share * spread(TEMPLATES["row"]) + (1 - share) / LENGTH

    with intervene(grid, edit("pattern", lambda current: mixed(current).expand_as(current).to(current))):
        found = patterns.scores(grid, tokens, {"row": TEMPLATES["row"]})
    assert found.frame["corrected"].tolist() == pytest.approx([0.6] * 8)
    assert set(patterns.classify(found).groups) == {"unclear"}
    assert set(patterns.classify(found, threshold=0.19).groups) == {"row"}


def test_of_one_example_nothing_is_sure_and_of_no_visible_key_nothing_is_said(grid, tokens):
    """Another template with no key at a scored query has a score of NaN, and cannot fit."""
    named = {"row": TEMPLATES["row"], "first": patterns.constant(LENGTH, 0) & torch.eye(LENGTH).bool()}
    with intervene(grid, attending(spread(TEMPLATES["row"]))):
        for count, expected in ((1, "unclear"), (8, "row")):
            found = patterns.scores(grid, tokens[:count], named, positions=[1, 2])
            assert found.frame["effect_ci_low"].isna().tolist() == [count == 1, True] * 8
            for unless in (None, {"row": "first"}):
                frame = patterns.classify(found, unless=unless).frame
                assert set(frame["class"]) == {expected}
                assert set(frame["template"]) == {"row"}
            assert set(patterns.classify(found, unless={"first": "row"}).groups) == {"other"}


def half(pattern, where, otherwise):
    """One pattern [query key] at some queries, another at the others."""
    return torch.where(where[:, None], pattern, otherwise)


def test_a_class_of_what_a_head_does_at_some_queries_only(grid, tokens):
    """Own position in the first row; in the second: the same, uniform, or half way."""
    first = torch.arange(LENGTH) < 3
    own, flat = spread(TEMPLATES["identity"]), torch.full((LENGTH, LENGTH), 1 / LENGTH, dtype=torch.float64)
    keys = patterns.identity(LENGTH)
    named = {"identity": keys, "here": keys & first[:, None], "there": keys & ~first[:, None]}
    edits = [
        attending(own, "0.0-3"),
        attending(half(own, first, flat), "1.0-1"),
        attending(half(own, first, 0.5 * own + 0.5 * flat), "1.2-3"),
    ]
    with intervene(grid, *edits):
        found = patterns.scores(grid, tokens, named)
    only = patterns.classify(found, unless={"here": "there"})
    assert only.groups == {
        # Half way to one's own position is enough for the template on the right, and for identity with it.
        "identity": heads("0.0-3, 1.2-3", grid),
        "here": heads("1.0-1", grid),
    }
    assert "here: only where there does not fit." in only.rule
    # The template on the right is no class, whatever fits it.
    there = patterns.classify(found, unless={"identity": "there"})
    assert "there" not in there.groups
    assert there[0, 0] == "here"
    assert patterns.classify(found, 0.6, unless={"here": "there"})[1, 2] == "here"


GROUPS = torch.tensor([0, 1, 2, 0, 1, 2])


def test_what_follows_is_counted_by_loops(model, tokens, other_tokens, mask, seen):
    before_by, after_by = seen(model, tokens), seen(model, other_tokens)

    def attended(pattern):
        """The group of keys with most attention, [batch head query]."""
        by_group = [pattern[..., (group == GROUPS).numpy()].sum(-1) for group in range(3)]
        return np.stack(by_group, -1).argmax(-1)

    before = torch.from_numpy(attended(before_by[0])[:, 0, 5])
    after = torch.from_numpy(attended(after_by[0])[:, 0, 5])
    after = torch.where(after == before, (after + 1) % 3, after)
    found = patterns.follow(model, tokens, other_tokens, GROUPS, before, after, positions=mask, seed=2).frame
    order = derangement(8, 2)
    for row in found.itertuples():
        here, there = attended(before_by[row.layer])[:, row.head], attended(after_by[row.layer])[:, row.head]
        for column, pairs in (("share", range(8)), ("unpaired", order.tolist())):
            hits = [
                here[example, query] == before[pair] and there[example, query] == after[pair]
                for example, pair in enumerate(pairs)
                for query in range(LENGTH)
                if mask[example, query]
            ]
            assert getattr(row, column) == pytest.approx(np.mean(hits))
        assert row.effect == pytest.approx(row.share - row.unpaired)
        assert row.share_ci_low <= row.share <= row.share_ci_high
    assert found["share"].max() > 0


def test_mean_maps_are_the_means_of_a_forward_by_hand(model, tokens, mask, seen):
    expected = seen(model, tokens)
    everywhere = patterns.attention(model, tokens)
    some = patterns.attention(model, tokens, positions=mask)
    chosen = mask.numpy()[:, None, :, None]
    assert len(everywhere.mean) == len(expected)
    assert (everywhere.n, everywhere.mean.dtype) == (8, torch.float64)
    for layer, pattern in expected.items():
        np.testing.assert_allclose(everywhere.mean[layer], pattern.mean(0), rtol=0, atol=1e-12)
        np.testing.assert_allclose(
            some.mean[layer], (pattern * chosen).sum(0) / chosen.sum(0), rtol=0, atol=1e-12
        )
        logs = np.where(pattern > 0, np.log(np.where(pattern > 0, pattern, 1)), 0)
        sees = np.ones((LENGTH, LENGTH))
        sees = np.tril(sees) if model.cfg.attention_dir == "causal" else sees
        most = np.broadcast_to(np.log(sees.sum(-1)), pattern.shape[:3])
        ratio = -(pattern * logs).sum((0, 2, 3)) / most.sum((0, 2))
        np.testing.assert_allclose(everywhere.diffuseness[layer], ratio, rtol=0, atol=1e-12)
    torch.testing.assert_close(everywhere.of((0, 2)), everywhere.mean[0, 2])


def test_heads_that_stay_and_heads_that_follow(grid, tokens, other_tokens):
    row, column = spread(TEMPLATES["row"]), GROUPS[None] == GROUPS[:, None]
    with intervene(grid, attending(row, "1.1")):
        assert patterns.movement(grid, tokens, other_tokens).static() == (Head(1, 1),)
    ones = torch.ones(len(tokens), dtype=torch.long)
    with intervene(grid, attending(spread(column), "all")):
        followed = patterns.follow(grid, tokens, other_tokens, GROUPS, 0 * ones, ones)
    assert followed.frame["share"].max() == 0, "a head that ignores the input cannot follow"
    assert followed.heads() == ()


def test_movement_is_the_total_variation_of_pairs(model, tokens, other_tokens, mask, seen):
    one, two = seen(model, tokens), seen(model, other_tokens)
    order = derangement(8, 4).numpy()
    found = patterns.movement(model, tokens, other_tokens, positions=mask, seed=4, draws=300).frame
    weights = np.random.default_rng([4, 1]).multinomial(8, np.full(8, 1 / 8), size=300)
    counts = mask.numpy().sum(1)
    for row in found.itertuples():
        mine = one[row.layer][:, row.head]
        theirs = two[row.layer][:, row.head]
        sums = [(np.abs(mine - other).sum(-1) / 2 * mask.numpy()).sum(1) for other in (theirs, theirs[order])]
        near, far = (part.sum() / counts.sum() for part in sums)
        assert row.distance == pytest.approx(near, abs=1e-12)
        assert row.unpaired == pytest.approx(far, abs=1e-12)
        assert row.effect == pytest.approx(near - far, abs=1e-12)
        assert row.share == pytest.approx(near / far, abs=1e-12)
        drawn = [(draw @ sums[0] / (draw @ counts), draw @ sums[1] / (draw @ counts)) for draw in weights]
        # A resample of examples whose attention cannot move has no share.
        three = [(a, a - b, a / b if b else np.nan) for a, b in drawn]
        lows = np.nanquantile(three, 0.025, axis=0)
        assert [row.distance_ci_low, row.effect_ci_low, row.share_ci_low] == pytest.approx(
            list(lows), abs=1e-12
        )


def test_templates_by_hand():
    assert patterns.row(2, 2).int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert patterns.column(2, 2, itself=False).nonzero()[:, 1].tolist() == [2, 3, 0, 1]
    assert patterns.row(2, 3, itself=False)[4].nonzero().flatten().tolist() == [3, 5]
    assert patterns.previous(3, by=2).nonzero().tolist() == [[2, 0]]
    assert patterns.constant(3, -1).int().tolist() == [[0, 0, 1]] * 3
    marks = torch.tensor([[True, False], [False, True]])
    assert patterns.marked(marks).int().tolist() == [[[1, 0], [1, 0]], [[0, 1], [0, 1]]]


def test_duplicate_and_induction_by_loops():
    tokens = torch.randint(3, (7, 9), generator=torch.Generator().manual_seed(0))
    for name, back in (("duplicate", 0), ("induction", 1)):
        found = getattr(patterns, name)(tokens)
        for row, ids in enumerate(tokens.tolist()):
            for query in range(9):
                earlier = {key + back for key in range(query) if ids[key] == ids[query]}
                assert set(found[row, query].nonzero().flatten().tolist()) == earlier
    assert patterns.induction(torch.tensor([[1, 2, 1]])).nonzero().tolist() == [[0, 2, 1]]
    assert patterns.duplicate(torch.tensor([[1, 2, 1]])).nonzero().tolist() == [[0, 2, 0]]
