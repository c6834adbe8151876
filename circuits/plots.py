"""Figures of what was measured, as plotly figures with titles, axes and units; and files of them.

    from circuits import plots

    figure = plots.attention(patterns.attention(model, tokens))   # a map per head
    plots.heads(result, "mse_masked")                             # layer × head, of a sweep, a table or an array
    plots.spectrum(fourier.spectrum(model.W_E[:113]))             # share of variance by frequency
    plots.curve({"test": (steps, losses)}, log_y=True)            # lines, with bands where there are bounds
    plots.save(figure, "attention.svg")                           # .html, .json, .png, .svg, .pdf, .jpg, .webp

Every result has a `plot()` of its own. Colours are told apart by colour-blind readers too (`circuits.palette`).
"""

from circuits.attention_plots import attention
from circuits.curve_plots import curve
from circuits.exporting import picture, save
from circuits.figures import titled, untitled
from circuits.head_plots import heads
from circuits.spectra_plots import spectrum

__all__ = ["attention", "curve", "heads", "picture", "save", "spectrum", "titled", "untitled"]
