"""Sections of a page. Each turns itself into HTML; everything that came from outside is escaped."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from interp_tasks.pages.numbers import number

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


@runtime_checkable
class Section(Protocol):
    """Anything with a title that renders itself; ``identifier`` is unique on the page and safe in an id."""

    needs_plotly: ClassVar[bool]

    @property
    def title(self) -> str: ...

    def html(self, identifier: str) -> str: ...


def heading(title: str, identifier: str) -> str:
    return f'<h2 id="{identifier}-title">{escape(title)}</h2>' if title else ""


def embed(data: str) -> str:
    """Returns text that may stand inside a script element: nothing in it can close the element or open a comment."""
    return data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@dataclass(frozen=True)
class Text:
    """Paragraphs, divided by blank lines; a paragraph whose lines all begin with ``- `` is a list, and words between
    backquotes are code.

    Attributes:
        links: words of it -> the address that they lead to.
    """

    needs_plotly: ClassVar[bool] = False

    body: str
    title: str = ""
    links: Mapping[str, str] = field(default_factory=dict)

    def html(self, identifier: str) -> str:
        parts = [heading(self.title, identifier)]
        for paragraph in filter(None, map(str.strip, re.split(r"\n\s*\n", self.body))):
            lines = paragraph.splitlines()
            if all(line.startswith("- ") for line in lines):
                items = "".join(f"<li>{self.linked(line[2:])}</li>" for line in lines)
                parts.append(f"<ul>{items}</ul>")
            else:
                parts.append(f"<p>{self.linked(paragraph)}</p>")
        return "\n".join(parts)

    def linked(self, text: str) -> str:
        shown = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
        for words, address in self.links.items():
            link = f'<a href="{escape(address)}" rel="noreferrer">{escape(words)}</a>'
            shown = shown.replace(escape(words), link)
        return shown


@dataclass(frozen=True)
class Fold:
    """Words and tables behind one line that opens them. (A figure would have no width while it is folded.)"""

    needs_plotly: ClassVar[bool] = False
    title: ClassVar[str] = ""

    summary: str
    sections: Sequence[Section]

    def html(self, identifier: str) -> str:
        parts = "".join(each.html(f"{identifier}-{index}") for index, each in enumerate(self.sections))
        return f"<details><summary>{escape(self.summary)}</summary>{parts}</details>"


@dataclass(frozen=True)
class Chapter:
    """Sections below one heading; controls among them stay in view until its end."""

    needs_plotly: ClassVar[bool] = True

    title: str
    sections: Sequence[Section]

    def html(self, identifier: str) -> str:
        parts = "\n".join(each.html(f"{identifier}-{index}") for index, each in enumerate(self.sections))
        return f"{heading(self.title, identifier)}\n{parts}"


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

    needs_plotly: ClassVar[bool] = False

    frame: pandas.DataFrame
    title: str = ""
    caption: str = ""
    columns: Sequence[Column] = ()
    name: str = "table"
    download: pandas.DataFrame | None = None
    tall: bool = False

    def html(self, identifier: str) -> str:
        rows: list[Any] = self.frame.to_dict("records")
        columns, numeric = self.shown_columns()
        head = "".join(self.header(column, number_class(column.key in numeric)) for column in columns)
        body = "\n".join(
            "<tr>" + "".join(cell(column, row, column.key in numeric) for column in columns) + "</tr>"
            for row in rows
        )
        data = embed(json.dumps({"name": self.name, "csv": self.whole().to_csv(index=False)}))
        return (
            self.around(identifier, head, body)
            + f'<script type="application/json" id="{identifier}-data">{data}</script>'
        )

    def shown_columns(self) -> tuple[Sequence[Column], set[str]]:
        """Returns the columns, and the keys of those that are set as numbers: if anything in them is one."""
        columns = self.columns or [Column(str(name), str(name)) for name in self.frame.columns]
        return columns, {c.key for c in columns if any(is_number(value) for value in self.frame[c.key])}

    def whole(self) -> pandas.DataFrame:
        """Returns the table that is downloaded."""
        return self.frame if self.download is None else self.download

    @staticmethod
    def header(column: Column, kind: str) -> str:
        return f'<th scope="col"{kind}><button type="button">{escape(column.header)}</button></th>'

    def around(self, identifier: str, head: str, body: str, attributes: str = "") -> str:
        """Returns the table and its button, around its rows."""
        caption = escape(self.caption or self.title)
        tall = " tall" if self.tall else ""
        return (
            f"{heading(self.title, identifier)}\n"
            f'<div class="scroll{tall}" tabindex="0" role="region" aria-label="{escape(self.title or self.name)}">'
            f'<table id="{identifier}"{attributes}><caption><span>{caption}</span></caption>'
            f"<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>\n"
            f'<button type="button" class="download" data-table="{identifier}">Download CSV</button>'
        )


def cell(column: Column, row: Mapping[str, Any], numeric: bool) -> str:
    shown, key = cell_parts(column, row)
    kind = ' class="sentences"' if column.sentences else number_class(numeric)
    return f'<td{kind} data-value="{escape(key)}">{breakable(shown)}</td>'


#: Where a name may be broken: behind these marks. An interval is one part, and so is a number.
MARKS = re.compile(r"(?<=[/:_=])(?=\S)|(?<=\w\()(?=\S)|(?<=\D,)(?=\S)")
WHOLE = re.compile(r"(\[[^]]*\]|[-+]?\d[\d.]*e[-+]\d+)")


def breakable(text: str) -> str:
    """Returns the HTML of a cell's text: names may be broken behind their marks, an interval or a number may not."""
    return "".join(
        f'<span class="whole">{escape(part)}</span>'
        if at % 2
        else "<wbr>".join(map(escape, MARKS.split(part)))
        for at, part in enumerate(WHOLE.split(text))
    )


