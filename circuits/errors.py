"""The one exception that users of `circuits` are meant to catch."""


class CircuitsError(ValueError):
    """An error in a request; its message says in one line what was requested and what would be valid."""

    def __init__(self, message: str) -> None:
        # What was asked may be anything, a large tensor too.
        line = " ".join(message.split())
        super().__init__(
            line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
        )


_LONGEST = 800
