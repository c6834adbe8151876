"""Every row of the table of families, against forwards written by hand."""

from pathlib import Path

import pytest
import torch

from circuits import Site, edit, intervene
from circuits.model.hooked_model import HookedModel
from circuits.model.supported_models import FAMILIES, PROVED_VERSIONS
from tests.circuits.model.test_hooked_model import places, write

families = pytest.importorskip("tests.circuits.families")

ROOT = Path(__file__).parents[3]
TOKENS = torch.randint(3, families.WORDS, (4, 7), generator=torch.Generator().manual_seed(1))
#: Every family with its weights as they are, and the commonest norms and attentions in each other mode.
IN_MODES = [
    *((name, "raw") for name in families.NAMES),
    *((name, mode) for name in ("gpt2", "llama") for mode in ("compatible", "processed")),
    ("gemma2", "processed"),
    ("bert", "compatible"),
]


def errors(model, tokens=TOKENS, keep=None):
    """The largest difference at each place, relative to the effect of the write there."""
    given = {} if keep is None else {"attention_mask": keep.long()}
    real = torch.ones_like(tokens, dtype=torch.bool) if keep is None else keep
    clean = families.forward(model, tokens, keep=keep)[real]
    found = {}
    for place in places(model):

        def written(x, place=place):
            # What stands at padding is the model's own affair, and nobody looks at it.
            return torch.where(real[:, None, None], write(x), x) if place[0] == "pattern" else write(x)

        by_hand = families.forward(
            model, tokens, lambda s, at, x, place=place: written(x) if (s, at) == place else x, keep
        )[real]
        with torch.no_grad(), intervene(model, edit(Site(*place), written)):
            ours = model(tokens, **given)[real]
        effect = (by_hand - clean).square().mean().sqrt()
        assert effect >= 0.01 * clean.std(), place
        found[place] = float((ours - by_hand).abs().max() / effect)
    return found


def made(hf_model, name, mode="raw"):
    model = hf_model(name, mode)
    try:
        model(TOKENS)
    except RuntimeError as error:
        # transformer-lens 3.9 adds biases in single precision to some classes.
        if mode == "processed" and "same dtype" in str(error):
            pytest.skip(f"this version does not process a {name} in float64")
        raise
    return model


def row(model):
    return HookedModel(model)._bridge.family


@pytest.mark.parametrize(("name", "mode"), IN_MODES)
def test_every_place_is_written_as_by_hand(hf_model, name, mode):
    model = made(hf_model, name, mode)
    assert row(model) in FAMILIES
    assert {site for site, _ in places(model)} == row(model).sites
    for place, error in errors(model).items():
        assert error <= 1e-5, place


@pytest.mark.parametrize(("name", "padded"), [("gpt2", False), ("llama", True)])
def test_every_place_is_written_as_by_hand_under_fused_attention(hf_model, name, padded):
    """With a mask that the kernel is given, and with the causal one that it has."""
    model = hf_model(name, fresh=True)
    model.original_model.set_attn_implementation("sdpa")
    keep = torch.ones_like(TOKENS, dtype=torch.bool)
    keep[0, 5:] = keep[1, 3:] = False
    assert {site for site, _ in places(model)} == row(model).sites
    for place, error in errors(model, keep=keep if padded else None).items():
        assert error <= 1e-5, place


def test_every_row_is_tested_and_every_version_proved(hf_model):
    assert {row(hf_model(name)).name for name in families.NAMES} == {family.name for family in FAMILIES}
    assert set(PROVED_VERSIONS) == {"transformer-lens", "transformers"}
    constrained = dict(
        line.split("==") for line in (ROOT / ".ci/constraints.txt").read_text().splitlines() if "==" in line
    )
    assert constrained["transformers"].rpartition(".")[0] == PROVED_VERSIONS["transformers"][-1]


@pytest.mark.parametrize("name", families.NAMES)
def test_the_forward_by_hand_is_the_model_as_hugging_face_made_it(hf_model, name):
    with torch.no_grad():
        theirs = hf_model.plain(name)(TOKENS).logits
    ours = families.forward(hf_model(name), TOKENS)
    assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.std())
