"""What is special about native bridges; that every site is read and written is held by test_hooked_model."""

import pytest
import torch

from circuits import CircuitsError, ablate, cache, edit, intervene
from circuits.model.hooked_model import HookedModel


@pytest.fixture
def bridge(make_model):
    return make_model(family="TransformerBridge")


def number_of_hooks(model):
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())


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


def test_the_wrapped_model_takes_its_inputs_by_name(bridge, tokens):
    with intervene(bridge, ablate.zero("1.1")):
        assert torch.equal(bridge.original_model(input_ids=tokens), bridge(tokens))


def test_gradients_flow_through_scores_also_where_a_query_sees_nothing(bridge, tokens):
    keep = torch.ones(8, 6, dtype=torch.long)
    keep[0, :2] = 0
    leaves, hooks = [], number_of_hooks(bridge)
    with intervene(
        bridge, edit("scores.0", lambda x: leaves.append(x.detach().requires_grad_()) or leaves[0])
    ):
        bridge(tokens, attention_mask=keep).square().sum().backward()
    assert number_of_hooks(bridge) == hooks
    for gradient in (leaves[0].grad, bridge.blocks[0].attn.v.weight.grad):
        assert bool(gradient.isfinite().all())
        assert bool((gradient != 0).any())


def test_weights_that_processing_has_put_elsewhere_are_not_exchanged(bridge, tokens):
    bridge.enable_compatibility_mode(disable_warnings=True)
    hooked = HookedModel(bridge)
    if isinstance(bridge.state_dict(keep_vars=True)["unembed.bias"], torch.nn.Parameter):
        pytest.skip("in this version the bias of the unembedding is a parameter")
    with pytest.raises(CircuitsError, match=r"unembed\.bias is set, and no parameter"):
        hooked.named_weights()
