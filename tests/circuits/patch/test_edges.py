"""Estimates of edges over every value that edges carry, method, kind of model and precision."""

import copy

import pytest
import torch

from circuits import patch

WEIGHT = torch.randn(6, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
HOWS = [pytest.param("resample", marks=pytest.mark.slow), "mean", "zero"]
METHODS = {
    "gradient": {"method": "gradient"},
    "integrated": {"method": "integrated", "steps": 2},
}
#: Largest difference from float64, as a share of the largest estimate.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.15}
SERVED = ["gpt2", "neox", "pythia", "llama", "qwen2", "qwen3", "mistral", "gemma2"]


def weighed(output):
    return (output.double()[..., :11] * WEIGHT[: output.shape[1], : output.shape[-1]]).sum((1, 2))


def estimates(model, base, source, how, method):
    given = None if how == "zero" else source
    found = patch.edges(
        model, base, given, weighed, how=how, **METHODS[method], draws=1, flips=1, exact=1
    ).frame
    return torch.tensor(found.set_index("variant")["estimate"].sort_index().to_numpy())


def assert_near(models, exact, *asked):
    """Estimates are those of float64, which other tests hold to slopes of paths."""
    expected = estimates(exact, *asked)
    for dtype, tolerance in TOLERANCES.items():
        found = estimates(models(dtype), *asked)
        assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max()), dtype


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", HOWS)
def test_every_precision(model, tokens, other_tokens, how, method):
    model = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            # Smaller, as without norms the softmax is a step otherwise, which half precision is too coarse for.
            weight.copy_((weight / 2).bfloat16())
    assert_near(lambda dtype: copy.deepcopy(model).to(dtype), model, tokens, other_tokens, how, method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SERVED)
def test_every_precision_of_hugging_face(hf_model, name, method):
    base, source = torch.randint(3, 50, (2, 3, 6), generator=torch.Generator().manual_seed(1))
    assert_near(lambda dtype: hf_model(name, dtype=dtype), hf_model(name), base, source, "mean", method)
