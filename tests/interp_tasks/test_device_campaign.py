"""That the campaign of devices compares everything, takes rounding for rounding, and finds what is more than that."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch.overrides import TorchFunctionMode

from interp_tasks.cli.app import program
from interp_tasks.cli.groups import every_command
from tests.campaigns.device import mixed, on
from tests.campaigns.device.agreement import Check, Tolerance, columns, differences
from tests.campaigns.device.commands import COMMANDS, OTHERWISE
from tests.campaigns.frame import perform

pytestmark = pytest.mark.filterwarnings("ignore:.*HookedTransformer.*:DeprecationWarning")
#: A command, training alone and stacked, and verbs in double and in (partly) single precision, and without a model.
TRIALS = [
    *(
        "command: attention --ckpt zoo:matrix",
        "training: training modular-addition",
        "stacked dropout",
    ),
    *(": sweeps, causal", "edges ranked, post-norm", "probes, gpt2", "attention, llama", "modular sums"),
]
#: Products, and sums that are no whole numbers.
OPERATIONS = {"matmul", "linear", "einsum", "bmm", "softmax", "sum", "mean", "rsqrt", "__matmul__", "lstsq"}


class Elsewhere(TorchFunctionMode):
    """Computes as a device would whose products and sums are off by up to a share, the same in every row.

    Args:
        share: ``None``: by one or two units in the last place.
    """

    def __init__(self, share=None):
        super().__init__()
        self.share = share

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") not in OPERATIONS or not isinstance(found, torch.Tensor):
            return found
        if not found.is_floating_point() or not found.ndim:
            return found
        with torch._C.DisableTorchFunction():
            share = self.share or 2 * torch.finfo(found.dtype).eps
            off = 1 + share * (7.0 * torch.arange(found.shape[-1], dtype=torch.float64) + 1).sin()
            return torch.where(found == found.round(), found, (found.double() * off).to(found.dtype))


def campaign(*names, planted):
    summary = perform(on("cpu", planted), only=names)
    assert summary.n == len(names)
    return summary


@pytest.mark.slow
def test_rounding_is_no_difference():
    assert campaign(*TRIALS, planted=Elsewhere).failures == {}


@pytest.mark.slow
def test_numbers_that_are_off_by_half_a_percent_are_found_in_every_kind_of_trial():
    found = campaign(*TRIALS, planted=lambda: Elsewhere(5e-3))
    assert len(found.failures) == len(TRIALS), found.kinds
    # Where the package compares two ways of its own, it refuses before anything is compared here.
    refused = [text for text in found.failures.values() if ", as " not in text]
    assert len(refused) == sum("status 2: " in text or "CircuitsError: " in text for text in refused) <= 2


def test_a_difference_in_a_verb_is_found_and_rounding_is_none():
    assert campaign("ablations, causal", "spectra", planted=Elsewhere).failures == {}
    found = campaign("ablations, causal", "spectra", planted=lambda: Elsewhere(1e-6))
    texts = list(found.failures.values())
    assert texts[0].startswith("ablations, causal: tokens on cpu: /")
    assert texts[1].startswith("spectra: tokens on cpu: /")


def test_an_error_on_the_device_alone_is_a_failure_with_the_name_of_the_trial():
    class Without(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            raise RuntimeError("tensors of two devices")

    found = campaign("variances", planted=Without)
    assert next(iter(found.failures.values())).startswith("variances: RuntimeError: tensors of two devices")


def test_every_command_that_takes_a_device_is_compared_or_named():
    taking = {
        " ".join(path)
        for path, command in every_command(program())
        if any("--device" in parameter.opts for parameter in command.params)
    }
    assert set(COMMANDS) | set(OTHERWISE) == taking
    assert not set(COMMANDS) & set(OTHERWISE)


def test_the_first_trials_are_of_every_kind():
    made = [Check(kind, "", Tolerance(0, 0, 0), list, list) for kind in "aaabbc"]
    assert [check.kind for check in mixed(made)] == list("abcaba")


ROWS = pd.DataFrame({"variant": ["a", "b"], "rank": [1, 2], "effect": [2.0, 1.0], "p_value": [0.2, 0.3]})


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"variant": ["b", "a"], "effect": [1.0, 2.0], "p_value": [0.3, 0.2]}, []),
        ({"effect": [2.0, 1.0001]}, []),
        ({"effect": [2.0, 1.01]}, ["/effect: 1 of 2, as 1.0 and 1.01"]),
        ({"effect": [-2.0, 1.0]}, ["/effect: 1 of 2, as 2.0 and -2.0"]),
        ({"effect": [2.0, np.nan]}, ["/effect: 1 of 2, as 1.0 and nan"]),
        ({"p_value": [0.2, 0.31]}, []),
        ({"p_value": [0.2, 0.9]}, ["/p_value: 1 of 2, as 0.3 and 0.9"]),
        ({"variant": ["a", "c"]}, ["/variant: 1 of 2, as b and c"]),
        ({"engine": "fast"}, ["one has, the other has not: ['/engine']"]),
    ],
)
def test_tables_are_compared_row_by_row_by_their_words(changes, found):
    other = ROWS.assign(**changes)
    assert differences(columns(ROWS), columns(other), Tolerance(1e-3, 1e-4, 1e-7)) == found


def test_p_values_of_effects_that_are_rounding_alone_are_not_compared():
    one, other = ROWS.assign(effect=[2.0, 1e-9]), ROWS.assign(effect=[2.0, -1e-9], p_value=[0.2, 0.9])
    assert differences(columns(one), columns(other), Tolerance(1e-3, 1e-4, 1e-7)) == []


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("0.004321 [0.000611]", "0.00432 [0.000611]", True),
        ("step 3,250", "step 3,251", True),
        ("0.0043", "0.0053", False),
        ("keys 1 and 4", "keys 1 and 5", False),
        ("keys 1 and 4", "keys 1", False),
        (torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1e-5]), True),
        (torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1e-3]), False),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, torch.inf]), True),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, -torch.inf]), False),
        (torch.ones(2), torch.ones(3), False),
        (torch.ones(2), torch.ones(2, 1), False),
        ([1.0, "a"], [1.0, "a"], True),
        ([1.0], [1.0, 2.0], False),
        (torch.tensor([1j]), torch.tensor([-1j]), False),
    ],
)
def test_texts_and_tensors_are_compared_to_rounding(one, other, same):
    assert (differences(columns(one), columns(other), Tolerance(1e-3, 1e-4, 1e-7)) == []) == same


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--device", "meta"), "--device meta: "),
        (("--device", "nothing"), "--device nothing: "),
        (("--device", "cpu", "--only", "nothing"), "no trial is called 'nothing'"),
    ],
)
def test_a_device_and_a_name_that_are_not_there_are_refused_in_a_line(options, said):
    command = [sys.executable, "-m", "tests.campaigns", "device", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]
