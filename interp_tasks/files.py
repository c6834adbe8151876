"""Files that users name: regular ones only, and of what people write no more than people write."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from interp_tasks.errors import UserError
from interp_tasks.texts import brief

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Bytes of a file that somebody wrote (a grid, a space, Python), and of a JSON object that describes something.
MAX_TEXT, MAX_JSON = 4 << 20, 64 << 20
#: Dots in a TOML key, for which its parser takes the square of their number in time and memory.
MAX_DOTS = 50
#: One past the largest whole number that a generator, or the integer column of a table, holds.
WHOLE_END = 2**63


def read_file(file: Path, noun: str, most: int | None = None, option: str = "") -> bytes:
    """Returns the content of a regular file; refuses a pipe or a device, which may never end.

    Args:
        noun: that it should hold.
        most: bytes; ``None``: as many as it has.
        option: that names the file.
    """
    named = f"{option} {file}".lstrip()
    try:
        # Opening a device may do something; opening a pipe waits for who writes to it.
        if is_other := file.exists() and not file.is_file():
            content = b""
        else:
            with file.open("rb") as opened:
                content = opened.read() if most is None else opened.read(most + 1)
    except FileNotFoundError:
        raise UserError(f"{named} is missing: it would hold {noun}") from None
    except (OSError, ValueError) as error:  # a null character in its name
        raise UserError(f"cannot read {named}: {getattr(error, 'strerror', None) or error}") from None
    if is_other:
        raise UserError(f"{named} is no regular file: it should hold {noun}")
    if most is not None and len(content) > most:
        raise UserError(f"{named} is longer than {most >> 20} MiB: it should hold {noun}")
    return content


def check_file(file: Path, option: str) -> None:
    """Refuses a path that is no regular file, headed by the option that names it."""
    try:
        what = "" if file.is_file() else "it is a folder" if file.is_dir() else "it is no regular file"
        what = what if file.exists() else "no such file"
    except OSError as error:
        what = f"cannot read it: {error.strerror}"
    if what:
        raise UserError(f"{option} {file}: {what}")


def read_toml(file: Path, noun: str, option: str = "") -> dict[str, Any]:
    """Returns the content of a TOML file."""
    named = f"{option} {file}".lstrip()
    content = read_file(file, noun, MAX_TEXT, option)
    joined = re.sub(rb"[ \t]+", b" ", content).replace(b" .", b".").replace(b". ", b".")
    if any(word.count(b".") > MAX_DOTS for word in re.split(rb"[\s,=\[\]{}]", joined)):
        raise UserError(f"{named} has a key of more than {MAX_DOTS} parts: it should hold {noun}")
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError:
        raise UserError(f"{named} is no UTF-8 text: it should hold {noun}") from None
    except (ValueError, RecursionError) as error:  # numbers that Python refuses to read included
        raise UserError(f"{named} is not TOML: {error}") from None


def parse_value(text: str) -> Any:
    """Reads a user's text as JSON."""
    try:
        return json.loads(text, parse_int=parse_whole)
    except RecursionError:
        raise UserError(f"{brief(text)}: nested too deeply") from None


def parse_whole(digits: str) -> int:
    # Python reads no more than some thousands.
    if len(digits) > len(str(WHOLE_END)) or abs(int(digits)) >= WHOLE_END:
        raise UserError(f"{brief(digits)}: whole numbers lie below 2^63")
    return int(digits)
