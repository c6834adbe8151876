"""A command that is a dataclass: its fields are the options, its docstring the help."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(kw_only=True)
class Command(ABC):
    """Defines the options and methods that every such command has."""

    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and warnings.")] = False

    @abstractmethod
    def check(self) -> None:
        """Refuses wrong options in one line, before anything slow is imported.

        Raises:
            UserError: in one line.
        """

    @abstractmethod
    def execute(self) -> None:
        """Does the work; results go to stdout, everything else to stderr."""
