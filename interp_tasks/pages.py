"""Self-contained HTML pages: ``Page(title, [Text(...), Table(...), Figure(...)]).write("report.html")``.

All that came from outside is escaped; numbers are as people read them, in a terminal and on a page alike.
"""

from __future__ import annotations

import base64
import json
import math
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from interp_tasks.file_io import atomic_write

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


def number(value: float | None, significant: int = 4, *, zeros: bool = False, sign: bool = False) -> str:
    """Formats a number with so many significant digits, integers with all; a dash stands for a missing one.

    No exponent from 1,000 to a million, no sign on 0.

    Args:
        zeros: zeros are digits too: 0.2 is 0.200 with three; a whole number stays one.
        sign: of a difference: always with its sign, and zeros.
    """
    if value is None or math.isnan(value):
        return "–"
    value += 0.0
    if 1e3 <= abs(value) < 1e6:
        text = f"{value:.0f}"
    elif (zeros or sign) and abs(value) < 1e3 and value != round(value):
        text = f"{value:#.{significant}g}".rstrip(".")
    else:
        text = f"{value:.{significant}g}"
    return f"+{text}" if sign and value > 0 else text


def format_percent(value: float | None) -> str:
    """Formats a share as a percentage with one decimal; all of it and none without."""
    if value is None or math.isnan(value):
        return "–"
    return {"100.0%": "100%", "0.0%": "0%" if value == 0 else "0.0%"}.get(f"{value:.1%}", f"{value:.1%}")


def with_interval(text: str, low: float | None, high: float | None, *, share: bool = False) -> str:
    """Returns a text with ``[low, high]`` after it, where there is an interval; of a share as percentages."""
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return text
    ends = [format_percent(end) if share else number(end, 3, zeros=True) for end in (low, high)]
    return f"{text} [{', '.join(ends)}]".lstrip()


def format_p_value(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return "<0.001" if value < 0.001 else f"{value:.3f}"


@runtime_checkable
class Section(Protocol):
    """Anything with a title that renders itself; ``identifier`` is unique on the page and safe in an id."""

    @property
    def title(self) -> str: ...

    def html(self, identifier: str) -> str: ...


def heading_html(title: str) -> str:
    return f"<h2>{escape(title)}</h2>\n" if title else ""


@dataclass(frozen=True)
class Text:
    """Paragraphs, divided by blank lines; a paragraph whose lines all begin with ``- `` is a list, words between
    backquotes are code, and addresses are links.
    """

    body: str
    title: str = ""

    def html(self, identifier: str) -> str:
        parts = []
        for paragraph in filter(None, map(str.strip, re.split(r"\n\s*\n", self.body))):
            lines = paragraph.splitlines()
            if all(line.startswith("- ") for line in lines):
                parts.append(f"<ul>{''.join(f'<li>{text_to_html(line[2:])}</li>' for line in lines)}</ul>")
            else:
                parts.append(f"<p>{text_to_html(paragraph)}</p>")
        return heading_html(self.title) + "\n".join(parts)


def text_to_html(text: str) -> str:
    """Returns a text as HTML, with its code and its links."""
    shown = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"https://[\w./-]*\w", r'<a href="\g<0>" rel="noreferrer">\g<0></a>', shown)


@dataclass(frozen=True)
class Column:
    """One column people see: sorted by ``key``'s value, shown as ``text(row)``; of sentences, broken into lines."""

    header: str
    key: str
    text: Callable[[Mapping[str, Any]], str] | None = None
    sentences: bool = False

    def shown(self, row: Mapping[str, Any]) -> str:
        if self.text is not None:
            return self.text(row)
        value = row[self.key]
        if isinstance(value, float):
            return number(value)
        return "" if value is None else str(value)


