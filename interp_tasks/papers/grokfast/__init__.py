"""Analyses of Lee et al. 2024 (Grokfast), steps to generalisation."""
