"""Makes standard streams safe: escapes control characters, and copes with closed, full or limited streams."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from interp_tasks.texts import LAYOUT, printable

#: What stands in for a character of ours that an encoding lacks; one for one, so that columns still line up.
PLAINER = str.maketrans("·–−—…×→’▁▂▃▄▅▆▇█", "|---.x>'_.-:=+*#")
#: What an error of it names in place of a file.
STDOUT = "<stdout>"
#: Error handlers of codecs: for text that people read, and for data (JSON's own escapes).
FOR_PEOPLE, FOR_PROGRAMS = "interp-run-text", "interp-run-data"


def escape(error: UnicodeError) -> tuple[str, int]:
    r"""Replaces characters that an encoding lacks by ``\uXXXX``, as within a JSON string."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return escaped(error.object[error.start : error.end]), error.end


def simplify(error: UnicodeError) -> tuple[str, int]:
    """Returns a plainer character for each of ours, else its escape."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return escaped(error.object[error.start : error.end].translate(PLAINER)), error.end


def escaped(text: str) -> str:
    units = text.encode("utf-16-be", "surrogatepass")
    codes = (int.from_bytes(units[offset : offset + 2], "big") for offset in range(0, len(units), 2))
    return "".join(chr(code) if code < 128 else f"\\u{code:04x}" for code in codes)


codecs.register_error(FOR_PROGRAMS, escape)
codecs.register_error(FOR_PEOPLE, simplify)


def write_data(text: str) -> None:
    """Writes JSON or CSV to stdout; characters that it cannot show are escaped, never replaced."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = printable(text, keep=LAYOUT, json=True)
    sys.stdout.write(text.encode(encoding, FOR_PROGRAMS).decode(encoding))


def write_line(text: str) -> None:
    """Writes a line for people to stdout."""
    sys.stdout.write(printable(text) + "\n")


class NamedStream:
    """A stream whose failures name it, as those of files do: else a full disk would be taken for a full stdout."""

    def __init__(self, stream: Any, name: str) -> None:
        self._stream, self._name = stream, name

    def write(self, text: str) -> Any:
        with self._named():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._named():
            self._stream.flush()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = self._name
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def usable_streams() -> Iterator[None]:
    """Puts usable streams in place of closed ones, and restores stdout and stderr afterwards.

    Python sets a stream that was closed by the caller (``>&-``) to ``None``, and the next file opened would take
    its place: what is printed would end up in a checkpoint.
    """
    before = sys.stdout, sys.stderr
    fill_closed()
    # Nobody can be told of a closed stderr; a result that cannot be written is a failure.
    sys.stdout = sys.stdout or stream_to_nowhere(os.O_RDONLY)
    sys.stderr = sys.stderr or stream_to_nowhere(os.O_WRONLY)
    streams: list[Any] = [sys.stdout, sys.stderr]
    sys.stdout = cast(TextIO, NamedStream(sys.stdout, STDOUT))
    handlers = [(stream, stream.errors) for stream in streams if hasattr(stream, "reconfigure")]
    try:
        for stream, _ in handlers:
            stream.reconfigure(errors=FOR_PEOPLE)
        yield
    finally:
        for stream, handler in handlers:
            # It writes out what is left.
            with contextlib.suppress(OSError, ValueError):
                stream.reconfigure(errors=handler)
        for stream, old in zip(streams, before, strict=True):
            if old is None:
                with contextlib.suppress(OSError):
                    stream.close()
        sys.stdout, sys.stderr = before


def fill_closed() -> None:
    """Put something at descriptors 0 to 2 where nothing is: the lowest free number is the next to be given."""
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)


def stream_to_nowhere(mode: int) -> TextIO:
    """Returns a stand-in for a closed stream; opened with ``O_RDONLY``, every write to it fails."""
    return open(os.open(os.devnull, mode), "w", encoding="utf-8")


def silence(stream: Any) -> None:
    """Points a stream that failed at nowhere, so that the interpreter's last flush does not complain."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def to_stderr(text: str) -> None:
    """Writes a line or a traceback to stderr; a closed stderr is no failure."""
    text = printable(text, keep=LAYOUT)
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        silence(sys.stderr)
