"""One HTML file with everything in it: no request leaves the page, so it opens offline, and years later."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from interp_tasks.disk import atomic_write
from interp_tasks.pages.sections import Section

#: What tells a page of ours from any other file.
GENERATOR = '<meta name="generator" content="interp-tasks">'


PACKAGES = ("torch", "transformer-lens", "numpy", "pandas", "plotly")


def versions() -> dict[str, str]:
    """Returns the version of each package, ``python`` first: of this code, and of the others as they are installed."""
    # Not above, as --help loads this file. Of the code that runs, which need not be the copy that is installed.
    from importlib.metadata import PackageNotFoundError, version

    from circuits import __version__

    by_package = {"python": platform.python_version(), "interp-tasks": __version__}
    for package in PACKAGES:
        try:
            by_package[package] = version(package)
        except PackageNotFoundError:
            # circuits is used without transformer-lens on newer releases; its absence is the fact to record.
            by_package[package] = "not installed"
    return by_package


@dataclass(frozen=True)
class Page:
    """A title, sections in order, and at the foot the configuration and the versions that made them.

    Attributes:
        config: what was asked for, JSON; shown at the foot.
        versions: package -> version (default: those installed now).
    """

    title: str
    sections: Sequence[Section]
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=versions)

    def html(self) -> str:
        """Returns the whole page as text; whatever it needs stands in it."""
        from jinja2 import Environment
        from markupsafe import Markup

        sections = [Markup(section.html(f"s{index}")) for index, section in enumerate(self.sections)]
        plotly = ""
        if any('class="plot"' in section for section in sections):
            from plotly.offline import get_plotlyjs

            plotly = get_plotlyjs()
        template = resources.files("interp_tasks.pages").joinpath("page.html").read_text(encoding="utf-8")
        return (
            Environment(autoescape=True)
            .from_string(template)
            .render(
                title=self.title,
                generator=Markup(GENERATOR),
                sections=sections,
                plotly=Markup(plotly),
                made_with=", ".join(f"{name} {number}" for name, number in self.versions.items()),
                config=json.dumps(dict(self.config), indent=2, ensure_ascii=False, default=str),
            )
        )

    def write(self, path: str | Path) -> Path:
        """Writes the page, whole or not at all.

        Raises:
            UserError: if the file system refuses. Call ``check_writable_file`` before slow work.
        """
        return atomic_write(Path(path), self.html())


def is_page(path: Path) -> bool:
    """Returns whether a file is a page that this package wrote."""
    return path.is_file() and GENERATOR.encode() in path.read_bytes()[:1000]
