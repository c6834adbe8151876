"""What is special about native bridges; that every site is read and written is held by test_hooked_model."""

import pytest
import torch

from circuits import CircuitsError, ablate, cache, edit, intervene, run
from circuits.model.hooked_model import HookedModel


@pytest.fixture
def bridge(make_model):
    return make_model(family="TransformerBridge")


def shifted(site, layer=0, by=1.0):
    """An edit and the same for the forward by hand; unevenly, as softmax does not see an even shift."""

    def shift(x):
        return x + by * torch.arange(x.numel(), dtype=x.dtype).sin().reshape(x.shape)

    return edit(f"{site}.{layer}", shift), lambda s, at, x: shift(x) if (s, at) == (site, layer) else x


def in_turn(*edits):
    def apply(site, layer, value):
        for one in edits:
            value = one(site, layer, value)
        return value

    return apply


@pytest.mark.parametrize("site", ["resid_pre", "q", "k", "v", "z", "attn_out", "mlp_pre", "mlp_post"])
def test_users_hooks_before_and_after_ours(bridge, tokens, by_hand, assert_same, site):
    """Theirs fires on what ours left, or the other way round, in the order in which they were put on."""
    ours, by_ours = shifted(site)
    hook = HookedModel.of(bridge).at(ours.places[0].site)[0][1]

    def double(s, at, x):
        return 2 * x if (s, at) == (site, 0) else x

    def theirs(x, hook):
        return 2 * x

    clean = by_hand(bridge, tokens)
    bridge.add_hook(hook, theirs)
    assert_same(run(bridge, tokens, ours), by_hand(bridge, tokens, in_turn(double, by_ours)), clean)
    bridge.reset_hooks()
    with intervene(bridge, ours):
        bridge.add_hook(hook, theirs)
        assert_same(bridge(tokens), by_hand(bridge, tokens, in_turn(by_ours, double)), clean)
        bridge.reset_hooks()
        assert_same(bridge(tokens), by_hand(bridge, tokens, by_ours), clean)


def test_what_a_later_start_leaves_out_is_not_edited(bridge, tokens):
    """From layer 1 on, an edit of layer 0 has no place, though its hooks fire."""
    middle = cache(bridge, tokens, ["resid_pre.1"])["resid_pre.1"]
    try:
        clean = bridge(middle, start_at_layer=1)
    except NotImplementedError:
        pytest.skip("this version cannot start at a later layer")
    for early in ("attn_out.0", "embed", "pos_embed", "q.0", "pattern.0", "resid_mid.0"):
        with (
            pytest.raises(CircuitsError, match="never fired"),
            intervene(bridge, edit(early, torch.zeros_like)),
        ):
            bridge(middle, start_at_layer=1)
    with intervene(bridge, ablate.zero("1.1")):
        assert not torch.equal(bridge(middle, start_at_layer=1), clean)
        torch.testing.assert_close(bridge(middle, start_at_layer=1), bridge(tokens))


def test_gradients_flow_through_scores_also_where_a_query_sees_nothing(bridge, tokens):
    keep = torch.ones(8, 6, dtype=torch.long)
    keep[0, :2] = 0
    leaves = []
    with intervene(
        bridge, edit("scores.0", lambda x: leaves.append(x.detach().requires_grad_()) or leaves[0])
    ):
        bridge(tokens, attention_mask=keep).square().sum().backward()
    for gradient in (leaves[0].grad, bridge.blocks[0].attn.v.weight.grad):
        assert bool(gradient.isfinite().all())
        assert bool((gradient != 0).any())


def test_weights_that_processing_has_put_elsewhere_are_not_exchanged(bridge, tokens):
    bridge.enable_compatibility_mode(disable_warnings=True)
    surface = HookedModel.of(bridge)
    if isinstance(bridge.state_dict(keep_vars=True)["unembed.bias"], torch.nn.Parameter):
        pytest.skip("in this version the bias of the unembedding is a parameter")
    with pytest.raises(CircuitsError, match=r"unembed\.bias is set, and no parameter"):
        surface.named_weights()
