"""Everything of `circuits` on bridges around Hugging Face models, against forwards written by hand."""

import sys

import pytest
import torch

from circuits import (
    CircuitsError,
    ablate,
    cache,
    edit,
    intervene,
    lens,
    patch,
    patterns,
    permute,
    probe,
    prompts,
    run,
    sweep,
    transplant,
)
from circuits.model.hooked_model import HookedModel

families = pytest.importorskip("tests.circuits.families")

MAIN = ["gpt2", "neox", "pythia", "llama", "qwen2", "mistral", "gemma2"]
# The wrapped module computes attention itself.
DELEGATED = ["gptj", "opt", "bert"]
GENERATOR = torch.Generator().manual_seed(1)
TOKENS = torch.randint(3, families.WORDS, (4, 7), generator=GENERATOR)
OTHER = torch.randint(3, families.WORDS, (4, 7), generator=GENERATOR)


def metric(output):
    return output[:, -1, 5] - output[:, -1, 6]


def by_hand(model, functions=None, tokens=TOKENS, keep=None):
    """The output under functions by (site, layer), and every activation."""
    seen = {}

    def at(site, layer, x):
        seen[site, layer] = (functions or {}).get((site, layer), lambda x: x)(x)
        return seen[site, layer]

    return families.forward(model, tokens, at, keep), seen


def heads_put(new, head, axis=2):
    """Replaces one head of an activation."""

    def put(x):
        x = x.clone()
        x.select(axis, head).copy_(new(x).select(axis, head) if callable(new) else new.select(axis, head))
        return x

    return put


def equal(model, found, functions, tokens=TOKENS, keep=None, tolerance=1e-5):
    expected, _ = by_hand(model, functions, tokens, keep)
    clean, _ = by_hand(model, None, tokens, keep)
    if keep is not None:
        found, expected, clean = found[keep], expected[keep], clean[keep]
    effect = float((expected - clean).abs().max())
    assert effect > 1e-3 * float(clean.std())
    assert float((found - expected).abs().max()) <= tolerance * effect


def uniform(x):
    seen = x > 0
    return seen.to(x.dtype) / seen.sum(-1, keepdim=True).clamp(min=1)


@pytest.fixture(params=MAIN)
def model(request, hf_model):
    return hf_model(request.param)


@pytest.mark.parametrize("name", [*MAIN, *DELEGATED])
def test_ablations_are_those_by_hand(hf_model, name):
    model = hf_model(name)
    _, other = by_hand(model, tokens=OTHER)
    cases = {
        "zero": (ablate.zero("0.1"), {("z", 0): heads_put(torch.zeros_like, 1)}),
        "uniform": (ablate.uniform("1.2"), {("pattern", 1): heads_put(uniform, 2, axis=1)}),
        "mean": (
            ablate.mean("0.3", reference=OTHER),
            {("z", 0): heads_put(other["z", 0].mean(0, keepdim=True).expand(4, -1, -1, -1), 3)},
        ),
        "mean pattern": (
            ablate.mean_pattern("0.3", reference=OTHER),
            {
                ("pattern", 0): heads_put(
                    other["pattern", 0].mean(0, keepdim=True).expand(4, -1, -1, -1), 3, 1
                )
            },
        ),
        "site": (ablate.zero("mlp_out.1"), {("mlp_out", 1): torch.zeros_like}),
        "neurons": (
            ablate.neurons(1, [0, 5]),
            {("mlp_post", 1): lambda x: x.index_fill(-1, torch.tensor([0, 5]), 0.0)},
        ),
        "edit": (edit("scores.1", lambda x: 0.5 * x), {("scores", 1): lambda x: 0.5 * x}),
    }
    for intervention, functions in cases.values():
        equal(model, run(model, TOKENS, intervention), functions)
    resampled = run(model, TOKENS, ablate.resample("mlp_out.0", source=OTHER, seed=0), cache=["mlp_out.0"])[1]
    rows = [int((other["mlp_out", 0] - one).abs().amax((1, 2)).argmin()) for one in resampled["mlp_out.0"]]
    assert sorted(rows) == [0, 1, 2, 3]
    assert all(i != row for i, row in enumerate(rows))


