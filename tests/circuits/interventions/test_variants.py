"""Grids of interventions: one call for each, swept in one call."""

import numpy as np
import pytest
import torch

from circuits import CircuitsError, ablate, grid, heads, patch, permute, run, sweep, transplant


def metric(output):
    return output[:, -1].square().sum(-1)


def test_every_combination_once_the_last_axis_fastest():
    calls = []

    def make(**arguments):
        calls.append(arguments)
        return ablate.zero("0.0")

    made = grid(make, {"layer": [0, 1], "neurons": [3, 4, 5]}, how="zero")
    assert calls == [
        {"layer": layer, "neurons": neuron, "how": "zero"} for layer in (0, 1) for neuron in (3, 4, 5)
    ]
    assert list(made) == [f"layer {layer}, neuron {neuron}" for layer in (0, 1) for neuron in (3, 4, 5)]


def test_names(causal):
    taken = []

    def make(**arguments):
        taken.append(arguments)
        return ablate.zero("0.0")

    first, second = heads("0.1,1.2", causal)
    for axis, items, names in (
        ("heads", [first, second], ["0.1", "1.2"]),
        ("heads", ["all", "0.1"], ["all", "0.1"]),
        ("heads", [(first, second), [second]], ["0.1+1.2", "1.2"]),
        ("heads", [(0, 1)], ["(0, 1)"]),
        ("positions", np.arange(2), ["position 0", "position 1"]),
        ("positions", [-1, (0, 2)], ["position -1", "position 0+position 2"]),
        ("layers", torch.arange(2).tolist(), ["layer 0", "layer 1"]),
        ("layer", [1], ["layer 1"]),
        ("keys", [2], ["key 2"]),
        ("components", ["qkv", ["q", "mlp"]], ["qkv", "q+mlp"]),
        ("seed", [7], ["seed 7"]),
        ("keep", [True, False], ["True", "False"]),
    ):
        assert list(grid(make, {axis: items})) == names
    # Numbers arrive as numbers of Python's, and a head as a choice of heads.
    assert not any(isinstance(value, np.integer) for arguments in taken for value in arguments.values())
    assert taken[0] == {"heads": [first]}


@pytest.mark.usefixtures("untyped")
def test_each_names_and_refuses_doubles(causal):
    made = ablate.each(ablate.zero, [*heads("0.1", causal), "mlp_out.1", 1, np.int64(0)])
    assert list(made) == ["0.1", "mlp_out.1", "layer 1", "layer 0"]
    assert made["0.1"] == ablate.zero("0.1")
    assert made["layer 1"] == ablate.zero(1)
    with pytest.raises(CircuitsError, match=r"two items are called 'mlp_out\.1'"):
        ablate.each(ablate.zero, ["mlp_out.1", "mlp_out.1"])
    for items, message in (
        ("all", "give a list of items"),
        ([], "nothing to go over"),
        (torch.arange(0), "nothing to go over"),
        (None, "give a list of items, not None"),
        (0, "give a list of items, not 0"),
        (torch.tensor(0), r"give a list of items, not tensor\(0\)"),
    ):
        with pytest.raises(CircuitsError, match=message):
            ablate.each(ablate.zero, items)


def test_over_goes_to_what_takes_it_and_is_the_items_without_any(tokens):
    pooled = ablate.each(ablate.mean, ["0.1", "mlp_out.1"], reference=tokens, over="batch,pos")
    assert pooled == {name: ablate.mean(name, tokens, "batch,pos") for name in ("0.1", "mlp_out.1")}
    assert ablate.each(ablate.mean, over=["0.1"], reference=tokens) == {"0.1": ablate.mean("0.1", tokens)}


