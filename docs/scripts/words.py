"""Counts words of README and docs beside code and tables, and lists the pages over their bound.

Run it in the repository's root: ``python docs/scripts/words.py``, with ``--all`` for every page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
#: Blocks of code, comments (which fence generated parts), and rows of tables.
NOT_PROSE = re.compile(r"^```.*?^```$|<!--.*?-->|^\|.*?$|^::: .*?$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\([^)]*\)")


def words(page: Path) -> int:
    """Returns how many words of a page are prose."""
    prose = LINK.sub("]", NOT_PROSE.sub("", page.read_text(encoding="utf-8")))
    return sum(any(character.isalnum() for character in word) for word in prose.split())


def bound(page: Path) -> int | None:
    """Returns how many words a page may have, None where it has no bound: tutorials and generated reference."""
    if page.name == "README.md":
        return 500
    if page.parent.name in ("tutorials", "api"):
        return None
    return 1500 if page.parent.name == "results" else 800


def main() -> None:
    """Prints the pages over their bound, the longest first, or all pages."""
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    counted = sorted(((words(page), page) for page in pages), reverse=True)
    for count, page in counted:
        allowed = bound(page)
        over = allowed is not None and count > allowed
        if over or "--all" in sys.argv:
            print(f"{count:6} {allowed or '-':>6} {'over' if over else '':4} {page.relative_to(REPOSITORY)}")
    print(f"{sum(count for count, _ in counted):6} words in {len(counted)} pages")


if __name__ == "__main__":
    main()