def cell_parts(column: Column, row: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the text of a cell, and the text by which it is sorted."""
    value = row[column.key]
    return column.shown(row), "" if is_missing(value) else str(value)


def is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def number_class(numeric: bool) -> str:
    return ' class="number"' if numeric else ""


#: Pixels, of a figure that does not say its own.
USUAL_HEIGHT = 420


@dataclass(frozen=True)
class Drawn:
    """A figure that is HTML already, made in another process than the page."""

    needs_plotly: ClassVar[bool] = True
    #: What stands for the identifier, which the page gives.
    PLACE: ClassVar[str] = "identifier-of-a-drawn-figure"

    markup: str
    title: str = ""

    @classmethod
    def of(cls, figure: Figure) -> Drawn:
        return cls(figure.html(cls.PLACE), figure.title)

    def html(self, identifier: str) -> str:
        return self.markup.replace(self.PLACE, identifier)


@dataclass(frozen=True)
class Figure:
    """A plotly figure, drawn in the reader's colour scheme; ``alt`` describes it in words.

    Colours of the palette, and those left to the template, change with the scheme; others stay as they are. ``height``
    in pixels is the figure's own by default; ``width`` is the most that it takes of the page (default: all).
    """

    needs_plotly: ClassVar[bool] = True

    figure: plotly.graph_objects.Figure
    title: str = ""
    caption: str = ""
    alt: str = ""
    height: int | None = None
    width: int | None = None

    def html(self, identifier: str) -> str:
        """Returns the figure with heading and caption as HTML; one that cannot be narrow scrolls in a frame."""
        from circuits.figures.layout import NARROWEST, laid_out, least_width
        from circuits.figures.saved import fades, without_menu
        from circuits.figures.style import untitled

        # The page says the title itself.
        figure = untitled(self.figure)
        if fades(figure.layout.meta):
            figure = without_menu(figure)
        own_width = figure.layout.width
        short_labels = laid_out(figure)
        own_height = self.figure.layout.height
        height = self.height or int(own_height or USUAL_HEIGHT)
        # Without its title a figure is lower.
        height -= (own_height or 0) - (figure.layout.height or 0)
        specification = json.loads(figure.to_json())
        specification.get("layout", {}).pop("template", None)
        # A figure of a width of its own is that wide where there is room, and narrower where there is not.
        specification.get("layout", {}).pop("width", None)
        data = embed(json.dumps(specification))
        widest = self.width if self.width is not None else own_width
        wide = f";max-width:{int(widest)}px" if widest is not None else ""
        alt = escape(self.alt or ". ".join(filter(None, [self.title, self.caption])) or "figure")
        around, after = "", ""
        if (least := least_width(figure, widest)) > NARROWEST:
            wide += f";min-width:{least}px"
            around, after = (
                f'<div class="scroll" tabindex="0" role="region" aria-label="{alt}">',
                "</div>",
            )
        caption = (
            f"{self.caption} {short_labels}".strip() if short_labels not in self.caption else self.caption
        )
        return (
            f"{heading(self.title, identifier)}\n<figure>{around}"
            f'<div class="plot" id="{identifier}" role="img" aria-label="{alt}" '
            f'style="height:{height}px{wide}"></div>{after}'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
            f'<script type="application/json" id="{identifier}-data">{data}</script>'
        )
