"""Runs many variants of one model together."""
