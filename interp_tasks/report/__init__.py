"""A run on one page: ``report("runs/x").page().write("report.html")``.

Importing this package imports neither torch nor pandas; making a report does.
"""

from interp_tasks.report.run_report import Report, check_report, report
from interp_tasks.report.snapshots import Source, read_source

__all__ = ["Report", "Source", "check_report", "read_source", "report"]
