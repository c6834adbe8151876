"""Tokens, batches and functions: what can be meant is taken in every form, all else is refused in one line."""

import numpy as np
import pytest
import torch

from circuits import ablate, cache, intervene, patch, run

pytestmark = pytest.mark.usefixtures("untyped")


TOKENS = {
    "int32": lambda t: t.int(),
    "made without gradients": lambda t: _inferred(t),
    "a list of lists": lambda t: t.tolist(),
    "what a tokenizer returns": lambda t: {"input_ids": t, "attention_mask": torch.ones_like(t)},
    "an array of the other byte order": lambda t: t.numpy().astype(t.numpy().dtype.newbyteorder()),
    "an array of uint16, backwards": lambda t: t.numpy().astype(np.uint16)[:, ::-1].copy()[:, ::-1],
}


def _inferred(tokens):
    with torch.inference_mode():
        return tokens.clone()


@pytest.mark.parametrize("form", TOKENS)
def test_every_form_of_whole_numbers_is_the_same_tokens(causal, tokens, other_tokens, form):
    given, source = TOKENS[form](tokens), TOKENS[form](other_tokens)
    expected = causal(tokens)
    assert bool((run(causal, given) == expected).all())
    for one, other in (
        (ablate.mean("0.1", reference=source), ablate.mean("0.1", reference=other_tokens)),
        (ablate.resample("0.1", source=source), ablate.resample("0.1", source=other_tokens)),
        (patch.activations("z", source=source), patch.activations("z", source=other_tokens)),
    ):
        edited = run(causal, given, one)
        assert bool((edited == run(causal, tokens, other)).all())
        assert not bool((edited == expected).all())
    assert ablate.zero("0.1", positions=torch.tensor(2)) == ablate.zero("0.1", positions=[2])
    found = patch.attribution(causal, given, source, draws=9, flips=9)
    assert found.frame.effect.equals(
        patch.attribution(causal, tokens, other_tokens, draws=9, flips=9).frame.effect
    )


def test_inside_inference_mode(causal, tokens, other_tokens):
    one, clean = patch.activations("z", source=other_tokens), causal(tokens)
    stored = cache(causal, other_tokens, "z")
    expected = run(causal, tokens, one)
    effects = patch.attribution(causal, tokens, other_tokens, draws=9, flips=9).frame.effect
    with torch.inference_mode():
        inside = patch.activations("z", source=cache(causal, other_tokens, "z"))
        assert bool((run(causal, tokens, one) == expected).all())
        assert bool((run(causal, tokens.clone(), patch.activations("z", source=stored)) == expected).all())
        found = patch.attribution(causal, tokens.clone(), other_tokens, draws=9, flips=9)
    assert found.frame.effect.equals(effects)
    # What was made there can be used where gradients are wanted.
    with intervene(causal, inside):
        edited = causal(tokens)
    assert bool((edited == expected).all())
    assert not bool((edited == clean).all())
    (gradient,) = torch.autograd.grad(edited.sum(), [next(causal.parameters())], allow_unused=True)
    assert gradient is not None
