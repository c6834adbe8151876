"""Sweeps: variants run on examples, measured and tabulated.

How a value reaches the table:

    sweep(model, tokens, variants, metric, batch, positions)
      Metric.of(metric, batch, ...)          the function, its batch and where it reads, checked once  metrics.py
      SweepInputs(prompts, metric, ...)      what all variants share; the examples of each forward     inputs.py
      assign_engines(surface, variants, ...) an engine for each variant, with reasons                  engine_choice.py
      ModelSweep(...).run()                  the engines run                                           measure.py
        an engine: rows, variant -> output [n pos out]
        metric.at(rows).measure(output, unedited output) -> sum [n] and count [n], by name
      Measurements                           of one engine at one checkpoint: sums and counts          measurements.py
                                             [run example], run 0 is the unedited model
      Table.add(measurements).result()       values, effects, intervals and p-values, a row for each   table.py

Beside these: the logit difference of given answers (logit_difference.py), the checkpoints of a sweep (checkpoints.py),
and copies of what users' functions are given (copies.py).

`compare` and `patch.attribution` fill Measurements with outputs and estimates of their own; `patch.screen` and
`patch.edges` measure their largest estimates by `swept`, and `circuit.evaluate` circuits by the same Metric.
"""
