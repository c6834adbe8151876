"""``interp-run tasks list``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from interp_tasks.cli.result_command import PrintingCommand
from interp_tasks.cli.rows import print_rows
from interp_tasks.cli.streams import write_line


@dataclass(kw_only=True)
class Tasks(PrintingCommand):
    """List the tasks there are, with their presets."""

    def execute(self) -> None:
        """Prints each preset of each task, with its settings."""
        from interp_tasks.training.config import presets_of
        from tasks import catalog

        self.import_tasks()
        rows: list[dict[str, Any]] = [
            {
                "task": name,
                "preset": preset,
                "settings": {
                    f"{section}.{key}": value
                    for section, values in sections.items()
                    for key, value in values.items()
                },
            }
            for name in catalog.names()
            for preset, sections in presets_of(name).items()
        ]
        if self.format != "table":
            print_rows(rows, self.format, [])
            return
        shown = [
            {
                **row,
                "of the task": {
                    key.removeprefix("task."): value
                    for key, value in row["settings"].items()
                    if key.startswith("task.")
                },
                "steps": row["settings"].get("train.steps", ""),
            }
            for row in rows
        ]
        print_rows(shown, "table", ["task", "preset", "of the task", "steps"])
        write_line("")
        write_line("All settings of the presets, of models and training too: --format json.")
