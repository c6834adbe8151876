"""Controls of a page, such as a slider over the checkpoints of a run, and the sections that follow them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, ClassVar

from interp_tasks.pages.pack import Packed, deflated
from interp_tasks.pages.sections import Figure, Section, Table, cell_parts, embed, heading, number_class

#: The name of a page's slider where it says no other.
CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Slider:
    """The slider of a page: a native range, so that arrows, Home, End and Page keys move it.

    Attributes:
        labels: what each step is called, such as ``"step 4,000"``.
        marks: names of some steps, by index: a button each.
        meanings: what a mark means, where its name does not say it: shown when one points at its button.
        start: where it stands when the page opens.
        name: what sections that follow it call it, one of its own for each control of a page.
    """

    needs_plotly: ClassVar[bool] = False
    title: ClassVar[str] = ""

    labels: Sequence[str]
    marks: Mapping[str, int] = field(default_factory=dict)
    start: int = 0
    name: str = CHECKPOINT
    meanings: Mapping[str, str] = field(default_factory=dict)

    def html(self, identifier: str) -> str:
        label = escape(self.labels[self.start])
        return control(
            self,
            identifier,
            "stepper",
            "Checkpoint",
            f'<label for="{identifier}">Checkpoint</label>'
            f'<input type="range" id="{identifier}" min="0" max="{len(self.labels) - 1}" step="1" '
            f'value="{self.start}" aria-valuetext="{label}" autocomplete="off"'
            f"{' disabled' if len(self.labels) == 1 else ''}>"
            f'<output for="{identifier}">{label}</output>'
            f'<span class="marks">{buttons(self.marks, self.labels, self.meanings)}</span>',
        )


@dataclass(frozen=True)
class Choice:
    """Buttons that choose what figures show: one for each label, or a single one that goes on to the next.

    Attributes:
        labels: what is chosen among.
        called: what the buttons are about, for those who cannot see them.
        onward: the text of the one button that goes to the next and after the last to the first.
    """

    needs_plotly: ClassVar[bool] = False
    title: ClassVar[str] = ""

    labels: Sequence[str]
    name: str
    called: str
    onward: str = ""
    start: int = 0

    def html(self, identifier: str) -> str:
        if self.onward:
            shown = (
                f'<button type="button" data-onward>{escape(self.onward)}</button>'
                f'<output aria-live="polite">{escape(self.labels[self.start])}</output>'
            )
        else:
            shown = buttons({label: index for index, label in enumerate(self.labels)}, self.labels, {})
        return control(self, identifier, "choice", self.called, shown)


def control(control: Slider | Choice, identifier: str, kind: str, called: str, inside: str) -> str:
    """Returns a control as the script of the page finds it: its name, where it stands, its labels."""
    return (
        f'<div class="{kind}" role="group" aria-label="{escape(called)}" data-control="{escape(control.name)}" '
        f'data-start="{control.start}" data-labels="{identifier}-labels">{inside}</div>'
        f'<script type="application/json" id="{identifier}-labels">{embed(json.dumps(list(control.labels)))}</script>'
    )


def buttons(by_text: Mapping[str, int], labels: Sequence[str], meanings: Mapping[str, str]) -> str:
    titles = {
        text: f"{meanings[text]}: {labels[index]}" if text in meanings else labels[index]
        for text, index in by_text.items()
    }
    return "".join(
        f'<button type="button" data-index="{index}" aria-pressed="false" '
        f'title="{escape(titles[text])}">{escape(text)}</button>'
        for text, index in by_text.items()
    )


@dataclass(frozen=True)
class Controls:
    """Controls in a row that stays in view while the part of the page around it does."""

    needs_plotly: ClassVar[bool] = False
    title: ClassVar[str] = ""

    controls: Sequence[Slider | Choice]

    def html(self, identifier: str) -> str:
        parts = (each.html(f"{identifier}-{index}") for index, each in enumerate(self.controls))
        return f'<div class="controls">{"".join(parts)}</div>'


@dataclass(frozen=True)
class Stepped:
    """A figure with parts that change with the slider, or with several controls.

    Attributes:
        figure: drawn with the parts that ``moves`` names put in.
        moves: where, as in ``"data.0.z"`` or ``"layout.shapes.1.x0"`` -> what stands there, frame by frame: a list of
            JSON values, or a :class:`~interp_tasks.pages.pack.Packed` of as many frames.
        at: of each step of the slider, which frame is shown; of several controls, of each combination of where they
            stand, the last one's changing fastest.
        picks: where on the x axis each step of the slider lies; a click there moves the slider.
        follows: names of the controls; of several sliders the first is the one that ``picks`` are of.
    """

    needs_plotly: ClassVar[bool] = True

    figure: Figure
    moves: Mapping[str, Sequence[Any] | Packed]
    at: Sequence[int]
    picks: Sequence[int | float] = ()
    follows: Sequence[str] = (CHECKPOINT,)

    @property
    def title(self) -> str:
        return self.figure.title

    def html(self, identifier: str) -> str:
        paths = {
            path: values.described() if isinstance(values, Packed) else list(values)
            for path, values in self.moves.items()
        }
        content = {"follows": list(self.follows), "at": list(self.at), "paths": paths}
        moves = embed(json.dumps(content, allow_nan=False))
        figure_html = self.figure.html(identifier)
        if self.picks:
            picks = escape(json.dumps(list(self.picks)))
            figure_html = figure_html.replace(
                f'id="{identifier}" role="img"', f'id="{identifier}" data-picks="{picks}" role="img"'
            )
        return f'{figure_html}<script type="application/json" id="{identifier}-moves">{moves}</script>'


@dataclass(frozen=True)
class SteppedTable:
    """A table that shows the rows of the slider's step; the download has all of them.

    Attributes:
        at: of each step of the slider the first and one past the last of its rows.
        follows: the name of the slider.
    """

    needs_plotly: ClassVar[bool] = False

    table: Table
    at: Sequence[tuple[int, int]]
    follows: str = CHECKPOINT

    @property
    def title(self) -> str:
        return self.table.title

    def html(self, identifier: str) -> str:
        """Returns the table as HTML, and its rows as data: a script shows those of the slider's step."""
        rows: list[Any] = self.table.frame.to_dict("records")
        columns, numeric = self.table.shown_columns()
        content = {
            "classes": [
                "sentences" if c.sentences else "number" if c.key in numeric else "" for c in columns
            ],
            "frames": [list(ends) for ends in self.at],
            "cells": [[cell_parts(column, row) for column in columns] for row in rows],
        }
        data = {"name": self.table.name, "deflated": deflated(self.table.whole().to_csv(index=False))}
        head = "".join(self.table.header(column, number_class(column.key in numeric)) for column in columns)
        return (
            self.table.around(identifier, head, "", f' data-stepped="{escape(self.follows)}"')
            + f'<script type="application/json" id="{identifier}-data">{embed(json.dumps(data))}</script>'
            + f'<script type="text/plain" id="{identifier}-rows">{deflated(json.dumps(content))}</script>'
        )


@dataclass(frozen=True)
class Beside:
    """Sections next to each other where there is room, below each other where there is not.

    Attributes:
        narrowest: the least width of each, in multiples of the text's size.
    """

    needs_plotly: ClassVar[bool] = True

    sections: Sequence[Section]
    title: str = ""
    caption: str = ""
    narrowest: int = 30

    def html(self, identifier: str) -> str:
        parts = "".join(
            f"<div>{section.html(f'{identifier}-{index}')}</div>"
            for index, section in enumerate(self.sections)
        )
        caption_html = f'<p class="note">{escape(self.caption)}</p>' if self.caption else ""
        start = f'<div class="beside" style="--narrowest:{self.narrowest}rem">'
        return f"{heading(self.title, identifier)}\n{caption_html}{start}{parts}</div>"
