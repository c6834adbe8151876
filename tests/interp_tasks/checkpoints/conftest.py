"""What the tests of this folder share."""

import os

import pytest


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch):
    """No test here cuts the power, and a busy disk takes seconds to sync."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
