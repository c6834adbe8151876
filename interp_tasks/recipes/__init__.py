"""Files that say what to train: grids, and among them the recipes of the shipped models."""
