"""Analyses that serve one paper each, a folder for each paper, and the grid of inputs that they share."""
