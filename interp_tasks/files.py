"""Files that users name: regular ones only, and of what people write no more than people write."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any, BinaryIO

from interp_tasks.errors import UserError
from interp_tasks.texts import brief

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Bytes of a file that somebody wrote (a grid, a space, Python), and of a JSON object that describes something.
MAX_TEXT, MAX_JSON = 4 << 20, 64 << 20
#: One past the largest whole number: TOML has no larger ones, and no setting takes one.
WHOLE_END = 2**63
#: Parts of a TOML key, ``a.b.c``; the time and memory to read one grow with their square.
KEY_PARTS = 32
_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
LONG_KEY = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*\.[ \t]*{_PART}){{{KEY_PARTS}}}")
TOO_LARGE = "whole numbers lie below 2^63"


class NotRegular(OSError):
    """A pipe, a device or a folder in the place of a file."""


def open_regular(file: Path) -> BinaryIO:
    """Opens a regular file for reading.

    Raises:
        NotRegular: for anything else.
        OSError: if the system refuses.
    """

    def check(mode: int) -> None:
        if not stat.S_ISREG(mode):
            raise NotRegular(errno.EINVAL, "no regular file", str(file))

    # Opening a device may do something; opening a pipe waits for who writes to it.
    check(file.stat().st_mode)
    opened = open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115
    try:
        check(os.fstat(opened.fileno()).st_mode)
    except NotRegular:
        opened.close()
        raise
    return opened


def read_file(file: Path, noun: str, most: int | None = None, option: str = "") -> bytes:
    """Returns the content of a regular file; refuses a pipe or a device, which may never end.

    Args:
        noun: that it should hold.
        most: bytes; ``None``: as many as it has.
        option: that names the file.

    Raises:
        UserError: in one line, if it is missing, unreadable, no regular file, or too long.
    """
    named = f"{option} {file}".lstrip()
    try:
        with open_regular(file) as opened:
            content = opened.read() if most is None else opened.read(most + 1)
    except NotRegular:
        raise UserError(f"{named} is no regular file: it should hold {noun}") from None
    except FileNotFoundError:
        raise UserError(f"{named} is missing: it would hold {noun}") from None
    except OSError as error:
        raise UserError(f"cannot read {named}: {error.strerror}") from None
    except ValueError as error:  # a null character in its name
        raise UserError(f"cannot read {named}: {error}") from None
    if most is not None and len(content) > most:
        raise UserError(f"{named} is longer than {most >> 20} MiB: it should hold {noun}")
    return content


def check_file(file: Path, option: str) -> None:
    """Refuses a path that is no regular file.

    Raises:
        UserError: headed by the option that names it.
    """
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        raise UserError(f"{option} {file}: no such file") from None
    except OSError as error:
        raise UserError(f"{option} {file}: cannot read it: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{option} {file}: {error}") from None
    if not stat.S_ISREG(mode):
        raise UserError(f"{option} {file}: it is {'a folder' if stat.S_ISDIR(mode) else 'no regular file'}")


def read_toml(file: Path, noun: str, option: str = "") -> dict[str, Any]:
    """Returns the content of a TOML file.

    Raises:
        UserError: in one line.
    """
    named = f"{option} {file}".lstrip()
    try:
        text = read_file(file, noun, MAX_TEXT, option).decode()
        if LONG_KEY.search(text):
            raise UserError(f"{named} has a key of more than {KEY_PARTS} parts: it should hold {noun}")
        values = tomllib.loads(text)
        check_numbers(values)
    except UnicodeDecodeError:
        raise UserError(f"{named} is no UTF-8 text: it should hold {noun}") from None
    except RecursionError:
        raise UserError(f"{named} is nested too deeply: it should hold {noun}") from None
    except UserError:
        raise
    except ValueError as error:  # numbers that Python refuses to read included
        raise UserError(f"{named} is not TOML: {error}") from None
    return values


def check_numbers(value: Any) -> None:
    """Refuses whole numbers that no setting takes, wherever they stand.

    Raises:
        ValueError: in one line.
    """
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            check_numbers(part)
    elif isinstance(value, int) and abs(value) >= WHOLE_END:
        raise ValueError(TOO_LARGE)


def parse_value(text: str) -> Any:
    """Reads a user's text as JSON.

    Raises:
        json.JSONDecodeError: for what is no JSON.
        UserError: for what is, but nested without end or with whole numbers that no setting takes.
    """
    try:
        return json.loads(text, parse_int=parse_whole)
    except RecursionError:
        raise UserError(f"{brief(text)}: nested too deeply") from None


def parse_whole(digits: str) -> int:
    # Python reads no more than some thousands.
    if len(digits) > len(str(WHOLE_END)) or abs(int(digits)) >= WHOLE_END:
        raise UserError(f"{brief(digits)}: {TOO_LARGE}")
    return int(digits)
