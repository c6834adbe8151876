"""The short forms of the campaigns: runs that are killed, files that are mangled, verbs that are interrupted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n"), [("kill", 6), ("mangle", 40), ("interrupt", 60)])
def test_no_trial_of_a_campaign_fails(name, n):
    """In an interpreter of its own, as it forks."""
    command = [sys.executable, "-m", "tests.campaigns", name, "--n", str(n)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    summary = json.loads(done.stdout)
    assert summary["failures"] == {}
    assert sum(summary["kinds"].values()) == n
