import numpy as np
import pytest
import torch

from circuits import CircuitsError, ablate, edit, intervene, run, sweep
from circuits.interventions.replacements import derangement
from circuits.model.hooked_model import HookedModel


def only(site, layer, function):
    return lambda s, at, x: function(x) if (s, at) == (site, layer) else x


def of_heads(heads, function, axis=2):
    """Apply `function` to some heads along `axis` of a copy."""

    def apply(x):
        x, index = x.clone(), [slice(None)] * x.ndim
        index[axis] = heads
        x[tuple(index)] = function(x)[tuple(index)]
        return x

    return apply


def values_at(by_hand, model, tokens, wanted):
    found = {}
    by_hand(model, tokens, lambda s, at, x: found.setdefault((s, at), x))
    return found[wanted]


def uniform_pattern(model, x):
    length = x.shape[-1]
    causal = model.cfg.attention_dir == "causal"
    allowed = torch.ones(length, length, dtype=x.dtype)
    allowed = allowed.tril() if causal else allowed
    return (allowed / allowed.sum(-1, keepdim=True)).expand_as(x)


def test_uniform_all_against_a_forward_by_hand(model, tokens, by_hand, assert_same):
    expected = by_hand(model, tokens, lambda s, at, x: uniform_pattern(model, x) if s == "pattern" else x)
    assert_same(run(model, tokens, ablate.uniform("all")), expected, model(tokens))


def test_uniform_of_some_heads_against_run_with_hooks(model, tokens, assert_same):
    last = model.cfg.n_layers - 1

    def hook(pattern, hook):
        pattern[:, [1, 3]] = uniform_pattern(model, pattern)[:, [1, 3]]
        return pattern

    expected = model.run_with_hooks(tokens, fwd_hooks=[(f"blocks.{last}.attn.hook_pattern", hook)])
    if bool((expected == model(tokens)).all()):
        pytest.skip("in this model class the hook of the pattern is not in line")
    assert_same(run(model, tokens, ablate.uniform(f"{last}.1,{last}.3")), expected, model(tokens))


def test_uniform_in_a_causal_model_is_the_running_mean_of_v(causal, tokens):
    """Closed form: z at position i is the mean of v at positions 0..i."""
    _, cache = run(causal, tokens, ablate.uniform("0.2"), cache=["v.0", "z.0"])
    v = cache["v.0"][:, :, 2]
    running = v.cumsum(1) / torch.arange(1, 7, dtype=v.dtype)[None, :, None]
    torch.testing.assert_close(cache["z.0"][:, :, 2], running, rtol=0, atol=1e-12)
    assert (cache["z.0"][:, :, 1] - cache["v.0"][:, :, 1].cumsum(1)).abs().max() > 0.1


def test_uniform_on_a_grid_is_one_over_n_squared(make_model):
    """arXiv:2410.22244, section 3.1.2: every weight of a bidirectional 7×7 model is 1/49."""
    model = make_model(n_ctx=49, d_vocab_out=1, attention_dir="bidirectional", d_vocab=20)
    tokens = torch.randint(0, 20, (3, 49), generator=torch.Generator().manual_seed(0))
    output, cache = run(model, tokens, ablate.uniform("all"), cache="pattern")
    assert output.shape == (3, 49, 1)
    assert len(cache) == 2
    assert all(bool((pattern - 1 / 49).abs().max() < 1e-15) for pattern in cache.values())


def test_visible_keys_come_from_the_scores_not_from_the_config(make_model, hooked_only, tokens):
    """A user's hook that masks one more key is respected."""
    causal = make_model(family=hooked_only)

    def hide_key_two(scores, hook):
        scores[..., 2] = -torch.inf
        return scores

    causal.add_hook("blocks.0.attn.hook_attn_scores", hide_key_two)
    _, cache = run(causal, tokens[:, 1:] * 0 + 3, ablate.uniform("0.0"), cache=["pattern.0"])
    expected = torch.tensor(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]
    )
    expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(cache["pattern.0"][0, 0], expected.double())


