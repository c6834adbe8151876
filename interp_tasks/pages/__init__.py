"""Self-contained HTML pages: ``Page(title, [Text(...), Table(...), Figure(...)]).write("report.html")``."""

from interp_tasks.disk import (
    check_writable_file,
    check_writable_folder,
)
from interp_tasks.pages.numbers import number, p_value, percent, signed, three_digits, with_interval
from interp_tasks.pages.page import Page, is_page, versions
from interp_tasks.pages.sections import Column, Figure, Section, Table, Text, step_labels, stepped

__all__ = [
    "Column",
    "Figure",
    "Page",
    "Section",
    "Table",
    "Text",
    "check_writable_file",
    "check_writable_folder",
    "is_page",
    "number",
    "p_value",
    "percent",
    "signed",
    "step_labels",
    "stepped",
    "three_digits",
    "versions",
    "with_interval",
]
