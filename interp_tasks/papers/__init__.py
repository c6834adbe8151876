"""Analyses that serve one paper each, a folder for each paper; `interp_tasks.experiments` lists them all."""