def test_a_query_that_sees_nothing_keeps_its_zero_pattern(causal, tokens):
    """Padding on the left: the padded keys are seen by nobody, and their queries see nothing."""
    keep = torch.ones(8, 6, dtype=torch.long)
    keep[0, :2] = 0
    with intervene(causal, ablate.uniform("0.0"), edit("pattern.0", lambda x: found.setdefault("it", x))):
        found: dict[str, torch.Tensor] = {}
        causal(tokens, attention_mask=keep)
    seen = torch.ones(6, 6, dtype=torch.float64).tril()
    seen[:, :2] = 0
    torch.testing.assert_close(found["it"][0, 0], seen / seen.sum(-1, keepdim=True).clamp(min=1))
    seen = torch.ones(6, 6, dtype=torch.float64).tril()
    torch.testing.assert_close(found["it"][1, 0], seen / seen.sum(-1, keepdim=True))


def test_a_finite_mask_value_is_recognised(causal, tokens):
    expected = run(causal, tokens, ablate.uniform("all"))
    for block in causal.blocks:
        block.attn.IGNORE = torch.tensor(-1e5)
    torch.testing.assert_close(run(causal, tokens, ablate.uniform("all")), expected)


def test_uniform_over_keys(model, tokens, by_hand, assert_same):
    causal = model.cfg.attention_dir == "causal"

    def over_keys(x):
        allowed = torch.zeros(6, 6, dtype=x.dtype)
        allowed[:, [0, 2]] = 1
        allowed = allowed.tril() if causal else allowed
        return (allowed / allowed.sum(-1, keepdim=True)).expand_as(x)

    expected = by_hand(model, tokens, lambda s, at, x: over_keys(x) if s == "pattern" else x)
    assert_same(run(model, tokens, ablate.uniform("all", keys=[0, 2])), expected, model(tokens))


def test_a_query_that_sees_none_of_the_keys_is_an_error_unless_left_out(causal, tokens):
    with pytest.raises(CircuitsError, match=r"query 0 sees none of the keys \[3\].*positions="):
        run(causal, tokens, ablate.uniform("all", keys=[3]))
    _, cache = run(causal, tokens, ablate.uniform("all", keys=[3], positions=[3, 4, 5]), cache=["pattern.0"])
    assert bool((cache["pattern.0"][:, :, 3:, 3] == 1).all())
    with pytest.raises(CircuitsError, match="no position 6: the run has positions 0-5"):
        run(causal, tokens, ablate.uniform("all", keys=[6]))


def test_queries_as_positions_and_as_a_mask_per_example(model, tokens, by_hand, assert_same):
    clean = model(tokens)

    def at_positions(x):
        x = x.clone()
        x[:, :, [1, 5]] = uniform_pattern(model, x)[:, :, [1, 5]]
        return x

    expected = by_hand(model, tokens, lambda s, at, x: at_positions(x) if s == "pattern" else x)
    assert_same(run(model, tokens, ablate.uniform("all", positions=[1, -1])), expected, clean)
    assert_same(run(model, tokens, ablate.uniform("all", positions=torch.tensor([1, 5]))), expected, clean)

    mask = torch.rand(8, 6, generator=torch.Generator().manual_seed(0)) < 0.5

    def where_masked(x):
        return torch.where(mask[:, None, :, None], uniform_pattern(model, x), x)

    expected = by_hand(model, tokens, lambda s, at, x: where_masked(x) if s == "pattern" else x)
    assert_same(run(model, tokens, ablate.uniform("all", positions=mask)), expected, clean)
    with pytest.raises(CircuitsError, match=r"\[8, 6\].*\[3, 6\]"):
        run(model, tokens[:3], ablate.uniform("all", positions=mask))


def test_mean_pattern(model, tokens, other_tokens, by_hand, assert_same):
    mean = values_at(by_hand, model, other_tokens, ("pattern", 0)).mean(0)
    edit = only("pattern", 0, of_heads([0, 2], lambda x: mean.expand_as(x), axis=1))
    found = run(model, tokens, ablate.mean_pattern("0.0,0.2", reference=other_tokens))
    assert_same(found, by_hand(model, tokens, edit), model(tokens))


