import pytest
import torch

from circuits import CircuitsError, Head, heads
from circuits.model.heads import KeyValueGroup, parse_heads


@pytest.fixture
def model(make_model):
    return make_model(n_layers=3)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("0.1, 2.1-3", [(0, 1), (2, 1), (2, 2), (2, 3)]),
        ("L0H1", [(0, 1)]),
        ("l2h0+0.1", [(2, 0), (0, 1)]),
        ("1.3,1.3", [(1, 3)]),
        ([(0, 1), (2, 0)], [(0, 1), (2, 0)]),
        (["0.1", "2.0"], [(0, 1), (2, 0)]),
        (Head(1, 2), [(1, 2)]),
        ((1, 2), [(1, 2)]),
    ],
)
def test_specs(model, spec, expected):
    found = heads(spec, model)
    assert found == tuple(expected)
    assert all(isinstance(head, Head) for head in found)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("L2K0", [(2, 0)]),
        ("0.k1, l1k0 + 0.K1", [(0, 1), (1, 0)]),
        (KeyValueGroup(1, 1), [(1, 1)]),
        ([KeyValueGroup(1, 1), "0.k0"], [(1, 1), (0, 0)]),
    ],
)
def test_specs_of_key_value_groups(make_model, spec, expected):
    model = make_model(n_layers=3, n_key_value_heads=2)
    assert heads(spec, model) == tuple(KeyValueGroup(*one) for one in expected)


def test_a_group_is_no_head_of_the_same_numbers(make_model):
    model = make_model(n_layers=3, n_key_value_heads=2)
    mixed = heads("0.1, 0.k1", model)
    assert mixed == (Head(0, 1), KeyValueGroup(0, 1))
    assert KeyValueGroup(0, 1) != Head(0, 1)
    assert parse_heads("0.k1") == parse_heads("L0K1") != parse_heads("0.1")
    assert str(KeyValueGroup(2, 1)) == "2.k1"
    assert heads(",".join(map(str, mixed)), model) == mixed
    assert KeyValueGroup(2, 1).serves(model) == (Head(2, 2), Head(2, 3))
    assert all(isinstance(one, Head) for one in heads("all", model))


@pytest.mark.parametrize(
    "spec", ["", " ", "foo", "0", "0.1;0.2", "0.-1", "0.3-1", "0.1,,0.2", "all,0.1", [], "1.2.3"]
)
def test_what_is_not_a_spec_is_repeated_in_one_line(model, spec):
    with pytest.raises(CircuitsError) as caught:
        heads(spec, model)
    assert repr(spec) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_heads_in_a_tensor_or_an_array(model):
    pairs = torch.tensor([[0, 1], [0, 3], [0, 1]])
    for given in (pairs, pairs.numpy(), pairs.int(), pairs.tolist()):
        assert heads(given, model) == heads("0.1, 0.3", model)
    for given in (pairs.double(), (pairs, pairs), [(0, torch.tensor([1, 2]))]):
        with pytest.raises(CircuitsError, match="cannot read") as caught:
            heads(given, model)
        assert "\n" not in str(caught.value)
