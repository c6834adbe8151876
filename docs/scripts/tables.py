"""Writes the tables of docs that are made from code, records or stored results into their pages.

Run it as `python docs/scripts/tables.py`. A table stands between two comments that name it, such as
`<!-- families:begin -->` and `<!-- families:end -->`, so that a page reads the same in a clone, on a code host and on
the site. A test holds that no page is behind.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import circuit_tables
import commands
import families
import learning_coefficient
import results

DOCS = Path(__file__).parents[1]
#: What makes the table of a name, from the words after it.
MAKERS: dict[str, Callable[[str], str]] = {
    "families": lambda _: families.table(),
    "commands": lambda _: commands.table(),
    "headlines of": results.table,
    "learning coefficient": lambda _: learning_coefficient.table(),
    "circuits of": lambda names: circuit_tables.table(circuit_tables.stored(names.split())),
    "seeds of": lambda names: circuit_tables.over_seeds(circuit_tables.stored_by_seed(names.split())),
}
PLACE = re.compile(
    rf"^<!-- (({'|'.join(MAKERS)}) ?(.*)):begin -->\n.*?^<!-- \1:end -->$", re.MULTILINE | re.DOTALL
)


def filled(markdown: str) -> str:
    """Returns a page with each of its tables made anew."""
    return PLACE.sub(
        lambda place: f"<!-- {place[1]}:begin -->\n\n{MAKERS[place[2]](place[3])}\n\n<!-- {place[1]}:end -->",
        markdown,
    )


if __name__ == "__main__":
    for page in sorted(DOCS.rglob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = filled(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(page.relative_to(DOCS.parent))
