"""Numbers of calls on small random models, as they were when they were recorded."""

import json
import warnings

import pytest

from tests import recorded_calls


@pytest.mark.parametrize("name", recorded_calls.NATIVE)
def test_calls_give_the_numbers_that_they_gave(name):
    kept = json.loads(recorded_calls.FILE.read_text(encoding="utf-8"))
    with warnings.catch_warnings():
        # A random model may not tell the clean from the source run.
        warnings.simplefilter("ignore")
        found = recorded_calls.made(name, (recorded_calls.native(name), recorded_calls.native(name, 1)))
    differences = {label: recorded_calls.difference(kept.get(label), one) for label, one in found.items()}
    assert {label: by for label, by in differences.items() if by > recorded_calls.TOLERANCE} == {}
