"""A run on one page: ``report("runs/x").page().write("report.html")``.

Importing this package imports neither torch nor pandas; making a report does.
"""

from interp_tasks.surveying.sources import Source, read_source
from interp_tasks.surveying.survey import Report, check_report, report

__all__ = ["Report", "Source", "check_report", "read_source", "report"]
