"""The one exception that users of `circuits` are meant to catch."""


class CircuitsError(ValueError):
    """A request that cannot be served. The message is one line: what was asked, and what would be valid."""

    def __init__(self, message: str) -> None:
        # What was asked may be anything, a large tensor too.
        line = " ".join(message.split())
        super().__init__(
            line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
        )


_LONGEST = 800
