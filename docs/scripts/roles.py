"""A hook of mkdocs: cross-references in docstrings, ``:class:`~a.b.Name` ``, become plain code, ``Name``."""

import re

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):<code>~?([^<]*)</code>")


def on_page_content(html: str, **_: object) -> str:
    return ROLE.sub(lambda found: f"<code>{found[1].rsplit('.', 1)[-1]}</code>", html)