def test_patches_at_every_stream_and_together(model):
    _, other = by_hand(model, tokens=OTHER)
    sites = ["resid_pre", "resid_post"] + ([] if families.Form.of(model).parallel else ["resid_mid"])
    for site in sites:
        equal(
            model,
            run(model, TOKENS, patch.activations(f"{site}.0", source=OTHER, positions=[2])),
            {(site, 0): lambda x, site=site: torch.cat([x[:, :2], other[site, 0][:, 2:3], x[:, 3:]], 1)},
        )
    together = [
        patch.activations("z", source=OTHER, heads="0.1"),
        ablate.uniform("1.0"),
        edit(f"{sites[-1]}.1", lambda x: 1.5 * x),
        ablate.zero("mlp_out.0"),
    ]
    equal(
        model,
        run(model, TOKENS, *together),
        {
            ("z", 0): heads_put(other["z", 0], 1),
            ("pattern", 1): heads_put(uniform, 0, axis=1),
            (sites[-1], 1): lambda x: 1.5 * x,
            ("mlp_out", 0): torch.zeros_like,
        },
    )


@pytest.mark.parametrize("mode", ["raw", "compatible"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", [*MAIN, *DELEGATED])
def test_uniform_attention_under_a_mask(hf_model, name, side, mode):
    """Keys that a query may see are those of the causal mask, the window and the padding."""
    # In float64 many models give NaN themselves where a query sees no key; compatibility mode mends the bridge's own
    # attention.
    single = side == "left" and (mode == "raw" or name in DELEGATED)
    model = hf_model(name, mode, torch.float32 if single else torch.float64)
    keep = torch.ones(4, 7, dtype=torch.bool)
    keep[0, :2] = keep[1, :1] = False
    keep = keep if side == "left" else keep.flip(1)
    order = (keep.long().cumsum(1) - 1).clamp(min=0)
    with torch.no_grad(), intervene(model, ablate.uniform("0.1, 1.3")):
        found = model(TOKENS, attention_mask=keep.long(), position_ids=order)
    functions = {("pattern", layer): heads_put(uniform, head, 1) for layer, head in ((0, 1), (1, 3))}
    equal(hf_model(name, mode), found, functions, keep=keep, tolerance=1e-3 if single else 1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma2"])
def test_a_padded_batch_in_double_precision(hf_model, name, side):
    """Queries that see no key, before the text and past a window behind it, leave no NaN to what reads them."""
    model = hf_model(name)
    rows = [TOKENS[0].tolist(), TOKENS[1, :2].tolist()]
    others = [OTHER[0].tolist(), OTHER[1, :2].tolist()]
    base, source = prompts(model, rows, side=side), prompts(model, others, side=side)
    group = "1.0" if name == "gpt2" else "1.k0"
    made = {
        "clean": lambda two: [],
        "mean": lambda two: [ablate.mean("mlp_out", source)],
        "edits": lambda two: [patch.activations("z", two, heads="0.1"), ablate.uniform("1.2")],
        "path": lambda two: [patch.path("0.1", ("v", group), two)],
    }
    for label, edits in made.items():
        found = run(model, base, *edits(source))
        for row, (one, two) in enumerate(zip(rows, others, strict=True)):
            alone = run(model, [one], *edits([two]))[0]
            torch.testing.assert_close(found[row][base.real[row]], alone, rtol=1e-6, atol=1e-6, msg=label)


@pytest.mark.parametrize("name", MAIN)
def test_with_another_attention_implementation(hf_model, name):
    """The bridge computes attention itself, from the mask that the wrapped model makes."""
    model = hf_model(name, fresh=True)
    model.original_model.config._attn_implementation = "sdpa"
    edits = {"scores": lambda x: x * 0.5, "pattern": uniform, "z": lambda x: x.flip(-1)}
    for site, function in edits.items():
        equal(model, run(model, TOKENS, edit(f"{site}.0", function)), {(site, 0): function})
    equal(model, run(model, TOKENS, ablate.uniform("0.1")), {("pattern", 0): heads_put(uniform, 1, 1)})


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("name", "attention"),
    [*((name, "eager") for name in DELEGATED), ("opt", "sdpa"), ("bert", "sdpa")],  # GPT-J has one
)
def test_attention_that_the_wrapped_module_computes(hf_model, name, attention, side):
    """Patterns and scores of a padded batch are those of each prompt alone, by hand; written to and read."""
    model = hf_model(name, fresh=True)
    model.original_model.set_attn_implementation(attention)
    rows = [TOKENS[0].tolist(), TOKENS[1, :3].tolist()]
    base = prompts(model, rows, side=side)
    edits = [
        ablate.uniform("0.1"),
        ablate.uniform("1.2", keys=[0, 1], positions=[-1]),
        edit("scores", lambda x: 0.5 * x, heads="1.0"),
        ablate.zero("0.2"),
    ]

    def two_keys(x):
        x = x.clone()
        x[:, 2, -1] = 0.0
        x[:, 2, -1, :2] = 0.5
        return x

    functions = {
        ("pattern", 0): heads_put(uniform, 1, axis=1),
        ("pattern", 1): two_keys,
        ("scores", 1): heads_put(lambda x: 0.5 * x, 0, axis=1),
        ("z", 0): heads_put(torch.zeros_like, 2),
    }
    found, seen = run(model, base, *edits, cache=["pattern"])
    for row, ids in enumerate(rows):
        real = base.real[row]
        expected, values = by_hand(model, functions, torch.tensor([ids]))
        torch.testing.assert_close(found[row][real], expected[0], rtol=1e-5, atol=1e-5)
        for layer in (0, 1):
            own = seen[f"pattern.{layer}"][row][:, real][:, :, real]
            torch.testing.assert_close(own, values["pattern", layer][0], rtol=1e-5, atol=1e-5)
    shown = torch.as_tensor(patterns.attention(model, TOKENS).mean)
    torch.testing.assert_close(
        shown[1].double(), by_hand(model)[1]["pattern", 1].mean(0), rtol=1e-5, atol=1e-5
    )
    estimated = patch.attribution(model, TOKENS, OTHER, metric=metric, site="pattern").frame
    assert estimated["effect"].abs().min() > 0
    # Nothing stays behind.
    assert model.original_model.config._attn_implementation == attention
    assert torch.equal(run(model, TOKENS), model(TOKENS))


def shows_nothing(module, query, *given, **options):
    return query.transpose(1, 2), None


@pytest.mark.parametrize("name", DELEGATED)
def test_attention_without_a_softmax_is_refused(hf_model, name, monkeypatch):
    """Another's kernel shows no scores; and a softmax in the user's own hook is not taken for the model's."""
    if name != "gptj":  # It has one implementation.
        model = hf_model(name, fresh=True)
        modeling = sys.modules[type(model.original_model).__module__]
        monkeypatch.setitem(modeling.ALL_ATTENTION_FUNCTIONS, "another", shows_nothing)
        model.original_model.config._attn_implementation = "another"
        with pytest.raises(
            CircuitsError, match=r'blocks\.0\.attn: 0 softmaxes .*set_attn_implementation\("eager"\)'
        ):
            run(model, TOKENS, ablate.uniform("0.1"))
    model = hf_model(name)
    with pytest.raises(CircuitsError, match=r"2 softmaxes .* no softmax in a hook there"):
        run(model, TOKENS, edit("q.0", lambda x: x.softmax(-1)), ablate.uniform("0.1"))
    equal(model, run(model, TOKENS, ablate.uniform("0.1")), {("pattern", 0): heads_put(uniform, 1, axis=1)})


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("site", ["q.0", "pattern.0", "z.0"])
def test_no_softmax_is_watched_after_an_exception(hf_model, site, error):
    model = hf_model("opt")

    def fail(x):
        raise error

    before = torch.overrides._len_torch_function_stack()
    with pytest.raises(error):
        run(model, TOKENS, ablate.uniform("0.1"), edit(site, fail))
    assert torch.overrides._len_torch_function_stack() == before
    equal(model, run(model, TOKENS, ablate.uniform("0.1")), {("pattern", 0): heads_put(uniform, 1, axis=1)})


def test_caches_and_patterns(model):
    _, clean = by_hand(model)
    seen = cache(model, TOKENS, ["q", "k", "pattern", "mlp_post", "attn_out"])
    for site in ("q", "k", "pattern", "mlp_post", "attn_out"):
        torch.testing.assert_close(seen[f"{site}.1"], clean[site, 1], rtol=1e-5, atol=1e-5)
    maps = torch.as_tensor(patterns.attention(model, TOKENS).mean)
    torch.testing.assert_close(maps[1].double(), clean["pattern", 1].mean(0), rtol=1e-5, atol=1e-5)
    columns = patterns.scores(model, TOKENS, {"first": patterns.column(7, 1, itself=False)}).frame
    assert len(columns) == 8


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("name", MAIN)
def test_the_lens_adds_up(hf_model, name, mode):
    model = hf_model(name, mode)
    try:
        model(TOKENS)
    except RuntimeError:
        pytest.skip(f"this version does not process a {name} in float64")
    seen = lens(model, TOKENS)
    total = sum(seen.contributions.values()) + seen.constant
    cap = families.Form.of(model).last_cap
    total = total if cap is None else cap * torch.tanh(total / cap)
    assert float((total - seen.output).abs().max()) <= 1e-5 * float(seen.output.std())
    assert {"0.0", "1.3", "mlp_out.1"} <= set(seen.contributions)
    shares = lens(model, TOKENS, lambda output: output[:, -1, 5] - output[:, -1, 7], batch_size=1)
    assert float((sum(shares.shares.values()) - shares.metric).abs().max()) <= 1e-5 * float(seen.output.std())
    if cap is None:
        for name, part in seen.contributions.items():
            expected = part[:, -1, 5] - part[:, -1, 7]
            torch.testing.assert_close(shares.shares[name], expected, rtol=0, atol=1e-5)


def test_sweeps_are_those_of_the_forward_by_hand(model):
    result = sweep(model, TOKENS, {"a": ablate.zero("0.1"), "b": ablate.uniform("1.2")}, metric=metric)
    assert set(result.settings["naive"].values()) == {"a bridge cannot start at a block"}
    expected, _ = by_hand(model, {("z", 0): heads_put(torch.zeros_like, 1)})
    clean, _ = by_hand(model)
    row = result.frame[result.frame["variant"] == "a"].iloc[0]
    assert row["effect"] == pytest.approx(float((metric(expected) - metric(clean)).mean()), rel=1e-5)


def test_a_sweep_over_revisions_that_a_function_loads(hf_model):
    """As of Pythia's training checkpoints: each is booted when its turn comes."""
    loaded = []

    def revision(seed):
        def load():
            loaded.append(seed)
            return families.boot(hf_model.folder("pythia", seed=seed))

        return load

    model = hf_model("pythia")
    variants = {"a": ablate.zero("0.1"), "b": patch.activations("resid_post.0", source=OTHER)}
    result = sweep(
        model, TOKENS, variants, metric=metric, checkpoints={f"step {s}": revision(s) for s in (1, 2)}
    )
    assert loaded == [1, 2]
    for seed in (1, 2):
        one = families.boot(hf_model.folder("pythia", seed=seed))
        expected, _ = by_hand(one, {("z", 0): heads_put(torch.zeros_like, 1)})
        clean, _ = by_hand(one)
        frame = result.frame
        row = frame[(frame["variant"] == "a") & (frame["checkpoint"] == f"step {seed}")].iloc[0]
        assert row["effect"] == pytest.approx(float((metric(expected) - metric(clean)).mean()), rel=1e-5)


@pytest.mark.parametrize("site", ["z", "resid_mid", "mlp_out"])
def test_attribution_is_the_gradient_by_hand(model, site):
    if site == "resid_mid" and families.Form.of(model).parallel:
        pytest.skip("no resid_mid in parallel blocks")
    _, base = by_hand(model)
    _, source = by_hand(model, tokens=OTHER)
    estimates = patch.attribution(model, TOKENS, OTHER, metric=metric, site=site).frame
    leaf = base[site, 0].clone().requires_grad_()
    forward = families.forward.__wrapped__
    output = forward(model, TOKENS, lambda s, at, x: leaf if (s, at) == (site, 0) else x)
    (gradient,) = torch.autograd.grad(metric(output).mean(), leaf)
    product = (gradient * (source[site, 0] - base[site, 0])).sum((0, 1))  # [head d_head] or [d_model]
    chosen = estimates[estimates["layer"] == 0]
    found = torch.tensor(chosen["effect"].to_numpy())
    if site == "z":
        torch.testing.assert_close(found, product.sum(-1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.sum(), product.sum(), rtol=1e-4, atol=1e-6)


def test_screens_edges_and_probes_run(model):
    screen = patch.screen(model, TOKENS, OTHER, metric=metric).frame
    assert len(screen) > 8
    assert screen["effect"].abs().max() > 0
    edges = patch.edges(model, TOKENS, OTHER, metric=metric, exact=2).frame
    assert len(edges) > 20
    fitted = probe.linear(
        model, TOKENS.repeat(5, 1), targets=TOKENS.repeat(5, 1)[:, 0] % 2, sites=["resid_post"]
    )
    assert fitted is not None


@pytest.mark.parametrize("component", ["q", "v", "qkv", "o", "mlp", "pos_embed", "ln1", "ln2", "ln_final"])
def test_transplants_reach_the_model(hf_model, model, component):
    name = next(name for name in MAIN if hf_model(name) is model)
    donor = hf_model(name, fresh=True, seed=5)
    if component == "pos_embed" and name != "gpt2":
        with pytest.raises(CircuitsError, match="the source has no weights of 'pos_embed'"):
            transplant.weights(donor, component)
        return
    clean, _ = by_hand(model)
    weights, theirs = dict(model.state_dict()), donor.state_dict()
    moved = transplant.weights(donor, component)
    names = set(moved.describe()["parameters"])
    with intervene(model, moved), torch.no_grad():
        found, expected = model(TOKENS), by_hand(model)[0]
        for key, value in model.state_dict().items():
            assert torch.equal(value, theirs[key] if key in names else weights[key]), key
    effect = float((expected - clean).abs().max())
    assert effect > 0.01 * float(clean.std())
    assert float((found - expected).abs().max()) <= 1e-5 * effect
    assert float((run(model, TOKENS) - clean).abs().max()) <= 1e-5 * float(clean.std())


def test_tied_embeddings_are_not_transplanted(hf_model):
    donor = hf_model("gpt2", fresh=True, seed=5)
    for component in ("embed", "unembed"):
        with pytest.raises(CircuitsError, match="are one parameter"):
            run(hf_model("gpt2"), TOKENS, transplant.weights(donor, component))
    run(hf_model("llama"), TOKENS, transplant.weights(hf_model("llama", fresh=True, seed=5), "embed"))


def test_positions_are_permuted_where_there_is_a_table(hf_model):
    order = [1, 0, 2, 3, 4, 6, 5]
    model = hf_model("gpt2")
    equal(model, run(model, TOKENS, permute.positions(order)), {("pos_embed", None): lambda x: x[:, order]})
    with pytest.raises(CircuitsError, match="no table of position embeddings"):
        run(hf_model("pythia"), TOKENS, permute.positions(order))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MAIN)
def test_half_precision_gives_metrics_in_single(hf_model, name, dtype):
    """A metric gets the output as float32; the default ones are computed wider."""
    model, full = hf_model(name, dtype=dtype), hf_model(name)
    variants = {"a": ablate.zero("0.1"), "b": ablate.uniform("1.2"), "c": ablate.zero("mlp_out.1")}
    frame = sweep(model, TOKENS, variants, metric=metric).frame
    expected = sweep(full, TOKENS, variants, metric=metric).frame
    gap = (frame["value"] - expected["value"]).abs().max()
    assert gap <= (0.1 if dtype == torch.bfloat16 else 0.02) * float(full(TOKENS).detach().abs().max())
    exact = metric(run(model, TOKENS, variants["a"]).float()).double().mean()
    plain = sweep(model, TOKENS, variants, metric=metric, engine="naive").frame
    assert plain["value"].iloc[0] == pytest.approx(float(exact), rel=1e-12)
    by_default = sweep(model, TOKENS, variants).frame
    assert by_default["value"].notna().all()


@pytest.mark.parametrize("way", ["run_with_cache", "run_with_hooks", "forward", "__call__"])
def test_every_way_to_run_is_a_run(model, way):
    edits = [ablate.mean("0.1", reference=OTHER), ablate.uniform("1.0")]
    with torch.no_grad(), intervene(model, *edits):
        output = getattr(model, way)(TOKENS)
    output = output[0] if isinstance(output, tuple) else output
    torch.testing.assert_close(output, run(model, TOKENS, *edits), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "dropout"),
    [
        ("gpt2", "embd_pdrop"),
        ("gptj", "embd_pdrop"),
        ("pythia", "hidden_dropout"),
        ("bert", "hidden_dropout_prob"),
    ],
)
def test_dropout_is_off_in_every_module_of_the_wrapped_model(hf_model, name, dropout):
    """The bridge does not register the model that it wraps: no module of its own holds the embeddings' dropout."""
    model = hf_model(name, **{dropout: 0.5})
    clean = model.eval()(TOKENS).detach()
    model.train()
    before = [module.training for module in model.original_model.modules()]
    assert all(before)
    assert not torch.equal(model(TOKENS), model(TOKENS))
    assert torch.equal(run(model, TOKENS), clean)
    frame = sweep(model, TOKENS, {"as it was": edit("z", torch.clone)}, metric).frame
    assert frame["effect"].tolist() == [0.0]
    assert [module.training for module in model.original_model.modules()] == before


def test_with_the_models_own_switches_on(hf_model):
    for name in ("gpt2", "llama"):
        model = hf_model(name, fresh=True)
        model.set_use_attn_result(True)
        model.set_use_split_qkv_input(True)
        if hasattr(model, "set_use_hook_mlp_in"):
            model.set_use_hook_mlp_in(True)
        for site in ("q", "k", "v", "z", "resid_mid", "attn_out"):
            equal(
                model,
                run(model, TOKENS, edit(f"{site}.0", lambda x: x * 0.5)),
                {(site, 0): lambda x: x * 0.5},
            )


def test_hooks_of_the_users_own(hf_model):
    """A hook of theirs at resid_mid reaches the MLP alone, so that ours is refused there; elsewhere both act."""
    model = hf_model("llama", fresh=True)
    model.add_hook("blocks.0.hook_attn_out", lambda x, hook: 2 * x)
    equal(
        model,
        run(model, TOKENS, edit("attn_out.0", lambda x: x + 1)),
        {("attn_out", 0): lambda x: 2 * x + 1},
    )
    model.reset_hooks()
    model.add_hook("blocks.0.hook_resid_mid", lambda x, hook: 2 * x)
    with pytest.raises(CircuitsError, match="reaches the MLP and not the residual stream"):
        run(model, TOKENS, edit("resid_mid.0", lambda x: x + 1))


def test_the_difference_at_resid_mid_keeps_its_digits_or_is_refused(hf_model):
    model = hf_model("gpt2", fresh=True, dtype=torch.float32)
    with torch.no_grad():
        model.pos_embed.weight.mul_(1e6)
    with pytest.raises(CircuitsError, match="too few digits"):
        run(model, TOKENS, ablate.zero("resid_mid.0"))


def test_what_a_later_start_leaves_out_is_not_edited(hf_model):
    model = hf_model("llama")
    middle = cache(model, TOKENS, ["resid_pre.1"])["resid_pre.1"]
    try:
        clean = model(middle, start_at_layer=1)
    except (NotImplementedError, TypeError, ValueError):
        pytest.skip("this version cannot start at a later layer")
    for early in ("attn_out.0", "embed", "pattern.0", "resid_mid.0"):
        with (
            pytest.raises(CircuitsError, match="never fired"),
            intervene(model, edit(early, torch.zeros_like)),
        ):
            model(middle, start_at_layer=1)
    with intervene(model, ablate.zero("1.1")):
        changed = model(middle, start_at_layer=1)
    assert not torch.equal(changed, clean)
    torch.testing.assert_close(changed, run(model, TOKENS, ablate.zero("1.1")))


def test_sites_that_are_not_served_are_refused_by_name(hf_model):
    for name, site in [("llama", "pos_embed"), ("pythia", "resid_mid"), ("gptj", "resid_mid")]:
        with pytest.raises(CircuitsError, match=f"no site {site} in this model; it has"):
            run(hf_model(name), TOKENS, edit(site, torch.zeros_like))


def test_models_of_other_kinds_are_refused_in_one_line(hf_model, tmp_path):
    with pytest.raises(
        CircuitsError, match="GPT2LMHeadModel is a Hugging Face model, without hook points; a bridge"
    ):
        run(hf_model.plain("gpt2"), TOKENS)
    transformers = families.transformers
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=families.WORDS, **sizes))
    t5.save_pretrained(tmp_path)
    families.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(
        CircuitsError, match="this TransformerBridge has no blocks that follow each other, but an enc"
    ):
        run(families.boot(tmp_path), TOKENS)


