"""Grids of interventions: one call for each, swept in one call."""

import numpy as np
import torch

from circuits import ablate, grid, heads, patch, permute


def test_names(causal):
    taken = []

    def make(**arguments):
        taken.append(arguments)
        return ablate.zero("0.0")

    first, second = heads("0.1,1.2", causal)
    for axis, items, names in (
        ("heads", [first, second], ["0.1", "1.2"]),
        ("heads", [(first, second), [second]], ["0.1+1.2", "1.2"]),
        ("positions", np.arange(2), ["position 0", "position 1"]),
        ("positions", [-1, (0, 2)], ["position -1", "position 0+position 2"]),
        ("layers", torch.arange(2), ["layer 0", "layer 1"]),
        ("keys", [2], ["key 2"]),
        ("components", ["qkv", ["q", "mlp"]], ["qkv", "q+mlp"]),
        ("seed", [7], ["seed 7"]),
    ):
        assert list(grid(make, {axis: items})) == names
    # Numbers arrive as numbers of Python's, and a head as a choice of heads.
    assert not any(isinstance(value, np.integer) for arguments in taken for value in arguments.values())
    assert taken[0] == {"heads": [first]}


def test_each_calls_a_number_by_what_it_is_for(causal):
    for make, names in (
        (ablate.zero, ["layer 0", "layer 1"]),
        (permute.positions, ["seed 0", "seed 1"]),
        (lambda layer: ablate.zero(f"mlp_out.{layer}"), ["layer 0", "layer 1"]),
        (lambda neurons: ablate.neurons(1, neurons), ["neuron 0", "neuron 1"]),
        (lambda positions: ablate.uniform("1.0", positions=positions), ["position 0", "position 1"]),
    ):
        assert list(ablate.each(make, range(2))) == names


def test_tensors_as_items_are_named_by_their_content(tokens, other_tokens):
    made = grid(patch.activations, {"source": [tokens, other_tokens.numpy()]}, site="z.0")
    assert list(made.values()) == [
        patch.activations("z.0", source=source) for source in (tokens, other_tokens)
    ]
    assert all(name.startswith("tensor([8, 6], int64, sha256=") and "\n" not in name for name in made)
