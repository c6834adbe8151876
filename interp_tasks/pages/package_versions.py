"""Versions of what can change a number, read without importing any of it."""

from __future__ import annotations

import platform

PACKAGES = ("torch", "transformer-lens", "numpy", "pandas", "plotly")


def versions() -> dict[str, str]:
    """Returns the version of each package, ``python`` first: of this code, and of the others as they are installed."""
    # Not above, as --help loads this file. Of the code that runs, which need not be the copy that is installed.
    from importlib.metadata import PackageNotFoundError, version

    from circuits import __version__

    by_package = {"python": platform.python_version(), "interp-tasks": __version__}
    for package in PACKAGES:
        try:
            by_package[package] = version(package)
        except PackageNotFoundError:
            # circuits is used without transformer-lens on newer releases; its absence is the fact to record.
            by_package[package] = "not installed"
    return by_package