@pytest.mark.parametrize("kept", [None, "head", "queries"])
def test_mean_pattern_within_the_edited_pass(model, tokens, other_tokens, by_hand, assert_same, kept):
    """As the released code of Gopalani et al. does: every layer's mean is over what the earlier means have made."""
    rows = torch.rand(8, 6, generator=torch.Generator().manual_seed(1)) < 0.5

    def chosen(x, where):
        mask = torch.ones_like(x, dtype=torch.bool)
        if kept == "head":
            mask[:, 2] = False
        return mask & where[:, None, :, None] if kept == "queries" else mask

    def expected(tokens, reference, where):
        means = {}

        def averaged(s, at, x):
            means.setdefault((s, at), x.mean(0, keepdim=True))
            return torch.where(chosen(x, rows), means[s, at], x) if s == "pattern" else x

        by_hand(model, reference, averaged)
        return by_hand(
            model,
            tokens,
            lambda s, at, x: torch.where(chosen(x, where), means[s, at], x) if s == "pattern" else x,
        )

    last = model.cfg.n_layers - 1
    heads = (
        "all" if kept != "head" else "+".join(f"{layer}.{h}" for layer in range(last + 1) for h in (0, 1, 3))
    )
    options = {"positions": rows} if kept == "queries" else {}
    reference = torch.cat([other_tokens, other_tokens.flip(1)])[:8]
    edited = ablate.mean_pattern(heads, reference, of="edited", **options)
    assert_same(run(model, tokens, edited), expected(tokens, reference, rows), model(tokens))
    own = ablate.mean_pattern(heads, tokens, of="edited", **options)
    assert_same(run(model, tokens, own), expected(tokens, tokens, rows), model(tokens))
    if last:
        before = run(model, tokens, ablate.mean_pattern(heads, tokens, **options))
        assert not torch.allclose(run(model, tokens, own), before)


def test_mean_pattern_of_the_edited_pass_is_of_the_whole_reference(model, tokens, monkeypatch):
    variants = {"edited": ablate.mean_pattern("all", tokens, of="edited")}

    def found(**options):
        return sweep(model, tokens, variants, metric=lambda output: output.square().mean((1, 2)), **options)

    whole = found(engine="naive")
    for options in ({"engine": "naive", "batch_size": 3}, {"batch_size": 3}):
        frame = found(**options).frame
        torch.testing.assert_close(torch.tensor(frame["value"]), torch.tensor(whole.frame["value"]))
    monkeypatch.setattr("circuits.interventions.reference_runs.TOKENS_PER_PASS", 18)
    pieces = found(engine="naive").frame
    torch.testing.assert_close(torch.tensor(pieces["value"]), torch.tensor(whole.frame["value"]))


def test_the_means_of_all_layers_are_of_one_edited_pass(model, tokens, monkeypatch):
    calls = []
    call = HookedModel.call
    monkeypatch.setattr(HookedModel, "call", lambda self, *given: calls.append(1) or call(self, *given))
    edited = ablate.mean_pattern("all", tokens, of="edited")

    def passes():
        calls.clear()
        with intervene(model, edited):
            return len(calls), model(tokens)

    count, output = passes()
    assert count == 1
    # A reference that takes several pieces takes a pass per layer, since each layer's mean is of all of them.
    monkeypatch.setattr("circuits.interventions.reference_runs.TOKENS_PER_PASS", 18)
    count, in_pieces = passes()
    assert count == 3 * HookedModel.of(model).n_layers
    torch.testing.assert_close(output, in_pieces)


def test_mean_pattern_of_the_edited_pass_knows_no_other_edit(model, tokens):
    other, mean = ablate.zero("mlp_out.0", positions=[1]), ablate.mean_pattern("all", tokens, of="edited")
    if "mlp_out" not in HookedModel.of(model).site_names():
        pytest.skip("it has no MLP")
    with intervene(model, mean):
        _, alone = run(model, tokens, cache=["pattern"])
    with intervene(model, other):
        _, both = run(model, tokens, mean, cache=["pattern"])
    for hook in alone:
        torch.testing.assert_close(alone[hook], both[hook])


def test_a_mask_that_does_not_fit_the_edited_reference_is_refused(tokens):
    mask = torch.ones(3, 6, dtype=torch.bool)
    with pytest.raises(CircuitsError, match=r'of="edited" edits the reference, \[8, 6\].*\[3, 6\]'):
        ablate.mean_pattern("all", tokens, of="edited", positions=mask)
    with pytest.raises(CircuitsError, match="of="):
        ablate.mean_pattern("all", tokens, of="its own")


def test_zero_heads_acts_on_z_and_leaves_the_bias(model, tokens, by_hand, assert_same):
    expected = by_hand(model, tokens, only("z", 0, of_heads([1], torch.zeros_like)))
    assert_same(run(model, tokens, ablate.zero("0.1")), expected, model(tokens))
    _, cache = run(model, tokens, ablate.zero("all"), cache=["attn_out.0"])
    torch.testing.assert_close(cache["attn_out.0"], model.b_O[0].detach().expand(8, 6, -1))


