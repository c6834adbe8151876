"""Lists the tasks of each group of experiments by name, so that other tasks are refused without torch."""

from __future__ import annotations

from collections.abc import Mapping

from interp_tasks.errors import UserError
from tasks.catalog import BUILT_IN

#: Group of experiments -> the package of its tasks, and what these are called.
FAMILIES = {
    "matrix": ("tasks.matrix_completion", "matrix completion"),
    "modular": ("tasks.modular_arithmetic", "modular arithmetic"),
}


def check_family(group: str, command: str, tasks: Mapping[str, str]) -> None:
    """Refuses checkpoints of another group's tasks; whether a task of the user's own fits, the experiment says.

    Args:
        tasks: REF or run -> name of its task.

    Raises:
        UserError: in one line.
    """
    if group not in FAMILIES:
        return
    package, called = FAMILIES[group]
    for label, task in tasks.items():
        if BUILT_IN.get(task, package) != package:
            raise UserError(f"{command} is for models of {called}, and {label} is of {task}")
