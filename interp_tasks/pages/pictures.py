"""Marks pictures with their maker, so that those of an earlier call can be recognised and removed."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

from interp_tasks.files import open_regular

#: What figures are written as beside a page.
PICTURES = ("png", "svg")
MARK = b"interp-tasks"
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
#: Of a PNG the signature and its first chunk, which is always the header.
_HEADER = len(_SIGNATURE) + 25


def marked(picture: bytes, kind: str) -> bytes:
    """Returns a picture with a note of who made it: in a PNG its field Software, in an SVG a comment at the end."""
    if kind == "svg":
        return picture + b"<!-- " + MARK + b" -->\n"
    chunk = b"tEXtSoftware\x00" + MARK
    chunk = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return picture[:_HEADER] + chunk + picture[_HEADER:]


def is_marked(path: Path) -> bool:
    """Returns whether a file is a picture that :func:`marked` made."""
    try:
        with open_regular(path) as file:
            content = file.read()
    except OSError:
        return False
    return (
        MARK in content[_HEADER : _HEADER + 40] if content.startswith(_SIGNATURE) else MARK in content[-40:]
    )


def left_over(folder: Path, name: str, written: Collection[Path]) -> Iterator[Path]:
    """Returns pictures ``NAME.png``, ``NAME-2.png``, ... that an earlier call left in a folder."""
    of_name = re.compile(rf"{re.escape(name)}(-[0-9]+)?\.({'|'.join(PICTURES)})")
    for path in sorted(folder.glob(f"{name}*")):
        if of_name.fullmatch(path.name) and path not in written and is_marked(path):
            yield path
