"""The one exception that users of `circuits` are meant to catch."""


class CircuitsError(ValueError):
    """A request that cannot be served. The message is one line: what was asked, and what would be valid."""
