import contextlib

import pytest
import torch

from circuits import CircuitsError, Site, edit, intervene, patch, run
from circuits.model.hooked_model import HookedModel
from circuits.model.sites import KINDS

BRIDGE = "TransformerBridge"


NOISE = torch.randn(8 * 6 * 6 * 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def write(value):
    return value + NOISE[: value.numel()].reshape(value.shape)


def places(model):
    """Every (site, layer) of the table that the model has, in the order of the forward pass."""
    hooked = HookedModel(model)
    return [
        (name, layer)
        for layer in [None, *range(model.cfg.n_layers)]
        for name, kind in KINDS.items()
        if kind.per_layer == (layer is not None) and Site(name, layer).hook() in hooked.hooks
    ]


def check_every_place(model, tokens, by_hand, assert_same):
    """Qualification: our write at each place against a forward by hand with the same write, and after each write
    our reading of every place against what the forward by hand found there.
    """
    clean = by_hand(model, tokens)
    # The native RMS norm rounds to single precision inside.
    cfg = model.cfg
    rounded = HookedModel(model).family == BRIDGE and (cfg.normalization_type == "RMS" or cfg.final_rms)
    tolerance = 1e-5 if rounded else 1e-10

    there = [place for place in places(model) if place != ("pos_embed", None) or not silent(model)]
    for name, layer in there:
        if layer not in (None, 0, cfg.n_layers - 1):
            continue
        values = {}

        def at(site, place, x, here=(name, layer), values=values):
            values[site, place] = write(x) if (site, place) == here else x
            return values[site, place]

        expected = by_hand(model, tokens, at)
        with intervene(model, edit(Site(name, layer), write)), torch.no_grad(), reading(model, there) as seen:
            found = model(tokens)
        assert_same(found, expected, clean, tolerance)
        for place in there:  # quicker than torch.testing.assert_close, of which there would be thousands
            assert seen[place].shape == values[place].shape, place
            assert torch.allclose(seen[place], values[place], rtol=0, atol=tolerance * 10), place
    assert bool((model(tokens) - clean).abs().max() <= tolerance * clean.std())


def silent(model):
    return model.cfg.positional_embedding_type == "alibi"


@contextlib.contextmanager
def reading(model, there):
    hooked, seen = HookedModel(model), {}
    with contextlib.ExitStack() as stack:
        for place in there:
            keep = hooked.on_forward(Site(*place).hook(), lambda x, place=place: seen.update({place: x}))
            stack.callback(keep.remove)
        yield seen


def test_every_place_is_read_and_written(model, tokens, by_hand, assert_same):
    check_every_place(model, tokens, by_hand, assert_same)


def test_every_place_is_read_and_written_with_every_feature(featured, tokens, by_hand, assert_same):
    check_every_place(featured, tokens, by_hand, assert_same)


@pytest.mark.parametrize("processed", [False, True])
def test_every_place_is_read_and_written_in_compatibility_mode(
    make_model, processed, tokens, by_hand, assert_same
):
    model = make_model(family=BRIDGE, n_layers=1)
    model.enable_compatibility_mode(disable_warnings=True, no_processing=not processed)
    check_every_place(model, tokens, by_hand, assert_same)


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize(
    "hook",
    [
        "attn.hook_rot_q",
        "attn.hook_rot_k",
        "attn.hook_result",
        "hook_attn_in",
        "hook_q_input",
        "hook_k_input",
        "hook_v_input",
    ],
)
def test_heads_at_hooks_that_only_some_models_have(
    make_model, hooked_only, tokens, assert_same, hook, groups
):
    """Under grouped-query attention keys and values have a head for each group."""
    if hook == "hook_attn_in" and groups is not None:
        pytest.skip("transformer-lens cannot compute it")
    switched_on = {
        "use_attn_result": True,
        "use_split_qkv_input": hook != "hook_attn_in",
        "use_attn_in": hook == "hook_attn_in",
        "positional_embedding_type": "rotary",
    }
    model = make_model(family=hooked_only, **switched_on, n_key_value_heads=groups)
    clean, name = model(tokens).detach(), f"blocks.1.{hook}"
    grouped = groups is not None and hook.rpartition("hook_")[2] in ("rot_k", "k_input", "v_input")
    _, seen = model.run_with_cache(tokens)
    assert seen[name].shape[2] == HookedModel(model).head_count(Site(name).kind)

    def flipped(x, hook):
        x = x.clone()
        x[:, :, 1] = 1.5 * x[:, :, 1].flip(-1)
        return x

    expected = model.run_with_hooks(tokens, fwd_hooks=[(name, flipped)]).detach()
    one = edit(name, lambda x: 1.5 * x.flip(-1), heads="1.k1" if grouped else "1.1")
    assert_same(run(model, tokens, one), expected, clean)
    wrong = "1.1" if grouped else "1.k1"
    if groups is not None:
        with pytest.raises(CircuitsError, match="key-value group"):
            run(model, tokens, edit(name, lambda x: 2 * x, heads=wrong))


def test_one_norm_for_attention_and_mlp(make_model, hooked_only, tokens, other_tokens, by_hand, assert_same):
    """As GPT-J has it: the same parameters twice. One module twice is refused where the two must be told apart."""
    model = make_model(family=hooked_only, parallel_attn_mlp=True)
    for block in model.blocks:
        block.ln2.load_state_dict(block.ln1.state_dict())
    expected = by_hand(model, tokens, lambda s, at, x: write(x) if (s, at) == ("resid_pre", 1) else x)
    for block in model.blocks:
        block.ln2.w, block.ln2.b = block.ln1.w, block.ln1.b
    assert_same(run(model, tokens, edit("resid_pre.1", write)), expected, run(model, tokens))
    path = patch.path("embed", "mlp_pre.1", other_tokens)
    shared = run(model, tokens, path)
    assert float((shared - run(model, tokens)).abs().max()) > 0.01
    for block in model.blocks:
        block.ln2 = block.ln1
    with pytest.raises(CircuitsError, match=r"^blocks\.1: ln1 and ln2 are one module.*give each its own"):
        run(model, tokens, path)