@dataclass(frozen=True)
class Table:
    """A table that sorts by a click on its header and downloads as CSV: every column, all digits.

    Attributes:
        frame: the data.
        columns: what is shown (default: every column).
        name: stem of the downloaded file.
        download: what is downloaded (default: all of ``frame``).
        tall: it scrolls within a window of its own, below its header.
    """

    frame: pandas.DataFrame
    title: str = ""
    caption: str = ""
    columns: Sequence[Column] = ()
    name: str = "table"
    download: pandas.DataFrame | None = None
    tall: bool = False

    def html(self, identifier: str) -> str:
        rows: list[Any] = self.frame.to_dict("records")
        columns = self.columns or [Column(str(name), str(name)) for name in self.frame.columns]
        kinds = [self.cell_class(column) for column in columns]
        head = "".join(
            f'<th scope="col"{kind}>{escape(column.header)}</th>'
            for column, kind in zip(columns, kinds, strict=True)
        )
        body = "\n".join(
            "<tr>" + "".join(map(cell_html, columns, [row] * len(columns), kinds)) + "</tr>" for row in rows
        )
        whole = self.frame if self.download is None else self.download
        data = base64.b64encode(whole.to_csv(index=False).encode()).decode()
        return (
            f'{heading_html(self.title)}<div class="scroll{" tall" if self.tall else ""}">'
            f'<table id="{identifier}"><caption>{escape(self.caption or self.title)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>\n"
            f'<a class="download" download="{escape(self.name)}.csv" href="data:text/csv;base64,{data}">'
            "Download CSV</a>"
        )

    def cell_class(self, column: Column) -> str:
        """Returns the class of a column's cells: set as numbers, if anything in it is one."""
        if column.sentences:
            return ' class="sentences"'
        return ' class="number"' if any(map(is_number, self.frame[column.key])) else ""


def cell_html(column: Column, row: Mapping[str, Any], class_attribute: str) -> str:
    """Returns a cell with its text, and with the value by which it is sorted."""
    value = row[column.key]
    missing = value is None or (isinstance(value, float) and math.isnan(value))
    # Names may be broken behind their marks; an interval or a number may not.
    shown = re.sub(r"(?<=[/:_=])(?=\S)", "<wbr>", escape(column.shown(row)).replace("&#x27;", "'"))
    return f'<td{class_attribute} data-value="{"" if missing else escape(str(value))}">{shown}</td>'


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


@dataclass(frozen=True)
class Figure:
    """A plotly figure.

    ``height`` in pixels is the figure's own by default; ``width`` is the most that it takes of the page (default: all).
    """

    figure: plotly.graph_objects.Figure
    title: str = ""
    caption: str = ""
    height: int | None = None
    width: int | None = None

    def html(self, identifier: str) -> str:
        """Returns the figure with heading and caption as HTML; one that cannot be narrow scrolls in a frame."""
        from circuits.figures.panel_grid import least_readable_width, untitled

        # The page says the title itself.
        figure = untitled(self.figure)
        widest = self.width or figure.layout.width
        height = self.height or figure.layout.height or 420
        figure.update_layout(width=None, height=height)
        drawn = figure.to_html(
            full_html=False,
            include_plotlyjs=False,
            div_id=identifier,
            default_height=f"{height}px",
            config={"responsive": True, "displaylogo": False},
        )
        alt = escape(". ".join(filter(None, [self.title, self.caption])) or "figure")
        sizes = f"min-width:{least_readable_width(figure)}px" + (
            f";max-width:{int(widest)}px" if widest else ""
        )
        return (
            f'{heading_html(self.title)}<figure><div class="scroll"><div class="plot" role="img" aria-label="{alt}" '
            f'style="{sizes}">{drawn}</div></div><figcaption>{escape(self.caption)}</figcaption></figure>'
        )


def step_labels(steps: Sequence[int], marks: Mapping[str, int]) -> list[str]:
    """Returns what a slider says at each step, with the marks that lie there: ``step 4,000 (pre, onset)``."""
    at = {step: ", ".join(name for name, marked in marks.items() if marked == step) for step in steps}
    return [f"step {step:,}" + (f" ({at[step]})" if at[step] else "") for step in steps]


#: What of a trace changes with the slider, and pixels of the slider above the panels.
MOVED, SLIDER = ("x", "y", "z", "text", "customdata"), 80


