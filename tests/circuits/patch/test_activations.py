import numpy as np
import pytest

from circuits import cache, patch, run


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