def test_each_calls_a_number_a_layer_only_where_it_is_one(causal):
    for make, names in (
        (lambda number: ablate.zero(f"mlp_out.{number}"), ["layer 0", "layer 1"]),
        (lambda number: ablate.uniform(f"{number}.0"), ["layer 0", "layer 1"]),
        (lambda number: transplant.weights(causal, "qkv", layers=number), ["layer 0", "layer 1"]),
        (lambda number: ablate.neurons(1, number), ["0", "1"]),
        (lambda number: ablate.uniform("1.0", positions=number), ["0", "1"]),
        (lambda number: ablate.zero("resid_post.0", positions=number), ["0", "1"]),
    ):
        assert list(ablate.each(make, range(2))) == names


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({}, "axes are a dict of argument -> items"),
        ({"heads": "all"}, "axis 'heads' must be a list of items, got 'all'"),
        ({"layer": []}, "axis 'layer' has no items"),
        ({"heads": ["0.1", "0.1"]}, "two combinations are called '0.1'"),
        ({"heads": None}, "axis 'heads' must be a list of items, got None"),
        ({"heads": b"01"}, "axis 'heads' must be a list of items, got b'01'"),
        ({"layer": torch.tensor(1)}, r"axis 'layer' must be a list of items, got tensor\(1\)"),
        ({3: ["0.1"]}, "axis 3 is not the name of an argument"),
        ({None: ["0.1"]}, "axis None is not the name of an argument"),
        ({"source": [torch.ones(2, 2).to("meta")]}, "source: got a meta tensor"),
    ],
)
def test_faults_are_one_line(axes, message):
    with pytest.raises(CircuitsError, match=message) as caught:
        grid(lambda **given: ablate.zero("0.0"), axes)
    assert "\n" not in str(caught.value)


def test_per_site_and_position_in_one_sweep(causal, tokens, other_tokens):
    axes = {"site": ["resid_pre.0", "resid_pre.1"], "positions": range(6)}
    given = grid(patch.activations, axes, source=other_tokens)
    result = sweep(causal, tokens, given, metric=metric, batch_size=3)
    values = [
        metric(
            run(causal, tokens, patch.activations(f"resid_pre.{layer}", other_tokens, positions=at))
        ).mean()
        for layer in (0, 1)
        for at in range(6)
    ]
    np.testing.assert_allclose(result.frame["value"], values, rtol=1e-12)
    assert result.frame["layer"].tolist() == [0] * 6 + [1] * 6
    assert result.frame["position"].tolist() == [*range(6)] * 2
    assert result.frame["head"].isna().all()
    # Holm over the whole grid: the smallest p-value counts twelve times.
    np.testing.assert_allclose(result.frame["p_adjusted"].min(), min(1, 12 * result.frame["p_value"].min()))
    assert not result.frame["null_effect"].any()


def test_per_head_layer_component_and_key_in_one_sweep(causal, tokens):
    donor = {
        name: value * 0.5 for name, value in causal.state_dict().items() if value.dtype.is_floating_point
    }
    donor = {name: value for name, value in donor.items() if "mask" not in name and "IGNORE" not in name}
    given = {
        **grid(ablate.uniform, {"heads": heads("all", causal)}),
        **ablate.each(ablate.zero, [0, 1]),
        **grid(transplant.weights, {"components": ["qkv", "mlp"], "layers": range(2)}, source=donor),
        **grid(ablate.uniform, {"heads": ["1.0"], "positions": [-1], "keys": range(2)}),
        **grid(permute.draws, {"count": [2]}),
    }
    frame = sweep(causal, tokens, given, metric=metric).frame
    assert len(frame) == 8 + 2 + 4 + 2 + 3
    singles = frame[frame["draw"].isna() & (frame["variant"] != "count 2")]
    for name, value in zip(singles["variant"], singles["value"], strict=True):
        np.testing.assert_allclose(value, metric(run(causal, tokens, given[name])).mean(), rtol=1e-12)
    assert frame["p_adjusted"].notna().sum() == 8 + 2 + 4 + 2 + 1
    p_values = np.sort(frame["p_value"].dropna())
    adjusted = np.sort(frame["p_adjusted"].dropna())
    expected = np.minimum(1, np.maximum.accumulate(p_values * np.arange(17, 0, -1)))
    np.testing.assert_allclose(adjusted, expected)


def test_numbers_in_a_tensor_or_an_array_are_numbers(other_tokens):
    expected = grid(patch.activations, {"positions": range(3)}, site="z.0", source=other_tokens)
    for positions in (torch.arange(3), np.arange(3), torch.arange(3).short()):
        assert grid(patch.activations, {"positions": positions}, site="z.0", source=other_tokens) == expected
        assert ablate.each(ablate.zero, positions) == ablate.each(ablate.zero, range(3))


def test_tensors_as_items_are_named_by_their_content(tokens, other_tokens):
    made = grid(patch.activations, {"source": [tokens, other_tokens.numpy()]}, site="z.0")
    assert list(made.values()) == [
        patch.activations("z.0", source=source) for source in (tokens, other_tokens)
    ]
    assert all(name.startswith("tensor([8, 6], int64, sha256=") and "\n" not in name for name in made)
    with pytest.raises(CircuitsError, match="two combinations are called"):
        grid(patch.activations, {"source": [tokens, tokens.clone()]}, site="z.0")
