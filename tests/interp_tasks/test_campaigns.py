"""The short forms of the campaigns: runs that are killed, files that are mangled, verbs that are interrupted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n", "most"), [("kill", 6, 0), ("mangle", 40, 0), ("interrupt", 60, 1)])
def test_no_trial_of_a_campaign_fails(name, n, most):
    """In an interpreter of its own, as it forks. An interrupt in the last instants of a call may leave a hook."""
    command = [sys.executable, "-m", "tests.campaigns", name, "--n", str(n)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    summary = json.loads(done.stdout)
    assert len(summary["failures"]) <= most, summary["failures"]
    assert sum(summary["kinds"].values()) + len(summary["failures"]) == n
