"""Trained models shipped with the package: run folders, read as ``zoo:NAME@...`` like any other run.

``interp_tasks.zoo.pack`` makes one from a run; each run.json holds the command that trained it.
"""