def test_weights_that_are_not_in_memory_are_refused(hf_model):
    model = hf_model("gpt2", fresh=True)
    model.original_model.transformer.h[1].to("meta")
    for call in (
        lambda: run(model, TOKENS, ablate.zero("0.1")),
        lambda: sweep(model, TOKENS, {"0.1": ablate.zero("0.1")}),
        lambda: patch.edges(model, TOKENS, OTHER),
    ):
        with pytest.raises(CircuitsError, match="some weights of the model are not in memory"):
            call()


class Packed(torch.nn.Linear):
    """As a quantised model has them: a weight of whole numbers on one axis, unpacked when it is used."""

    def forward(self, x):
        return x @ (self.weight.reshape(self.out_features, -1).to(x) * self.scale).T


def test_packed_weights_are_edited_around_and_not_multiplied(hf_model):
    model = hf_model("llama", fresh=True)
    linear = model.blocks[1].attn.o.original_component
    linear.scale = linear.weight.detach().abs().max() / 127
    whole = (linear.weight.detach() / linear.scale).round().to(torch.int8)
    with torch.no_grad():
        linear.weight.copy_(whole * linear.scale)
    expected = sweep(model, TOKENS, {"1.2": ablate.zero("1.2")}, metric).frame["effect"]
    linear.__class__ = Packed
    linear.weight = torch.nn.Parameter(whole.reshape(-1, 1), requires_grad=False)
    found = sweep(model, TOKENS, {"1.2": ablate.zero("1.2")}, metric).frame["effect"]
    torch.testing.assert_close(*(torch.tensor(one.to_numpy()) for one in (found, expected)))
    for call in (
        lambda: run(model, TOKENS, patch.path("0.1", "output", OTHER)),
        lambda: patch.edges(model, TOKENS, OTHER),
        lambda: lens(model, TOKENS),
    ):
        with pytest.raises(CircuitsError, match=r"blocks.1.attn.o.weight is packed \(int8 \[768, 1\]\)"):
            call()


