import pytest
import torch
from torch import nn

from circuits import CircuitsError, Site, edit, run
from circuits.sites import KINDS
from circuits.surface import QUALIFIED, Surface


@pytest.mark.parametrize("name", sorted(QUALIFIED["HookedTransformer"]))
def test_a_random_write_at_every_qualified_site_is_what_the_model_goes_on_with(
    model, tokens, by_hand, assert_same, name
):
    """Qualification: our write against a forward written by hand with the same write."""
    surface = Surface.of(model)
    layer = model.cfg.n_layers - 1 if KINDS[name].per_layer else None
    if Site(name, layer).hook() not in surface.hooks:
        with pytest.raises(CircuitsError, match="no site"):
            run(model, tokens, edit(Site(name, layer), torch.zeros_like))
        return
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(8, 6, 4, 24, dtype=torch.float64, generator=generator)

    def write(value):
        shape = value.shape
        return value + noise.flatten()[: value[0].numel()].reshape(shape[1:])

    expected = by_hand(model, tokens, lambda s, at, x: write(x) if (s, at) == (name, layer) else x)
    found = run(model, tokens, edit(Site(name, layer), write))
    assert_same(found, expected, by_hand(model, tokens))


def test_shapes_and_sizes_are_those_of_the_activations(model, tokens):
    surface = Surface.of(model)
    _, cache = model.run_with_cache(tokens)
    for name, kind in KINDS.items():
        site = Site(name, 0 if kind.per_layer else None)
        if site.hook() in surface.hooks:
            assert cache[site.hook()].shape == surface.shape(kind, *tokens.shape)


def test_every_hook_point_of_the_class_is_written_through(make_model, tokens, assert_same):
    """A site outside the table, by its full hook name, does what the model's own hook does."""
    model = make_model(use_attn_result=True, use_split_qkv_input=True, use_hook_mlp_in=True)
    clean = model(tokens)
    for hook in ["attn.hook_result", "hook_q_input", "hook_v_input", "hook_mlp_in", "ln2.hook_normalized"]:
        name = f"blocks.0.{hook}"
        expected = model.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: x.flip(-1) * 1.5)])
        assert_same(run(model, tokens, edit(name, lambda x: x.flip(-1) * 1.5)), expected, clean)


def test_parameters_are_parameters_only(causal):
    found = Surface.of(causal).parameters()
    assert set(found) == {name for name, _ in causal.named_parameters()}
    assert not any("IGNORE" in name or "mask" in name for name in found)


def test_what_is_not_a_hooked_model_is_refused():
    with pytest.raises(CircuitsError, match="Linear is not a hooked transformer"):
        Surface.of(nn.Linear(2, 2))
    with pytest.raises(CircuitsError, match="got str"):
        Surface.of("model")


def test_an_unqualified_class_is_refused(causal):
    class Lookalike(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.cfg, self.hook_embed = causal.blocks, causal.cfg, causal.hook_embed

    with pytest.raises(CircuitsError, match="Lookalike is not served"):
        Surface.of(Lookalike())


def test_other_block_layouts_are_refused(make_model):
    with pytest.raises(CircuitsError, match="parallel"):
        Surface.of(make_model(parallel_attn_mlp=True))
    with pytest.raises(CircuitsError, match="pre-norm"):
        Surface.of(make_model(normalization_type="RMS", use_normalization_before_and_after=True))


def test_grouped_key_value_heads_cannot_be_edited_one_by_one(make_model, tokens):
    model = make_model(n_key_value_heads=2)
    with pytest.raises(CircuitsError, match="2 key-value heads"):
        run(model, tokens, edit("v", torch.zeros_like, heads="0.1"))
    assert run(model, tokens, edit("z", torch.zeros_like, heads="0.1")).shape == (8, 6, 11)


def test_a_site_the_model_lacks_lists_what_it_has(make_model, tokens):
    model = make_model(attn_only=True)
    with pytest.raises(CircuitsError, match=r"no site mlp_out in this model; it has .*z"):
        run(model, tokens, edit("mlp_out", torch.zeros_like))
    with pytest.raises(CircuitsError, match="layers 0-1"):
        run(model, tokens, edit("z.2", torch.zeros_like))
