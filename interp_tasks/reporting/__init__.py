"""Self-contained HTML pages: ``Page(title, [Text(...), Table(...), Figure(...)]).write("report.html")``."""

from interp_tasks.reporting.numbers import number, p_value, signed, with_interval
from interp_tasks.reporting.page import Page, is_page
from interp_tasks.reporting.sections import Column, Figure, Section, Table, Text
from interp_tasks.reporting.stamping import versions
from interp_tasks.reporting.stepping import Beside, Slider, Stepped, SteppedTable
from interp_tasks.reporting.writing import (
    check_writable_file,
    check_writable_folder,
    write_atomically,
    write_together,
)

__all__ = [
    "Beside",
    "Column",
    "Figure",
    "Page",
    "Section",
    "Slider",
    "Stepped",
    "SteppedTable",
    "Table",
    "Text",
    "check_writable_file",
    "check_writable_folder",
    "is_page",
    "number",
    "p_value",
    "signed",
    "versions",
    "with_interval",
    "write_atomically",
    "write_together",
]
