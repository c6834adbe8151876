import pytest
import torch

from circuits import CircuitsError, Site, ablate, cache, edit, run


def test_run_is_the_model_in_eval_mode_without_gradients(model, tokens):
    model.train()
    seen = []
    model.add_hook("blocks.0.attn.hook_z", lambda z, hook: seen.append((model.training, z.requires_grad)))
    output = run(model, tokens)
    assert seen == [(False, False)]
    assert model.training
    assert not output.requires_grad
    assert bool((output == model(tokens)).all())


def test_cache_shows_activations_after_the_edits(causal, tokens):
    output, found = run(causal, tokens, ablate.zero("0.1"), cache=["z.0", "resid_post", Site("pattern", 1)])
    assert list(found) == [
        "blocks.0.attn.hook_z",
        "blocks.0.hook_resid_post",
        "blocks.1.hook_resid_post",
        "blocks.1.attn.hook_pattern",
    ]
    assert bool((found["z.0"][:, :, 1] == 0).all())
    assert bool((found["blocks.0.attn.hook_z"] == found[Site("z", 0)]).all())
    assert bool((output == run(causal, tokens, ablate.zero("0.1"))).all())


def test_cache_agrees_with_run_with_cache(model, tokens):
    _, expected = model.run_with_cache(tokens)
    found = cache(model, tokens, ["z", "pattern", "embed", "resid_post"])
    assert all(bool((value == expected[hook]).all()) for hook, value in found.items())
    assert bool((cache(model, tokens, "z.0")["z.0"] == expected["z", 0]).all())


def test_what_is_not_cached(causal, tokens):
    found = cache(causal, tokens, ["z.0"])
    with pytest.raises(KeyError, match="not cached"):
        found["z.1"]
    with pytest.raises(CircuitsError, match=r"never fired|not qualified"):
        cache(causal, tokens, ["blocks.0.hook_mlp_in"])
    with pytest.raises(CircuitsError, match="no site"):
        cache(causal, tokens, ["nothing"])


def test_modes_come_back_module_by_module(causal, tokens):
    causal.eval()
    causal.blocks[1].train()
    before = {name: module.training for name, module in causal.named_modules()}
    run(causal, tokens, ablate.uniform("all"))

    def fail(activation):
        raise IndexError("inside")

    with pytest.raises(IndexError):
        run(causal, tokens, edit("z.1", fail))
    assert {name: module.training for name, module in causal.named_modules()} == before
    assert torch.is_grad_enabled()
