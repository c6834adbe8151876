"""Against what is not our code: TransformerLens' own patching over full grids, and hooks written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformer_lens import patching

from circuits import ablate, cache, intervene, lens, patch, run, sweep

pytestmark = pytest.mark.usefixtures("each_engine")

WEIGHT = torch.randn(4, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(8))


def per_example(output: Tensor) -> Tensor:
    """Every position and class counts, so that no place of an edit is out of sight."""
    return (output * WEIGHT).sum((1, 2))


@contextmanager
def float64_tables() -> Iterator[None]:
    """TransformerLens keeps what it finds in a table of the default dtype, float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SETTINGS = {
    "causal": {"attention_dir": "causal"},
    "bidirectional": {"attention_dir": "bidirectional", "normalization_type": None},
}


@pytest.fixture(scope="module")
def tokens():
    """Small: TransformerLens runs the model once for each place of a grid, and so do we."""
    return torch.randint(0, 11, (4, 4), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def other_tokens():
    return torch.randint(0, 11, (4, 4), generator=torch.Generator().manual_seed(2))


@pytest.fixture(params=list(SETTINGS))
def settings(request):
    """Both directions of attention, with and without LayerNorm, both with MLPs."""
    return SETTINGS[request.param]


@pytest.fixture
def model(make_model, settings, family):
    """The model that we edit, of every class."""
    return make_model(family=family, **settings)


@pytest.fixture
def twin(make_model, settings, hooked_only):
    """The same function as a HookedTransformer, which TransformerLens' own tools are made for."""
    return make_model(family=hooked_only, **settings)


def patched_by_both(
    model: Any,
    twin: Any,
    tokens: Tensor,
    source: Tensor,
    theirs: Callable[..., Tensor],
    ours: Callable[..., Any],
) -> tuple[np.ndarray, np.ndarray]:
    """Effects over the grid of `theirs`, on `twin`; ours come from one sweep, with `ours(*index)` at each place."""
    _, cached = twin.run_with_cache(source)
    with float64_tables(), torch.no_grad():
        table = theirs(twin, tokens, cached, lambda logits: per_example(logits).mean()).numpy()
    given = {str(index): ours(*index) for index in np.ndindex(table.shape)}
    frame = sweep(model, tokens, given, metric=per_example, draws=1, flips=1).frame
    assert list(frame["variant"]) == list(given)
    clean = per_example(twin(tokens)).mean().item()
    return frame["value"].to_numpy().reshape(table.shape) - clean, table - clean


def assert_equal_effects(found: np.ndarray, expected: np.ndarray, none: Any = None) -> None:
    """Equal to 1e-10 of the largest effect; each but those at `none` is real, and those are none at all."""
    largest = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10 * largest)
    real = np.ones(expected.shape, dtype=bool)
    if none is not None:
        real[none] = False
    assert (np.abs(expected[real]) > 1e-5 * largest).all()
    assert (np.abs(expected[~real]) < 1e-12 * largest).all()


@pytest.mark.parametrize("site", ["resid_pre", "resid_mid", "attn_out", "mlp_out"])
def test_residual_streams_by_position(model, twin, tokens, other_tokens, site):
    def ours(layer, position):
        return patch.activations(f"{site}.{layer}", source=other_tokens, positions=[position])

    theirs = getattr(patching, f"get_act_patch_{site}")
    assert_equal_effects(*patched_by_both(model, twin, tokens, other_tokens, theirs, ours))


@pytest.mark.parametrize("site", ["z", "q", "k", "v"])
@pytest.mark.parametrize("settings", [SETTINGS["causal"]], ids=["causal"])
def test_heads_by_position(model, twin, tokens, other_tokens, site):
    def ours(layer, position, head):
        return patch.activations(site, source=other_tokens, heads=[(layer, head)], positions=[position])

    theirs = getattr(patching, f"get_act_patch_attn_head_{'out' if site == 'z' else site}_by_pos")
    # The first query of a causal model has one key to see, whatever it asks for.
    none = (slice(None), 0) if site == "q" else None
    assert_equal_effects(*patched_by_both(model, twin, tokens, other_tokens, theirs, ours), none=none)


@pytest.mark.parametrize("settings", [SETTINGS["causal"]], ids=["causal"])
def test_patterns_by_query(model, twin, tokens, other_tokens):
    def ours(layer, head, query):
        return patch.activations("pattern", source=other_tokens, heads=[(layer, head)], positions=[query])

    theirs = patching.get_act_patch_attn_head_pattern_by_pos
    none = (slice(None), slice(None), 0)
    assert_equal_effects(*patched_by_both(model, twin, tokens, other_tokens, theirs, ours), none=none)


def test_clean_passes_attribution_and_lens_run_in_eval_mode(model, tokens, other_tokens):
    seen = []  # (training, gradients on)
    model.train().add_hook(
        "blocks.0.hook_resid_pre", lambda x, hook: seen.append((model.training, torch.is_grad_enabled()))
    )
    with intervene(model, ablate.mean("0.1", reference=other_tokens)):
        model(tokens)
    assert seen == [(False, False), (True, True)]
    seen.clear()
    patch.attribution(model, tokens, other_tokens, metric=per_example, draws=1, flips=1)
    assert seen == [(False, False), (False, True)]
    lens(model, tokens)
    assert set(seen[2:]) == {(False, False)}
    assert model.training


def test_the_mean_of_a_long_reference_is_taken_in_float64(make_model, tokens):
    model = make_model(normalization_type=None).float()  # LayerNorm has its dtype from the config
    reference = torch.randint(0, 11, (200, 4), generator=torch.Generator().manual_seed(7))
    expected = cache(model, reference, ["z.0"])["z.0"].double().mean(0).float()
    _, found = run(model, tokens, ablate.mean("z.0", reference=reference), cache=["z.0"])
    assert bool((found["z.0"] == expected).all())
