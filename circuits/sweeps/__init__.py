"""Sweeps: variants run on examples, measured and tabulated."""
