"""Code that experiments share: checkpoints as subjects, options, results, tables and figures."""
