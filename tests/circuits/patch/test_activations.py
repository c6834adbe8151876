import numpy as np
import pytest
import torch
from transformer_lens import patching

from circuits import CircuitsError, cache, intervene, patch, run


def test_head_patching_against_transformer_lens(causal, tokens, other_tokens):
    """`get_act_patch_attn_head_out_all_pos` patches every head in turn."""
    causal.eval()
    _, source = causal.run_with_cache(other_tokens)

    def metric(logits):
        return logits[:, -1].square().mean()

    expected = patching.get_act_patch_attn_head_out_all_pos(causal, tokens, source, metric)
    base = metric(causal(tokens))
    for layer in range(2):
        for head in range(4):
            given = patch.activations("z", source=source, heads=[(layer, head)])
            found = metric(run(causal, tokens, given))
            # TransformerLens keeps the metric in float32.
            assert (found - expected[layer, head]).abs() < 2e-7 * base
            assert (found - base).abs() > 5e-4 * base


def test_cache_and_tokens_are_the_same_source(model, tokens, other_tokens, assert_same):
    expected = run(model, tokens, patch.activations("z", source=other_tokens, heads="0.1"))
    for source in (cache(model, other_tokens, ["z"]), model.run_with_cache(other_tokens)[1]):
        assert_same(
            run(model, tokens, patch.activations("z", source=source, heads="0.1")), expected, model(tokens)
        )


def test_a_source_of_one_example_serves_every_row(model, tokens, other_tokens, assert_same):
    one = patch.activations("resid_pre.0", source=other_tokens[:1], positions=[2])
    every = patch.activations("resid_pre.0", source=other_tokens[:1].expand(8, -1), positions=[2])
    assert_same(run(model, tokens, one), run(model, tokens, every), model(tokens))


def test_the_source_is_run_without_our_outer_edits_but_with_the_users_hooks(causal, tokens, other_tokens):
    causal.add_hook("blocks.0.attn.hook_v", lambda v, hook: v * 2)
    expected = cache(causal, other_tokens, ["z.1"])["z.1"]
    with intervene(causal, patch.activations("resid_pre.0", source=tokens)):
        _, seen = run(causal, tokens, patch.activations("z.1", source=other_tokens), cache=["z.1"])
    assert bool((seen["z.1"] == expected).all())
    causal.reset_hooks()
    assert not bool((cache(causal, other_tokens, ["z.1"])["z.1"] == expected).all())


@pytest.mark.parametrize("name", ["z", "pattern", "scores"])
def test_arrays_are_activations_like_tensors(causal, tokens, other_tokens, name, assert_same):
    stored = cache(causal, other_tokens, name)
    of_tensors = patch.activations(name, source=stored, heads="0.1")
    expected = run(causal, tokens, of_tensors)
    assert_same(expected, run(causal, tokens, patch.activations(name, other_tokens, "0.1")), causal(tokens))
    held = {hook: value.numpy() for hook, value in stored.items()}
    for source in (held, {hook: value[::-1].copy()[::-1] for hook, value in held.items()}):
        assert patch.activations(name, source=source, heads="0.1") == of_tensors
    single = {hook: value.astype(np.float32) for hook, value in held.items()}
    found = run(causal, tokens, patch.activations(name, source=single, heads="0.1"))
    assert_same(found, expected, causal(tokens), tolerance=1e-5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda z: z.tolist(), "is not a tensor of real numbers$"),
        (lambda z: z.to(torch.complex128), "is not a tensor of real numbers$"),
        (lambda z: z.to_sparse(), "got a sparse tensor"),
        (lambda z: z.to("meta"), "got a meta tensor"),
    ],
)
def test_what_a_cache_cannot_hold(causal, other_tokens, changed, message):
    hook = "blocks.0.attn.hook_z"
    source = {hook: changed(cache(causal, other_tokens, "z.0")[hook])}
    with pytest.raises(CircuitsError, match=rf"patch\.activations: the source's {hook}:? {message}"):
        patch.activations("z.0", source=source)
