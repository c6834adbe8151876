import torch

from circuits import Site, ablate, cache, edit, run


def test_cache_shows_activations_after_the_edits(causal, tokens):
    _, found = run(causal, tokens, ablate.zero("0.1"), cache=["z.0", "resid_post", Site("pattern", 1)])
    assert list(found) == [
        "blocks.0.attn.hook_z",
        "blocks.0.hook_resid_post",
        "blocks.1.hook_resid_post",
        "blocks.1.attn.hook_pattern",
    ]
    assert ("resid_post.1" in found, "resid_post" in found, found.get("nonsense")) == (True, False, None)
    assert bool((found["z.0"][:, :, 1] == 0).all())
    assert bool((found["blocks.0.attn.hook_z"] == found[Site("z", 0)]).all())
    # All heads at a site of one layer are those of the layer.
    of_layer = (run(causal, tokens, edit("z.0", torch.neg, *every)) for every in ((), ("all",)))
    assert torch.equal(*of_layer)


def test_what_is_cached_is_as_it_was_at_its_hook(make_model, hooked_only, tokens):
    """Something later in the run may write to it, as to what a module is given."""
    model = make_model(0)
    before = cache(model, tokens, ["resid_pre.0"])["resid_pre.0"]

    def double(module, inputs):
        inputs[0].mul_(2)

    model.blocks[0].ln1.register_forward_pre_hook(double)
    assert torch.equal(cache(model, tokens, ["resid_pre.0"])["resid_pre.0"], before)


def test_the_mean_of_a_long_reference_is_taken_in_float64(make_model):
    model = make_model(normalization_type=None).float()  # LayerNorm has its dtype from the config
    reference = torch.randint(0, 11, (200, 4), generator=torch.Generator().manual_seed(7))
    expected = cache(model, reference, ["z.0"])["z.0"].double().mean(0).float()
    _, found = run(model, reference[:4], ablate.mean("z.0", reference=reference), cache=["z.0"])
    assert bool((found["z.0"] == expected).all())
