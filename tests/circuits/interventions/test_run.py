import torch

from circuits import Site, ablate, cache, run


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


def test_what_is_cached_is_as_it_was_at_its_hook(make_model, hooked_only, tokens):
    """Something later in the run may write to it, as to what a module is given."""
    model = make_model(0)
    before = cache(model, tokens, ["resid_pre.0"])["resid_pre.0"]

    def double(module, inputs):
        inputs[0].mul_(2)

    model.blocks[0].ln1.register_forward_pre_hook(double)
    assert torch.equal(cache(model, tokens, ["resid_pre.0"])["resid_pre.0"], before)
