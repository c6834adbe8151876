"""Draws results as plotly figures with titles, axes and units, and writes figures to files.

    from circuits import plots

    figure = plots.attention(patterns.attention(model, tokens))   # a map per head
    plots.heads(result, "mse_masked")                             # layer × head, of a sweep, a table or an array
    plots.spectrum(fourier.spectrum(model.W_E[:113]))             # share of variance by frequency
    plots.curve({"test": (steps, losses)}, log_y=True)            # lines, with bands where there are bounds
    plots.save(figure, "attention.svg")                           # .html, .json, .png, .svg, .pdf, .jpg, .webp

Every result has a `plot()` of its own. Colours are told apart by colour-blind readers too (`circuits.figures.palette`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.figures.attention_maps import attention_maps
from circuits.figures.curves import curve
from circuits.figures.export import picture, save
from circuits.figures.head_maps import heads
from circuits.figures.style import read_numbers, titled, untitled
from circuits.fourier import Bands, Spectrum
from circuits.fourier import spectrum as measure_spectrum
from circuits.patterns import Maps

__all__ = ["attention", "curve", "heads", "picture", "save", "spectrum", "titled", "untitled"]


def attention(
    maps: Any,
    labels: Sequence[str] | None = None,
    titles: Mapping[Any, str] | None = None,
    *,
    title: str | None = None,
) -> Any:
    """Returns a plotly figure: a heatmap per head, layers down, heads across, in one colour scale that begins at 0.

        plots.attention(patterns.attention(model, tokens))
        plots.attention(cache(model, tokens, ["pattern.0"]).popitem()[1].mean(0))

    Args:
        maps: what `patterns.attention` found, or attention [layer head query key], [head query key] or [query key].
        labels: what the positions are called (default: numbers).
        titles: Head -> its title (default: head 0.1).
    """
    if isinstance(maps, Maps):
        return maps.plot(labels, titles, title=title)
    if not isinstance(maps, Tensor):
        maps = torch.as_tensor(
            read_numbers(maps, "plots.attention", "attention [layer head query key] is needed")
        )
    if not 2 <= maps.ndim <= 4 or not maps.is_floating_point() or not maps.numel():
        raise CircuitsError(
            f"plots.attention: attention [layer head query key], [head query key] or [query key] is needed; got "
            f"{list(maps.shape)} of {str(maps.dtype).removeprefix('torch.')}"
        )
    mean = maps.detach().cpu().double()[(None,) * (4 - maps.ndim)]
    return attention_maps(mean, range(len(mean)), labels, titles or {}, title or "Attention")


def spectrum(
    values: Any, keys: Iterable[Any] = (), *, by: str | None = None, title: str | None = None
) -> Any:
    """Returns a plotly figure of the share of the variance that each frequency carries, all features together.

        plots.spectrum(fourier.spectrum(model.W_E[:113]))
        plots.spectrum(found, fourier.key_frequencies(found))
        plots.spectrum(model.W_E[:113])

    Args:
        values: a `Spectrum` or its `Bands`, or weights or activations as `fourier.spectrum` takes them.
        keys: frequencies that are marked, such as the key ones.
        by: bars by "block", "component" or a coordinate, see `Spectrum.bands`; default: a bar per frequency of one
            coordinate, and of two a map, or with keys bars by block.
    """
    if isinstance(values, Bands):
        return values.plot(keys, title=title)
    if not isinstance(values, Spectrum):
        values = measure_spectrum(values)
    return values.plot(keys, by=by, title=title)