def step_slider(figures: Mapping[str, plotly.graph_objects.Figure]) -> plotly.graph_objects.Figure:
    """Returns the last of some figures with a slider that shows the numbers and titles of the others.

    Args:
        figures: by what the slider says, such as "step 4,000"; equal but for their numbers and titles of panels.
    """
    from circuits.figures.panel_grid import untitled

    drawn = [untitled(figure) for figure in figures.values()]
    whole = drawn[-1]
    steps: list[dict[str, Any]] = []
    for label, figure in zip(figures, drawn, strict=True):
        moved = {
            key: [_rounded(trace[key]) if key in trace else None for trace in figure.data]
            for key in MOVED
            if any(key in trace and trace[key] is not None for trace in figure.data)
        }
        titles = {f"annotations[{at}].text": note.text for at, note in enumerate(figure.layout.annotations)}
        steps.append({"method": "update", "label": label, "args": [moved, titles]})
    if len(steps) > 1:
        # The last label is centred on the end of the slider.
        pad = min(90, int(3.4 * len(steps[-1]["label"])))
        slider = {"steps": steps, "active": len(steps) - 1, "y": 1, "yanchor": "bottom", "ticklen": 4}
        whole.update_layout(
            sliders=[
                slider
                | {
                    "pad": {"b": 35 + 17 * bool(whole.layout.annotations), "r": pad},
                    "currentvalue": {"prefix": ""},
                }
            ],
            height=whole.layout.height + SLIDER,
            margin={"t": whole.layout.margin.t + SLIDER},
        )
    return whole


def _rounded(values: Any) -> Any:
    """Returns numbers with four significant digits, which a figure can show; None for what is missing."""
    import numpy as np

    array = np.asarray(values) if values is not None else None
    if array is None or array.dtype.kind != "f":
        return None if array is None else array.tolist()
    if array.ndim > 1:
        return [_rounded(row) for row in array]
    return [None if value != value else float(f"{value:.4g}") for value in array]


PACKAGES = ("torch", "transformer-lens", "numpy", "pandas", "plotly")


def package_versions() -> dict[str, str]:
    """Returns the version of each package, ``python`` first: of this code, and of the others as they are installed."""
    # Not above, as --help loads this file. Of the code that runs, which need not be the copy that is installed.
    from importlib.metadata import PackageNotFoundError, version

    from circuits import __version__

    by_package = {"python": platform.python_version(), "interp-tasks": __version__}
    for package in PACKAGES:
        try:
            by_package[package] = version(package)
        except PackageNotFoundError:
            # circuits is used without transformer-lens on newer releases; its absence is the fact to record.
            by_package[package] = "not installed"
    return by_package


@dataclass(frozen=True)
class Page:
    """A title, sections in order, and at the foot the configuration and the versions that made them.

    Attributes:
        config: what was asked for, JSON; shown at the foot.
        versions: package -> version (default: those installed now).
    """

    title: str
    sections: Sequence[Section]
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=package_versions)

    def html(self) -> str:
        """Returns the whole page as text; whatever it needs stands in it."""
        from jinja2 import Environment
        from markupsafe import Markup

        sections = [Markup(section.html(f"s{index}")) for index, section in enumerate(self.sections)]
        plotly = ""
        if any('class="plot"' in section for section in sections):
            from plotly.offline import get_plotlyjs

            plotly = get_plotlyjs()
        template = resources.files("interp_tasks").joinpath("page.html").read_text(encoding="utf-8")
        return (
            Environment(autoescape=True)
            .from_string(template)
            .render(
                title=self.title,
                sections=sections,
                plotly=Markup(plotly),
                made_with=", ".join(f"{name} {number}" for name, number in self.versions.items()),
                config=json.dumps(dict(self.config), indent=2, ensure_ascii=False, default=str),
            )
        )

    def write(self, path: str | Path) -> Path:
        """Writes the page, whole or not at all.

        Raises:
            UserError: if the file system refuses. Call ``check_writable_file`` before slow work.
        """
        return atomic_write(Path(path), self.html())
