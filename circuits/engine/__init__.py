"""Runs many variants of one model together, and says how many rows are in one forward."""
