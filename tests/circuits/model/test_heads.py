import pytest
import torch

from circuits import CircuitsError, Head, heads
from circuits.model.heads import parse_heads


@pytest.fixture
def model(make_model):
    return make_model(n_layers=3)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("0.1", [(0, 1)]),
        ("0.1, 2.1-3", [(0, 1), (2, 1), (2, 2), (2, 3)]),
        ("L0H1", [(0, 1)]),
        ("l2h0+0.1", [(2, 0), (0, 1)]),
        ("0.1+0.2", [(0, 1), (0, 2)]),
        ("1.3,1.3", [(1, 3)]),
        ([(0, 1), (2, 0)], [(0, 1), (2, 0)]),
        (["0.1", "2.0"], [(0, 1), (2, 0)]),
        (Head(1, 2), [(1, 2)]),
        ((1, 2), [(1, 2)]),
        ([[1, 2]], [(1, 2)]),
    ],
)
def test_specs(model, spec, expected):
    found = heads(spec, model)
    assert found == tuple(expected)
    assert all(isinstance(head, Head) for head in found)


def test_all_is_every_head_once_in_order(model):
    assert heads("all", model) == tuple((layer, head) for layer in range(3) for head in range(4))
    assert heads(" ALL ", model) == heads("all", model)


@pytest.mark.parametrize(
    "spec", ["", " ", "foo", "0", "0.1;0.2", "0.-1", "0.3-1", "0.1,,0.2", "all,0.1", [], "1.2.3"]
)
def test_what_is_not_a_spec_is_repeated_in_one_line(model, spec):
    with pytest.raises(CircuitsError) as caught:
        heads(spec, model)
    assert repr(spec) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spec", [3, None, 0.1, [0.1], [(0, 1, 2)], [(True, False)], ["all"], torch.tensor(3), torch.arange(2)]
)
def test_other_types_are_refused(model, spec):
    with pytest.raises(CircuitsError, match="heads"):
        heads(spec, model)


def test_missing_head_names_the_valid_ones(model):
    with pytest.raises(
        CircuitsError, match=r"'0\.1, 3\.9': no head 3\.9: the model has layers 0-2 and heads 0-3"
    ):
        heads("0.1, 3.9", model)
    with pytest.raises(CircuitsError, match=r"no head -1\.0"):
        heads([(-1, 0)], model)


def test_specs_compare_by_what_they_name():
    assert parse_heads("0.1") == parse_heads("L0H1") == parse_heads([(0, 1)])
    assert parse_heads("0.1") != parse_heads("0.2")
    assert Head(2, 1).label == "L2H1"
    assert str(Head(2, 1)) == "2.1"


def test_two_plain_numbers_in_a_list_are_ambiguous(causal):
    with pytest.raises(CircuitsError, match=r"heads \[0, 3\]: cannot read 0 as a head"):
        heads([0, 3], causal)
    assert heads((0, 3), causal) == heads([(0, 3)], causal) == heads([[0, 3]], causal) == (Head(0, 3),)


def test_heads_in_a_tensor_or_an_array(model):
    pairs = torch.tensor([[0, 1], [0, 3], [0, 1]])
    for given in (pairs, pairs.numpy(), pairs.int(), pairs.tolist()):
        assert heads(given, model) == heads("0.1, 0.3", model)
    for given in (pairs.double(), (pairs, pairs), [(0, torch.tensor([1, 2]))]):
        with pytest.raises(CircuitsError, match="cannot read") as caught:
            heads(given, model)
        assert "\n" not in str(caught.value)
    for given, kind in ((pairs.to("meta"), "meta"), (pairs.to_sparse(), "sparse")):
        with pytest.raises(CircuitsError, match=f"heads: got a {kind} tensor"):
            heads(given, model)
