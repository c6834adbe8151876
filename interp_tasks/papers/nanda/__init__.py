"""Analyses of Nanda et al. 2023 (arXiv:2301.05217), modular addition, and the words of their rows."""

LOSS, ACCURACY = "loss", "accuracy"
#: All inputs of the grid, and those that the model was, and was not, trained on.
SPLITS = ALL, TRAIN, TEST = "grid", "train", "test"
#: What was done to the model or its logits; nothing.
NONE, RESTRICTED, EXCLUDED = "none", "restricted to key frequencies", "key frequencies excluded"
FITTED, HELD_OUT = "cosines of key frequencies", ", held out"
GINI, SQUARES, OF_W_E, ALL_WEIGHTS = "gini", "sum of squared weights", "W_E", "all weights"
