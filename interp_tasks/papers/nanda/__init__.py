"""Analyses of Nanda et al. 2023 (arXiv:2301.05217), modular addition."""
