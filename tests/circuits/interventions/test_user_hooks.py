"""Raw hooks of the user's between blocks, inside norms and on bridges; test_surroundings draws those at sites."""

import pytest
import torch

from circuits import CircuitsError, cache, edit, patch, run


def weighed(output):
    return (output * torch.linspace(-1, 2, output[0].numel()).reshape(output.shape[1:])).sum((1, 2))


def hooked(module, function):
    return module.register_forward_hook(lambda module, inputs, output: function(output))


@pytest.mark.parametrize("where", ["after block 0", "before block 1", "in place"])
def test_a_hook_between_two_blocks_is_refused_beside_a_path(causal, tokens, other_tokens, where):
    """It changes what passes by, too."""

    def double(module, given, *output):
        given = output[0] if output else given
        if where == "in place":
            given[0].mul_(2) if isinstance(given, tuple) else given.mul_(2)
            return None
        return (2 * given[0], *given[1:]) if isinstance(given, tuple) else 2 * given

    first, second = causal.blocks[0], causal.blocks[1]
    before = where == "before block 1"
    handle = (second.register_forward_pre_hook if before else first.register_forward_hook)(double)
    with pytest.raises(CircuitsError, match="what comes to block 1 differs from what was handed on to it"):
        run(causal, tokens, patch.path("0.1", ("q", "1.0"), other_tokens))
    # What has not sent by then, or is received before, is no matter of it.
    run(causal, tokens, patch.path("0.1", "mlp_pre.0", other_tokens))
    run(causal, tokens, patch.path("1.1", "output", other_tokens))
    with pytest.raises(CircuitsError, match="a hook of yours is on the residual stream in layer"):
        patch.edges(causal, tokens, other_tokens, weighed, draws=1, flips=1)
    handle.remove()


def test_a_hook_inside_a_norm_that_is_of_one_example(causal, tokens, other_tokens, hooked_only):
    if type(causal).__name__ != hooked_only:
        pytest.skip("a bridge has one hook point inside its norms, which it computes anew")
    paths = [patch.path(f"0.{head}", ("q", f"1.{head}"), other_tokens) for head in range(2)]
    point = causal.blocks[1].ln1.hook_normalized
    plain = run(causal, tokens, *paths)
    handle = hooked(point, lambda x: 3 * x)
    tripled = run(causal, tokens, *paths)
    handle.remove()
    handle = hooked(point, lambda x: torch.cat([x[:2], 3 * x[2:3], x[3:]]))
    found = run(causal, tokens, *paths)
    handle.remove()
    torch.testing.assert_close(found, torch.cat([plain[:2], tripled[2:3], plain[3:]]))


@pytest.mark.parametrize("before", [False, True])
def test_a_hook_between_attention_and_mlp_of_a_bridge(make_model, tokens, other_tokens, before):
    """At `resid_mid` it is one of what the MLP reads; the stream goes on without it."""
    bridge = make_model(family="TransformerBridge", attention_dir="causal", normalization_type="LN")
    module = bridge.hook_dict["blocks.0.hook_resid_mid"]
    if before:
        handle = module.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    else:
        handle = hooked(module, lambda x: 2 * x)
        seen = cache(bridge, tokens, ["resid_pre.0", "attn_out.0", "resid_mid.0"])
        torch.testing.assert_close(seen["resid_mid.0"], 2 * (seen["resid_pre.0"] + seen["attn_out.0"]))
    for given in (edit("resid_mid.0", lambda x: x + 1), patch.path("0.1", "mlp_pre.0", other_tokens)):
        with pytest.raises(CircuitsError, match=r"resid_mid\.0: a hook of yours changes it"):
            run(bridge, tokens, given)
    run(bridge, tokens, edit("resid_mid.1", lambda x: x + 1))
    handle.remove()
    several = [edit("resid_mid.0", lambda x: x + 1), edit("resid_mid.0", lambda x: 2 * x)]
    run(bridge, tokens, *several, patch.path("0.1", ("q", "1.0"), other_tokens))
