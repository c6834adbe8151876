"""``interp-run tasks list``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from interp_tasks.cli.result_command import PrintingCommand
from interp_tasks.cli.rows import print_rows


@dataclass(kw_only=True)
class Tasks(PrintingCommand):
    """List the tasks there are, with their presets."""

    def execute(self) -> None:
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
        print_rows(rows, self.format, ["task", "preset", "settings"])
