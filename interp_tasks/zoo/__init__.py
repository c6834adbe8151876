"""Trained models shipped with the package: run folders, read as ``zoo:NAME@...`` like any other run.

``recipes/`` holds the grid files that train them: ``interp-run grid RECIPE`` trains the runs of one, and
``docs/scripts/pack.py`` of the source tree ships them.
"""
