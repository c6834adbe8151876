import json

import pytest
import torch

from circuits import CircuitsError, Head, ablate, edit, patch, permute
from circuits.model.sites import Site
from circuits.tensors import Snapshot, parse_positions

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


def test_repr_shows_a_tensor_by_shape_dtype_and_hash():
    shown = repr(ablate.mean("all", reference=TOKENS))
    assert "tensor([3, 4], int64, sha256=" in shown
    assert len(shown) < 400


def test_snapshot_of_bfloat16_and_scalars():
    assert Snapshot(torch.tensor([1.0, 2.0], dtype=torch.bfloat16)) == Snapshot(
        torch.tensor([1, 2]).bfloat16()
    )
    assert Snapshot(torch.tensor(1.0)) != Snapshot(torch.tensor(2.0))
    assert Snapshot(torch.zeros(2, 3)) != Snapshot(torch.zeros(3, 2))


@pytest.mark.parametrize(
    ("given", "expected"),
    [(3, (3,)), ([0, 2, 0], (0, 2)), (range(2), (0, 1)), (torch.tensor([1, -1]), (1, -1)), (None, None)],
)
def test_positions(given, expected):
    assert parse_positions(given, "test") == expected


def test_boolean_positions():
    assert isinstance(parse_positions(torch.tensor([True, False, True]), "test"), Snapshot)
    assert isinstance(parse_positions(torch.ones(2, 3, dtype=torch.bool), "test"), Snapshot)


def test_each_names_its_items():
    grid = ablate.each(ablate.uniform, [Head(0, 1), Head(1, 0)], keys=[0])
    assert list(grid) == ["0.1", "1.0"]
    assert grid["0.1"] == ablate.uniform("0.1", keys=[0])
    assert list(ablate.each(ablate.zero, [0, "mlp_out.1"])) == ["layer 0", "mlp_out.1"]


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
