"""Activation patching: put in place what the model computes on another input."""

from circuits.patch._activations import activations, path
from circuits.patch._attribution import attribution
from circuits.patch._edges import edges
from circuits.patch._screen import screen

__all__ = ["activations", "attribution", "edges", "path", "screen"]
