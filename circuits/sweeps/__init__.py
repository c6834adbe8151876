"""Sweeps: variants run on examples, measured and tabulated.

How a value reaches the table:

    sweep(model, tokens, variants, metric, batch, positions)
      Metric.parse(metric, batch, ...)       the function, its batch and where it reads, checked once  metrics.py
      ModelSweep(...).measure(size)          the variants run                                          sweep.py
        rows, variant -> output [n pos out]
        metric.for_rows(rows).measure(output, unedited output) -> sum [n] and count [n], by name
      Measurements                           sums and counts [run example],                            metrics.py
                                             run 0 is the unedited model
      tabulate_runs(measurements, ...)       values, effects, intervals and p-values, a row for each   sweep_result.py

The logit difference of given answers stands in logit_difference.py.
`compare` and `patch.attribution` fill Measurements with outputs and estimates of their own; `patch.screen` and
`patch.edges` measure their largest estimates by `sweep_with_measurements`, and `circuit.evaluate` by Metric too.
"""
