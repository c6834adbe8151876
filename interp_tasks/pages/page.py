"""One HTML file with everything in it: no request leaves the page, so it opens offline, and years later."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from interp_tasks.files import open_regular
from interp_tasks.pages.files import write_atomically
from interp_tasks.pages.pack import deflated
from interp_tasks.pages.package_versions import versions
from interp_tasks.pages.sections import Section, embed

# The browser itself refuses whatever would leave the page. Plotly builds its style sheet and its image
# downloads at run time, hence the inline styles, data: and blob:.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
)

#: What tells a page of ours from any other file.
GENERATOR = '<meta name="generator" content="interp-tasks">'


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
        body = "\n".join(
            f'<section id="s{index}"{self._label(section, index)}>\n{section.html(f"s{index}-x")}\n</section>'
            for index, section in enumerate(self.sections)
        )
        plotly, scripts = "", [asset("tables.js")]
        if any(section.needs_plotly for section in self.sections):
            from plotly.offline import get_plotlyjs

            from circuits.figures.palette import template
            from circuits.figures.saved import script

            templates = embed(json.dumps({"light": template("light"), "dark": template("dark")}))
            scripts += [script("fading.js"), script("windows.js"), asset("figures.js"), asset("stepper.js")]
            code = get_plotlyjs()
            plotly = (
                f"<!-- {licence(code)} -->\n"
                f'<script type="text/plain" id="plotly">{deflated(code)}</script>\n'
                f'<script type="application/json" id="plot-templates">{templates}</script>'
            )
        made_with = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        config = json.dumps(dict(self.config), indent=2, ensure_ascii=False, default=str)
        return "\n".join(
            [
                "<!DOCTYPE html>",
                '<html lang="en">',
                "<head>",
                '<meta charset="utf-8">',
                GENERATOR,
                f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                '<meta name="color-scheme" content="light dark">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{colours()}\n{asset('page.css')}</style>",
                "</head>",
                "<body>",
                f"<main>\n<h1>{escape(self.title)}</h1>",
                body,
                "</main>",
                "<footer>\n<h2>Configuration and versions</h2>",
                f"<p>{escape(made_with)}</p>",
                f"<details><summary>Configuration</summary><pre>{escape(config)}</pre></details>\n</footer>",
                plotly,
                f"<script>{''.join(scripts)}</script>",
                "</body>\n</html>\n",
            ]
        )

    def write(self, path: str | Path) -> Path:
        """Writes the page, whole or not at all.

        Raises:
            UserError: if the file system refuses. Call ``check_writable_file`` before slow work.
        """
        return write_atomically(Path(path), self.html())

    @staticmethod
    def _label(section: Section, index: int) -> str:
        return f' aria-labelledby="s{index}-x-title"' if section.title else ""


def is_page(path: Path) -> bool:
    """Returns whether a file is a page that this package wrote."""
    try:
        with open_regular(path) as file:
            return GENERATOR.encode() in file.read(1000)
    except OSError:
        return False


def licence(code: str) -> str:
    """Returns the first comment of a script: its licence."""
    comment = code.partition("/*")[2].partition("*/")[0]
    return " ".join(comment.replace("*", " ").replace("--", " ").split())


def asset(name: str) -> str:
    return resources.files("interp_tasks.pages").joinpath(name).read_text(encoding="utf-8")


def colours() -> str:
    """Returns the palette as CSS variables, so that plots and page cannot drift apart."""
    # Where torch is loaded: the palette is that of ``circuits``, and a command's help needs no page.
    from circuits.figures.palette import COLOURS, GRID, GROUND, INK

    def variables(scheme: Any) -> str:
        accent = COLOURS[scheme][0]
        return f"--ground:{GROUND[scheme]};--ink:{INK[scheme]};--rule:{GRID[scheme]};--accent:{accent}"

    return (
        f":root{{{variables('light')}}}\n@media (prefers-color-scheme:dark){{:root{{{variables('dark')}}}}}"
    )
