"""Arguments of experiments: what is of another type than they say is refused before anything is looked for."""

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch

from interp_tasks import experiments
from interp_tasks.errors import UserError
from interp_tasks.measurement.argument_types import check_types, checked, option_types, validator_of
from interp_tasks.measurement.heads.edits import read_specs

EXPERIMENTS = sorted(
    name for name in experiments.__all__ if name.islower() and name != "subjects" and name in dir(experiments)
)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_argument_of_every_experiment_is_checked(name):
    call = getattr(experiments, name)
    checked = 0
    for argument, parameter in inspect.signature(call).parameters.items():
        validator = validator_of(parameter.annotation)
        if parameter.kind is parameter.VAR_KEYWORD or validator is None or parameter.annotation == "Any":
            continue
        checked += 1
        with pytest.raises(UserError, match=rf"^{name}: {argument} is of type .*, not "):
            check_types(call, {argument: object()})
        if parameter.default is not parameter.empty:
            check_types(call, {argument: parameter.default})
    assert checked


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: experiments.ablation("nowhere", heads=5), r"ablation: heads is of type str \| Sequence"),
        (
            lambda: experiments.ablation("nowhere", samples="many"),
            r"samples is of type int \| None, not 'many'",
        ),
        (lambda: experiments.permute("nowhere", draws="3"), "permute: draws is of type int, not '3'"),
        (lambda: experiments.permute("nowhere", draws=2.5), "draws is of type int, not 2.5"),
        (lambda: experiments.fourier(3), "fourier: refs is of type"),
        (lambda: experiments.attention("nowhere", templates=["row", 3]), "templates is of type"),
        (lambda: experiments.permute("nowhere", draws=None), "permute: draws is of type int, not None"),
    ],
)
def test_a_wrong_type_is_one_line_and_comes_before_the_run_is_looked_for(call, said):
    with pytest.raises(UserError, match=said) as error:
        call()
    assert "\n" not in str(error.value)


def test_paths_arrays_and_numbers_of_arrays_stand_for_what_they_hold():
    check_types(experiments.ablation, {"refs": [Path("runs/a"), "runs/b"], "keys": np.array([0, 1])})
    check_types(experiments.permute, {"draws": np.int64(3), "options": {"samples": np.int32(5)}})
    check_types(experiments.generalisation, {"level": 1})
    check_types(experiments.ablation, {"heads": [(0, 1), "0.2"], "queries": range(3)})


def sent(**given):
    """What an experiment gets of what it is given."""

    @checked
    def experiment(
        refs: "str | Sequence[str]" = (), keys: "Sequence[int]" = (), **options: "Unpack[Options]"
    ):
        return {"refs": refs, "keys": keys, **options}

    return {name: value for name, value in experiment(**given).items() if name in given}


def test_sets_iterators_arrays_and_devices_are_taken_for_what_they_hold():
    assert sent(refs=(ref for ref in ["b", "a"])) == {"refs": ["b", "a"]}
    assert sent(refs={"b": 1, "a": 2}.keys()) == {"refs": ["b", "a"]}
    assert sent(refs={"b", "c", "a"}, keys={2, 0}) == {"refs": ["a", "b", "c"], "keys": [0, 2]}
    assert sent(refs=Path("runs/a"), keys=torch.tensor([1])) == {"refs": "runs/a", "keys": [1]}
    assert sent(device=torch.device("cpu"), samples=np.int64(3)) == {"device": "cpu", "samples": 3}
    assert sent(seed=None, split=None, task_config=None) == {"seed": None, "split": None, "task_config": None}
    tokens = np.zeros((2, 3), int)
    assert sent(tokens=tokens)["tokens"] is tokens


def test_a_value_of_many_lines_is_shown_in_one():
    with pytest.raises(UserError, match="queries is of type") as error:
        experiments.ablation("nowhere", queries=torch.ones(8, 3, dtype=torch.bool))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"heads": [0, 1]}, "heads: 0 is no choice of heads: write 0.1"),
        ({"heads": [[(0, True)]]}, "is no choice of heads"),
        ({"task": 3}, "task is a task or the name of one, not 3"),
        ({"tokens": "nowhere.npy"}, "cannot read nowhere.npy"),
        ({"progress": 3}, "progress is of type"),
    ],
)
def test_what_has_the_right_type_and_no_meaning_comes_before_the_run_too(given, said):
    with pytest.raises(UserError, match=said):
        experiments.ablation("nowhere", **given)


def test_heads_of_a_file_are_lists_of_lists():
    assert [each.heads for each in read_specs([[0, 1], [0, 2]])] == [((0, 1), (0, 2))]


def test_a_long_value_is_cut():
    with pytest.raises(UserError) as error:
        check_types(experiments.permute, {"draws": "x" * 1000})
    assert len(str(error.value)) < 150


def test_options_are_those_of_every_experiment():
    assert option_types()["samples"] == "int | None"
