"""The exception for a mistake of the user's: the command line prints its message, one line, and exits with 2."""


class UserError(ValueError):
    """What is wrong and what would be right, in one line."""


class Diverged(UserError):
    """Training diverged: a search goes on with other settings, anything else stops."""
