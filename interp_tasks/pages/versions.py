"""Versions of what can change a number, read without importing any of it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("interp-tasks", "torch", "transformer-lens", "numpy", "pandas", "plotly")


def versions() -> dict[str, str]:
    """Returns the installed version of each package, ``python`` first."""
    by_package = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            by_package[package] = version(package)
        except PackageNotFoundError:
            # circuits is used without transformer-lens on newer releases; its absence is the fact to record.
            by_package[package] = "not installed"
    return by_package
