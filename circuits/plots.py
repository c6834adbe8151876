"""Figures of what was measured, as plotly figures with titles, axes and units; and files of them.

    from circuits import plots

    figure = plots.attention(patterns.attention(model, tokens))   # a map per head
    plots.heads(result, "mse_masked")                             # layer × head, of a sweep, a table or an array
    plots.spectrum(fourier.spectrum(model.W_E[:113]))             # share of variance by frequency
    plots.curve({"test": (steps, losses)}, log_y=True)            # lines, with bands where there are bounds
    plots.save(figure, "attention.svg")                           # .html, .json, .png, .svg, .pdf, .jpg, .webp

Every result has a `plot()` of its own. Colours are told apart by colour-blind readers too (`circuits.figures.palette`).
"""

from circuits.figures.attention_maps import attention
from circuits.figures.curves import curve
from circuits.figures.export import picture, save
from circuits.figures.head_maps import heads
from circuits.figures.spectra import spectrum
from circuits.figures.style import titled, untitled

__all__ = ["attention", "curve", "heads", "picture", "save", "spectrum", "titled", "untitled"]