def test_zero_a_site_and_a_layer(model, tokens, by_hand, assert_same):
    clean = model(tokens)
    expected = by_hand(model, tokens, only("attn_out", 0, torch.zeros_like))
    assert_same(run(model, tokens, ablate.zero("attn_out.0")), expected, clean)
    expected = by_hand(model, tokens, lambda s, at, x: x * 0 if s in ("z", "mlp_post") and at == 0 else x)
    assert_same(run(model, tokens, ablate.zero(0)), expected, clean)
    with pytest.raises(CircuitsError, match=r"no site z\.7: the model has layers 0-"):
        run(model, tokens, ablate.zero(7))


def test_zero_scores_keep_the_mask(model, tokens, assert_same):
    """Equal scores are uniform attention; a zero must not open the future."""
    found = run(model, tokens, ablate.zero("scores"))
    assert_same(found, run(model, tokens, ablate.uniform("all")), model(tokens))


def test_heads_of_several_layers_in_one_edit(causal, tokens, by_hand, assert_same):
    chosen = {0: [1], 1: [0, 3]}
    edit = lambda s, at, x: of_heads(chosen[at], torch.zeros_like)(x) if s == "z" else x  # noqa: E731
    assert_same(
        run(causal, tokens, ablate.zero("0.1,1.0,1.3")), by_hand(causal, tokens, edit), causal(tokens)
    )


def test_mean_per_position_and_pooled(model, tokens, other_tokens, by_hand, assert_same):
    z = values_at(by_hand, model, other_tokens, ("z", 0))
    clean = model(tokens)
    for over, axes in (("batch", [0]), ("batch,pos", [0, 1])):
        mean = z.mean(axes, keepdim=True)
        expected = by_hand(model, tokens, only("z", 0, of_heads([1, 2], lambda x, m=mean: m.expand_as(x))))
        assert_same(
            run(model, tokens, ablate.mean("0.1-2", reference=other_tokens, over=over)), expected, clean
        )


@pytest.mark.parametrize(
    ("at", "columns"), [(slice(1, None), range(1, 6)), (slice(-2, None), [4, 5]), ([-1, 1], [1, 5])]
)
def test_a_pooled_mean_leaves_positions_of_the_reference_out(
    causal, tokens, other_tokens, by_hand, assert_same, at, columns
):
    z = values_at(by_hand, causal, other_tokens, ("z", 0))
    mean = z[:, list(columns)].mean([0, 1], keepdim=True)
    expected = by_hand(causal, tokens, only("z", 0, of_heads([1, 2], mean.expand_as)))
    edit = ablate.mean("0.1-2", reference=other_tokens, over="batch,pos", reference_positions=at)
    assert_same(run(causal, tokens, edit), expected, causal(tokens))
    # Of prompts of unequal length, the same positions of each.
    rows = [other_tokens[0].tolist(), other_tokens[1, :4].tolist()]
    chosen = [
        z[0, torch.arange(6)[at]],
        values_at(by_hand, causal, other_tokens[1:2, :4], ("z", 0))[0, torch.arange(4)[at]],
    ]
    mean = torch.cat(chosen).mean(0)
    edit = ablate.mean("0.1-2", reference=rows, over="batch,pos", reference_positions=at)
    expected = by_hand(causal, tokens, only("z", 0, of_heads([1, 2], lambda x: mean.expand_as(x))))
    assert_same(run(causal, tokens, edit), expected, causal(tokens))


def test_positions_of_a_reference_that_cannot_be_pooled(causal, tokens):
    for over, at, message in (
        ("batch", slice(1, None), 'go with over="batch,pos"'),
        ("batch,pos", [6], "no position 6"),
        ("batch,pos", slice(6, None), "no tokens at reference_positions=6:"),
    ):
        with pytest.raises(CircuitsError, match=message):
            run(causal, tokens, ablate.mean("0.1", tokens, over, reference_positions=at))


def test_mean_with_a_reference_of_another_length(causal, tokens):
    with pytest.raises(CircuitsError, match=r"reference is \[1, 4, 4, 4\], the run \[8, 6, 4, 4\]"):
        run(causal, tokens, ablate.mean("all", reference=tokens[:, :4]))
    with pytest.raises(CircuitsError, match="reference"):
        run(causal, tokens, ablate.mean("all", reference=tokens[:, :1]))
    assert run(causal, tokens, ablate.mean("all", reference=tokens[:3, :4], over="batch,pos")).shape == (
        8,
        6,
        11,
    )


