"""What tasks say of their answers as linear forms of the grid's coordinates."""

import pytest
import torch

import tasks

CASES = [
    ("modular-addition", {"p": 7}),
    ("modular-addition", {"p": 7, "equals_class": True}),
    ("modular-multiplication", {"p": 7}),
    ("miiii", {"p": 11}),
    ("miiii", {"p": 11, "digits": "high-first", "primes": (3, 7)}),
]


@pytest.mark.parametrize(("name", "config"), CASES)
def test_linear_forms_are_the_answers(name, config):
    task = tasks.get(name, **config)
    found = task.modular_answers()
    axes = task.grid_axes()
    grid = task.input_grid()
    inside = torch.ones(len(grid), dtype=torch.bool)
    coordinates = []
    for axis in axes:
        index = {value: place for place, value in enumerate(axis.values)}
        tokens = grid.tokens[:, axis.position].tolist()
        inside &= torch.tensor([token in index for token in tokens])
        coordinates.append(torch.tensor([index.get(token, 0) for token in tokens]))
    assert inside.any()
    targets = grid.targets.reshape(len(grid), -1)
    columns = []
    for which, answer in enumerate(found.values()):
        assert len(answer.classes) == answer.modulus
        remainder = sum(c * x for c, x in zip(answer.coefficients, coordinates, strict=True)) % answer.modulus
        column = torch.tensor(answer.classes)[remainder]
        # Read-outs of several primes lie side by side.
        first = sum(task.moduli[:which]) if name == "miiii" else 0
        assert torch.equal(column[inside], targets[inside, which] + first)
        columns += answer.classes
    assert len(columns) == len(set(columns))
    assert max(columns) < task.d_vocab_out
