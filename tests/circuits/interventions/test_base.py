import json

import pytest
import torch

from circuits import CircuitsError, ablate, edit, patch, permute
from circuits.model.sites import Site

TOKENS = torch.arange(12).reshape(3, 4)


def build_all(tokens=TOKENS):
    return [
        ablate.uniform("all"),
        ablate.uniform("0.1", keys=[0, 1], positions=[-1]),
        ablate.mean_pattern("0.1", reference=tokens),
        ablate.zero("0.1,1.0"),
        ablate.zero("mlp_out.1"),
        ablate.zero(0),
        ablate.mean("all", reference=tokens),
        ablate.mean("all", reference=tokens, over="batch, pos"),
        ablate.resample("all", source=tokens, seed=3),
        patch.activations("z", source=tokens, heads="0.1", positions=[2]),
        patch.activations("resid_post.0", source={"blocks.0.hook_resid_post": tokens.double()}),
        edit("z", torch.zeros_like, heads="0.0"),
        ablate.zero("0.1", positions=tokens > 4),
    ]


def test_descriptions_are_json_and_tell_them_apart():
    texts = [json.dumps(one.describe(), sort_keys=True) for one in build_all()]
    assert len(set(texts)) == len(texts)
    described = ablate.mean("0.1", reference=TOKENS).describe()
    assert described["intervention"] == "ablate.mean"
    assert described["places"] == [{"site": "z", "heads": ["0.1"]}]
    assert set(described["reference"]) == {"shape", "dtype", "sha256"}


@pytest.mark.usefixtures("untyped")
def test_errors_are_one_line_whatever_was_given():
    """A message repeats what was asked, which may be anything."""
    for given in (
        torch.rand(100, 100),
        torch.nn.Sequential(*map(torch.nn.Identity, range(99))),
        "z\n" * 2000,
    ):
        for make in (ablate.zero, ablate.uniform, Site.parse, permute.positions):
            with pytest.raises(CircuitsError) as caught:
                make(given)
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) <= 900
    with pytest.raises(CircuitsError, match=r"^one two three$"):
        raise CircuitsError("one\n  two\tthree\n")
    kept = "begin " + "x" * 790 + " end"
    assert str(CircuitsError(kept)) == kept
    cut = str(CircuitsError("begin " + "x" * 9000 + " end"))
    assert cut.startswith("begin xx")
    assert cut.endswith("xx end")
    assert " ... " in cut
    assert len(cut) == 805