def test_inputs_out_of_range_are_refused(model):
    with pytest.raises(CircuitsError, match="the model has ids 0-49"):
        run(model, TOKENS + 49)
    with pytest.raises(CircuitsError, match="room for 32 positions"):
        run(model, torch.full((1, 33), 5))
    assert HookedModel.of(model).n_layers == 2


class Adapted(torch.nn.Module):
    """A linear layer under a LoRA adapter, as peft puts it into a model."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(2, base.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_weights_under_other_names(hf_model):
    """Errors say to merge adapters, and to make a bridge of a Hugging Face model."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM

    plain, folder = hf_model("llama"), hf_model.folder("llama")
    wrapped = AutoModelForCausalLM.from_pretrained(folder)
    state = wrapped.state_dict()
    for layer in wrapped.model.layers:
        layer.self_attn.o_proj = Adapted(layer.self_attn.o_proj)
    adapted = TransformerBridge.boot_transformers(
        str(folder), hf_model=wrapped, tokenizer=plain.tokenizer, device="cpu"
    )
    assert torch.isfinite(run(adapted, TOKENS, ablate.zero("0.1"))).all()
    for call, message in (
        (lambda: lens(adapted, TOKENS), r"^the model has no weight blocks\.0\.attn\.W_O, .*merge_and_unload"),
        (
            lambda: run(adapted, TOKENS, patch.path("0.1", "output", OTHER)),
            "LoRA adapters .*merge_and_unload",
        ),
        (
            lambda: run(adapted, TOKENS, transplant.weights(plain, "o")),
            r"no parameter .*\.o\.weight.*merge_and",
        ),
        (
            lambda: transplant.weights(state, "o"),
            "it has model.embed.*; of a Hugging Face model, give a bridge",
        ),
        (
            lambda: sweep(plain, TOKENS, {"a": ablate.zero("0.1")}, checkpoints={"a": state}),
            "the state_dict has none; of a Hugging Face model, give a bridge",
        ),
    ):
        with pytest.raises(CircuitsError, match=message):
            call()


def test_lens_under_autocast(hf_model):
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(CircuitsError, match=r"lens: under torch\.autocast .* call it outside"),
    ):
        lens(hf_model("llama"), TOKENS)
