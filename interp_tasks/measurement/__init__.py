"""What the experiments share: checkpoints as subjects, options, results, tables and figures."""
