"""Ways to spoil a file: by its bytes, as JSON, as safetensors. Each draws from the chance it is given."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: What no reader expects at any place of a JSON file.
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**30,
    -(10**18),
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x" * 10_000,
    "../../../../etc/passwd",
    "/etc/passwd",
    "__import__('os').abort()",
    "\ud800",
    "\x00\n\x1b[2J",
    [],
    {},
    [[[[]]]],
    {"": None},
    [None] * 1000,
    ["../x"],
    {"__class__": "os"},
    "NaN",
    "float16",
    "complex64",
    "int8",
)
#: JSON text that is none of Python's making.
TEXTS = (
    b"",
    b"{",
    b"null",
    b"[]",
    b"NaN",
    b'"text"',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"a":' * 400 + b"1" + b"}" * 400,
    b"\xff\xfe{\x00}\x00",
    b"\xef\xbb\xbf{}",
    b"\x80\x81",
    b"1" * 6000,
    b'{"format": ' + b"9" * 6000 + b"}",
    b'{"format": 1, "format": 2}',
    b"\x00" * 100,
)


class Canary:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def pickled(canary: Path) -> bytes:
    return pickle.dumps(Canary(canary))


# ---- Bytes


def truncated(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content) + 1)]


def flipped(content: bytes, chance: random.Random) -> bytes:
    found = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 2, 8])):
        if found:
            found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
    return bytes(found)


def overwritten(content: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(content) + 1)
    length = chance.choice([1, 4, 64, 512])
    filling = chance.choice([b"\x00" * length, b"\xff" * length, chance.randbytes(length)])
    return content[:start] + filling + content[start + length :]


def longer(content: bytes, chance: random.Random) -> bytes:
    start = chance.choice([0, len(content), chance.randrange(len(content) + 1)])
    return content[:start] + chance.randbytes(chance.choice([1, 8, 300])) + content[start:]


def repeated(content: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(content) + 1)
    part = content[start : start + chance.choice([1, 16, 200])]
    return content[:start] + part + content[start:]


def noise(content: bytes, chance: random.Random) -> bytes:
    return chance.randbytes(chance.choice([0, 1, 7, 8, 9, len(content)]))


BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    truncated,
    flipped,
    overwritten,
    longer,
    repeated,
    noise,
)


def spoil_place(file: Path, chance: random.Random, canary: Path) -> str:
    """Put something else than a file of that kind in its place."""
    how = chance.choice(["gone", "a folder", "a pipe", "an endless device", "a link to itself", "a pickle"])
    file.unlink()
    if how == "a folder":
        file.mkdir()
        (file / "inside").write_text("x")
    elif how == "a pipe":
        os.mkfifo(file)
    elif how == "an endless device":
        file.symlink_to("/dev/zero")
    elif how == "a link to itself":
        file.symlink_to(file.name)
    elif how == "a pickle":
        file.write_bytes(pickled(canary))
    return how


# ---- JSON


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key and index within."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for key, part in inside for place in places(part, (*path, key))]


def changed(value: dict[str, Any], chance: random.Random) -> tuple[dict[str, Any], str]:
    """A JSON object with one place spoilt."""
    found = json.loads(json.dumps(value))
    place = chance.choice(places(found) or [("new",)])
    holder = found
    for key in place[:-1]:
        holder = holder[key]
    how = chance.choice(["another value"] * 6 + ["a number", "missing", "renamed", "more"])
    if how == "another value":
        holder[place[-1]] = chance.choice(HOSTILE)
    elif how == "a number":
        holder[place[-1]] = chance.choice([-1, 1]) * chance.randrange(10 ** chance.randrange(1, 25))
    elif how == "missing":
        del holder[place[-1]]
    elif how == "renamed" and isinstance(holder, dict):
        holder[f"{place[-1]}_"] = holder.pop(place[-1])
    else:
        found[chance.choice(["invented", "__proto__", "../x", "format"])] = chance.choice(HOSTILE)
    return found, how


def doubled(content: bytes, chance: random.Random) -> bytes:
    """A key twice: readers may take the first or the last."""
    return content.replace(b"{", b'{"step": 1, "format": 1, "weights": {}, ', 1)


# ---- safetensors


def parts(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", (len(text) if length is None else length) % 2**64) + text + data


def tensors_spoilt(content: bytes, chance: random.Random) -> tuple[bytes, str]:
    """A safetensors file that is wrong in its header or its numbers."""
    header, data = parts(content)
    name = chance.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    begin, end = entry["data_offsets"]
    how = chance.choice(
        [
            "shape",
            "dtype",
            "offsets",
            "huge header",
            "name",
            "NaN",
            "less",
            "more",
            "foreign",
            "deep",
            "entry",
        ]
    )
    if how == "shape":
        entry["shape"] = chance.choice(
            [
                [],
                [0],
                [2**62],
                [2**31, 2**31],
                [-1],
                entry["shape"][::-1],
                [1, *entry["shape"]],
                [end - begin],
            ]
        )
    elif how == "dtype":
        entry["dtype"] = chance.choice(
            ["F64", "F16", "BF16", "I32", "U8", "BOOL", "F8_E4M3", "C64", "X", "", 7]
        )
    elif how == "offsets":
        entry["data_offsets"] = chance.choice(
            [[end, begin], [0, 2**63], [begin, end + 4], [-4, end], [], [begin], [0, 0], [begin, end - 4]]
        )
    elif how == "huge header":
        return joined(
            header, data, chance.choice([2**63, 2**64 - 1, 2**40, 10**8, len(content) * 2, 0, 1])
        ), how
    elif how == "name":
        header[chance.choice(["../../x", "/etc/passwd", "", "\x00", "a" * 100_000])] = header.pop(name)
    elif how == "NaN" and end > begin:
        value = struct.pack("<f", chance.choice([float("nan"), float("inf"), -float("inf")]))
        data = data[:begin] + value + data[begin + 4 :]
    elif how == "less":
        del header[name]
    elif how == "more":
        header["embed.W_X"] = {"dtype": "F32", "shape": [1], "data_offsets": [len(data), len(data) + 4]}
        data += b"\x00" * 4
    elif how == "foreign":
        header, data = {"wte": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"\x00" * 8
    elif how == "deep":
        return joined(b'{"__metadata__":' * 50_000 + b"}" * 50_000, data), how
    elif how == "entry":
        header[name] = chance.choice(HOSTILE)
    return joined(header, data), how