def test_a_long_reference_is_run_in_pieces(causal, tokens, monkeypatch):
    whole = run(causal, tokens, ablate.mean("all", reference=tokens), ablate.resample("mlp_out.0", tokens))
    monkeypatch.setattr("circuits.interventions.reference_runs.TOKENS_PER_PASS", 18)
    pieces = run(causal, tokens, ablate.mean("all", reference=tokens), ablate.resample("mlp_out.0", tokens))
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-12)


def test_noise_has_its_scale_and_is_the_same_whatever_the_batch_size(model, tokens):
    def added(edit, site="z.0"):
        return run(model, tokens, edit, cache=[site])[1][site] - run(model, tokens, cache=[site])[1][site]

    found = added(ablate.noise("0.0, 0.2", 0.5, seed=3))
    assert not found[:, :, [1, 3]].any()
    assert float(found[:, :, [0, 2]].std()) == pytest.approx(0.5, rel=0.1)
    twice = added(ablate.noise("0.0, 0.2", 1.0, seed=3))
    torch.testing.assert_close(twice, 2 * found)
    assert not torch.allclose(added(ablate.noise("0.0, 0.2", 0.5, seed=4)), found)
    if model.cfg.n_layers == 1:
        return  # It has attention alone.
    mlp = added(ablate.noise("mlp_out.1", 0.5, seed=3, positions=[2]), "mlp_out.1")
    assert mlp[:, 2].all()
    assert not mlp[:, [0, 1, 3]].any()
    variants = {"0.1": ablate.noise("0.1", 0.3), "all": ablate.noise("all", 0.1, seed=1)}
    frames = [sweep(model, tokens, variants, batch_size=size).frame for size in (None, 3)]
    np.testing.assert_allclose(frames[0]["value"], frames[1]["value"], rtol=1e-9)
    assert variants["0.1"].describe()["scale"] == 0.3
    with pytest.raises(
        CircuitsError, match=r"ablate\.noise: scale=-1; give a standard deviation, at least 0"
    ):
        ablate.noise("all", -1)


def test_resample_takes_another_row_of_the_source(model, tokens, other_tokens, by_hand, assert_same):
    order = derangement(8, seed=5)
    z = values_at(by_hand, model, other_tokens, ("z", 0))[order]
    expected = by_hand(model, tokens, only("z", 0, of_heads([3], lambda x: z)))
    assert_same(
        run(model, tokens, ablate.resample("0.3", source=other_tokens, seed=5)), expected, model(tokens)
    )
    with pytest.raises(CircuitsError, match="batch of 8, the run a batch of 5"):
        run(model, tokens[:5], ablate.resample("0.3", source=tokens))


@pytest.mark.parametrize("size", [2, 3, 5, 64])
def test_derangement_has_no_fixed_point_and_depends_on_the_seed_only(size):
    state = torch.get_rng_state()
    for seed in range(30):
        order = derangement(size, seed)
        assert sorted(order.tolist()) == list(range(size))
        assert not bool((order == torch.arange(size)).any())
        assert bool((order == derangement(size, seed)).all())
    assert bool((state == torch.get_rng_state()).all())


def test_derangements_are_drawn_uniformly():
    drawn = [tuple(derangement(4, seed).tolist()) for seed in range(900)]
    counts = {order: drawn.count(order) for order in set(drawn)}
    assert len(counts) == 9
    assert all(60 < count < 145 for count in counts.values())


def _is_v(name):
    return name in ("blocks.0.attn.W_V", "blocks.0.attn.v.weight")


def test_gradients_flow_through_an_edit(causal, tokens):
    with intervene(causal, ablate.zero("0.1"), ablate.uniform("1.0")):
        causal(tokens).sum().backward()
    # [head d_model d_head], or [head*d_head d_model]
    weight = next(w for name, w in HookedModel.of(causal).named_weights().items() if _is_v(name))
    gradient = weight.grad if weight.ndim == 3 else weight.grad.unflatten(0, (4, 4))
    assert bool((gradient[1] == 0).all())
    assert bool((gradient[0] != 0).any())
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("seed", [-1, 2**63, True])
def test_resample_refuses_what_is_no_seed(tokens, seed):
    with pytest.raises(CircuitsError, match=r"ablate\.resample: seed="):
        ablate.resample("all", tokens, seed=seed)
