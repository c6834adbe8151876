"""Blocks beside each other and beside hooks of the user's. test_properties holds that nothing is left behind."""

import contextlib

import pytest
import torch

from circuits import CircuitsError, ablate, edit, intervene, run


def test_users_hooks_may_come_and_go_inside(causal, tokens):
    """reset_hooks and run_with_hooks inside a block do not take our edit away, nor do we take theirs."""
    expected = run(causal, tokens, ablate.zero("0.0-3"))
    doubled = []
    with intervene(causal, ablate.zero("0.0-3")):
        causal.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_z", lambda z, hook: doubled.append(z))])
        causal.reset_hooks()
        torch.testing.assert_close(causal(tokens), expected)
        causal.add_hook("blocks.1.attn.hook_z", lambda z, hook: z * 3)
    assert bool((doubled[0] == 0).all())
    assert not bool(torch.isclose(causal(tokens), expected).all())
    assert len(causal.blocks[1].attn.hook_z.fwd_hooks) == 1


def test_uniform_sees_what_every_block_leaves_of_the_scores(model, tokens, by_hand, assert_same):
    """Nested blocks are arguments in order, also where an outer edit reads what an inner one writes."""

    def hide(scores):
        scores = scores.clone()
        scores[:, :, 2:, 0] = -torch.inf
        return scores

    seen = {}

    def uniform_over_visible(site, layer, value):
        if site == "scores":
            seen[layer] = value = hide(value)
        if site == "pattern":
            visible = (~seen[layer].isneginf()).double()
            value = visible / visible.sum(-1, keepdim=True)
        return value

    expected = by_hand(model, tokens, uniform_over_visible)
    uniform, hidden = ablate.uniform("all"), edit("scores", hide)
    only_uniform = run(model, tokens, uniform)
    for outer, inner in ((uniform, hidden), (hidden, uniform)):
        assert_same(run(model, tokens, outer, inner), expected, only_uniform)
        with intervene(model, outer):
            assert_same(run(model, tokens, inner), expected, only_uniform)


def test_a_hook_that_never_fires_does_not_hide_the_bodys_error(causal):
    with pytest.raises(RuntimeError, match="mine"), intervene(causal, ablate.zero("0.1")):
        raise RuntimeError("mine")


def test_a_clean_pass_is_not_a_firing(causal, tokens):
    """A nested block's clean pass runs the model with the outer edits off: that does not count for them."""
    outer, inner = intervene(causal, ablate.zero("0.1")), intervene(causal, ablate.mean("1.0", tokens))
    with (
        pytest.raises(CircuitsError, match=r"zero.*not run inside"),
        outer,
        contextlib.suppress(ZeroDivisionError),
        inner,
    ):
        raise ZeroDivisionError


def test_grad_mode_and_train_mode_of_the_body_are_its_own(causal, tokens):
    with intervene(causal, ablate.mean("0.1", reference=tokens)):
        assert causal(tokens).requires_grad
        with torch.no_grad():
            assert not causal(tokens).requires_grad
        assert causal.training


def test_a_run_that_is_broken_off_leaves_the_block_as_it_was(make_model, family, tokens):
    model, broken = make_model(0, family), []

    def breaks_off(z):
        if not broken:
            broken.append(True)
            raise KeyboardInterrupt
        return z * 2

    doubled = run(model, tokens, edit("z.0", lambda z: z * 2))
    with intervene(model, edit("z.0", breaks_off)):
        with pytest.raises(KeyboardInterrupt):
            model(tokens)
        assert torch.equal(model(tokens), doubled)
